"""Pods and ranks of an engine in the test's process: they do what a test says, and write down what they are asked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc

from orca.v1 import worker_pb2 as pb
from orca.v1 import worker_pb2_grpc
from orca_common.protocol import CONTROLLER, PROTOCOL
from orca_common.service import LoopPulse
from orca_common.tls import Plaintext
from orca_scheduler.core.core import Drain, EngineLost, EngineReady, GiveBack
from orca_scheduler.lifecycle.events import (
    Admit,
    Allocate,
    Confirm,
    Confirmed,
    Dial,
    EpochGiven,
    Fence,
    Form,
    HangUp,
    Hello,
    HostStore,
    Identified,
    Identify,
    LeaseLost,
    LifeAction,
    LifeEvent,
    NewEpoch,
    Opened,
    Record,
    Recorded,
    Rested,
    Run,
    Say,
    Stop,
    Wake,
)
from orca_scheduler.lifecycle.lifecycle import Lifecycle, Lost
from orca_scheduler.lifecycle.progress import Durations
from orca_scheduler.ranks.ranks import Ranks, Spawn
from orca_scheduler.settings import SchedulerSettings

EPOCH, TERM = 7, 5


class ScriptedRank(worker_pb2_grpc.ControllerServicer):
    """A rank that answers, unless `frozen` is set, and forms as soon as it `may_form`, unless it `fails` then.

    `report`, `pulled`, `leave`, `say` and `end` speak on its control lane.
    """

    def __init__(self, index: int, slots: int, samples: bool) -> None:
        self.index, self.pid, self.slots, self.samples = index, 100 + index, slots, samples
        pid = self.pid
        self.frozen = False
        self.may_form = asyncio.Event()
        self.may_form.set()
        self.fails: grpc.StatusCode | None = None
        self.hello = pb.HelloResponse(protocol=PROTOCOL, host="here", pid=pid, incarnation=f"of {pid}", iteration=3)
        self.form: pb.FormRequest | None = None
        self.allocated: int | None = None
        self.hosted: list[int] = []
        self.iterations: list[int] = []
        self.terms: list[str | bytes] = []
        self.lanes = 0  # that are open
        self._lane: asyncio.Queue[pb.Report | bytes | grpc.StatusCode] = asyncio.Queue()  # of the newest one
        self.server = grpc.aio.server()
        worker_pb2_grpc.add_ControllerServicer_to_server(self, self.server)
        run = grpc.stream_stream_rpc_method_handler(self.Run, pb.ControlMessage.FromString, bytes_of)
        self.server.add_registered_method_handlers(CONTROLLER, {"Run": run})  # which may say any bytes
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    def stand(self, tp: int, pp: int, return_tokens: bool = False) -> None:
        """It is a member of an epoch already, with 40 slots in blocks of 4."""
        stage, tensor_rank = divmod(self.index, tp)
        formation = pb.Formation(
            tensor_parallel=tp,
            pipeline_parallel=pp,
            stage=stage,
            tensor_rank=tensor_rank,
            block_size=4,
            return_tokens=return_tokens,
        )
        self.hello.MergeFrom(pb.HelloResponse(epoch=EPOCH, slots=40, formation=formation))

    def report(self, number: int, *, epoch: int = EPOCH, **fields: Any) -> None:
        times = pb.StageTimes(iteration=number, stage=7, tensor_rank=9)  # which no engine here has
        if self.samples or "error" in fields:
            result = pb.IterationReport(epoch=epoch, number=number, times=times, **fields)
            self._lane.put_nowait(pb.Report(iteration=result))
        else:
            self._lane.put_nowait(pb.Report(times=pb.Times(stages=[times])))

    def pulled(self, number: int, size: int = 0, error: str = "") -> None:
        """Says how its part of a pull has ended."""
        self._lane.put_nowait(pb.Report(pulled=pb.Pulled(number=number, bytes=size, error=error)))

    def say(self, message: bytes) -> None:
        """Puts bytes on the control lane."""
        self._lane.put_nowait(message)

    def leave(self) -> None:
        """Says that it was asked to end."""
        self._lane.put_nowait(pb.Report(leaving=pb.Leaving()))

    def end(self, code: grpc.StatusCode) -> None:
        """Ends the control lane with this status."""
        self._lane.put_nowait(code)

    async def _thaw(self) -> None:
        while self.frozen:
            await asyncio.sleep(0.01)

    async def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloResponse:  # noqa: N802
        await self._thaw()
        return self.hello

    async def HostStore(self, request: pb.HostStoreRequest, context: Any) -> pb.HostStoreResponse:  # noqa: N802
        self.hosted.append(request.epoch)
        return pb.HostStoreResponse(address="store:1")

    async def Form(self, request: pb.FormRequest, context: Any) -> pb.FormResponse:  # noqa: N802
        self.form = request
        await self.may_form.wait()
        if self.fails is not None:
            await context.abort(self.fails, "it says so")
        return pb.FormResponse(slots=self.slots)

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:  # noqa: N802
        self.allocated = request.slots
        return pb.AllocateResponse(blocks=pb.BlockSource(address=f"blocks:{self.index}"))

    async def Run(self, request_iterator: AsyncIterator[pb.ControlMessage], context: Any) -> None:  # noqa: N802
        lane = self._lane = asyncio.Queue[pb.Report | bytes | grpc.StatusCode]()
        self.terms.append(dict(context.invocation_metadata())["orca-term"])
        self.lanes += 1

        async def read() -> None:
            async for message in request_iterator:
                await self._thaw()
                if message.HasField("iteration"):
                    self.iterations.append(message.iteration.number)
                else:
                    lane.put_nowait(pb.Report(heartbeat=message.heartbeat))

        reading = asyncio.create_task(read())
        try:
            while isinstance(report := await lane.get(), pb.Report | bytes):
                await context.write(report)
            await context.abort(report, "scripted")
        finally:
            self.lanes -= 1
            reading.cancel()


def bytes_of(report: pb.Report | bytes) -> bytes:
    return report if isinstance(report, bytes) else report.SerializeToString()


class ScriptedPod(worker_pb2_grpc.SupervisorServicer):
    """A supervisor of scripted ranks."""

    def __init__(self, ranks: list[ScriptedRank]) -> None:
        self.ranks = ranks
        self.pids = [rank.pid for rank in ranks]
        self.fenced: list[tuple[int, int, str]] = []
        self._changed = asyncio.Event()
        self.server = grpc.aio.server()
        worker_pb2_grpc.add_SupervisorServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    def died(self, local_rank: int) -> None:
        """The process is gone."""
        self.pids[local_rank] = 0
        self._changed.set()
        self._changed = asyncio.Event()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.RankTable]:  # noqa: N802
        while True:
            changed = self._changed
            entries = zip(self.ranks, self.pids, strict=True)
            yield pb.RankTable(
                ranks=[pb.RankEntry(local_rank=n, address=r.address, pid=pid) for n, (r, pid) in enumerate(entries)]
            )
            await changed.wait()

    async def Fence(self, request: pb.FenceRequest, context: Any) -> pb.FenceResponse:  # noqa: N802
        self.fenced.append((request.local_rank, request.pid, request.verdict))
        return pb.FenceResponse(killed=True)


class Formed(NamedTuple):
    """The engine runs."""

    epoch: int
    slots: int
    stale_rows: tuple[int, ...]
    iteration: int  # the first one


class Verdict(NamedTuple):
    """Ranks were lost, and those that had to be were fenced."""

    sentence: str
    pids: list[int]  # fenced


class Master:
    """Runs the real lifecycle with the real ranks' adapter, and is the pool: it agrees to everything at once.

    `formed`, `refused` and `verdict` wait for the next outcome of that kind, each a sentence or a value to assert.
    """

    def __init__(self, pods: tuple[str, ...], settings: SchedulerSettings, pulse: LoopPulse, spawn: Spawn) -> None:
        self.lifecycle = Lifecycle("engine-0", settings.shape, pods)
        self.hellos: dict[int, Hello] = {}
        self.returned: list[pb.IterationReport] = []
        self.timed: dict[int, int] = {}  # iteration -> ranks that told their times
        self.places: set[tuple[int, int]] = set()  # of these ranks, for the latest
        self.pulled: list[tuple[int, int, str]] = []  # the claim, the bytes, and why it failed
        self.held: list[tuple[int, pb.AdaptersHeld]] = []  # by ranks
        self.given_back: dict[int, bool] = {}
        self.admitted: list[int] = []
        self._shape, self._pulse, self._spawn = settings.shape, pulse, spawn
        self._inbox: asyncio.Queue[LifeEvent] = asyncio.Queue()
        self._formed: asyncio.Queue[Formed] = asyncio.Queue()
        self._refused: asyncio.Queue[str] = asyncio.Queue()
        self._verdicts: asyncio.Queue[Verdict] = asyncio.Queue()
        self._run = Run(0, 0, ())
        self._lost: Verdict | None = None  # not everyone is fenced yet
        self._ranks: Ranks | None = None
        self._durations, self._met = Durations(), dict[int, int]()
        self._wake: asyncio.TimerHandle | None = None
        self._stopped = False
        self._loop = asyncio.get_running_loop()

    async def formed(self) -> Formed:
        return await asyncio.wait_for(self._formed.get(), 60)

    async def refused(self) -> str:
        return await asyncio.wait_for(self._refused.get(), 60)

    async def verdict(self) -> Verdict:
        return await asyncio.wait_for(self._verdicts.get(), 60)

    def send(self, iteration: pb.Iteration) -> None:
        self._dialed.send(iteration)

    def sources(self) -> list[str]:
        return [source.address for source in self._dialed.sources()]

    def wrong(self, report: str) -> None:
        self._dialed.wrong(report)

    def open(self, epoch: int, claims: tuple[int, ...]) -> None:
        """Begins the term, with this in the pool's books."""
        self._newest = epoch
        self._post(Opened(self._now, epoch, claims, False))

    def stop(self) -> None:
        """Ends the term: every task of its ranks ends too."""
        self._post(LeaseLost(self._now, "the test is over"))

    def _post(self, event: LifeEvent) -> None:
        self._inbox.put_nowait(event)

    async def run(self) -> None:
        while not self._stopped:
            event = await self._inbox.get()
            if isinstance(event, Hello) and event.life == self.lifecycle.life:
                self.hellos[event.rank] = event
            for action in self.lifecycle.step(event):
                self._perform(action)
            if self._lost is not None and not isinstance(self.lifecycle.state, Lost):
                self._verdicts.put_nowait(self._lost)
                self._lost = None
            if self._wake is not None:
                self._wake.cancel()
            due = self.lifecycle.wake_at
            self._wake = None if due is None else self._loop.call_at(due, self._wakes, due)

    def _wakes(self, due: float) -> None:
        self._post(Wake(max(due, self._now)))

    def _perform(self, action: LifeAction) -> None:
        match action:
            case Dial(life, pods):
                self._ranks = Ranks(
                    "engine-0",
                    TERM,
                    life,
                    pods,
                    self._shape,
                    self._pulse,
                    Plaintext(),
                    self._spawn,
                    self._post,
                    self.returned.append,
                    self._timed,
                    lambda *ended: self.pulled.append(ended),
                    lambda *told: self.held.append(told),
                    self._durations,
                    self._met,
                )
            case Identify(life):
                self._post(Identified(self._now, life))
            case NewEpoch(life, above):
                self._newest = max(self._newest, above) + 1
                self._post(EpochGiven(self._now, life, self._newest))
            case HostStore(_, epoch):
                self._dialed.host_store(epoch)
            case Form(_, epoch, store):
                self._dialed.form(epoch, store, self.lifecycle.formation)
            case Allocate(_, epoch, slots):
                self._dialed.allocate(epoch, slots)
            case Record(life, _, _, above, _):
                self._post(Recorded(self._now, life, above + 1))
            case Run():
                self._run = action
                self._dialed.run(action.epoch)
            case EngineReady(_, n_slots, iteration):
                self._formed.put_nowait(Formed(self._run.epoch, n_slots, self._run.stale_rows, iteration))
            case EngineLost():
                pass
            case Drain():
                self._post(Rested(self._now, self.lifecycle.life))
            case Admit(claims):
                self.admitted += claims
            case GiveBack(requests):
                self.given_back |= dict(requests)
            case Confirm(life):
                self._post(Confirmed(self._now, life))
            case Fence(_, rank, pid, verdict):
                assert self._lost is not None
                self._lost.pids.append(pid)
                self._dialed.fence(rank, pid, verdict)
            case HangUp():
                self._dialed.hang_up()
            case Say("rank lost", sentence):
                self._lost = Verdict(sentence, [])
            case Say("engine cannot form", why):
                self._refused.put_nowait(why)
            case Say():
                pass  # that it drains
            case Stop():
                self._stopped = True
            case _:
                raise AssertionError(action)

    def _timed(self, iteration: int, times: list[pb.StageTimes]) -> None:
        self.timed[iteration] = len(times)
        self.places = {(one.stage, one.tensor_rank) for one in times}

    @property
    def _dialed(self) -> Ranks:
        assert self._ranks is not None
        return self._ranks

    @property
    def _now(self) -> float:
        return self._loop.time()


