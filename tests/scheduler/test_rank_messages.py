"""The words of ranks, and what their master makes of them: events as a whole, without a connection."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from orca.v1 import worker_pb2 as pb
from orca_common.lanes.client import CallFailed, Status
from orca_common.tls import Plaintext
from orca_scheduler import timers
from orca_scheduler.lifecycle.events import (
    AllAnswered,
    Entry,
    Fenced,
    Formation,
    Hello,
    Model,
    PodAway,
    PodSeen,
    RankAllocated,
    RankFormed,
    RankLeaving,
    Refused,
    Standing,
    StoreHosted,
    Suspected,
)
from orca_scheduler.lifecycle.places import Shape
from orca_scheduler.lifecycle.progress import Durations
from orca_scheduler.lifecycle.suspicions import Kind, Suspicion
from orca_scheduler.ranks import ranks as module
from orca_scheduler.ranks.answers import MOST_SLOTS, problem_of_hello, problem_of_table
from orca_scheduler.ranks.rank import LONGEST_ERROR, UNDER_WAY, Listener, Rank, hello_of
from orca_scheduler.ranks.ranks import MOST_TIMES, Ranks

NOW = 50.0


def formation_of(tensor_rank: int) -> pb.Formation:
    """That of a rank of stage 1, of three stages of two."""
    return pb.Formation(
        tensor_parallel=2,
        pipeline_parallel=3,
        stage=1,
        tensor_rank=tensor_rank,
        block_size=16,
        return_tokens=True,
        hands_over=True,
    )


class Clock:
    """Stands for the event loop: its time is ours, and what it is to call soon waits in a list."""

    def __init__(self) -> None:
        self.now, self.soon = NOW, list[tuple[Any, ...]]()

    def time(self) -> float:
        return self.now

    def call_soon(self, *call: Any) -> None:
        self.soon.append(call)


class Listening:
    """A rank of number 3 that listens, and all that its listener has been given."""

    def __init__(self, *, latest: int = 10) -> None:
        self.told, self.clock, self.sent = list[Any](), Clock(), list[pb.ControlMessage]()

        def takes(name: str) -> Any:
            return lambda *given: self.told.append((name, *given))

        listener = Listener(
            self.told.append,
            takes("answered"),
            takes("returned"),
            takes("timed"),
            takes("pulled"),
            lambda: latest,
            takes("held"),
        )
        self.rank = Rank(3, "engine-0", 5, 2, Plaintext(), listener, {})
        self.rank._loop = self.clock  # pyright: ignore[reportAttributeAccessIssue]
        self.rank._lane = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
            send=lambda raw: self.sent.append(pb.ControlMessage.FromString(raw)), waits=False
        )

    def receives(self, report: pb.Report | bytes) -> list[Any]:
        """Returns the events that follow from a message."""
        self.told.clear()
        self.rank._heard(report if isinstance(report, bytes) else report.SerializeToString())
        return self.told

    def answers(self, method: str, answer: Any) -> list[tuple[Any, ...]]:
        """Has the rank answer calls of a method. Returns what is asked, as it comes."""
        asked = list[tuple[Any, ...]]()

        async def ask(path: str, request: Any, kind: Any, seconds: float) -> Any:
            asked.append((path, request, kind, seconds))
            if isinstance(answer, Status):
                raise CallFailed(answer)
            return answer

        self.rank._connection = SimpleNamespace(ask=ask)  # pyright: ignore[reportAttributeAccessIssue]
        return asked


def suspected(kind: Kind, detail: str, iteration: int = 0) -> Suspected:
    return Suspected(NOW, 2, Suspicion(3, kind, detail), iteration)


async def test_why_a_call_has_failed() -> None:
    for code, event in (
        (grpc.StatusCode.FAILED_PRECONDITION, Refused(NOW, 2, 3, "refuses: it says so")),
        (grpc.StatusCode.DEADLINE_EXCEEDED, suspected(Kind.SILENT, "listens and does not answer: it says so")),
        (grpc.StatusCode.UNAVAILABLE, suspected(Kind.PEER_LOST, "does not form: UNAVAILABLE: it says so")),
        (grpc.StatusCode.INTERNAL, suspected(Kind.FAILED, "does not form: INTERNAL: it says so")),
    ):
        this = Listening()
        asked = this.answers("Allocate", Status(code, "it says so"))
        await this.rank.allocate(7, 96)
        assert this.told == [event]
        assert len(asked) == 1


async def test_the_steps_of_a_formation() -> None:
    this = Listening()
    asked = this.answers("HostStore", pb.HostStoreResponse(address="store:1"))
    await this.rank.host_store(7)
    assert asked == [
        ("/orca.v1.Controller/HostStore", pb.HostStoreRequest(term=5, epoch=7), pb.HostStoreResponse, 600.0)
    ]
    assert this.told == [StoreHosted(NOW, 2, 7, "store:1")]
    for slots, believed in ((95, 95), (MOST_SLOTS + 1, MOST_SLOTS)):
        this.told.clear()
        asked = this.answers("Form", pb.FormResponse(slots=slots))
        await this.rank.form(8, Formation(2, 3, 1, 0, 16, True, True), "store:1", ["a:1", "b:2"])
        formation = formation_of(0)
        request = pb.FormRequest(term=5, epoch=8, formation=formation, store="store:1", controllers=["a:1", "b:2"])
        assert asked == [("/orca.v1.Controller/Form", request, pb.FormResponse, timers.LOAD)]
        assert this.told == [RankFormed(NOW, 2, 8, 3, believed)]
    this.told.clear()
    blocks = pb.BlockSource(address="c:3")
    asked = this.answers("Allocate", pb.AllocateResponse(blocks=blocks))
    await this.rank.allocate(8, 96)
    assert asked[0][:2] == ("/orca.v1.Controller/Allocate", pb.AllocateRequest(term=5, epoch=8, slots=96))
    assert (this.told, this.rank.blocks) == ([RankAllocated(NOW, 2, 8, 3)], blocks)


async def test_each_kind_of_report() -> None:
    this = Listening()
    this.clock.now = 60.0
    times = [pb.StageTimes(iteration=n, sent=n) for n in (4, 6)]
    assert this.receives(pb.Report(times=pb.Times(stages=times))) == [
        ("timed", 3, 4, times[0]),
        ("timed", 3, 6, times[1]),
    ]
    assert (this.rank.last_heard, this.rank.last_iteration) == (60.0, 6)
    report = pb.IterationReport(number=5, token_ids=[9], times=times[0])
    assert this.receives(pb.Report(iteration=report)) == [("returned", 3, report)]
    [(call, *given)] = this.clock.soon  # the next batch does not wait for the times
    this.told.clear()
    call(*given)
    assert this.told == [("timed", 3, 5, times[0])]
    assert this.rank.last_iteration == 6, "it goes up alone"
    assert this.receives(pb.Report(pulled=pb.Pulled(number=8))) == [("pulled", 3, pb.Pulled(number=8))]
    held = pb.AdaptersHeld(number=2)
    assert this.receives(pb.Report(adapters=held)) == [("held", 3, held)]
    assert this.receives(pb.Report(leaving=pb.Leaving())) == [RankLeaving(60.0, 2, 3, 6)]
    assert this.receives(pb.Report(heartbeat=pb.Heartbeat(number=4, iteration=7))) == [("answered",)]
    assert (this.rank.answered, this.rank.last_iteration) == (4, 7)


async def test_which_errors_of_iterations_count() -> None:
    """A complaint about a neighbour does not, once the rank was asked to leave its epoch for another."""
    this = Listening()
    this.answers("Form", pb.FormResponse(slots=9))
    await this.rank.form(8, Formation(1, 1, 0, 0, 16, False, False), "", [])

    def error(epoch: int, lost: bool, text: str = "no data") -> list[Any]:
        return this.receives(pb.Report(iteration=pb.IterationReport(epoch=epoch, number=4, error=text, peer_lost=lost)))

    assert error(7, True) == []
    assert error(8, True) == [suspected(Kind.PEER_LOST, "lost a neighbour: no data")]
    assert error(7, False) == [suspected(Kind.FAILED, "failed: no data")]
    [long] = error(8, False, "x" * (LONGEST_ERROR + 9))
    assert long.suspicion.detail == f"failed: {'x' * (LONGEST_ERROR - 1)}…"
    assert this.rank.last_iteration == 0, "of an iteration that it has not run"


@pytest.mark.parametrize("began", [0, 400])
async def test_an_iteration_of_the_future(began: int) -> None:
    """Above the last one that was sent, and above those that it had run when it was greeted."""
    this = Listening(latest=100)
    this.rank._began = began
    most = max(100, began) + UNDER_WAY
    assert this.receives(pb.Report(heartbeat=pb.Heartbeat(number=1, iteration=most))) == [("answered",)]
    assert this.receives(pb.Report(heartbeat=pb.Heartbeat(number=2, iteration=most + 1))) == [
        suspected(Kind.FAILED, f"failed: it reported iteration {most + 1}, which it was never sent", most)
    ]
    this.clock.now = 70.0
    assert this.receives(pb.Report(heartbeat=pb.Heartbeat(number=3, iteration=1))) == [], "it is believed no more"
    assert (this.rank.answered, this.rank.last_heard) == (1, 70.0), "and it lives"


async def test_bytes_that_are_no_report() -> None:
    this = Listening()
    assert this.receives(b"\xff\xff\xff") == [suspected(Kind.FAILED, "failed: it reported 3 bytes that are no report")]


async def test_heartbeats() -> None:
    """Numbered, with the epoch under which the engine runs."""
    this = Listening()
    assert this.rank.ask() == 1, "the next one will be: there is no lane yet"
    this.rank.run(7)
    assert (this.sent, this.rank.silence, this.rank.last_heard) == ([], timers.SILENCE, None)
    this.rank.last_heard = 1.0
    this.rank.run(7)
    assert this.rank.last_heard == NOW
    assert this.rank.ask() == 2
    assert this.sent == [pb.ControlMessage(heartbeat=pb.Heartbeat(number=n, epoch=7)) for n in (1, 2)]
    this.sent.clear()
    table = pb.AdapterTable(number=4)
    this.rank.tell_adapters(table)
    this.rank.send(pb.Iteration(number=4))
    assert this.sent == [pb.ControlMessage(adapters=table), pb.ControlMessage(iteration=pb.Iteration(number=4))]
    this.rank._lane = None
    this.rank.send(pb.Iteration(number=5))
    assert len(this.sent) == 2, "without a lane nothing is sent"


def test_the_answer_to_a_greeting() -> None:
    formation = formation_of(1)
    answer = pb.HelloResponse(
        **{"protocol": 9, "host": "here", "pid": 77, "epoch": 4, "iteration": 30, "slots": 96, "weights": "w"},
        **{"model_digest": "d", "max_positions": 64, "vocab_size": 97, "can": ["a", "b"], "formation": formation},
        rows=[pb.HeldRow(row=row) for row in (5, 1, 3)],
    )
    assert hello_of(1.5, 2, 3, answer) == Hello(
        *(1.5, 2, 3, "here", 77),
        Standing(4, 30, 96, (1, 3, 5), Formation(2, 3, 1, 1, 16, True, True)),
        Model("d", 64, 97, ("a", "b")),
        *(9, "w"),
    )


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"epoch": 1 << 52, "iteration": 1 << 52, "slots": 1 << 26, "can": ["x"] * 64, "host": "h" * 300}, None),
        ({"epoch": (1 << 52) + 1}, f"epoch {(1 << 52) + 1}, which no pool gives"),
        ({"iteration": (1 << 52) + 1}, f"iteration {(1 << 52) + 1}, which no pool gives"),
        ({"slots": (1 << 26) + 1}, f"{(1 << 26) + 1} slots, and an engine has {1 << 26} at most"),
        ({"can": ["x"] * 65}, "65 words of what it can"),
        *(
            ({name: "x" * 301}, "a name of 301 characters")
            for name in ("incarnation", "host", "model_digest", "weights")
        ),
        ({"blocks": pb.BlockSource(address="x" * 301)}, "a name of 301 characters"),
        ({"can": ["x" * 301]}, "a name of 301 characters"),
    ],
)
def test_an_answer_that_cannot_be(fields: dict[str, Any], problem: str | None) -> None:
    assert problem_of_hello(pb.HelloResponse(**fields)) == problem


@pytest.mark.parametrize(
    ("addresses", "problem"),
    [
        ([(0, "a:1"), (1, "[::1]:65535")], None),
        ([(1, "a:1"), (1, "b:1")], "rank 1 twice"),
        ([(0, "x" * 299 + ":1")], "an address of 301 characters"),
        *(([(0, wrong)], f"the address {wrong!r}") for wrong in ("a", ":1", "a:0", "a:65536", "a\n:1", "a:x")),
    ],
)
def test_a_table_that_cannot_be(addresses: list[tuple[int, str]], problem: str | None) -> None:
    entries = [pb.RankEntry(local_rank=number, address=address) for number, address in addresses]
    assert problem_of_table(entries) == problem


# -- all ranks of an engine


class Pod:
    """Stands for a supervisor's connection: a table, and fences."""

    def __init__(self, address: str, transport: Any, seen: Any, away: Any) -> None:
        self.address, self.seen, self.away = address, seen, away
        self.table: dict[int, pb.RankEntry] = {}
        self.fenced = list[tuple[int, int, str]]()

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def fence(self, local_rank: int, pid: int, verdict: str) -> None:
        self.fenced.append((local_rank, pid, verdict))

    async def close(self) -> None:
        pass


