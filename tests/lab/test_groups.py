"""The lines about process groups, by ranks whose times are known. `make distributed` runs real ones."""

import json
import signal
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orca_lab import groups
from orca_lab.groups import Member, Ranks, measure
from orca_worker.data_plane.plane import PeerLost
from orca_worker.partition import Place


class Known:
    """Stands for three ranks."""

    size = 3

    def __init__(self) -> None:
        self.asked = list[tuple[Any, ...]]()
        self._formed = iter([0.5, 0.25, 0.125, 4.0])

    def form(self) -> float:
        self.asked.append(("form",))
        return next(self._formed)

    def each(self, call: Any, *arguments: Any, but: int | None = None) -> list[Any]:
        self.asked.append((call.__name__, *arguments, but))
        answers = {"sweep": [1e-6, 3e-6, 2e-6], "leave": [(0.25, 500), (1.5, 700), (1.0, 600)], "begin": [None] * 3}
        return answers[call.__name__]

    def kill(self, rank: int) -> None:
        self.asked.append(("kill", rank))


def test_what_is_printed_of_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """Of each the slowest rank's time, and the least free memory."""
    ranks: Any = Known()
    measure(ranks, [8, 64], 2)
    left = {"left_seconds": 1.5, "free_bytes": 500}
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        *(
            {"kind": "all_reduce", "ranks": 3, "bytes": size, "microseconds": pytest.approx(3.0), "operations": 20}
            for size in (8, 64)
        ),
        {"kind": "formation", "ranks": 3, "epoch": 1, "formed_seconds": 0.5, **left},
        {"kind": "formation", "ranks": 3, "epoch": 2, "formed_seconds": 0.25, **left},
        {"kind": "killed", "ranks": 3, "left_seconds": 1.5, "formed_seconds": 4.0},
    ]
    assert ranks.asked == [
        *(("form",), ("sweep", 8, None), ("sweep", 64, None)),
        *[("leave", None), ("form",)] * 2,
        *(("begin", 2), ("kill", 2), ("leave", 2), ("form",)),
    ]


class Plane:
    """A data plane of one rank beside two others, which have the sum at once. It is left after some looks."""

    def __init__(self, looks: int = 0) -> None:
        self.looks, self.aborted = looks, list[str]()
        self.operations = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.operations += 1
        return torch.full_like(x, 6.0)

    def abort(self, why: str) -> None:
        self.aborted.append(why)

    @property
    def left(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class Clock:
    """The time moves with each look at it."""

    def __init__(self, *steps: float) -> None:
        self.now, self._steps = 0.0, iter(steps)
        self.slept = list[float]()

    def perf_counter(self) -> float:
        self.now += next(self._steps, 0.0)
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def member(plane: Plane) -> Any:
    made: Any = object.__new__(Member)
    made._device, made._place, made._plane, made._begun = torch.device("cpu"), Place(3, 1, 0, 1), plane, None
    return made


def test_the_time_of_an_operation_is_the_median_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    plane, took = Plane(), [20.0, 40.0, 60.0, 80.0, 2000.0, 2000.0, 2000.0]
    monkeypatch.setattr(groups, "time", Clock(*(step for one in took for step in (0.0, one))))
    assert member(plane).sweep(64) == 80.0 / 20
    assert plane.operations == 7 * 20


def test_a_sum_is_that_of_all_ranks() -> None:
    member(Plane())._check()
    wrong = member(Plane())
    wrong._place = Place(4, 1, 0, 1)
    with pytest.raises(AssertionError):
        wrong._check()


def test_the_time_of_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    plane, clock = Plane(looks=2), Clock(1.0, 0.5, 0.25, 2.0)
    monkeypatch.setattr(groups, "time", clock)
    monkeypatch.setattr(groups, "free_bytes", lambda device, modest: 700 if not modest else 0)
    assert member(plane).leave() == (2.75, 700)
    assert (plane.aborted, clock.slept) == (["the epoch is over"], [0.001, 0.001])


def test_groups_that_are_not_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "time", Clock(1.0, groups.LEAVE / 2, groups.LEAVE))
    with pytest.raises(TimeoutError, match=r"the groups were not left within .* s: a rank would start again"):
        member(Plane(looks=5)).leave()


@pytest.mark.parametrize("ends", [None, PeerLost("gone"), RuntimeError("it broke")])
def test_an_operation_that_was_under_way_may_have_lost_its_peer(
    ends: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "free_bytes", lambda device, modest: 700)
    leaving = member(Plane())
    leaving._begun = Future[None]()
    if ends is None:
        leaving._begun.set_result(None)
    else:
        leaving._begun.set_exception(ends)
    if isinstance(ends, RuntimeError):
        with pytest.raises(AssertionError):
            leaving.leave()
    else:
        assert leaving.leave()[1] == 700
        assert leaving._begun is None


class Pipe:
    """One end of a pipe to a rank that answers with its number and what it is asked."""

    def __init__(self, rank: int, life: int) -> None:
        self.rank, self.life, self.sent, self.silent = rank, life, list[Any](), False

    def send(self, call: Any) -> None:
        self.sent.append(call)

    def poll(self, seconds: float) -> bool:
        return not self.silent

    def recv(self) -> Any:
        return (10 * self.life + self.rank) / 4.0


def test_calls_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that was killed gets a successor at its place; all others stay."""
    pipes, killed = list[Pipe](), list[tuple[int, int]]()

    class Process:
        def __init__(self, target: Any, args: tuple[Any, ...], daemon: bool) -> None:
            self.pid, self.about = 700 + len(pipes), args[1:]
            assert (target, daemon) == (groups._serve, True)

        def start(self) -> None:
            assert self.about == (pipes[-1].rank, 3, "cpu")

        def join(self, seconds: float | None = None) -> None:
            killed.append((self.pid, 0 if seconds is None else int(seconds)))

    def pipe() -> tuple[Pipe, None]:
        rank = len(pipes) if len(pipes) < 3 else 1
        pipes.append(Pipe(rank, len(pipes) // 3))
        return pipes[-1], None

    monkeypatch.setattr(groups, "CONTEXT", SimpleNamespace(Pipe=pipe, Process=Process))
    monkeypatch.setattr(groups, "os", SimpleNamespace(kill=lambda pid, number: killed.append((pid, number))))
    monkeypatch.setattr(groups, "open_store", lambda host: SimpleNamespace(port=4711))
    ranks = Ranks(3, "cpu")
    assert ranks.each(Member.sweep, 64) == [0.0, 0.25, 0.5]
    assert ranks.each(Member.begin, but=1) == [0.0, 0.5]
    assert [ranks.form(), ranks.form()] == [0.5, 0.5]
    assert [one.sent for one in pipes] == [
        [("sweep", (64,)), *([("begin", ())] if n != 1 else []), ("form", (1, 4711)), ("form", (2, 4711))]
        for n in range(3)
    ]
    ranks.kill(1)
    assert killed == [(702, signal.SIGKILL), (702, 0)]
    assert ranks.each(Member.leave) == [0.0, 11 / 4, 0.5]
    pipes[2].silent = True
    with pytest.raises(TimeoutError, match="leave: a rank does not answer"):
        ranks.each(Member.leave)
    ranks.close()
    assert [one.sent[-1] for one in (pipes[0], pipes[3], pipes[2])] == [None] * 3
    assert killed[2:] == [(701, 5), (704, 5), (703, 5)]