class Scripted(NamedTuple):
    """An engine of scripted ranks, and its master."""

    ranks: list[ScriptedRank]
    pods: list[ScriptedPod]
    master: Master


@asynccontextmanager
async def scripted(
    tp: int,
    pp: int,
    ranks_per_pod: int | None = None,
    books: int = EPOCH - 1,
    claims: tuple[int, ...] = (),
    **others: Any,
) -> AsyncIterator[Scripted]:
    """An engine whose ranks hold 100, 99, .. slots, in blocks of 4.

    `books` is the last epoch of the pool's books, and `claims` what an earlier master left claimed. The body may still
    change what ranks and pods say before it waits for the first time. An error of any task of the master's ends the
    test, and when the body has ended, every such task must end.
    """
    per_pod = ranks_per_pod or tp
    ranks = [ScriptedRank(n, 100 - n, n == tp * pp - tp) for n in range(tp * pp)]
    pods = [ScriptedPod(ranks[n : n + per_pod]) for n in range(0, tp * pp, per_pod)]
    for part in [*ranks, *pods]:
        await part.server.start()
    addresses = tuple(pod.address for pod in pods)
    values: dict[str, Any] = {"tp": tp, "pp": pp, "gpus_per_pod": ranks_per_pod, "block_size": 4} | others
    settings = SchedulerSettings(workers=",".join(addresses), **values)
    try:
        async with asyncio.TaskGroup() as tasks:
            master = Master(addresses, settings, LoopPulse(), tasks.create_task)
            tasks.create_task(master.run())
            master.open(books, claims)
            try:
                yield Scripted(ranks, pods, master)
            finally:
                master.stop()
    finally:
        for part in [*ranks, *pods]:
            await part.server.stop(None)