class Engine:
    """Ranks of two stages of two, none of which is reached."""

    def __init__(self) -> None:
        self.events, self.timed, self.pulled = list[Any](), list[Any](), list[Any]()
        self.returned = list[pb.IterationReport]()
        self.tasks = list[asyncio.Task[None]]()
        self.ranks = Ranks(
            *("engine-0", 5, 2, ("p:1", "q:1")),
            Shape(2, 2, 2, 16),
            SimpleNamespace(late_at=0.0),  # pyright: ignore[reportArgumentType]
            Plaintext(),
            self._spawn,
            *(self.events.append, self.returned.append),
            lambda *given: self.timed.append(given),
            lambda *given: self.pulled.append(given),
            lambda *given: None,
            Durations(),
            {},
        )
        self.clock = Clock()
        for one in (self.ranks, *self.ranks._ranks):
            one._loop = self.clock  # pyright: ignore[reportAttributeAccessIssue]

    def _spawn(self, body: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(body))
        return self.tasks[-1]


@asynccontextmanager
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    monkeypatch.setattr(module, "Pod", Pod)
    made = Engine()
    try:
        yield made
    finally:
        await made.ranks.close()


async def test_the_times_of_an_iteration_wait_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the places that the ranks have, whatever they say. The oldest ones go where too many wait."""
    async with engine(monkeypatch) as this:
        for rank in (2, 0, 3):
            this.ranks._times_came(rank, 7, pb.StageTimes(stage=9, tensor_rank=9, sent=rank))
        assert this.timed == []
        this.ranks._times_came(1, 7, pb.StageTimes(sent=1))
        [(iteration, times)] = this.timed
        assert iteration == 7
        assert [(one.stage, one.tensor_rank, one.sent) for one in times] == [(1, 0, 2), (0, 0, 0), (1, 1, 3), (0, 1, 1)]
        assert this.ranks._times == {}
        for number in range(100, 100 + MOST_TIMES):
            this.ranks._times_came(0, number, pb.StageTimes())
        assert len(this.ranks._times) == MOST_TIMES
        this.ranks._times_came(1, 100, pb.StageTimes())
        assert len(this.ranks._times[100]) == 2, "one that is known takes no place"
        this.ranks._times_came(0, 900, pb.StageTimes())
        assert (len(this.ranks._times), min(this.ranks._times), max(this.ranks._times)) == (MOST_TIMES, 101, 900)


async def test_a_pull_has_ended_when_it_has_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sum of the bytes, and the first of the errors."""
    async with engine(monkeypatch) as this:
        for number in (4, 5):
            this.ranks.send(pb.Iteration(number=number, pull=pb.Pull(admission=pb.Admission(claim=10 * number))))
        for number in (4, 5):
            for rank, error in ((3, ""), (1, "x" * (LONGEST_ERROR + 9)), (0, "late"), (2, "")):
                this.ranks._pull_ended(
                    rank, pb.Pulled(number=number, bytes=rank + 1, error=error if number == 5 else "")
                )
                this.ranks._pull_ended(rank, pb.Pulled(number=9, bytes=100))  # of an earlier life
        (first, *whole), (second, size, why) = this.pulled
        assert (first, whole) == (40, [10, ""])
        assert (second, size) == (50, 10)
        assert why == "x" * (LONGEST_ERROR - 1) + "…"


