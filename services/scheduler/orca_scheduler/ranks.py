"""The ranks of one engine, as its master reaches them: dialling, formation, and the control lane (DESIGN section 6)."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import grpc

from orca.v1 import worker_pb2 as pb
from orca.v1.worker_pb2_grpc import ControllerStub, SupervisorStub
from orca_common.errors import FailedPrecondition
from orca_common.service import LoopPulse

from .discovery import Candidate

log = logging.getLogger(__name__)
PROTOCOL = 1
DIAL_SECONDS = 5.0  # bound of one attempt to reach a supervisor or a rank
LOAD_SECONDS = 600.0  # bound of loading a rank's slice of the model
BEAT_SECONDS = 0.5
SILENCE_SECONDS = 2.0  # without a beat: the verdict (DESIGN section 6)
STUCK_SECONDS, STUCK_TIMES = 30.0, 10  # without progress, and times the longest iteration: a stuck device
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
]


class RankLost(Exception):
    """A rank is gone, or judged so. The sentence names stage, rank, host and last iteration."""


class Progress:
    """How long iterations take, so that a stuck device is told from a long initiation. All times are the loop's."""

    def __init__(self) -> None:
        self._sent: deque[float] = deque()  # when each iteration in flight was sent, oldest first
        self._returned = 0.0  # when the last one came back
        self._longest = 0.0

    def sent(self, now: float) -> None:
        self._sent.append(now)

    def returned(self, now: float) -> None:
        self._longest = max(self._longest, now - self._began)
        self._sent.popleft()
        self._returned = now

    @property
    def _began(self) -> float:
        """When the oldest iteration in flight could begin."""
        return max(self._sent[0], self._returned)

    def stuck(self, now: float, since: float) -> float | None:
        """Seconds without progress, when they are too many; only those after `since` count."""
        if not self._sent:
            return None
        standing = now - max(self._began, since)
        return standing if standing > max(STUCK_SECONDS, STUCK_TIMES * self._longest) else None


