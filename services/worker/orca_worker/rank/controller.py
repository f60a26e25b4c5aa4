"""The controller of a rank: it carries out the requests of the engine's master.

It runs on the process's event loop, never touches a tensor and never waits for the GPU, so heartbeats are answered
whatever the GPU thread does. Iterations come down one stream, Run, to the controller of stage 0. It hands each of them
to its GPU thread and sends it on at once, over Relay streams, to its tensor peers and to the controller of the next
stage, which does the same (paper section 4.1, Figure 7). Each rank reports on its own Run.

Which epoch the rank is in is decided by `membership`. This module turns requests into its events, and carries its
actions out.
"""

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from opentelemetry.trace import StatusCode, set_span_in_context

from orca.v1 import worker_pb2
from orca_common.adapters import Adapter
from orca_common.address import join_address
from orca_common.checkpoint import Checkpoint
from orca_common.errors import FailedPrecondition, Internal, InvalidArgument, OrcaError, Unavailable
from orca_common.lanes.server import LaneCall, LaneServer, Methods, unary
from orca_common.protocol import CONTROLLER, PROTOCOL, TERM_METADATA, obeys
from orca_common.roles import Role
from orca_common.telemetry import Telemetry, context_of
from orca_common.tls import Transport

from ..data_plane.blocks import Asked, Block, BlockServer
from ..data_plane.plane import PeerLost
from ..data_plane.rendezvous import Rendezvous, Store
from ..models.families import check_partition
from ..partition import Place
from ..stage.adapters import Held, Wanted
from ..stage.gpu_thread import GpuThread
from ..stage.stage import Memory, Stage
from .epoch import Epoch
from .iterations import Iterations, Origin
from .lane import Lane, Lanes, Over, end, hearer
from .membership import (
    Action,
    Allocate,
    Broken,
    CloseStore,
    Formation,
    Forming,
    Idle,
    Join,
    Leave,
    Member,
    Membership,
    OpenStore,
)

T = TypeVar("T")
log = logging.getLogger(__name__)

LEAVING = "this rank is leaving"
# Who may call what, where certificates tell.
ALLOWED = {f"/{CONTROLLER}/": frozenset({Role.SCHEDULER}), f"/{CONTROLLER}/Relay": frozenset({Role.WORKER})}
MAX_NAME = 256  # characters of an engine's name