async def test_all_are_asked_after_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the lifecycle learns when all have answered, once."""
    async with engine(monkeypatch) as this:
        ranks = this.ranks._ranks
        ranks[2].answered = 5
        this.ranks._answered()
        assert this.events == [], "none was asked"
        for rank in ranks:
            rank._heartbeats = 5
        complaint = Suspected(NOW, 2, Suspicion(1, Kind.PEER_LOST, "no data"), 4)
        this.ranks._told(Suspected(NOW, 2, Suspicion(1, Kind.FAILED, "by itself"), 4))
        assert this.ranks._asked == []
        this.ranks._told(complaint)
        assert this.events[-1] is complaint
        assert this.ranks._asked == [6] * 4
        for rank in ranks[:3]:
            rank.answered = 6
            this.ranks._answered()
        assert len(this.events) == 2
        ranks[3].answered = 7
        this.ranks._answered()
        this.ranks._answered()
        assert this.events[2:] == [AllAnswered(NOW, 2)]


async def test_the_tokens_of_an_iteration_come_from_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the last stage. Reports of another iteration than the oldest are of an earlier life."""
    async with engine(monkeypatch) as this:
        for number in (4, 5):
            this.ranks.send(pb.Iteration(number=number, rows=[1], starts=[0], counts=[3]))
        for number in (5, 3, 4):
            this.ranks._tokens_came(2, pb.IterationReport(number=number))
        assert [report.number for report in this.returned] == [4]
        assert this.ranks._progress.oldest == 5
        this.ranks._tokens_came(3, pb.IterationReport(number=5))
        wrong = "failed: it reported tokens, and another rank makes them"
        assert this.events == [Suspected(NOW, 2, Suspicion(3, Kind.FAILED, wrong), 0)]
        this.ranks.wrong("nonsense")
        assert this.events[1:] == [Suspected(NOW, 2, Suspicion(2, Kind.FAILED, "failed: it reported nonsense"), 0)]


