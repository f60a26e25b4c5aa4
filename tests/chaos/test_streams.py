"""What a disturbance costs: a wait belongs to the disturbance in which it begins."""

from types import SimpleNamespace

import pytest

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
