"""The controller of a rank: the engine master's side of it. It never touches a tensor and never waits for the GPU.

Iterations come down one stream, Run, to the controller of stage 0; it hands them to its GPU thread and, without waiting
for that, to its tensor peers and to the controller of the next stage, over Relay streams; that one does the same (paper
section 4.2, Figure 7). Each rank reports what it made up its own Run. This loop alone answers heartbeats, whatever the
GPU thread does.
"""

import asyncio
import logging
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import grpc

from orca.v1 import worker_pb2, worker_pb2_grpc
from orca_common.checkpoint import Checkpoint
from orca_common.errors import (
    Aborted,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    OrcaError,
    ResourceExhausted,
    Unavailable,
    abort,
)
from orca_common.protocol import PROTOCOL, TERM_METADATA
from orca_common.telemetry import Telemetry, context_of

from .data_plane import DataPlane, Loopback, Rendezvous, Store
from .gpu_thread import GpuThread
from .partition import Place, check_partition
from .process import join_address
from .relay import Neighbour
from .stage import Memory, Stage

log = logging.getLogger(__name__)

RELAY_TIMEOUT = 10.0  # seconds for the neighbours' streams to open
MAX_TIMES = 256  # iterations whose times are kept for the next heartbeat
MAX_WAITING = 64  # iterations that were accepted and have not been reported; a master has a few in flight


@dataclass(frozen=True)
class Forming:
    """An epoch that this rank was asked to form."""

    epoch: int
    formation: worker_pb2.Formation
    place: Place
    controllers: tuple[str, ...]
    memory: asyncio.Future[Memory]  # when all have joined


@dataclass(frozen=True)
class Member:
    """The epoch that this rank is a member of."""

    epoch: int
    formation: worker_pb2.Formation
    place: Place
    slots: int
    relays: tuple[Neighbour, ...]


class Hosted(NamedTuple):
    """The store that this rank hosts for an epoch."""

    epoch: int
    address: str
    store: Store


