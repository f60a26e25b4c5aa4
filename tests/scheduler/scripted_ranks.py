"""Pods and ranks of an engine in the test's process: they do what a test says, and write down what they are asked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from orca.v1 import worker_pb2 as pb
from orca.v1 import worker_pb2_grpc
from orca_common.protocol import PROTOCOL
from orca_common.service import LoopPulse
from orca_scheduler.discovery import Candidate, Place
from orca_scheduler.rank import Seen
from orca_scheduler.ranks import Ranks
from orca_scheduler.settings import SchedulerSettings

EPOCH = 7


class ScriptedRank(worker_pb2_grpc.ControllerServicer):
    """A rank that answers, unless `frozen` is set. `report`, `leave` and `end` speak on its control lane."""

    def __init__(self, index: int, slots: int, samples: bool) -> None:
        self.index, self.pid, self.slots, self.samples = index, 100 + index, slots, samples
        pid = self.pid
        self.frozen = False
        self.hello = pb.HelloResponse(protocol=PROTOCOL, host="here", pid=pid, incarnation=f"of {pid}", iteration=3)
        self.form: pb.FormRequest | None = None
        self.allocated: int | None = None
        self.hosted: list[int] = []
        self.iterations: list[int] = []
        self.terms: list[str | bytes] = []
        self._lane: asyncio.Queue[pb.Report | grpc.StatusCode] = asyncio.Queue()
        self.server = grpc.aio.server()
        worker_pb2_grpc.add_ControllerServicer_to_server(self, self.server)
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

    def report(self, number: int, **fields: Any) -> None:
        times = pb.StageTimes(iteration=number)
        if self.samples or "error" in fields:
            result = pb.IterationReport(epoch=EPOCH, number=number, times=times, **fields)
            self._lane.put_nowait(pb.Report(iteration=result))
        else:
            self._lane.put_nowait(pb.Report(times=pb.Times(stages=[times])))

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
        return pb.FormResponse(slots=self.slots)

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:  # noqa: N802
        self.allocated = request.slots
        return pb.AllocateResponse()

    async def Run(self, request_iterator: AsyncIterator[pb.ControlMessage], context: Any) -> None:  # noqa: N802
        self.terms.append(dict(context.invocation_metadata())["orca-term"])

        async def read() -> None:
            async for message in request_iterator:
                await self._thaw()
                if message.HasField("iteration"):
                    self.iterations.append(message.iteration.number)
                else:
                    self._lane.put_nowait(pb.Report(heartbeat=message.heartbeat))

        reading = asyncio.create_task(read())
        try:
            while isinstance(report := await self._lane.get(), pb.Report):
                await context.write(report)
            await context.abort(report, "scripted")
        finally:
            reading.cancel()


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


@dataclass
class Scripted:
    """An engine of scripted ranks, and what its master's `Ranks` told."""

    ranks: list[ScriptedRank]
    pods: list[ScriptedPod]
    master: Ranks
    returned: list[pb.IterationReport] = field(default_factory=list)
    timed: dict[int, int] = field(default_factory=dict)  # iteration -> ranks that told their times
    leaving: list[str] = field(default_factory=list)
    seen: dict[Place, Seen] = field(default_factory=dict)


@asynccontextmanager
async def scripted(tp: int, pp: int, ranks_per_pod: int | None = None, **others: Any) -> AsyncIterator[Scripted]:
    """An engine whose ranks hold 100, 99, .. slots, in blocks of 4; `greet` is still to come."""
    per_pod = ranks_per_pod or tp
    ranks = [ScriptedRank(n, 100 - n, n == tp * pp - tp) for n in range(tp * pp)]
    pods = [ScriptedPod(ranks[n : n + per_pod]) for n in range(0, tp * pp, per_pod)]
    for part in [*ranks, *pods]:
        await part.server.start()
    candidate = Candidate("engine-0", tuple(pod.address for pod in pods))
    values: dict[str, Any] = {"tp": tp, "pp": pp, "gpus_per_pod": ranks_per_pod, "block_size": 4} | others
    settings = SchedulerSettings(workers=",".join(candidate.pods), **values)
    pulse = LoopPulse()

    async def returned(report: pb.IterationReport) -> None:
        engine.returned.append(report)

    def timed(number: int, times: list[pb.StageTimes]) -> None:
        engine.timed[number] = len(times)

    async def leaving(sentence: str) -> None:
        engine.leaving.append(sentence)

    seen: dict[Place, Seen] = {}
    master = Ranks(candidate, 5, settings, pulse, seen, returned, timed, leaving)
    engine = Scripted(ranks, pods, master, seen=seen)
    try:
        async with master:
            yield engine
    finally:
        pulse.close()
        for part in [*ranks, *pods]:
            await part.server.stop(None)
