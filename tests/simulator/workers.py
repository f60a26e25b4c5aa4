"""Modelled engines: supervisors and ranks that answer as those of orca_worker do, over a modelled gRPC.

The scheduler's own code for pods, ranks and control lanes runs unchanged; only its transport is another one.
A rank checks what it is sent: rows and blocks that are free, the right tokens, an iteration's number never twice.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc.aio import Metadata

from orca.v1 import worker_pb2 as pb
from orca_common.lanes.client import CallFailed, Status
from orca_common.protocol import HANDED, NO_TOKEN, PROTOCOL, SHARED, TERM_METADATA

from .oracle import MODELS, POISON, sample, state_of
from .processes import Process, World

M = TypeVar("M", bound=Message)
DIGEST = "a model"
REFUSED, GONE = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE


class Refusal(Exception):
    """A rank's error."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, Metadata(), Metadata(), details)


@dataclass
class Row:
    """A request in a rank's memory."""

    claim: int
    state: int
    length: int
    last: int
    blocks: tuple[int, ...]
    term: int  # of the master that sent it
    ids: tuple[int, ...]  # that it began with: what its blocks' keys are made of
    told: bool = False  # a later master has heard of it, and frees it
    missing: set[int] = field(default_factory=set[int])  # ranks that have not pulled their part


@dataclass(eq=False)
class Epoch:
    """The ranks of an engine that have formed together."""

    number: int
    formations: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # of the ranks that were asked
    waiting: list[Callable[[Any], None]] = field(default_factory=list)
    slots: int = 0
    block_size: int = 1
    rows: dict[int, Row] = field(default_factory=dict)
    busy_until: float = 0.0
    over: bool = False