class Ranks:
    """One engine's ranks under one master's term. An async context manager: leaving it closes all channels."""

    def __init__(self, candidate: Candidate, term: int, pulse: LoopPulse) -> None:
        self._candidate, self._term, self._pulse = candidate, term, pulse
        self._channels: list[grpc.aio.Channel] = []
        self._entry = pb.RankEntry()
        self.hello = pb.HelloResponse()
        self.stage_times: pb.StageTimes | None = None
        self._writing = asyncio.Lock()
        self._last_heard = 0.0
        self._last_iteration = 0
        self._progress = Progress()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close()

    def _dial(self, address: str) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._channels.append(channel)
        return channel

    async def greet(self) -> pb.HelloResponse:
        """Finds the rank by its pod's supervisor and says Hello.

        Raises RankLost when it cannot be reached, FailedPrecondition when it speaks another protocol.
        """
        try:
            self._supervisor = SupervisorStub(self._dial(self._candidate.pods[0]))
            async with asyncio.timeout(DIAL_SECONDS):
                self._entry = await self._running_rank()
            self._controller = ControllerStub(self._dial(self._entry.address))
            request = pb.HelloRequest(protocol=PROTOCOL, engine=self._candidate.engine, term=self._term)
            self.hello = await self._controller.Hello(request, timeout=DIAL_SECONDS, wait_for_ready=True)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            raise RankLost(f"{self._name()} cannot be reached: {_reason(error)}") from None
        if self.hello.protocol != PROTOCOL:
            raise FailedPrecondition(
                f"{self._name()} speaks protocol {self.hello.protocol} and this scheduler {PROTOCOL}: "
                "an engine of mixed versions never forms"
            )
        self._last_iteration = self.hello.iteration
        return self.hello

    async def _running_rank(self) -> pb.RankEntry:
        call = self._supervisor.Watch(pb.WatchRequest(), wait_for_ready=True)
        try:
            async for table in call:
                if all(rank.pid for rank in table.ranks):
                    return table.ranks[0]
        finally:
            call.cancel()
        raise RankLost(f"the supervisor at {self._candidate.pods[0]} ended its list of ranks")

    async def form(self, epoch: int, block_size: int, max_batch_size: int, slots: int | None) -> int:
        """Forms the engine under a new epoch: its `n_slots`. Raises RankLost."""
        try:
            request = pb.FormRequest(
                term=self._term,
                epoch=epoch,
                tensor_parallel=1,
                pipeline_parallel=1,
                block_size=block_size,
                max_batch_size=max_batch_size,
            )
            formed = await self._controller.Form(request, timeout=LOAD_SECONDS)
            if slots is not None and slots > formed.slots:
                raise FailedPrecondition(f"slots: {slots} do not fit, {self._name()} has room for {formed.slots}")
            n_slots = (slots or formed.slots) // block_size * block_size
            if n_slots == 0:
                raise FailedPrecondition(
                    f"slots: {self._name()} has room for {slots or formed.slots}, a block is {block_size}"
                )
            allocate = pb.AllocateRequest(term=self._term, epoch=epoch, slots=n_slots)
            await self._controller.Allocate(allocate, timeout=LOAD_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                raise FailedPrecondition(f"{self._name()} does not form: {error.details()}") from None
            raise RankLost(f"{self._name()} was lost while it formed: {_reason(error)}") from None
        return n_slots

    def open(self) -> None:
        """Opens the control lane."""
        self._lane = self._controller.Run(metadata=(("orca-term", str(self._term)),))
        self._last_heard = self._pulse.last

    async def send(self, iteration: pb.Iteration) -> None:
        """Puts an iteration on the control lane. Raises RankLost."""
        self._progress.sent(self._now)
        await self._write(pb.ControlMessage(iteration=iteration))

    async def _write(self, message: pb.ControlMessage) -> None:
        try:
            async with self._writing:  # gRPC allows one write at a time: a beat must not meet an iteration
                await self._lane.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise RankLost(f"{self._name()} closed the control lane: {_reason(error)}") from None

    async def reports(self) -> AsyncIterator[pb.IterationReport]:
        """Reports of iterations, in order. Ends by RankLost alone."""
        try:
            async for report in self._lane:
                self._last_heard = self._pulse.last
                if report.WhichOneof("report") == "iteration":
                    if report.iteration.error:
                        raise RankLost(f"{self._name()} failed: {report.iteration.error}")
                    self._last_iteration = report.iteration.number
                    self._progress.returned(self._now)
                    yield report.iteration
            raise RankLost(f"{self._name()} closed the control lane: {await self._lane.details()}")
        except grpc.aio.AioRpcError as error:
            raise RankLost(f"{self._name()} left the control lane: {_reason(error)}") from None

    async def beats(self) -> None:
        """Asks for signs of life. A frozen rank's full window may hold a write back. Ends by RankLost alone."""
        number = 0
        while True:
            number += 1
            await self._write(pb.ControlMessage(beat=pb.Beat(number=number)))
            await asyncio.sleep(BEAT_SECONDS)

    async def watch(self) -> None:
        """Judges silence and standstill, while this process itself is on time. Ends by RankLost alone."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if not self._pulse.on_time(SILENCE_SECONDS):
                continue
            silent = self._now - self._last_heard
            if silent > SILENCE_SECONDS + BEAT_SECONDS:
                raise RankLost(f"{self._name()} has been silent for {silent:.1f} s")
            stuck = self._progress.stuck(self._now, since=self._pulse.late_at)
            if stuck is not None:
                raise RankLost(f"{self._name()} answers and has made no progress for {stuck:.1f} s")

    async def condemn(self, verdict: str) -> None:
        """Has the rank killed by its supervisor, if it still lives. Returns when that was tried."""
        request = pb.CondemnRequest(local_rank=self._entry.local_rank, pid=self._entry.pid, verdict=verdict)
        try:
            await self._supervisor.Condemn(request, timeout=DIAL_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.warning("supervisor away", extra={"pod": self._candidate.pods[0], "error": _reason(error)})

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _name(self) -> str:
        return (
            f"stage 0 rank 0 of {self._candidate.engine} at {self._entry.address or self._candidate.pods[0]} "
            f"(host {self.hello.host or 'unknown'}, pid {self._entry.pid}, last iteration {self._last_iteration})"
        )


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
