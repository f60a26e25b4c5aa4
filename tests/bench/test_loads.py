"""The loads of the bench of policies, at a door that answers at once: what is asked, and in what order."""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from orca.v1 import orca_pb2 as pb
from orca_bench import policies
from orca_bench.cases import Request, fixed
from orca_bench.load import Planned, load_of
from orca_bench.measures import Answer
from orca_bench.policies import LONG, PAPER, batch, chat, copies, fresh, long, main, paper, saturated
from orca_lab.workload import Lengths

IDS = range(97)


class Door:
    """Answers each request with as many tokens 5 as it wants."""

    label, vocab_size = "door", 97

    def __init__(self) -> None:
        self.sampling: pb.Sampling | None = None
        self.asked = list[tuple[Request, pb.Sampling | None]]()

    async def ask(self, answer: Answer, clock: Callable[[], float]) -> None:
        self.asked.append((answer.request, self.sampling))
        answer.made = [5] * answer.request.output
        answer.tokens = len(answer.made)
        await asyncio.sleep(0)
        answer.came, answer.ended = [clock()], clock()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Planned]:
    """The requests that are sent at their moments, without the waits."""
    found: list[Planned] = []

    async def open_loop(door: Door, load: Sequence[Planned]) -> list[Answer]:
        found.extend(load)
        return [Answer(one.request, one.at) for one in load]

    monkeypatch.setattr(policies, "open_loop", open_loop)
    return found


@pytest.mark.parametrize(("load", "rate", "count", "lengths"), [(paper, 1.2, 40, PAPER), (long, 1.0, 60, LONG)])
async def test_loads_of_drawn_lengths(
    load: Any, rate: float, count: int, lengths: Lengths, planned: list[Planned]
) -> None:
    told, everyone = await load(Door(), 7)
    assert planned == load_of(rate, count, 7, lengths, IDS)
    assert [one.request for one in told] == [one.request for one in planned]
    assert told is everyone


async def test_a_batch_job_beside_chats(planned: list[Planned]) -> None:
    """The numbers are those of the chats."""
    door: Any = Door()
    told, everyone = await batch(door, 7)
    job, chats = fixed(16, 256, 96, 7, IDS), load_of(1.0, 24, 7, Lengths((32, 96), (16, 48)), IDS)
    assert planned == [*(Planned(0.0, one) for one in job), *(Planned(0.5 + one.at, one.request) for one in chats)]
    assert [one.request for one in told] == [one.request for one in chats]
    assert len(everyone) == 16 + 24


async def test_all_at_once() -> None:
    door: Any = Door()
    told, everyone = await saturated(door, 7)
    assert [one for one, _ in door.asked] == [one.request for one in load_of(1.0, 60, 7, LONG, IDS)]
    assert {one.due for one in told} == {0.0}
    assert told is everyone


@pytest.mark.parametrize(("load", "sampling"), [(copies, None), (fresh, pb.Sampling(temperature=1.0, seed=7))])
async def test_one_request_after_the_other(load: Any, sampling: pb.Sampling | None) -> None:
    """On one clock: each begins where the one before has ended."""
    door: Any = Door()
    told, _ = await load(door, 7)
    assert len(told) == 8
    assert {one.output for one, _ in door.asked} == {100}
    assert [given for _, given in door.asked] == [sampling] * 8
    assert door.sampling is None, "for the loads after it"
    for before, after in itertools.pairwise(told):
        assert after.due == before.ended
        assert after.due <= after.sent <= after.came[0] <= after.ended
    for request, _ in door.asked:
        if load is copies:
            assert request.prompt == request.prompt[:48] * 4
        else:
            assert len(request.prompt) == 64
    assert len({tuple(one.prompt) for one, _ in door.asked}) == 8


async def test_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn has the system prompt, and all that was said in the turns before it."""
    waits, sleep = list[float](), asyncio.sleep

    async def short(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(policies, "CONVERSATIONS", 2)
    monkeypatch.setattr(policies.asyncio, "sleep", short)
    door: Any = Door()
    told, everyone = await chat(door, 7)
    assert told is everyone
    first, second = told[:4], told[4:]
    for turns in (first, second):
        assert [len(one.request.prompt) for one in turns] == [136, 216, 296, 376]
        for before, after in itertools.pairwise(turns):
            assert after.request.prompt[: len(before.request.prompt) + 40] == [*before.request.prompt, *[5] * 40]
    assert first[0].request.prompt[:96] == second[0].request.prompt[:96]
    assert first[0].request.prompt[96:] != second[0].request.prompt[96:]
    pauses = [one for one in waits if one]
    assert pauses.count(0.2) == 8
    early, late = (one for one in pauses if one != 0.2)
    assert 0 < early < late


async def test_rounds_go_forth_and_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = list[tuple[Any, ...]]()

    async def measured(policy: str, loads: Sequence[str], seed: int, **settings: Any) -> AsyncIterator[dict[str, Any]]:
        asked.append((policy, loads, seed, settings))
        yield {"policy": policy, "seed": seed}

    monkeypatch.setattr(policies, "measured", measured)
    monkeypatch.setattr(policies, "isa", lambda: "an isa")
    given = ["--model", "m", "--policies", "a", "b", "--loads", "long", "fresh", "--slots", "99"]
    monkeypatch.setattr(sys, "argv", ["policies", *given])
    await main()
    order = [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]
    assert asked == [(policy, ["long", "fresh"], seed, {"model": "m", "slots": 99}) for policy, seed in order]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"policy": policy, "seed": seed, "isa": "an isa"} for policy, seed in order
    ]
    asked.clear()
    monkeypatch.setattr(sys, "argv", ["policies", "--rounds", "1"])
    await main()
    loads, settings = ["paper", "long", "chat", "batch", "copies"], {"model": None, "slots": 20_000}
    assert asked == [(policy, loads, 1, settings) for policy in policies.POLICIES]
