"""What a disturbance costs: a wait belongs to the disturbance in which it begins."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from orca_chaos import late
from orca_chaos.oracle import requests
from orca_chaos.streams import Streams


class Told(Streams):
    """Two streams. At each `flows`, tokens come as a test has written them down: of a stream, at a second."""

    def __init__(self, *tokens: list[tuple[int, float]]) -> None:
        super().__init__(2)
        self.now, self._tokens = 0.0, list(tokens)

    async def _request(self, n: int) -> None:
        raise NotImplementedError

    async def flows(self) -> None:
        for n, at in self._tokens.pop(0):
            self.now = at
            self._came(n, "engine-0")


async def test_a_wait_belongs_to_one_disturbance(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was open when all went on was the next one's, and one from before a disturbance its own."""
    streams = Told([(0, 6.0), (1, 7.0)], [(0, 8.0), (1, 15.0)], [(0, 15.2), (1, 15.2)], [(0, 15.5), (1, 15.3)])
    monkeypatch.setattr("orca_chaos.streams.time", SimpleNamespace(monotonic=lambda: streams.now))
    streams.now = 5.0
    async with streams.disturbed("first") as first:
        pass
    async with streams.disturbed("second") as second:
        pass
    assert (first.pause, first.seconds, first.tokens.total()) == (8.0, 10.0, 4)
    assert second.pause == pytest.approx(0.3)


def stand_still() -> None:
    """The loop of the event that calls it does."""
    time.sleep(0.02)


async def test_how_late_this_program_itself_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the block ends in such a pause."""
    monkeypatch.setattr(late, "LOOK", 0.001)
    async with late.watched() as seen:
        await asyncio.sleep(0)
        stand_still()
    assert seen.seconds >= 0.015


def test_what_is_asked_of_a_stack() -> None:
    """Half of the requests are greedy; of the others half have penalties and a bias. They fit the model."""
    made = [one.request for one in requests(7, 512, 1024, 40)]
    assert (
        [one.request for one in requests(7, 512, 1024, 40)]
        == made
        != [one.request for one in requests(8, 512, 1024, 40)]
    )
    assert len(requests(7, 512, 1024)) == 24
    assert all(one.ignore_eos for one in made)
    for n, one in enumerate(made):
        drawn = one.sampling
        assert one.HasField("sampling") == bool(n % 2)
        assert 1 <= len(one.token_ids.ids) <= 48
        assert 16 <= one.max_new_tokens <= 48
        assert max(one.token_ids.ids) < 512
        if n % 2:
            assert (drawn.temperature, drawn.top_k, drawn.top_p) == pytest.approx((0.8, 50, 0.95))
        given = drawn.repetition_penalty, drawn.presence_penalty, drawn.frequency_penalty, drawn.min_p
        assert given == pytest.approx((1.3, -0.5, 0.7, 0.02) if n % 4 == 3 else (0, 0, 0, 0))
        assert list(drawn.logit_bias.values()) == ([3.0] if n % 4 == 3 else [])
    assert {one.request.max_new_tokens for one in requests(7, 512, 50, 40)} == {2}
    assert {one.request.max_new_tokens for one in requests(7, 512, 10, 40)} == {1}
