"""One rank as its engine's master reaches it: greeting, formation, and its control lane."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from orca.v1 import worker_pb2 as pb
from orca_common.errors import echo
from orca_common.lanes.client import CallFailed, ClientCall, LaneConnection, Status
from orca_common.protocol import CONTROLLER, PROTOCOL, TERM_METADATA, drives
from orca_common.tls import Transport

from .. import timers
from ..lifecycle.events import (
    Formation,
    Hello,
    Listens,
    Model,
    RankAllocated,
    RankFormed,
    RankLeaving,
    Refused,
    Standing,
    StoreHosted,
    Suspected,
)
from ..lifecycle.suspicions import Kind, Suspicion
from .answers import MOST_SLOTS, problem_of_hello
from .channels import connect, listens

M = TypeVar("M", bound=Message)
UNDER_WAY = 1024  # iterations of an earlier life, at most
LONGEST_ERROR = 2000  # characters of what a rank says of its failure
ENDS = {  # of a control lane, by their status
    grpc.StatusCode.FAILED_PRECONDITION: Kind.REFUSED,
    grpc.StatusCode.ABORTED: Kind.REFUSED,
    grpc.StatusCode.UNAVAILABLE: Kind.CUT,
}

Told = (
    Hello | Listens | RankAllocated | RankFormed | RankLeaving | Refused | StoreHosted | Suspected
)  # what a rank posts to its master


@dataclass(frozen=True, slots=True)
class Listener:
    """The listeners to a rank: `post` takes events of the lifecycle, `answered` is called at each answered heartbeat,
    `returned` takes reports with tokens and the rank's index, `timed` the times of an iteration on one rank, `pulled`
    the end of a pull on one rank, `latest` tells the last iteration that was sent, `held` takes the adapters that the
    rank of an index has."""

    post: Callable[[Told], None]
    answered: Callable[[], None]
    returned: Callable[[int, pb.IterationReport], None]
    timed: Callable[[int, int, pb.StageTimes], None]
    pulled: Callable[[int, pb.Pulled], None]
    latest: Callable[[], int]
    held: Callable[[int, pb.AdaptersHeld], None] = lambda rank, held: None


class Rank:
    """The connection to one rank in one life of its engine."""

    def __init__(
        self,
        index: int,
        engine: str,
        term: int,
        life: int,
        transport: Transport,
        listener: Listener,
        met: dict[int, int],
    ) -> None:
        """met: pid of the process that has answered a greeting, by rank, in earlier lives too."""
        self.index, self._transport, self._met = index, transport, met
        self._engine, self._term, self._life, self._hears = engine, term, life, listener
        self._loop = asyncio.get_running_loop()
        self._connection: LaneConnection | None = None
        self._lane: ClientCall | None = None
        self._heartbeats = 0
        self.answered = 0  # the number of the last heartbeat that the rank has answered
        self._epoch = 0  # under which the engine runs; 0: it does not run
        self._asked_for = 0  # the epoch that the rank was last asked to form in this life
        self.address = ""
        self.blocks = pb.BlockSource()  # where other engines' ranks get its keys and values, as it has told
        self.last_iteration = 0  # that the rank has told
        self._believed = True
        self._began = 0  # .. in its greeting: of an earlier life
        self.last_heard: float | None = None  # on the loop's clock; None: nothing is expected of it
        self.silence = timers.FORMING_SILENCE  # seconds from then on, until it is suspected

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    # -- greeting

    async def serve(self, entry: Callable[[], pb.RankEntry | None]) -> None:
        """Greets the rank and keeps its control lane until the lane ends. `entry` is its line in its pod's table."""
        while True:
            named = entry()
            if named is not None and named.pid and await listens(named.address):
                try:
                    hello = await self._greet(named)
                    break
                except CallFailed as failed:
                    self.last_heard = None
                    if failed.status.code is not grpc.StatusCode.UNAVAILABLE:  # it is leaving, or the connection broke
                        self._complain(failed.status)
                        return
            await asyncio.sleep(timers.POLL)
        if not drives(hello.protocol):
            can = f"this scheduler of protocol {PROTOCOL} drives {PROTOCOL - 1} and {PROTOCOL}"
            self._refuse(f"speaks protocol {hello.protocol}, and {can}")
            return
        if problem := problem_of_hello(hello):
            self.last_heard = None
            self.wrong(problem)
            return
        self._began = self.last_iteration = max(self.last_iteration, hello.iteration)
        self.blocks = hello.blocks
        assert self._connection is not None
        self._lane = self._connection.call(f"/{CONTROLLER}/Run", self._heard, [(TERM_METADATA, str(self._term))])
        self.last_heard, self.silence = self._now, timers.FORMING_SILENCE
        self._met[self.index] = named.pid
        self._hears.post(hello_of(self._now, self._life, self.index, hello))
        beating = self._loop.create_task(self._send_heartbeats())
        try:
            status = await self._lane.over
        finally:
            beating.cancel()
        self.last_heard = None
        kind = ENDS.get(status.code, Kind.CLOSED)
        self.suspect(kind, f"{kind.value}: {status}")

    async def _greet(self, named: pb.RankEntry) -> pb.HelloResponse:
        """Dials the process that a supervisor has named. Raises CallFailed."""
        await self.close()
        self.address = named.address
        if self._met.get(self.index) == named.pid:  # it has no imports left that could hold it up
            self.last_heard, self.silence = self._now, timers.GREETING
        self._hears.post(Listens(self._now, self._life, self.index, named.address, named.pid))
        self._connection = await connect(self.address, self._transport)
        request = pb.HelloRequest(protocol=PROTOCOL, engine=self._engine, term=self._term)
        return await self._connection.ask(f"/{CONTROLLER}/Hello", request, pb.HelloResponse, timers.DIAL)

    def run(self, epoch: int) -> None:
        """Reports to the rank that the engine runs, and counts its silence from now on, unless its lane has ended."""
        self._epoch, self.silence = epoch, timers.SILENCE
        if self.last_heard is not None:
            self.last_heard = self._now
            self._send_heartbeat()

    # -- formation

    async def host_store(self, epoch: int) -> None:
        """Has the rank host the epoch's store. This may import torch: heartbeats tell whether it lives."""
        request = pb.HostStoreRequest(term=self._term, epoch=epoch)
        hosted = await self._ask("HostStore", request, pb.HostStoreResponse)
        if hosted is not None:
            self._hears.post(StoreHosted(self._now, self._life, epoch, hosted.address))

    async def form(self, epoch: int, formation: Formation, store: str, controllers: list[str]) -> None:
        """Has the rank take its place in a new epoch, which happens when all others do."""
        self._asked_for = epoch
        request = pb.FormRequest(
            term=self._term,
            epoch=epoch,
            formation=pb.Formation(
                tensor_parallel=formation.tp,
                pipeline_parallel=formation.pp,
                stage=formation.stage,
                tensor_rank=formation.tensor_rank,
                block_size=formation.block_size,
                return_tokens=formation.return_tokens,
                hands_over=formation.hands_over,
            ),
            store=store,
            controllers=controllers,
        )
        formed = await self._ask("Form", request, pb.FormResponse)
        if formed is not None:
            slots = min(formed.slots, MOST_SLOTS)
            self._hears.post(RankFormed(self._now, self._life, epoch, self.index, slots))

    async def allocate(self, epoch: int, slots: int) -> None:
        """Has the rank allocate its K/V memory: from then on it is a member of the epoch."""
        request = pb.AllocateRequest(term=self._term, epoch=epoch, slots=slots)
        allocated = await self._ask("Allocate", request, pb.AllocateResponse)
        if allocated is not None:
            self.blocks = allocated.blocks
            self._hears.post(RankAllocated(self._now, self._life, epoch, self.index))

    async def _ask(self, method: str, request: Message, answer: type[M]) -> M | None:
        """Returns the answer of a call; None where it failed, which is reported to the lifecycle."""
        assert self._connection is not None
        try:
            return await self._connection.ask(f"/{CONTROLLER}/{method}", request, answer, timers.LOAD)
        except CallFailed as failed:
            self._complain(failed.status)
        return None

    def _complain(self, status: Status) -> None:
        """Reports to the lifecycle why the rank's call has failed."""
        match status.code:
            case grpc.StatusCode.FAILED_PRECONDITION:
                self._refuse(f"refuses: {status.details}")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                self.suspect(Kind.SILENT, f"listens and does not answer: {status.details}")
            case grpc.StatusCode.UNAVAILABLE:  # this rank is gone (its supervisor will say so), or a neighbour is
                self.suspect(Kind.PEER_LOST, f"does not form: {status}")
            case _:
                self.suspect(Kind.FAILED, f"does not form: {status}")

    def _refuse(self, why: str) -> None:
        self._hears.post(Refused(self._now, self._life, self.index, why))

    def suspect(self, kind: Kind, detail: str) -> None:
        """Reports a suspicion of this rank to the lifecycle."""
        suspicion = Suspicion(self.index, kind, detail)
        self._hears.post(Suspected(self._now, self._life, suspicion, self.last_iteration))

    # -- the control lane

    def send(self, iteration: pb.Iteration) -> None:
        """Puts an iteration on the control lane. Never waits: a rank that does not read is found by its silence."""
        self._write(pb.ControlMessage(iteration=iteration))

    def tell_adapters(self, table: pb.AdapterTable) -> None:
        """Sends the rank the table of adapters. It answers when it has loaded them."""
        self._write(pb.ControlMessage(adapters=table))

    def _write(self, message: pb.ControlMessage) -> None:
        if self._lane is not None:
            self._lane.send(message.SerializeToString())

    async def _send_heartbeats(self) -> None:
        while True:
            if self._lane is not None and not self._lane.waits:  # a message that waits does as well
                self._send_heartbeat()
            await asyncio.sleep(timers.HEARTBEAT)

    def ask(self) -> int:
        """Sends a heartbeat at once, where a control lane is open. Returns its number, which the answer repeats."""
        if self.last_heard is None:
            return self._heartbeats + 1  # none has it yet
        self._send_heartbeat()
        return self._heartbeats

    def _send_heartbeat(self) -> None:
        self._heartbeats += 1
        heartbeat = pb.Heartbeat(number=self._heartbeats, epoch=self._epoch)
        self._write(pb.ControlMessage(heartbeat=heartbeat))

    def _heard(self, message: bytes) -> None:
        """A report has come on the lane."""
        self.last_heard = self._now
        if not self._believed:
            return
        try:
            report = pb.Report.FromString(message)
        except DecodeError:
            self.wrong(f"{len(message)} bytes that are no report")
            return
        match report.WhichOneof("report"):
            case "iteration":
                self._reported(report.iteration)
            case "times":
                for times in report.times.stages:
                    if self._ran(times.iteration):
                        self._hears.timed(self.index, times.iteration, times)
            case "pulled":
                self._hears.pulled(self.index, report.pulled)
            case "adapters":
                self._hears.held(self.index, report.adapters)
            case "leaving":
                self._hears.post(RankLeaving(self._now, self._life, self.index, self.last_iteration))
            case _:
                if self._ran(report.heartbeat.iteration):
                    self.answered = report.heartbeat.number
                    self._hears.answered()

    def _reported(self, report: pb.IterationReport) -> None:
        if report.peer_lost and report.epoch < self._asked_for:
            return  # an iteration of an older epoch was abandoned, because this life has asked the rank to leave it
        if report.error:
            kind = Kind.PEER_LOST if report.peer_lost else Kind.FAILED
            self.suspect(kind, f"{kind.value}: {echo(report.error, LONGEST_ERROR)}")
            return
        if self._ran(report.number):
            self._hears.returned(self.index, report)
            # The next batch does not wait for it.
            self._loop.call_soon(self._hears.timed, self.index, report.number, report.times)

    def _ran(self, iteration: int) -> bool:
        """Whether the rank may have run an iteration that it names. Some of an earlier life may be under way yet."""
        if iteration > max(self._hears.latest(), self._began) + UNDER_WAY:
            self.wrong(f"iteration {iteration}, which it was never sent")
            return False
        self.last_iteration = max(self.last_iteration, iteration)
        return True

    def wrong(self, what: str) -> None:
        """Distrusts the rank for the rest of this life: it has sent an impossible report."""
        self._believed = False
        self.suspect(Kind.FAILED, f"{Kind.FAILED.value}: it reported {what}")

    @property
    def _now(self) -> float:
        return self._loop.time()


def hello_of(now: float, life: int, rank: int, hello: pb.HelloResponse) -> Hello:
    """The answer to a greeting as the lifecycle knows it."""
    f = hello.formation
    place = f.stage, f.tensor_rank
    formation = Formation(f.tensor_parallel, f.pipeline_parallel, *place, f.block_size, f.return_tokens, f.hands_over)
    rows = tuple(sorted(held.row for held in hello.rows))
    standing = Standing(hello.epoch, hello.iteration, hello.slots, rows, formation)
    model = Model(hello.model_digest, hello.max_positions, hello.vocab_size, tuple(hello.can))
    return Hello(now, life, rank, hello.host, hello.pid, standing, model, hello.protocol, hello.weights)
