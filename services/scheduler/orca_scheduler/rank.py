"""One rank as its engine's master sees it: greeting, formation, and its control lane."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Never, TypeVar

import grpc

from orca.v1 import worker_pb2 as pb
from orca.v1.worker_pb2_grpc import ControllerStub
from orca_common.errors import FailedPrecondition
from orca_common.protocol import PROTOCOL, TERM_METADATA
from orca_common.service import cancel

from .channels import DIAL_SECONDS, dial, listens, reason
from .discovery import Place
from .pods import Pod
from .signs import Kind, Signs

T = TypeVar("T")
log = logging.getLogger(__name__)
LOAD_SECONDS = 600.0  # bound of each step of a formation: a rank's slice of the model is read in one
HEARTBEAT_SECONDS = 0.5
POLL_SECONDS = 0.05  # between looks whether a starting rank listens
REFUSALS = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED  # of a lane: see Kind.REFUSED

Returned = Callable[[pb.IterationReport], Awaitable[None]]  # of a rank that samples
Timed = Callable[[int, pb.StageTimes], None]
Leaving = Callable[[str], Awaitable[None]]  # takes a sentence


@dataclass(frozen=True, slots=True)
class Seen:
    """What was known of a rank in an earlier life of its engine: a sentence about one that does not answer names it."""

    host: str = "unknown"
    iteration: int = 0


class Rank:
    """What goes wrong with it becomes a sign; a call that cannot go on then waits for the verdict, which ends it."""

    def __init__(
        self,
        place: Place,
        engine: str,
        term: int,
        pod: Pod,
        signs: Signs,
        seen: Seen,
        returned: Returned,
        timed: Timed,
        leaving: Leaving,
    ) -> None:
        self.place, self._engine, self._term = place, engine, term
        self._pod, self._signs = pod, signs
        self._returned, self._timed, self._leaving = returned, timed, leaving
        self._loop = asyncio.get_running_loop()
        self._channel: grpc.aio.Channel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._writing = asyncio.Lock()
        self._left = False  # its control lane has ended
        self._gone = False
        self.hello = pb.HelloResponse()
        self.address = pod.address
        self.pid = 0  # of the process that was greeted; 0: none was yet
        self.host, self.last_iteration = seen.host, seen.iteration
        self.last_heard: float | None = None  # on the loop's clock; None: its control lane is not open

    async def close(self) -> None:
        await cancel(*self._tasks)
        if self._channel is not None:
            await self._channel.close()

    def __str__(self) -> str:
        return (
            f"stage {self.place.stage} rank {self.place.tensor_rank} of {self._engine} at {self.address} "
            f"(host {self.host}, pid {self.pid or 'unknown'}, last iteration {self.last_iteration})"
        )

    # -- greeting

    async def greet(self) -> pb.HelloResponse:
        """Waits until the rank listens and says Hello. Raises FailedPrecondition when it speaks another protocol."""
        while True:
            entry = self._entry()
            if entry is not None and await listens(entry.address):
                self.address, self.pid = entry.address, entry.pid
                break
            await asyncio.sleep(POLL_SECONDS)
        self._channel = dial(self.address)
        self._controller = ControllerStub(self._channel)
        request = pb.HelloRequest(protocol=PROTOCOL, engine=self._engine, term=self._term)
        self.hello = await self._ask(self._controller.Hello(request, timeout=DIAL_SECONDS, wait_for_ready=True))
        if self.hello.protocol != PROTOCOL:
            raise FailedPrecondition(
                f"{self} speaks protocol {self.hello.protocol} and this scheduler {PROTOCOL}: "
                "an engine of mixed versions never forms"
            )
        self.pid, self.host = self.hello.pid, self.hello.host
        self.last_iteration = max(self.last_iteration, self.hello.iteration)
        return self.hello

    def _entry(self) -> pb.RankEntry | None:
        """The rank's running process by its pod's table."""
        entries = self._pod.table or ()
        return next((e for e in entries if e.local_rank == self.place.local_rank and e.pid), None)

    def look(self) -> None:
        """There is news of the pod: is the process that was greeted still there?"""
        if not self.pid or self._gone:
            return
        entry = self._entry()
        if self._pod.away is not None and self._left:
            self._is_gone(f"has ended, and so has its supervisor ({self._pod.away})")
        elif self._pod.away is None and (entry is None or entry.pid != self.pid):
            self._is_gone("has ended")

    def _is_gone(self, detail: str) -> None:
        self._gone = True
        self._signs.put(self.place, Kind.GONE, detail)

    # -- formation

    async def host_store(self, epoch: int) -> str:
        """Has the rank host the epoch's store: its address. This may import torch: heartbeats tell whether it lives."""
        request = pb.HostStoreRequest(term=self._term, epoch=epoch)
        return (await self._ask(self._controller.HostStore(request, timeout=LOAD_SECONDS))).address

    async def form(self, epoch: int, formation: pb.Formation, store: str, controllers: list[str]) -> pb.FormResponse:
        """Takes its place in a new epoch. Returns with all others."""
        request = pb.FormRequest(
            term=self._term, epoch=epoch, formation=formation, store=store, controllers=controllers
        )
        return await self._ask(self._controller.Form(request, timeout=LOAD_SECONDS))

    async def allocate(self, epoch: int, slots: int) -> None:
        request = pb.AllocateRequest(term=self._term, epoch=epoch, slots=slots)
        await self._ask(self._controller.Allocate(request, timeout=LOAD_SECONDS))

    async def _ask(self, call: Awaitable[T]) -> T:
        """The answer of a call. Raises FailedPrecondition with the rank's sentence."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise FailedPrecondition(f"{self} refuses: {error.details()}") from None
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return await self._wait_for_verdict(Kind.SILENT, f"listens and does not answer: {error.details()}")
            away = error.code() is grpc.StatusCode.UNAVAILABLE  # itself, which its supervisor tells, or a neighbour
            kind = Kind.PEER_LOST if away else Kind.FAILED
            return await self._wait_for_verdict(kind, f"does not form: {reason(error)}")

    async def _wait_for_verdict(self, kind: Kind, detail: str) -> Never:
        self._signs.put(self.place, kind, detail)
        await asyncio.Event().wait()
        raise AssertionError("the event is never set")

    # -- the control lane

    def open(self) -> None:
        """Opens the control lane: heartbeats, and reports from the rank."""
        self._lane = self._controller.Run(metadata=((TERM_METADATA, str(self._term)),))
        self.last_heard = self._loop.time()
        self._tasks = [self._signs.guard(asyncio.create_task(part)) for part in (self._read(), self._heartbeat())]

    def heard(self) -> None:
        """Counts its silence from now on, unless its lane has ended."""
        if self.last_heard is not None:
            self.last_heard = self._loop.time()

    async def send(self, iteration: pb.Iteration) -> None:
        """Puts an iteration on the control lane."""
        await self._write(pb.ControlMessage(iteration=iteration))

    async def _write(self, message: pb.ControlMessage) -> None:
        try:
            async with self._writing:  # gRPC allows one write at a time: a heartbeat must not meet an iteration
                await self._lane.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await asyncio.Event().wait()  # the lane has ended: `_read` tells why

    async def _heartbeat(self) -> None:
        number = 0
        while True:
            number += 1
            await self._write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=number)))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _read(self) -> None:
        try:
            async for report in self._lane:
                self.last_heard = self._loop.time()
                match report.WhichOneof("report"):
                    case "iteration":
                        await self._reported(report.iteration)
                    case "times":
                        for times in report.times.stages:
                            self._has_run(times.iteration, times)
                    case "leaving":
                        await self._leaving(f"{self} is leaving")
                    case _:
                        self.last_iteration = max(self.last_iteration, report.heartbeat.iteration)
            why = f"{(await self._lane.code()).name}: {await self._lane.details()}"
        except grpc.aio.AioRpcError as error:
            why = reason(error)
        self._left, self.last_heard = True, None
        refused = await self._lane.code() in REFUSALS
        kind = Kind.REFUSED if refused else Kind.CLOSED
        self._signs.put(self.place, kind, f"{kind.value}: {why}")
        self.look()

    async def _reported(self, report: pb.IterationReport) -> None:
        if report.error:
            kind = Kind.PEER_LOST if report.peer_lost else Kind.FAILED
            self._signs.put(self.place, kind, f"{kind.value}: {report.error}")
            return
        self._has_run(report.number, report.times)
        await self._returned(report)

    def _has_run(self, iteration: int, times: pb.StageTimes) -> None:
        self.last_iteration = max(self.last_iteration, iteration)
        self._timed(iteration, times)