class Rank:
    """One process of a rank."""

    def __init__(self, engine: "Engine", index: int, pid: int) -> None:
        self.engine, self.index, self.pid, self.weights = engine, index, pid, engine.weights
        self.alive, self.frozen = True, False
        self.term = self.newest = self.iteration = 0
        self.epoch: Epoch | None = None  # that it is forming or a member of
        self.member = False
        self.lane: Lane | None = None
        self._thawed: list[Callable[[], object]] = []

    @property
    def address(self) -> str:
        return f"{self.engine.name}.{self.index}:{self.pid}"

    def receive(self, what: Callable[[], object]) -> None:
        """Something has come; a frozen process takes it later."""
        if self.frozen:
            self._thawed.append(what)
        elif self.alive:
            what()

    def thaw(self) -> None:
        self.frozen = False
        heard, self._thawed = self._thawed, []
        for what in heard:
            self.receive(what)

    def observe(self, term: int) -> None:
        if term < self.term:
            raise Refusal(REFUSED, f"term {term} is old: this rank has seen {self.term}")
        if term > self.term:
            self.term = term
            if self.lane is not None:
                self.lane.end(REFUSED, f"term {term} has taken over")
                self.lane = None

    def hello(self, request: pb.HelloRequest) -> pb.HelloResponse:
        self.observe(request.term)
        answer = pb.HelloResponse(
            protocol=PROTOCOL,
            incarnation=self.address,
            host="host",
            pid=self.pid,
            iteration=self.iteration,
            model_digest=DIGEST,
            max_positions=1024,
            vocab_size=64,
            weights=self.weights,
            can=[SHARED, HANDED],
            blocks=self.source(),
        )
        if self.member and self.epoch is not None:
            epoch, formation = self.epoch, pb.Formation()
            formation.CopyFrom(epoch.formations[self.index][0])
            for row in epoch.rows.values():
                row.told = True
            rows = [pb.HeldRow(row=n, claim=row.claim, length=row.length) for n, row in epoch.rows.items()]
            answer.MergeFrom(pb.HelloResponse(epoch=epoch.number, slots=epoch.slots, formation=formation, rows=rows))
        return answer

    def running(self, term: int) -> float:
        """A greeting waits so long for the iterations of an earlier master, and no longer than 1 s."""
        self.observe(term)
        busy = 0.0 if self.epoch is None else self.epoch.busy_until - self.engine.world.now
        return min(max(busy, 0.0), 1.0)

    def form(self, request: pb.FormRequest, answer: Callable[[Any], None]) -> None:
        self.observe(request.term)
        if request.epoch <= self.newest:
            raise Refusal(REFUSED, f"epoch {request.epoch} is old: this rank has seen {self.newest}")
        self.leave("another epoch is being formed")
        self.newest = request.epoch
        epoch = self.engine.epochs.setdefault(request.epoch, Epoch(request.epoch))
        self.epoch, self.member = epoch, False
        epoch.formations[self.index] = (request.formation,)
        epoch.waiting.append(answer)
        if len(epoch.formations) == len(self.engine.ranks):
            for waiting in epoch.waiting:
                waiting(pb.FormResponse(slots=self.engine.room))

    def allocate(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        self.observe(request.term)
        epoch = self.epoch
        if epoch is None or epoch.number != request.epoch or epoch.over:
            raise Refusal(REFUSED, f"epoch {request.epoch} is not being formed here")
        epoch.slots, epoch.block_size = request.slots, epoch.formations[self.index][0].block_size
        self.member = True
        return pb.AllocateResponse(blocks=self.source())

    def source(self) -> pb.BlockSource | None:
        """Where other engines pull blocks from."""
        hands_over = self.epoch is not None and self.epoch.formations[self.index][0].hands_over
        return pb.BlockSource(address=self.address, secret=b"secret") if self.member and hands_over else None

    def leave(self, why: str) -> None:
        """Leaves its epoch, which is over for its peers too."""
        epoch, self.epoch, self.member = self.epoch, None, False
        if epoch is not None and not epoch.over:
            epoch.over = True
            for waiting in epoch.waiting:
                waiting(Refusal(GONE, why))

    def run(self, lane: "Lane", term: int) -> None:
        self.observe(term)
        if self.lane is not None:
            self.lane.end(grpc.StatusCode.ABORTED, "a newer Run took over")
        self.lane = lane

    def message(self, lane: "Lane", message: pb.ControlMessage) -> None:
        if lane is not self.lane:
            return
        try:
            if message.HasField("iteration"):
                self._iteration(message.iteration)
            else:
                beat = pb.Heartbeat(number=message.heartbeat.number, iteration=self.iteration)
                lane.tell(pb.Report(heartbeat=beat))
        except Refusal as refusal:
            lane.end(refusal.code, refusal.details)
            self.lane = None

    def _iteration(self, iteration: pb.Iteration) -> None:
        self.observe(iteration.term)
        epoch, world, engine = self.epoch, self.engine.world, self.engine
        if epoch is None or epoch.number != iteration.epoch or not self.member:
            raise Refusal(REFUSED, f"iteration {iteration.number} is of epoch {iteration.epoch}: not a member")
        if epoch.over:
            self._lost(iteration, "a neighbour is gone")
            return
        used = engine.numbers.get(iteration.number)
        again = used is not None and used[0] != epoch.number and used[1] < engine.rollbacks()  # its reserve was lost
        world.need(used is None or again, f"{engine.name} used iteration {iteration.number} twice")
        engine.numbers[iteration.number] = epoch.number, engine.rollbacks()
        world.need(iteration.number > self.iteration, f"{engine.name} went back to iteration {iteration.number}")
        seconds = 0.0 if iteration.HasField("pull") else world.random.uniform(*engine.pace)
        epoch.busy_until = max(epoch.busy_until, world.now) + seconds
        message = pb.Iteration.FromString(iteration.SerializeToString())
        world.after(epoch.busy_until - world.now, lambda: self._compute(epoch, message))

    def _lost(self, iteration: pb.Iteration, why: str) -> None:
        if self.lane is not None:
            report = pb.IterationReport(epoch=iteration.epoch, number=iteration.number, error=why, peer_lost=True)
            self.lane.tell(pb.Report(iteration=report))

    def _compute(self, epoch: Epoch, iteration: pb.Iteration) -> None:
        """All ranks have run an iteration."""
        ranks = self.engine.ranks
        frozen = next((rank for rank in ranks if rank.frozen), None)
        if frozen is not None:
            frozen._thawed.append(lambda: self._compute(epoch, iteration))
            return
        if epoch.over or not all(rank.alive and rank.epoch is epoch and rank.member for rank in ranks):
            if self.alive and self.epoch is epoch:
                self._lost(iteration, "a neighbour is gone")
            return
        if any(start.token_ids[0] == POISON for start in iteration.admissions):
            self.engine.poisoned()
            self.engine.kill(ranks[0], 0.3)
            return
        for rank in ranks:
            rank.iteration = iteration.number
        for row in iteration.free_rows:
            epoch.rows.pop(row, None)
        if iteration.HasField("pull"):
            self._begin_pull(epoch, iteration)
        tokens = self._tokens(epoch, iteration)
        first, last = ranks[0], ranks[-1]
        if last.lane is not None and last.term == iteration.term:
            times = pb.StageTimes(iteration=iteration.number, stage=last.index)
            report = pb.IterationReport(epoch=epoch.number, number=iteration.number, token_ids=tokens, times=times)
            last.lane.tell(pb.Report(iteration=report))
        if first is not last and first.lane is not None:
            first.lane.tell(pb.Report(times=pb.Times(stages=[pb.StageTimes(iteration=iteration.number)])))

    def _tokens(self, epoch: Epoch, iteration: pb.Iteration) -> list[int]:
        world, tokens, rows = self.engine.world, list[int](), epoch.rows
        blocks = {growth.row: tuple(growth.blocks) for growth in iteration.growths}
        for start in iteration.admissions:
            row = self._admit(epoch, iteration.term, start, blocks[start.row])
            row.state = state_of(start.token_ids, MODELS[self.weights])
            row.length, row.last = len(start.token_ids), sample(row.state)
            tokens.append(row.last)
        new = len(iteration.admissions)
        given = iteration.tokens or [None] * len(iteration.rows)
        for n, position, token in zip(iteration.rows[new:], iteration.starts[new:], given[new:], strict=True):
            row = rows.get(n)
            if row is None or row.length != position or row.missing:
                world.fail(f"{self.engine.name}: an increment of row {n} at {position}, which holds {row}")
                return tokens
            row.state = state_of([row.last if token in (None, NO_TOKEN) else token], row.state)
            row.length, row.last = row.length + 1, sample(row.state)
            tokens.append(row.last)
        return tokens

    def _admit(self, epoch: Epoch, term: int, start: pb.Admission, mine: tuple[int, ...]) -> Row:
        """Gives a request its row and blocks, which no other row may have."""
        world, rows, name = self.engine.world, epoch.rows, self.engine.name
        # A master that was not told of a row, because its iteration still ran, takes it over without a word.
        known = {n: held for n, held in rows.items() if held.told or held.term == term}
        taken = {block for held in known.values() for block in held.blocks}
        world.need(start.row not in known, f"{name}: row {start.row} is in use")
        world.need(not taken & set(mine), f"{name}: blocks of row {start.row} are in use")
        bound = epoch.slots // epoch.block_size
        world.need(all(block < bound for block in mine), f"{name}: there is no such block")
        ids = tuple(start.token_ids)
        row = rows[start.row] = Row(start.claim, 0, start.computed, ids[-1], mine, term, ids)
        return row

    def _begin_pull(self, epoch: Epoch, iteration: pb.Iteration) -> None:
        """Each rank fills its part of a row with what another engine has."""
        pull, transfers, world = iteration.pull, self.engine.transfers, self.engine.world
        row, ranks = self._admit(epoch, iteration.term, pull.admission, tuple(pull.blocks)), self.engine.ranks
        row.missing = set(range(len(ranks)))
        for rank in ranks:
            seconds, fails = transfers.draw(world.random)
            if seconds is not None:
                world.after(seconds, partial(rank.receive, partial(rank._pulled, epoch, iteration, row, fails)))

    def _pulled(self, epoch: Epoch, iteration: pb.Iteration, row: Row, fails: bool) -> None:
        """This rank's part of a pull has ended. A block is taken only if its key is that of the row's own tokens."""
        handed, positions, error = iteration.pull.handed, iteration.pull.admission.computed, ""
        source = self.engine.transfers.held(handed, self.index)
        if epoch.rows.get(iteration.pull.admission.row) is not row:
            error = "the row was freed meanwhile"
        elif fails or source is None:
            error = "the transfer has failed"
        elif source.ids[:positions] != row.ids[:positions]:
            error = "the keys and values of other tokens"
        else:
            row.missing.discard(self.index)
            row.state = source.state
        if self.lane is not None:
            self.lane.tell(pb.Report(pulled=pb.Pulled(number=iteration.number, bytes=positions, error=error)))


@dataclass
class Transfers:
    """Pulls between engines: where their blocks are, and the probabilities of faults, while these last."""

    engines: "dict[str, Engine]"
    fails: float = 0.0
    late: float = 0.0  # it takes up to the bound of a pull
    hangs: float = 0.0  # its rank never says how it ended
    hung: Callable[[], None] = lambda: None

    def draw(self, chance: random.Random) -> tuple[float | None, bool]:
        """Seconds until a pull ends, None for never, and whether it fails."""
        if self.hangs and chance.random() < self.hangs:
            self.hung()
            return None, True
        late = self.late and chance.random() < self.late
        return chance.uniform(0.5, 10.0) if late else chance.random() * 0.01, chance.random() < self.fails

    def held(self, handed: pb.Handed, index: int) -> Row | None:
        """The row that a request was handed over with, while it is there and its rank answers."""
        rank = self.engines[handed.engine].ranks[index]
        epoch = rank.epoch
        if not rank.alive or rank.frozen or epoch is None or epoch.over or not rank.member:
            return None
        if epoch.number != handed.epoch or rank.address != handed.sources[index].address:
            return None
        row = epoch.rows.get(handed.row)
        return row if row is not None and (row.claim, row.length) == (handed.claim, handed.positions) else None


@dataclass(eq=False)
class Engine:
    """The workers of one engine: a pod with a supervisor for each rank."""

    world: World
    name: str
    transfers: Transfers
    room: int
    pace: tuple[float, float]  # seconds of an iteration, at least and at most
    stages: int = 1
    poisoned: Callable[[], None] = lambda: None  # told when a request has ended a rank
    role: str = ""
    rollbacks: Callable[[], int] = lambda: 0  # how often a primary of Redis was lost with its last writes

    def __post_init__(self) -> None:
        self.epochs: dict[int, Epoch] = {}
        self.numbers: dict[int, tuple[int, int]] = {}  # iterations' numbers -> the epoch, and the rollbacks before
        self.pids = 1
        self.deaths = 0
        self.weights = next(iter(MODELS))  # that a rank reads as it begins
        self.watchers: list[list[Callable[[pb.RankTable], None]]] = [[] for _ in range(self.stages)]
        self.ranks = [self._started(n) for n in range(self.stages)]

    @property
    def pods(self) -> list[str]:
        return [f"{self.name}-pod-{n}:1" for n in range(self.stages)]

    def _started(self, index: int) -> Rank:
        self.pids += 1
        return Rank(self, index, self.pids)

    def table(self, index: int) -> pb.RankTable:
        rank = self.ranks[index]
        return pb.RankTable(ranks=[pb.RankEntry(local_rank=0, address=rank.address, pid=rank.pid if rank.alive else 0)])

    def tell(self, index: int) -> None:
        for watcher in list(self.watchers[index]):
            watcher(self.table(index))

    def kill(self, rank: Rank, restart: float) -> None:
        """The process of a rank ends; its supervisor starts another one."""
        if not rank.alive:
            return
        self.world.note("rank dies", rank.address)
        self.deaths += 1
        rank.alive = rank.frozen = False
        rank.leave("a neighbour is gone")
        for other in self.ranks:
            if other.epoch is not None and other.epoch.over and other.alive:
                other.member = other.member and False
        if rank.lane is not None:
            rank.lane.end(GONE, "socket closed")
        self.tell(rank.index)

        def start() -> None:
            self.ranks[rank.index] = self._started(rank.index)
            self.tell(rank.index)

        self.world.after(restart, start)

    def fence(self, index: int, pid: int) -> None:
        rank = self.ranks[index]
        if rank.pid == pid:
            self.kill(rank, self.world.random.uniform(0.2, 1.0))


class Lane:
    """A control lane: the scheduler's side is a call of orca_common.lanes.client. Messages keep their order."""

    waits = False

    def __init__(self, network: "Network", process: Process, rank: Rank, heard: Callable[[bytes], None]) -> None:
        self._network, self._process, self._rank, self._heard = network, process, rank, heard
        self.over: asyncio.Future[Status] = process.create_future()  # as the scheduler knows it
        self._ended = False  # as the rank knows it
        self._order = {"to": 0.0, "from": 0.0}

    def open(self, term: int) -> None:
        def run() -> None:
            try:
                self._rank.run(self, term)
            except Refusal as refusal:
                self.end(refusal.code, refusal.details)

        self._send("to", lambda: self._rank.receive(run) if self._rank.alive else self.end(GONE, "connection refused"))

    def _send(self, direction: str, what: Callable[[], object]) -> None:
        self._network.travel(self._process, direction, what, self._order)

    # -- the rank's side
    def tell(self, report: pb.Report) -> None:
        if not self._ended:
            raw = report.SerializeToString()
            self._send("from", lambda: self._process.call_soon(self._came, raw) if self._process.alive else None)

    def end(self, code: grpc.StatusCode, details: str) -> None:
        if not self._ended:
            self._ended = True
            self._send("from", lambda: self._closed(Status(code, details)))

    # -- the scheduler's side
    def _came(self, raw: bytes) -> None:
        if not self.over.done():
            self._heard(raw)

    def _closed(self, status: Status) -> None:
        if self._process.alive:
            self._process.call_soon(self._over, status)

    def _over(self, status: Status) -> None:
        if not self.over.done():
            self.over.set_result(status)

    def send(self, raw: bytes) -> None:
        message = pb.ControlMessage.FromString(raw)
        if not self.over.done():
            rank = self._rank
            self._send("to", lambda: None if self._ended else rank.receive(lambda: rank.message(self, message)))

    def cancel(self) -> None:
        """The scheduler closes the lane."""
        rank = self._rank
        self._over(Status(grpc.StatusCode.CANCELLED, "by this side"))

        def closed() -> None:
            self._ended = True
            if rank.lane is self:
                rank.lane = None

        self._send("to", closed)


class Watch:
    """A supervisor's tables of its ranks, as a stream of gRPC."""

    def __init__(self, network: "Network", process: Process, engine: Engine, index: int) -> None:
        self._network, self._process, self._engine, self._index = network, process, engine, index
        self._tables: asyncio.Queue[pb.RankTable] = asyncio.Queue()
        self._connected = asyncio.Event()
        self._order = {"from": 0.0}
        network.travel(process, "to", self._begin)

    def _begin(self) -> None:
        self._engine.watchers[self._index].append(self._tell)
        self._tell(self._engine.table(self._index))

    def _tell(self, table: pb.RankTable) -> None:
        self._network.travel(self._process, "from", lambda: self._came(table), self._order)

    def _came(self, table: pb.RankTable) -> None:
        if self._process.alive:
            self._connected.set()
            self._tables.put_nowait(table)

    async def wait_for_connection(self) -> None:
        await self._connected.wait()

    async def __aiter__(self) -> AsyncIterator[pb.RankTable]:
        while True:
            yield await self._tables.get()

    def cancel(self) -> None:
        """The scheduler closes the stream."""
        watchers = self._engine.watchers[self._index]
        if self._tell in watchers:
            watchers.remove(self._tell)


class Network:
    """gRPC between schedulers and workers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.engines: dict[str, Engine] = {}
        self.transfers = Transfers(self.engines)
        self.partitions: dict[str, list[Callable[[], object]]] = {}  # by the name of a scheduler
        self.delay = 0.0005

    def add(self, engine: Engine) -> None:
        self.engines[engine.name] = engine

    def travel(
        self, process: Process, direction: str, what: Callable[[], object], order: dict[str, float] | None = None
    ) -> None:
        held = self.partitions.get(process.name)
        if held is not None:
            held.append(lambda: self.travel(process, direction, what, order))
            return
        at = self._world.now + self._world.random.random() * self.delay
        if order is not None:
            at = order[direction] = max(at, order[direction] + 1e-9)
        self._world.after(at - self._world.now, what)

    def heal(self, process: str) -> None:
        for what in self.partitions.pop(process, []):
            what()

    def rank(self, address: str) -> Rank | None:
        """The process that listens there."""
        for engine in self.engines.values():
            for rank in engine.ranks:
                if rank.address == address and rank.alive:
                    return rank
        return None

    def supervisor(self, address: str) -> tuple[Engine, int]:
        return next((e, e.pods.index(address)) for e in self.engines.values() if address in e.pods)

    def channel(self, address: str, role: object = None, options: object = None) -> "Channel":
        """A channel of the process that runs, as orca_common.tls.Transport opens one."""
        process = asyncio.get_running_loop()
        assert isinstance(process, Process)
        return Channel(self, process, address)

    async def connect(self, address: str, role: object = None) -> "Connection":
        """A connection to a rank, as orca_common.tls.Transport opens one."""
        process = asyncio.get_running_loop()
        assert isinstance(process, Process)
        return Connection(self, process, address)

    async def listens(self, address: str) -> bool:
        """Whether a process accepts connections there."""
        channel = self.channel(address)

        def look(answer: Callable[[Any], None]) -> None:
            answer(self.rank(address) is not None)

        try:
            return await channel.ask(look, 5.0)
        except grpc.aio.AioRpcError:
            return False


class Channel:
    """A channel of grpc.aio, as the stubs and the scheduler use it."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network, self._process, self._address = network, process, address
        self._streams: list[Watch] = []
        self._asked: list[asyncio.Future[Any]] = []

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        for stream in self._streams:
            stream.cancel()
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(rpc_error(grpc.StatusCode.CANCELLED, "channel closed"))
                asked.exception()

    async def ask(self, do: Callable[[Callable[[Any], None]], None], timeout: float | None) -> Any:
        """The answer that `do` gives at the other side."""
        future, process, network = self._process.create_future(), self._process, self._network
        self._asked.append(future)

        def answered(answer: Any) -> None:
            def back() -> None:
                if process.alive and not future.done():
                    if isinstance(answer, Refusal):
                        future.set_exception(rpc_error(answer.code, answer.details))
                    else:
                        future.set_result(answer)

            network.travel(process, "from", back)

        def arrive() -> None:
            try:
                do(answered)
            except Refusal as refusal:
                answered(refusal)

        network.travel(process, "to", arrive)
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded") from None
        finally:
            if not future.done():
                future.cancel()
            elif not future.cancelled():
                future.exception()

    def unary_unary(self, method: str, **_: Any) -> Callable[..., Coroutine[Any, Any, Any]]:
        name = method.rpartition("/")[2]

        def call(request: Any, timeout: float | None = None, wait_for_ready: bool = False) -> Any:
            return self.ask(lambda answer: self.serve(name, request, answer), timeout)

        return call

    def serve(self, name: str, request: Any, answer: Callable[[Any], None]) -> None:
        if name == "Fence":
            engine, index = self._network.supervisor(self._address)
            engine.fence(index, request.pid)
            answer(pb.FenceResponse(killed=True))
            return
        rank = self._network.rank(self._address)
        if rank is None:
            raise Refusal(GONE, "connection refused")

        def do_hello() -> None:
            try:
                answer(rank.hello(request))
            except Refusal as refusal:
                answer(refusal)

        def do() -> None:
            try:
                match name:
                    case "Hello" if rank.running(request.term):
                        rank.engine.world.after(rank.running(request.term), lambda: rank.receive(do_hello))
                    case "Hello":
                        do_hello()
                    case "HostStore":
                        rank.observe(request.term)
                        answer(pb.HostStoreResponse(address="store:1"))
                    case "Form":
                        rank.form(request, answer)
                    case "Allocate":
                        answer(rank.allocate(request))
                    case _:
                        raise AssertionError(name)
            except Refusal as refusal:
                answer(refusal)

        rank.receive(do)

    def unary_stream(self, method: str, **_: Any) -> Callable[..., "Watch"]:
        assert method.endswith("Watch")
        engine, index = self._network.supervisor(self._address)

        def watch(request: Any, wait_for_ready: bool = False) -> Watch:
            stream = Watch(self._network, self._process, engine, index)
            self._streams.append(stream)
            return stream

        return watch


class Connection:
    """A connection of orca_common.lanes.client to the rank that listens at an address."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network, self._process, self._address = network, process, address
        self._channel = Channel(network, process, address)
        self._lanes: list[Lane] = []

    def close(self) -> None:
        self._channel.end()
        for lane in self._lanes:
            lane.cancel()

    async def ask(self, path: str, request: Any, answer: type[M], timeout: float) -> M:
        name = path.rpartition("/")[2]
        try:
            return await self._channel.ask(lambda done: self._channel.serve(name, request, done), timeout)
        except grpc.aio.AioRpcError as error:
            raise CallFailed(Status(error.code(), error.details() or "")) from None

    def call(self, path: str, heard: Callable[[bytes], None], metadata: Sequence[tuple[str, str]]) -> Lane:
        assert path.endswith("/Run")
        rank = self._network.rank(self._address)
        if rank is None:  # it died since its Hello
            engine = next(iter(self._network.engines.values()))
            rank = Rank(engine, 0, 0)
            rank.alive = False
        lane = Lane(self._network, self._process, rank, heard)
        self._lanes.append(lane)
        lane.open(int(dict(metadata)[TERM_METADATA]))
        return lane