async def test_who_holds_an_engine_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first stage that has not run the oldest iteration, those furthest behind; else the one that samples."""
    async with engine(monkeypatch) as this:
        this.ranks.send(pb.Iteration(number=9))
        for ran, stuck in (
            ((8, 7, 0, 0), [1]),
            ((8, 8, 0, 0), [0, 1]),
            ((9, 8, 0, 0), [1]),
            ((9, 9, 8, 7), [3]),
            ((9, 12, 8, 8), [2, 3]),
            ((9, 9, 9, 9), [2]),
        ):
            for rank, last in zip(this.ranks._ranks, ran, strict=True):
                rank.last_iteration = last
            assert [rank.index for rank in this.ranks._stuck()] == stuck, ran


async def test_pods_and_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(monkeypatch) as this:
        first, second = this.ranks._pods
        entries = [pb.RankEntry(local_rank=n, address=f"r:{n}", pid=70 + n) for n in (1, 0, 2)]
        second.table = {entry.local_rank: entry for entry in entries}
        this.ranks._ranks[3].last_iteration = 12
        second.seen()  # pyright: ignore[reportAttributeAccessIssue]
        first.away("it ended its list of ranks")  # pyright: ignore[reportAttributeAccessIssue]
        rows = (Entry(1, "r:1", 71, 12), Entry(0, "r:0", 70, 0), Entry(2, "r:2", 72, 0))
        assert this.events == [PodSeen(NOW, 2, 1, rows), PodAway(NOW, 2, 0, "it ended its list of ranks")]
        assert [this.ranks._entry(rank) for rank in range(4)] == [None, None, second.table[0], second.table[1]]
        this.ranks.fence(3, 71, "a verdict")
        await asyncio.gather(*this.ranks._fences)
        assert this.events[2:] == [Fenced(NOW, 2, 3)]
        assert second.fenced == [(1, 71, "a verdict")]  # pyright: ignore[reportAttributeAccessIssue]
        assert first.fenced == []  # pyright: ignore[reportAttributeAccessIssue]