class Controller:
    """Answers the master. `on_failure` is called once, with a sentence, when this rank must not be used again."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        stage: Stage,
        telemetry: Telemetry,
        rendezvous: Rendezvous,
        transport: Transport,
        on_failure: Callable[[str], None],
    ) -> None:
        self._checkpoint, self._stage, self._telemetry = checkpoint, stage, telemetry
        self._rendezvous, self._transport, self._on_failure = rendezvous, transport, on_failure
        self._loop = asyncio.get_running_loop()
        self._gpu = GpuThread(stage, self._from_gpu_thread)
        self.incarnation = uuid.uuid4().hex
        self._engine = ""
        self._lanes = Lanes()
        self._iterations = Iterations()
        self._membership = Membership()
        self._loading: set[asyncio.Task[None]] = set()  # of adapters, one at a time
        self._one_loads = asyncio.Lock()
        self._table: worker_pb2.AdapterTable | None = None  # the last one that has come
        self._epoch: Epoch | None = None  # of the last Join
        self._leaving = False  # it was asked to end: takes no new master; the present one may still send iterations
        self._left = False  # it takes nothing more
        self._failed = False  # `on_failure` was called
        self._blocks: BlockServer | None = None  # from the first epoch on in which it hands over
        stage.pulled = self._from_a_pull
        # The last OpenStore, Join and Allocate. A request that comes again waits for the same one.
        self._store: asyncio.Task[Store] | None = None
        self._joined: asyncio.Task[Memory] | None = None
        self._allocated: asyncio.Task[None] | None = None

    # Life

    def ready(self) -> str | None:
        """Why this rank is not ready; None: it is a member of the epoch that its engine's master runs.

        Called in the thread of the status port.
        """
        if self._leaving:
            return "leaving"
        if self._gpu.failed:
            return "an iteration failed"
        match self._membership.state:
            case Member(epoch=epoch):
                lane = self._lanes.current
                return lane.not_held(epoch) if lane is not None else "no master holds its control lane"
            case Broken(reason=reason):
                return reason
            case Forming(epoch=epoch):
                return f"epoch {epoch} is being formed"
            case Idle():
                return "not a member of an engine's epoch yet"

    async def leave(self, timeout: float) -> bool:
        """Leaves in order, within `timeout` seconds. False: the GPU still works then.

        The master hears of it first. It has half of the time to bring the engine to rest and to close the lane. Then
        the rank accepts no more iterations, finishes those that it has accepted, and ends the lane itself.
        """
        self._leaving = True
        deadline = self._loop.time() + timeout
        lane = self._lanes.current
        if lane is not None and not self._gpu.failed:  # a failed rank brings nothing to rest
            lane.put(worker_pb2.Report(leaving=worker_pb2.Leaving()))
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout / 2):
                    await lane.ended.wait()
        self._left = True
        self._gpu.stop()
        await self._iterations.wait_idle(deadline - self._loop.time())
        self._carry_out(self._membership.leave(LEAVING))
        self._lanes.end(Unavailable(LEAVING))
        if self._blocks is not None:
            self._blocks.close()
        return await asyncio.to_thread(self._gpu.join, 0 if len(self._iterations) else 1)

    def methods(self) -> Methods:
        """The methods of this rank by their paths."""
        return {
            f"/{CONTROLLER}/Hello": unary(worker_pb2.HelloRequest, self.hello),
            f"/{CONTROLLER}/HostStore": unary(worker_pb2.HostStoreRequest, self.host_store),
            f"/{CONTROLLER}/Form": unary(worker_pb2.FormRequest, self.form),
            f"/{CONTROLLER}/Allocate": unary(worker_pb2.AllocateRequest, self.allocate),
            f"/{CONTROLLER}/Run": self.run,
            f"/{CONTROLLER}/Relay": self.relay,
        }

    def server(self) -> LaneServer:
        """A server of this rank's methods, for callers of the right role."""
        return LaneServer(self.methods(), self._transport, ALLOWED, Unavailable(LEAVING))

    # Formation

    async def hello(self, request: worker_pb2.HelloRequest) -> worker_pb2.HelloResponse:
        if self._leaving:
            raise Unavailable(LEAVING)
        if len(request.engine) > MAX_NAME:
            raise InvalidArgument("engine", f"is a name of {len(request.engine)} characters; at most {MAX_NAME}")
        if obeys(request.protocol):  # another master reads the number in the answer, and says so
            if self._lanes.observe_term(request.term):
                log.info("a new master", extra={"engine": request.engine, "term": request.term})
            self._engine = request.engine
            # An earlier lane's iterations may still run: wait, so that the answer's rows and iteration are final. If
            # they take longer, no harm is done, because whatever comes next runs after them.
            await self._iterations.wait_idle(1.0)
        state = self._membership.state
        member = state if isinstance(state, Member) else None
        return worker_pb2.HelloResponse(
            protocol=PROTOCOL,
            incarnation=self.incarnation,
            host=socket.gethostname(),
            pid=os.getpid(),
            epoch=member.epoch if member else 0,
            iteration=self._gpu.iteration,
            slots=member.slots if member else 0,
            formation=_message_of(member.formation) if member else None,
            rows=[worker_pb2.HeldRow(row=r, claim=c, length=n) for r, c, n in self._stage.rows.held()],
            model_digest=self._checkpoint.digest,
            max_positions=self._checkpoint.max_positions,
            vocab_size=self._checkpoint.vocab_size,
            weights=self._stage.weights,
            can=self._checkpoint.can,
            blocks=self._source(member.formation) if member else None,
        )

    async def host_store(self, request: worker_pb2.HostStoreRequest) -> worker_pb2.HostStoreResponse:
        self._check_master(request.term)
        self._carry_out(self._membership.host(request.epoch))
        assert self._store is not None
        store = await asyncio.shield(self._store)
        return worker_pb2.HostStoreResponse(address=join_address(self._rendezvous.host, store.port))

    async def form(self, request: worker_pb2.FormRequest) -> worker_pb2.FormResponse:
        self._check_master(request.term)
        self._carry_out(self._membership.form(request.epoch, self._formation_of(request)))
        assert self._joined is not None
        memory = await asyncio.shield(self._joined)
        return worker_pb2.FormResponse(slots=memory.slots, free_bytes=memory.free_bytes, slot_bytes=memory.slot_bytes)

    async def allocate(self, request: worker_pb2.AllocateRequest) -> worker_pb2.AllocateResponse:
        self._check_master(request.term)
        self._carry_out(self._membership.allocate(request.epoch, request.slots))
        assert self._allocated is not None
        await asyncio.shield(self._allocated)
        state = self._membership.state
        return worker_pb2.AllocateResponse(blocks=self._source(state.formation) if isinstance(state, Member) else None)

    def _check_master(self, term: int) -> None:
        self._lanes.observe_term(term)
        if self._left:
            raise Unavailable(LEAVING)

    def _formation_of(self, request: worker_pb2.FormRequest) -> Formation:
        """The formation that a master asks of this rank. Raises FailedPrecondition when no engine has such a place."""
        asked = request.formation
        tp, pp = asked.tensor_parallel, asked.pipeline_parallel
        place = Place(tp, pp, asked.stage, asked.tensor_rank)
        check_partition(self._checkpoint, tp, pp)
        if place.stage >= pp or place.tensor_rank >= tp:
            raise FailedPrecondition(f"stage {place.stage}, tensor rank {place.tensor_rank} of a {tp} x {pp} engine")
        if asked.block_size < 1:
            raise FailedPrecondition("block_size is 0")
        if place.ranks > 1 and len(request.controllers) != place.ranks:
            raise FailedPrecondition(f"{len(request.controllers)} controllers of a {tp} x {pp} engine (tp x pp)")
        controllers = tuple(request.controllers)
        return Formation(place, asked.block_size, asked.return_tokens, request.store, controllers, asked.hands_over)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case OpenStore(epoch=number):
                    self._store = asyncio.create_task(self._open_store(number))
                case CloseStore():
                    self._store = None
                case Join(epoch=number, formation=formation):
                    on_broken = partial(self._lose_peer, number)
                    epoch = Epoch(number, formation, self._rendezvous, self._transport, on_broken, self._give_up)
                    self._epoch = epoch
                    self._joined = asyncio.create_task(self._form(epoch, "Form", self._join(epoch)))
                case Allocate(slots=slots):
                    assert self._epoch is not None
                    allocating = self._allocate(self._epoch, slots)
                    self._allocated = asyncio.create_task(self._form(self._epoch, "Allocate", allocating))
                case Leave(reason=reason):
                    assert self._epoch is not None
                    self._epoch.close(reason)
                    self._gpu.call(self._stage.leave)  # behind the iterations of the epoch, which the close has ended

    async def _open_store(self, epoch: int) -> Store:
        try:
            return await asyncio.to_thread(self._rendezvous.open_store)
        except Exception as error:
            self._membership.store_failed(epoch)
            raise _quotable("HostStore", error, epoch) from None

    async def _join(self, epoch: Epoch) -> Memory:
        plane = await epoch.open_plane()
        place, block_size = epoch.formation.place, epoch.formation.block_size
        memory = await self._on_gpu_thread(partial(self._stage.form, block_size, place, plane))
        self._membership.joined(epoch.number, memory.slots)
        return memory

    async def _allocate(self, epoch: Epoch, slots: int) -> None:
        block_size = epoch.formation.block_size
        await self._on_gpu_thread(partial(self._stage.allocate, slots, block_size))
        await epoch.open_relays()
        self._membership.allocated(epoch.number)
        log.info("member", extra={"engine": self._engine, "epoch": epoch.number, "slots": slots})

    def _on_gpu_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Runs work after all iterations that have come. Raises Unavailable when one has failed, or the rank leaves."""
        return asyncio.wrap_future(self._gpu.call(work))

    async def _form(self, epoch: Epoch, step: str, work: Coroutine[Any, Any, T]) -> T:
        """One step of forming an epoch. If the step fails, the rank leaves the epoch."""
        try:
            return await work
        except Exception as error:
            self._carry_out(self._membership.failed(epoch.number, str(error)))
            raise _quotable(step, error, epoch.number) from None

    def _lose_peer(self, epoch: int, reason: str) -> None:
        """Ends this rank's epoch, but not the rank, because a neighbour is gone."""
        actions = self._membership.peer_lost(epoch, reason)
        if actions:
            log.warning("neighbour lost: %s", reason, extra={"epoch": epoch})
        self._carry_out(actions)

    # Blocks for other engines

    def _source(self, formation: Formation) -> worker_pb2.BlockSource | None:
        """The address at which other engines' ranks get blocks, if this rank hands over."""
        if not formation.hands_over:
            return None
        if self._blocks is None:
            self._blocks = BlockServer(self._rendezvous.listen_on, self._blocks_for)
        address = join_address(self._rendezvous.host, self._blocks.port)
        return worker_pb2.BlockSource(address=address, secret=self._blocks.secret)

    def _blocks_for(self, asked: Asked) -> Iterator[Block]:
        """Called in a thread of each connection. Raises FailedPrecondition."""
        state = self._membership.state
        if not (isinstance(state, Member) and state.epoch == asked.epoch and state.formation.hands_over):
            raise FailedPrecondition(f"epoch {asked.epoch} hands nothing over here")
        return self._stage.blocks_of(asked)

    def _from_a_pull(self, pulled: worker_pb2.Pulled) -> None:
        self._loop.call_soon_threadsafe(self._pulled, pulled)

    def _pulled(self, pulled: worker_pb2.Pulled) -> None:
        """A pull has ended. The master that asked for it may be gone: the next one asks for others."""
        if self._lanes.current is not None:
            self._lanes.current.put(worker_pb2.Report(pulled=pulled))

    # Iterations

    async def run(self, call: LaneCall) -> None:
        if self._leaving:
            raise Unavailable(LEAVING)
        lane = Lane(call.send)
        try:
            self._lanes.open(lane, call.metadata.get(TERM_METADATA))
            call.listen(hearer(worker_pb2.ControlMessage, partial(self._told, lane), lane.over), lane.end)
            error = await lane.over
            if error is not None:
                raise error
        finally:
            self._lanes.closed(lane)

    def _told(self, lane: Lane, message: worker_pb2.ControlMessage) -> None:
        """Takes a message of the master from a lane."""
        lane.heard = time.monotonic()
        if message.HasField("iteration"):
            self._take(message.iteration, lane)
        elif message.HasField("heartbeat"):
            lane.answer(message.heartbeat, self._gpu.iteration)
        elif message.HasField("adapters"):
            loading = self._loop.create_task(self._load_adapters(message.adapters, lane))
            self._loading.add(loading)
            loading.add_done_callback(self._loading.discard)

    async def _load_adapters(self, table: worker_pb2.AdapterTable, lane: Lane) -> None:
        """Has the adapters of a table loaded, and reports which of them there are, unless a newer table has come.

        The GPU thread has one call for each, and runs the iterations that have come before the next: behind all of
        them in one call, an iteration would be judged stuck.
        """
        wanted = [Wanted(one.id, Adapter(one.name, Path(one.folder))) for one in table.entries]
        self._table = table
        try:
            async with self._one_loads:
                if table is not self._table:
                    return
                there = await self._on_gpu_thread(partial(self._stage.adapters.keep, wanted))
                held = {one.id: one for one in there}
                for one in wanted:
                    if one.id not in held:
                        held[one.id] = await self._load_adapter(one)
                    if table is not self._table:
                        return
        except Unavailable:
            return  # the rank is leaving
        except Exception:
            log.exception("adapters were not loaded")
            return
        report = worker_pb2.Report()
        report.adapters.number = table.number
        for one in held.values():
            report.adapters.adapters.add(id=one.id, fingerprint=one.fingerprint, error=one.error)
        lane.put(report)

    async def _load_adapter(self, wanted: Wanted) -> Held:
        files = await asyncio.to_thread(self._stage.adapters.read, wanted)
        if isinstance(files, Held):
            return files
        return await self._on_gpu_thread(partial(self._stage.adapters.load, wanted, files))

    async def relay(self, call: LaneCall) -> bytes:
        call.begin()  # the sender waits for it before its first iteration
        over: Over = self._loop.create_future()
        call.listen(
            hearer(worker_pb2.Iteration, lambda iteration: self._take(iteration, None), over), partial(end, over)
        )
        error = await over
        if error is not None:
            raise error
        return worker_pb2.RelayResponse().SerializeToString()

    def _take(self, iteration: worker_pb2.Iteration, lane: Lane | None) -> None:
        """Sends an iteration on, and hands it to the GPU thread. `lane` None: it came by a relay."""
        received = time.time_ns()
        self._lanes.observe_term(iteration.term, lane)
        if lane is not None:
            self._lanes.check_current(lane)
        if self._left:
            raise Unavailable(LEAVING)
        if self._gpu.failed:
            raise Unavailable("this rank has failed and is about to end")
        try:
            self._membership.check_iteration(iteration.epoch, iteration.number, relayed=lane is None)
        except PeerLost as error:  # this rank is well: a lane that ended now would make the master suspect it
            self._report_lost(iteration, lane or self._lanes.current, str(error))
            return
        members = len(iteration.rows)
        trace = dict(iteration.trace) if self._telemetry.enabled else {}
        self._iterations.accept(iteration.number, Origin(lane, iteration.term, members, trace))
        assert self._epoch is not None
        self._epoch.forward(iteration)
        self._gpu.submit(iteration, received)

    def _report_lost(self, iteration: worker_pb2.Iteration, lane: Lane | None, reason: str) -> None:
        if lane is not None:
            result = worker_pb2.IterationReport(
                epoch=iteration.epoch, number=iteration.number, error=reason, peer_lost=True
            )
            lane.put(worker_pb2.Report(iteration=result))

    def _from_gpu_thread(self, report: worker_pb2.Report) -> None:
        self._loop.call_soon_threadsafe(self._reported, report)

    def _reported(self, report: worker_pb2.Report) -> None:
        """Sends the report of an iteration that has run.

        Only the lane that brought it gets its report. After a broken lane the master starts over, and another master
        does not know this batch. The report on a relayed iteration goes to this rank's own lane, if its master is the
        same.
        """
        origin, result = self._iterations.reported(), report.iteration
        is_relayed = origin.lane is None and origin.term == self._lanes.term
        lane = self._lanes.current if is_relayed else origin.lane
        if lane is not None:
            if self._stage.samples or result.error:  # also without a token: the master waits for the iteration
                lane.put(report)
            elif lane is self._lanes.current:
                lane.keep_times(result.times, idle=not self._iterations)
        if origin.trace:
            self._trace(origin, result)
        if result.peer_lost:
            self._lose_peer(result.epoch, result.error)
        elif result.error:
            self._iterations.abandon()
            self._fail(result.error)

    def _give_up(self, reason: str) -> None:
        """This rank leaves in order, and another process takes its place: what an epoch has left on the device would
        stay there, and more with each epoch."""
        log.error("%s: this rank starts again", reason)
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._on_failure(reason)

    def _trace(self, origin: Origin, result: worker_pb2.IterationReport) -> None:
        """The span of this rank's share in an iteration, and below it those of its parts."""
        times, tracer = result.times, self._telemetry.tracer
        span = tracer.start_span(
            "orca.stage",
            context=context_of(origin.trace),
            start_time=times.received,
            attributes={
                "orca.engine": self._engine,
                "orca.epoch": result.epoch,
                "orca.iteration": result.number,
                "orca.batch_size": origin.members,
                "orca.stage": times.stage,
                "orca.tensor_rank": times.tensor_rank,
                "process.pid": os.getpid(),
            },
        )
        below = set_span_in_context(span)
        for name, since, until in (
            ("orca.stage.control", times.received, times.taken),  # until the GPU thread took the message
            ("orca.stage.wait", times.started - times.waited, times.started),  # for another rank's data
            ("orca.stage.compute", times.started, times.computed),
            ("orca.stage.send", times.computed, times.sent),
        ):
            if 0 < since < until:
                tracer.start_span(name, below, start_time=since).end(until)
        if result.error:
            span.add_event("failed", {"error": result.error}, timestamp=times.computed)
            span.set_status(StatusCode.ERROR, result.error)
        span.end(end_time=time.time_ns())


def _quotable(step: str, error: Exception, epoch: int) -> OrcaError:
    """An error of a formation, as a sentence that the master can quote in its verdict. Others are logged here."""
    if isinstance(error, OrcaError):
        return error
    log.error("%s failed", step, exc_info=error, extra={"epoch": epoch})
    return Internal(f"{step}: {type(error).__name__}: {error}")


def _message_of(formation: Formation) -> worker_pb2.Formation:
    place = formation.place
    return worker_pb2.Formation(
        tensor_parallel=place.tensor_parallel,
        pipeline_parallel=place.pipeline_parallel,
        stage=place.stage,
        tensor_rank=place.tensor_rank,
        block_size=formation.block_size,
        return_tokens=formation.return_tokens,
        hands_over=formation.hands_over,
    )