class Lane:
    """One Run call: what is to be written to it. An error ends it."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[worker_pb2.Report | OrcaError | None] = asyncio.Queue()
        self.ended = asyncio.Event()  # the call is over

    def put(self, report: worker_pb2.Report) -> None:
        self._queue.put_nowait(report)

    def end(self, error: OrcaError | None) -> None:
        """Ends the call behind what was put; None: well."""
        self._queue.put_nowait(error)

    async def next(self) -> worker_pb2.Report | None:
        """What was put, in order; None at a good end. Raises the error that ended it."""
        report = await self._queue.get()
        if isinstance(report, OrcaError):
            raise report
        return report


class Waiting(NamedTuple):
    """An accepted iteration: the lane that brought it (None: a relay) in whose term, and what its span needs."""

    lane: Lane | None
    term: int
    members: int
    trace: dict[str, str]


class Controller(worker_pb2_grpc.ControllerServicer):
    """`on_failure` is called once, with a sentence, when this rank is not to be used again."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        stage: Stage,
        telemetry: Telemetry,
        rendezvous: Rendezvous,
        on_failure: Callable[[str], None],
    ) -> None:
        self._checkpoint, self._stage, self._telemetry = checkpoint, stage, telemetry
        self._rendezvous, self._on_failure = rendezvous, on_failure
        self._loop = asyncio.get_running_loop()
        self._gpu = GpuThread(stage, self._from_gpu_thread)
        self.incarnation = uuid.uuid4().hex
        self._engine = ""
        self._term = 0
        self._forming: Forming | None = None  # not yet allocated
        self._member: Member | None = None
        self._plane: DataPlane = Loopback()  # of the epoch that is being formed, or that this rank is a member of
        self._lost: str | None = None  # why the member's epoch has come to its end
        self._hosted: Hosted | None = None
        self._last_epoch = 0
        self._accepted = 0  # number of the last iteration taken
        self._waiting: deque[Waiting] = deque()
        self._times = worker_pb2.Times()  # of iterations, for the next heartbeat
        self._idle = asyncio.Event()  # nothing waits
        self._idle.set()
        self._lane: Lane | None = None
        self._leaving = False  # asked to end
        self._left = False  # and takes no more

    # The calls

    async def Hello(  # noqa: N802 the proto's name
        self, request: worker_pb2.HelloRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.HelloResponse:
        try:
            return await self._hello(request)
        except OrcaError as error:
            await abort(context, error)

    async def HostStore(  # noqa: N802 the proto's name
        self, request: worker_pb2.HostStoreRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.HostStoreResponse:
        try:
            return await self._host_store(request)
        except OrcaError as error:
            await abort(context, error)

    async def Form(  # noqa: N802 the proto's name
        self, request: worker_pb2.FormRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.FormResponse:
        try:
            return await self._form(request)
        except OrcaError as error:
            await abort(context, error)
        except Exception as error:
            log.exception("formation failed", extra={"epoch": request.epoch})
            await abort(context, Internal(f"Form: {type(error).__name__}: {error}", "-"))

    async def Allocate(  # noqa: N802 the proto's name
        self, request: worker_pb2.AllocateRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AllocateResponse:
        try:
            return await self._allocate(request)
        except OrcaError as error:
            await abort(context, error)
        except Exception as error:
            log.exception("allocation failed", extra={"epoch": request.epoch, "slots": request.slots})
            await abort(context, Internal(f"Allocate: {type(error).__name__}: {error}", "-"))

    async def Run(  # noqa: N802 the proto's name
        self, request_iterator: AsyncIterator[worker_pb2.ControlMessage], context: grpc.aio.ServicerContext
    ) -> None:
        lane = Lane()
        reader = None
        try:
            self._open(lane, dict(context.invocation_metadata() or ()).get(TERM_METADATA))
            reader = asyncio.create_task(self._read(request_iterator, lane))
            while (report := await lane.next()) is not None:
                await context.write(report)
        except OrcaError as error:
            await abort(context, error)
        finally:
            if reader is not None:
                reader.cancel()
            lane.ended.set()
            if self._lane is lane:
                self._lane = None

    async def Relay(  # noqa: N802 the proto's name
        self, request_iterator: AsyncIterator[worker_pb2.Iteration], context: grpc.aio.ServicerContext
    ) -> worker_pb2.RelayResponse:
        try:
            await context.send_initial_metadata(())  # the sender waits for it before its first iteration
            async for iteration in request_iterator:
                self._take(iteration, None)
        except OrcaError as error:
            log.warning("relay refused: %s", error)
            await abort(context, error)
        return worker_pb2.RelayResponse()

    # What they do

    def ready(self) -> str | None:
        """Why this rank is not ready; None: it is a member of an epoch."""
        if self._leaving:
            return "leaving"
        if self._gpu.failed:
            return "an iteration failed"
        if self._lost is not None:
            return self._lost
        return None if self._member is not None else "not a member of an engine's epoch yet"

    async def leave(self, timeout: float) -> bool:
        """Tells its master, who has half of the time to bring the engine to rest and close the lane. Then it takes no
        more, finishes what was accepted, ends the stream. False: the GPU still works after `timeout`."""
        self._leaving = True
        deadline = self._loop.time() + timeout
        if self._lane is not None and not self._gpu.failed:  # a failed rank brings nothing to rest
            self._lane.put(worker_pb2.Report(leaving=worker_pb2.Leaving()))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._lane.ended.wait(), timeout / 2)
        self._left = True
        self._gpu.stop()
        await self._idle_within(deadline - self._loop.time())
        self._leave_epoch("this rank is leaving")
        if self._lane is not None:
            self._lane.end(Unavailable("this rank is leaving"))
        return await asyncio.to_thread(self._gpu.join, 0 if self._waiting else 1)

    async def _idle_within(self, timeout: float) -> None:
        """Waits until nothing waits, but no longer."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            log.warning("iterations still run", extra={"waiting": len(self._waiting), "after": timeout})

    async def _hello(self, request: worker_pb2.HelloRequest) -> worker_pb2.HelloResponse:
        if self._leaving:
            raise Unavailable("this rank is leaving")
        if request.protocol == PROTOCOL:  # the master sees the number of another, and says so
            if self._raise_term(request.term, None):
                log.info("a new master", extra={"engine": request.engine, "term": request.term})
            self._engine = request.engine
            # What an earlier lane brought still runs. Its end makes the rows and the iteration stand still; a longer
            # one is no harm, since whatever comes next runs behind it.
            await self._idle_within(1.0)
        member = self._member if self._lost is None else None
        return worker_pb2.HelloResponse(
            protocol=PROTOCOL,
            incarnation=self.incarnation,
            host=socket.gethostname(),
            pid=os.getpid(),
            epoch=member.epoch if member else 0,
            iteration=self._gpu.iteration,
            slots=member.slots if member else 0,
            formation=member.formation if member else None,
            rows=[worker_pb2.HeldRow(row=r, claim=c, length=n) for r, c, n in self._stage.rows.held()],
            model_digest=self._checkpoint.digest,
            max_positions=self._checkpoint.max_positions,
            vocab_size=self._checkpoint.vocab_size,
        )

    async def _host_store(self, request: worker_pb2.HostStoreRequest) -> worker_pb2.HostStoreResponse:
        self._raise_term(request.term, None)
        hosted = self._hosted
        if hosted is None or hosted.epoch != request.epoch:
            if request.epoch <= self._last_epoch:
                raise FailedPrecondition(f"epoch {request.epoch} is old: this rank has seen {self._last_epoch}")
            store = await asyncio.to_thread(self._rendezvous.open_store)
            hosted = self._hosted = Hosted(request.epoch, join_address(self._rendezvous.host, store.port), store)
        return worker_pb2.HostStoreResponse(address=hosted.address)

    async def _form(self, request: worker_pb2.FormRequest) -> worker_pb2.FormResponse:
        self._raise_term(request.term, None)
        formation, place = request.formation, self._place_of(request)
        forming = self._forming
        again = forming is not None and (forming.epoch, forming.formation) == (request.epoch, formation)
        if forming is None or not again:  # else an answer was lost
            if request.epoch <= self._last_epoch:
                raise FailedPrecondition(f"epoch {request.epoch} is old: this rank has seen {self._last_epoch}")
            self._last_epoch = request.epoch
            self._leave_epoch(f"epoch {request.epoch} is being formed")
            arguments = place, request.epoch, request.store, formation.return_tokens
            if place.ranks > 1:  # imports torch
                plane = await asyncio.to_thread(self._rendezvous.plane, *arguments)
                self._check_newest(request.epoch)
            else:
                plane = self._rendezvous.plane(*arguments)
            self._plane = plane
            memory = self._gpu.call(partial(self._stage.form, formation.block_size, place, plane))
            forming = self._forming = Forming(
                request.epoch, formation, place, tuple(request.controllers), asyncio.wrap_future(memory)
            )
        try:
            memory = await asyncio.shield(forming.memory)
        except Exception:
            if self._forming is forming:
                self._forming = None
            raise
        self._check_newest(request.epoch)
        return worker_pb2.FormResponse(slots=memory.slots, free_bytes=memory.free_bytes, slot_bytes=memory.slot_bytes)

    def _place_of(self, request: worker_pb2.FormRequest) -> Place:
        """This rank's place in the engine. Raises FailedPrecondition when there is no such place."""
        formation = request.formation
        tp, pp = formation.tensor_parallel, formation.pipeline_parallel
        place = Place(tp, pp, formation.stage, formation.tensor_rank)
        check_partition(self._checkpoint, tp, pp)
        if place.stage >= pp or place.tensor_rank >= tp:
            raise FailedPrecondition(f"stage {place.stage}, tensor rank {place.tensor_rank} of a {tp} x {pp} engine")
        if formation.block_size < 1:
            raise FailedPrecondition("block_size is 0")
        if place.ranks > 1 and len(request.controllers) != place.ranks:
            raise FailedPrecondition(f"{len(request.controllers)} controllers of a {tp} x {pp} engine (tp x pp)")
        return place

    def _leave_epoch(self, reason: str) -> None:
        """Leaves the epoch that this rank is in; its GPU thread wakes if it waits for a neighbour."""
        self._plane.abort(reason)
        for relay in self._member.relays if self._member is not None else ():
            relay.close()
        if self._hosted is not None and self._hosted.epoch < self._last_epoch:
            self._hosted = None
        self._plane, self._member, self._forming, self._lost = Loopback(), None, None, None

    async def _allocate(self, request: worker_pb2.AllocateRequest) -> worker_pb2.AllocateResponse:
        self._raise_term(request.term, None)
        slots, forming, member = request.slots, self._forming, self._member
        if member is not None and (member.epoch, member.slots) == (request.epoch, slots):
            return worker_pb2.AllocateResponse()
        if forming is None or forming.epoch != request.epoch or not forming.memory.done():
            raise FailedPrecondition(f"epoch {request.epoch} is not being formed here")
        holds, block_size = forming.memory.result().slots, forming.formation.block_size
        if not block_size <= slots <= holds:
            raise FailedPrecondition(f"{slots} slots: this rank's memory holds {holds}, a block {block_size}")
        await asyncio.wrap_future(self._gpu.call(lambda: self._stage.allocate(slots, block_size)))
        self._check_newest(request.epoch)
        relays = await self._open_relays(forming)
        if request.epoch != self._last_epoch:
            for relay in relays:
                relay.close()
            self._check_newest(request.epoch)
        self._member = Member(request.epoch, forming.formation, forming.place, slots, relays)
        self._forming = None
        log.info("member", extra={"engine": self._engine, "epoch": request.epoch, "slots": slots})
        return worker_pb2.AllocateResponse()

    async def _open_relays(self, forming: Forming) -> tuple[Neighbour, ...]:
        """From a controller to that of the next stage, which has the farthest to go, and to its own tensor peers."""
        place = forming.place
        if place.tensor_rank:
            return ()
        end = place.index + place.tensor_parallel
        numbers = [*(() if place.is_last else (end,)), *range(place.index + 1, end)]
        broken = partial(self._lose_peer, forming.epoch)
        relays = tuple(Neighbour(forming.controllers[number], broken) for number in numbers)
        try:
            async with asyncio.timeout(RELAY_TIMEOUT):
                await asyncio.gather(*(relay.connected() for relay in relays))
        except (TimeoutError, OrcaError) as error:
            for relay in relays:
                relay.close()
            reason = str(error) or f"no answer within {RELAY_TIMEOUT} s"
            raise Unavailable(f"the neighbours of epoch {forming.epoch}: {reason}") from None
        return relays

    def _lose_peer(self, epoch: int, reason: str) -> None:
        """A neighbour is gone: this rank's epoch has come to its end, but the rank has not."""
        if self._member is None or self._member.epoch != epoch or self._lost is not None:
            return
        log.warning("neighbour lost: %s", reason, extra={"epoch": epoch})
        self._lost = reason
        self._plane.abort(reason)

    def _check_newest(self, epoch: int) -> None:
        if epoch != self._last_epoch:
            raise FailedPrecondition(f"epoch {epoch} is old: this rank has seen {self._last_epoch}")

    def _raise_term(self, term: int, lane: Lane | None) -> bool:
        """Checks a message's term. A higher one is the rank's from now on, and ends the stream of the one before."""
        if term < self._term:
            raise FailedPrecondition(f"term {term} is old: this rank has seen {self._term}")
        if term == self._term:
            return False
        self._term = term
        if self._lane is not None and self._lane is not lane:
            self._lane.end(FailedPrecondition(f"term {term} has taken over"))
            self._lane = None
        return True

    def _open(self, lane: Lane, term: str | bytes | None) -> None:
        if self._leaving:
            raise Unavailable("this rank is leaving")
        if term is not None:
            if not term.isdigit():
                raise InvalidArgument(TERM_METADATA, "is not a number")
            self._raise_term(int(term), None)
        if self._lane is not None:
            self._lane.end(Aborted("a newer Run took over"))
        self._lane, self._times = lane, worker_pb2.Times()

    async def _read(self, messages: AsyncIterator[worker_pb2.ControlMessage], lane: Lane) -> None:
        """Everything that comes down a stream, until it ends."""
        try:
            async for message in messages:
                if message.HasField("iteration"):
                    self._take(message.iteration, lane)
                elif message.HasField("heartbeat"):
                    self._put_times()
                    heartbeat = worker_pb2.Heartbeat(number=message.heartbeat.number, iteration=self._gpu.iteration)
                    lane.put(worker_pb2.Report(heartbeat=heartbeat))
        except OrcaError as error:
            log.warning("control lane refused: %s", error)
            lane.end(error)
        else:
            lane.end(None)

    def _take(self, iteration: worker_pb2.Iteration, lane: Lane | None) -> None:
        """Hands an iteration on, and to the GPU thread. `lane` None: it came by a relay."""
        received = time.time_ns()
        self._raise_term(iteration.term, lane)
        if lane is not None and self._lane is not lane:
            raise Aborted("a newer Run took over")
        if self._left or self._gpu.failed:
            raise Unavailable("this rank is leaving" if self._left else "this rank has failed and is about to end")
        if self._member is None or iteration.epoch != self._member.epoch:
            has = f"a member of {self._member.epoch}" if self._member is not None else "a member of none"
            raise FailedPrecondition(f"iteration {iteration.number} is of epoch {iteration.epoch}: this rank is {has}")
        if (self._member.place.index == 0) != (lane is not None):
            way, right = ("Run", "a relay") if lane is not None else ("a relay", "Run")
            raise FailedPrecondition(f"iteration {iteration.number} came by {way}: here they come by {right}")
        if iteration.number <= self._accepted:
            raise FailedPrecondition(f"iteration {iteration.number} is old: this rank has taken {self._accepted}")
        if len(self._waiting) >= MAX_WAITING:
            raise ResourceExhausted(f"{MAX_WAITING} iterations wait here already", 0.1)
        for relay in self._member.relays:
            relay.put(iteration)
        self._accepted = iteration.number
        self._idle.clear()
        members = len(iteration.initiations) + len(iteration.increment_rows)
        trace = dict(iteration.trace) if self._telemetry.enabled else {}
        self._waiting.append(Waiting(lane, iteration.term, members, trace))
        self._gpu.submit(iteration, received)

    def _from_gpu_thread(self, report: worker_pb2.Report) -> None:
        self._loop.call_soon_threadsafe(self._reported, report)

    def _reported(self, report: worker_pb2.Report) -> None:
        """An iteration is done. Only the lane that brought it hears of it: behind a broken one the master starts over,
        and no other master knows the batch. What a relay brought goes up this rank's own lane, of the same master."""
        done = self._waiting.popleft()
        if not self._waiting:
            self._idle.set()
        result = report.iteration
        lane = done.lane if done.lane is not None or done.term != self._term else self._lane
        if result.token_ids or result.error:
            if lane is not None:
                lane.put(report)
        elif lane is self._lane:
            self._times.stages.append(result.times)
            if not self._waiting or len(self._times.stages) >= MAX_TIMES:
                self._put_times()
        if self._telemetry.enabled:
            self._trace(done, result)
        if result.peer_lost:
            self._lose_peer(result.epoch, result.error)
        elif result.error:
            self._waiting.clear()
            self._idle.set()
            self._on_failure(result.error)

    def _put_times(self) -> None:
        """Sends the iterations' times that are kept: with a heartbeat, when many wait, or when the rank is idle."""
        if self._times.stages and self._lane is not None:
            self._lane.put(worker_pb2.Report(times=self._times))
        self._times = worker_pb2.Times()

    def _trace(self, done: Waiting, result: worker_pb2.IterationReport) -> None:
        """The span of this rank's share in an iteration."""
        times = result.times
        span = self._telemetry.tracer.start_span(
            "orca.stage",
            context=context_of(done.trace),
            start_time=times.received,
            attributes={
                "orca.engine": self._engine,
                "orca.epoch": result.epoch,
                "orca.iteration": result.number,
                "orca.batch_size": done.members,
                "orca.stage": times.stage,
                "orca.tensor_rank": times.tensor_rank,
                "process.pid": os.getpid(),
            },
        )
        span.add_event("started", timestamp=times.started)
        span.add_event("computed", timestamp=times.computed)
        if result.error:
            span.add_event("failed", {"error": result.error}, timestamp=times.computed)
        span.end(end_time=time.time_ns())
