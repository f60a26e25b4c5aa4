"""The long run's own parts: whom it hits, where it goes on, what its table says, and how a choice is read on."""

import asyncio
import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from e2e import long_run
from e2e.long_run import NOTHING, Line, Load, faults, hit, read, row, table
from e2e.long_streams import Ask, Choice, Event, Waits, Wrong
from stacks import of_themselves

from orca_chaos.client import Violation
from orca_chaos.faults import Fault, Kind
from orca_chaos.local_target import victims_of
from orca_local.settings import ServeSettings

VICTIMS = victims_of(ServeSettings.load(engines=2, pp=2, endpoints=2, schedulers=2), links=False)
ROLES = {"endpoint", "scheduler", "supervisor", "rank of stage 0", "rank of stage 1", "redis", "fork server"}
ROUND = 3 * len(ROLES) + 1


def test_each_role_is_killed_twice_and_frozen_once_in_a_round() -> None:
    drawn = list(islice(faults(VICTIMS, 1, 0), 2 * ROUND))
    for one in (drawn[:ROUND], drawn[ROUND:]):
        counts = Counter((row(fault.victim), fault.kind) for fault in one)
        kills, freezes = {(role, Kind.KILL): 2 for role in ROLES}, {(role, Kind.STOP): 1 for role in ROLES}
        assert counts == {**kills, **freezes, (NOTHING.role, Kind.STOP): 1}


@pytest.mark.parametrize("skip", [1, ROUND - 1, ROUND, ROUND + 5])
def test_a_run_goes_on_with_the_fault_behind_those_of_its_file(skip: int) -> None:
    whole = list(islice(faults(VICTIMS, 1, 0), 3 * ROUND))
    assert list(islice(faults(VICTIMS, 1, skip), 10)) == whole[skip : skip + 10]


def line(role: str, kind: Kind, inside: float, first: float = 0.1, late: float = 0.0) -> Line:
    ended = Counter({"greedy": 3}), Counter({"greedy": 1}), Counter({"no end": 2}), Counter({"responses": 1})
    return Line(*ended, phase="decoder", role=role, name=role, kind=kind, inside=inside, first=first, late=late)


LINES = [
    *(line("redis", Kind.KILL, seconds / 100) for seconds in range(1, 101)),
    line("redis", Kind.KILL, 30.0, late=20.0),
    line("rank of stage 0", Kind.KILL, 0.5, 2.0),
    line(NOTHING.role, Kind.STOP, 1.5),
    Line(Counter({"chat": 4}), phase="decoder"),
]


def test_a_loss_that_no_fault_explains_is_an_error(tmp_path: Path) -> None:
    """A rank was taken for a liar again and again, and a scheduler ended, and all streams went on."""
    lost = '{"event": "rank lost", "verdict": "stage 1 rank 0 of engine-0 (host vm, pid 7, last iteration 9) '
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "scheduler-0.log").write_text(f'{lost}failed: it reported 5"}}\n{lost}has been silent for 2.1 s"}}\n')
    (logs / "serve.log.1").write_text('{"event": "endpoint-1 (pid 4) ended with status 2, starting it again"}\n')
    (logs / "serve.log").write_text(
        '{"event": "scheduler-0 (pid 5) ended with status 1, starting it again"}\n'
        '{"event": "endpoint-0 (pid 6) was killed by SIGKILL, starting it again"}\n'
    )
    (logs / "supervisor-0.log").write_text('{"event": "rank ended", "why": "its process ended with status -9"}\n')
    (logs / "supervisor-1.log").write_text('{"event": "rank ended", "why": "its process ended with status -6"}\n')
    assert of_themselves(tmp_path) == {"verdict on a right rank": 1, "process that ended by itself": 3}


def test_pauses_count_where_the_program_itself_was_not_late() -> None:
    rows = table(LINES).splitlines()[2:]
    assert rows[0] == "| rank of stage 0 | SIGKILL | 1 | 1 | 2.00 s | 2.00 s | 2.00 s | 0.50 s | 2.00 s |"
    assert rows[1] == "| redis | SIGKILL | 101 | 100 | 0.50 s | 0.99 s | 1.00 s | 1.00 s | 0.10 s |"
    assert rows[2] == "| all | SIGKILL | 102 | 101 | 0.51 s | 1.00 s | 2.00 s | 1.00 s | 2.00 s |"
    assert rows[3] == "| nothing | SIGSTOP, 4 s | 1 | 1 | 1.50 s | 1.50 s | 1.50 s | 1.50 s | 0.10 s |"
    assert rows[4] == "| all | SIGSTOP, 4 s | 0 | 0 |  |  |  |  |  |"


def test_all_streams_are_counted() -> None:
    told = table(LINES).splitlines()
    assert told[-3] == "313 streams: 4 chat, 309 greedy."
    assert told[-2] == "103 of them differ (103 greedy), 206 ended in an error (206 no end)."
    assert told[-1] == "Over HTTP streams were taken up again 103 times (103 responses)."


def test_a_line_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text("".join(json.dumps(vars(one)) + "\n" for one in LINES) + '{"phase": "deco')
    assert read(file) == LINES
    assert read(tmp_path / "none") == []


class Scripted:
    """Clients whose streams bring these texts, or end so, and then what is right."""

    def __init__(self, *brought: str | Wrong) -> None:
        self._brought = list(brought)
        self.all_brought = asyncio.Event()

    async def answer(self, ask: Ask) -> str:
        await asyncio.sleep(0)
        if not self._brought:
            self.all_brought.set()
            return "right"
        if isinstance(one := self._brought.pop(), Wrong):
            raise one
        return one


async def test_a_stream_that_differs_or_fails_is_counted_and_reported(tmp_path: Path) -> None:
    clients: Any = Scripted("right", "rigHt", Wrong("no end", "no end within 120 s"), "")
    load = Load(clients, [(Ask("greedy", "generate", {}), "right")], 1, tmp_path / "wrong")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        await clients.all_brought.wait()
        load.end()
    assert load.ended.differing == {"greedy": 2}
    assert load.ended.errors == {"no end": 1}
    assert load.ended.streams["greedy"] > 4
    said = [json.loads(line)[2:] for line in (tmp_path / "wrong").read_text().splitlines()]
    assert sorted(said) == [["no end", "no end within 120 s"], ["right", ""], ["right", "rigHt"]]


class Gone:
    """A target on which no victim runs."""

    async def begin(self, fault: Fault) -> bool:
        return False


async def test_a_victim_that_does_not_come_back_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_run, "HEALED", 0.2)
    target: Any = Gone()
    with pytest.raises(Violation, match=f"^{VICTIMS[0].name} does not run"):
        await hit(target, Fault(0, Kind.KILL, VICTIMS[0], 0.0), Waits(), "decoder")


def of_chat(text: str, scores: int | None, finish: str | None = None) -> Event:
    logprobs = None if scores is None else {"content": [{}] * scores, "refusal": None}
    delta = {"content": text} if text else {}
    return Event("", {"choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]})


def test_one_of_several_choices_goes_on_behind_its_tokens_and_its_text() -> None:
    """Its events have no ids: the client counts tokens, and a text without one comes behind the last of them."""
    waits = Waits()
    with waits.streams("chat, n") as (wait,):
        choice = Choice(wait, True)
        for event, seen in ((of_chat("a", 2), "2"), (of_chat("", 1), "3"), (of_chat("b", None), "3.1")):
            choice.take(event)
            assert (choice.seen, choice.ended) == (seen, False)
        choice.take(of_chat("", None, "stop"))
        assert choice.ended
        assert not waits.open
