"""How many engines one Redis carries while all keep their pace, by the rule of the ledger: one commit of an engine is
under way at a time, and what its iterations make meanwhile joins the next one.

Each engine iterates 50 times a second whatever Redis does. A request that ends is followed at once by another, so they
come no slower when Redis is late. Endpoints read their streams 400 times a second at most, schedulers their hints 50
times, and all leases are renewed every 0.4 s, with the product's limits.

The commands are the pool's own, and `pool_drive` sets the case up. One process drives it with an epoll loop.
`Carried.driver` is its share of a core: near 1 the driver is the limit, and not Redis.
"""

import gc
import heapq
import itertools
import random
import select
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from orca_bench.commit import Wire
from orca_bench.pool_drive import BATCH, PER_SECOND, PROMPT, SLOTS, TOKENS, Drive, Engine, Exchange
from orca_lab.timeline import percentile
from orca_pool.leases import LEASE_SECONDS, RENEW_SECONDS
from orca_pool.link import pack_command
from orca_pool.pool import READ_ENTRIES, SUBMITTED_TOGETHER
from orca_pool.records import Attached, ClaimAnswer, CommitAnswer, CommitRow, EngineLoad, Reason
from orca_pool.scripts import Constants
from orca_pool.wire import ADDRESS, CONTENT, TOKEN

STEP = 1 / PER_SECOND
READ_EVERY = 1 / 400
LATEST = 1.0  # seconds: what was made is committed, and what was asked is begun, in the second in which it was
GROWTH, SLACK = 1.5, 0.01  # a backlog grows where the later delays are so many times the earlier, and seconds longer
TURNS = 32  # exchanges of a process at a time: the width of the pool's link
ITERATION_AT = TOKEN.size - 8  # where a token names its iteration


class Overrun(Exception):
    """The pool came so late that a lease was lost."""


class Carried(NamedTuple):
    """How a case went. Times in seconds; shares of a core."""

    joined: float  # iterations in a commit, on average
    rows: float  # rows of a commit, on average
    delivery: tuple[float, float]  # from a token's iteration to its endpoint: p50, p99
    oldest: float  # the longest that an iteration was not committed
    claim: float  # from submit to claim, p99
    renewal: tuple[float, float]  # from question to answer: p99, longest
    grows: bool
    redis: float
    driver: float

    @property
    def sustained(self) -> bool:
        """Whether Redis carries these engines."""
        in_time = max(self.oldest, self.claim) <= LATEST and self.renewal[1] <= LEASE_SECONDS - RENEW_SECONDS
        return in_time and not self.grows


@dataclass(slots=True)
class Row:
    """A claimed request: iterations `first` to `last` make its tokens, and `base` of them are committed."""

    request_id: str
    first: int
    last: int
    base: int = 0


@dataclass(slots=True)
class Master:
    """An engine's master, as its ledger works. made: the tokens of the iterations that no commit carries yet."""

    lease: Engine
    at: float  # the moment of iteration 0
    held: dict[int, Row]
    running: int = 0
    ends: Counter[int] = field(default_factory=Counter[int])  # requests that end with an iteration
    iteration: int = 0
    sent: int = 0  # the last iteration that a commit carries
    committed: int = 0  # the last one whose commit was answered
    made: bytearray = field(default_factory=bytearray)
    committing: bool = False
    claiming: bool = False
    hinted: bool = False
    needs: int = 0


class Together:
    """Stands for what gathers a Pool's submits: an operation yields what it asks for, and is sent the answer."""

    async def ask(self, item: Any) -> Any:
        return await Exchange(item)


class Exchanged(NamedTuple):
    """An operation of the pool, and who takes its answer."""

    work: Coroutine[Any, Any, Any]
    then: Callable[[Any], None]


@dataclass(slots=True)
class Turns:
    """The exchanges of one process, as its link bounds them."""

    busy: int = 0
    waiting: deque[Exchanged] = field(default_factory=deque[Exchanged])


class Sustained:
    """A case while it is driven."""

    def __init__(self, port: int, engines: int, endpoints: int, schedulers: int) -> None:
        self._port, self._drive = port, Drive(port, engines, endpoints, schedulers, Constants())
        self._pool, self._keys = self._drive.pool, self._drive.pool._keys  # pyright: ignore[reportPrivateUsage]
        self._pool._submits = Together()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        self._arrived: dict[str, deque[Coroutine[Any, Any, Any]]] = {name: deque() for name, _ in self._drive.doors}
        self._submitting = set[str]()  # endpoints
        self._random, self._numbers = random.Random(2), itertools.count(self._drive.submitted + 1)
        self._doors = [name for name, _ in self._drive.doors]
        self._read = dict.fromkeys(self._doors, b"0-0")
        self._hints: dict[str, bytes] = {}
        self._submitted: dict[str, float] = {}
        self._idle: list[Wire] = []
        self._under_way: dict[int, tuple[Wire, Exchanged]] = {}
        self._turns = defaultdict[str, Turns](Turns)
        self._poll = select.epoll()
        for _ in range(3 * engines + endpoints + 2 * schedulers):  # a queue of new connections would be lost time
            self._connect()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._forget()
        begin = time.monotonic() + STEP
        self._masters = [
            self._master(engine, begin + n / engines * STEP) for n, engine in enumerate(self._drive.engines)
        ]
        self._named = {master.lease.name.encode(): master for master in self._masters}
        for n, master in enumerate(self._masters):
            self._at(master.at, lambda master=master: self._iterate(master))
            self._at(begin + n / engines * RENEW_SECONDS, lambda master=master: self._renew(master))
        for n, name in enumerate(self._doors):
            self._at(begin + n / endpoints * READ_EVERY, lambda name=name: self._deliver(name))
            self._at(begin + n / endpoints * RENEW_SECONDS, lambda name=name: self._renew_endpoint(name))
        for name, _ in self._drive.schedulers:
            self._at(begin, lambda name=name: self._hear(name))
            self._at(begin, lambda name=name: self._renew_scheduler(name))

    @staticmethod
    def _master(engine: Engine, at: float) -> Master:
        held = {claim: Row(name, 1, left) for claim, (name, _, left) in engine.held.items()}
        return Master(engine, at, held, len(held), Counter(row.last for row in held.values()))

    def _forget(self) -> None:
        """Begins to measure."""
        self._commits = self._joined = self._rows = 0
        self._oldest = 0.0
        self._delivery, self._claims, self._renewals = list[float](), list[float](), list[float]()

    def measure(self, seconds: float) -> Carried:
        """Drives the case for so many seconds, and half as long before."""
        gc.disable()  # a collection would be a pause of the driver's
        self._run(seconds / 2)
        self._forget()
        redis, driver, began = self._drive.probe.cpu(), time.process_time(), time.monotonic()
        self._run(seconds)
        redis, driver = (self._drive.probe.cpu() - redis) / 1e6, time.process_time() - driver
        took, half = time.monotonic() - began, len(self._delivery) // 2
        early, late = sorted(self._delivery[:half])[half // 2], sorted(self._delivery[half:])[half // 2]
        self._oldest = max(self._oldest, *map(self._age, self._masters))
        waiting = [time.monotonic() - since for since in self._submitted.values()]
        return Carried(
            self._joined / max(1, self._commits),
            self._rows / max(1, self._commits),
            (percentile(self._delivery, 0.5), percentile(self._delivery, 0.99)),
            self._oldest,
            percentile(self._claims + waiting or [0.0], 0.99),
            (percentile(self._renewals, 0.99), max(self._renewals)),
            late > GROWTH * early + SLACK,
            redis / took,
            driver / took,
        )

    @staticmethod
    def _age(master: Master) -> float:
        """For how many seconds the oldest iteration that is not committed waits."""
        return time.monotonic() - master.at - (master.committed + 1) * STEP

    def close(self) -> None:
        self._drive.close()
        waiting = [exchanged for turns in self._turns.values() for exchanged in turns.waiting]
        for exchanged in [*waiting, *(exchanged for _, exchanged in self._under_way.values())]:
            exchanged.work.close()
        for submit in itertools.chain(*self._arrived.values()):
            submit.close()
        for wire in [*self._idle, *(wire for wire, _ in self._under_way.values())]:
            wire.close()
        self._poll.close()
        gc.enable()

    # -- the loop

    def _at(self, moment: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (moment, next(self._order), work))

    def _connect(self) -> None:
        wire = Wire(self._port)
        self._poll.register(wire.fileno(), select.EPOLLIN)
        self._idle.append(wire)

    def _ask(self, work: Coroutine[Any, Any, Any], then: Callable[[Any], None]) -> None:
        """Sends a command on a connection that nobody uses, as the pool's link does."""
        if not self._idle:
            self._connect()
        wire = self._idle.pop()
        self._under_way[wire.fileno()] = wire, Exchanged(work, then)
        wire.start(work.send(None))

    def _ask_in_turn(self, process: str, work: Coroutine[Any, Any, Any], then: Callable[[Any], None]) -> None:
        """The same, when fewer than `TURNS` others of the process are under way."""
        turns = self._turns[process]

        def answered(answer: Any) -> None:
            turns.busy -= 1
            if turns.waiting:
                turns.busy += 1
                self._ask(*turns.waiting.popleft())
            then(answer)

        if turns.busy < TURNS:
            turns.busy += 1
            self._ask(work, answered)
        else:
            turns.waiting.append(Exchanged(work, answered))

    def _run(self, seconds: float) -> None:
        timers, end = self._timers, time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            while timers[0][0] <= now:
                heapq.heappop(timers)[2]()
            for fd, _ in self._poll.poll(max(0.0, timers[0][0] - time.monotonic())):
                wire, exchanged = self._under_way.pop(fd)
                answer = wire.finish()
                self._idle.append(wire)
                try:
                    exchanged.work.send(answer)
                except StopIteration as done:
                    exchanged.then(done.value)

    # -- engines

    def _iterate(self, master: Master) -> None:
        master.iteration += 1
        master.made += TOKEN.pack(7, -0.5, master.iteration)
        for _ in range(master.ends.pop(master.iteration, 0)):
            master.running -= 1
            self._submit()
        if not master.committing:
            self._commit(master)
        self._claim(master)
        self._at(master.at + (master.iteration + 1) * STEP, lambda: self._iterate(master))

    def _commit(self, master: Master) -> None:
        """All that the iterations made which no commit carries."""
        low, now, size = master.sent + 1, master.iteration, TOKEN.size
        rows: list[CommitRow] = []
        for claim, row in list(master.held.items()):
            first, last = row.first + row.base, min(row.last, now)
            if first > last:
                continue
            tokens = bytes(master.made[(first - low) * size : (last + 1 - low) * size])
            rows.append(CommitRow(row.request_id, claim, row.base, tokens, Reason.LENGTH if last == row.last else None))
            row.base += last + 1 - first
            if last == row.last:
                del master.held[claim]
        master.sent = now
        master.made.clear()
        if not rows:
            master.committed = now
            return
        master.committing = True
        lease = master.lease

        def answered(answer: CommitAnswer | None) -> None:
            if answer is None:
                raise Overrun(f"{lease.name} lost its lease")
            assert set(answer.rows) <= {-1}, f"{lease.name} holds what the pool has not: {answer.rows}"
            self._commits += 1
            self._joined += now + 1 - low
            self._rows += len(rows)
            self._oldest = max(self._oldest, self._age(master))
            master.committed = now
            master.committing, master.needs = False, answer.needs or master.needs
            if master.sent < master.iteration:
                self._commit(master)
            self._claim(master)

        self._ask_in_turn(lease.owner, self._pool.commit(lease.name, lease.owner, lease.term, rows), answered)

    def _claim(self, master: Master) -> None:
        """Claims after a hint, and when there is room for what waits."""
        free, lease = BATCH - master.running, master.lease
        if master.claiming or not (master.hinted or master.needs) or free == 0:
            return
        master.claiming, master.hinted = True, False

        def answered(answer: ClaimAnswer | None) -> None:
            if answer is None:
                raise Overrun(f"{lease.name} lost its lease")
            lease.heard, master.needs, master.claiming, now = answer.last_claim, answer.needs, False, time.monotonic()
            for one in answer.requests:
                first = master.iteration + 1
                master.held[one.claim] = Row(one.request_id, first, first + TOKENS - 1)
                master.ends[first + TOKENS - 1] += 1
                master.running += 1
                if (since := self._submitted.pop(one.request_id, None)) is not None:
                    self._claims.append(now - since)
            self._claim(master)

        claim = self._pool.claim(
            lease.name, lease.owner, lease.term, lease.heard, count=free, slots=free * SLOTS, total=BATCH * SLOTS
        )
        self._ask_in_turn(lease.owner, claim, answered)

    def _renew(self, master: Master) -> None:
        lease, asked = master.lease, time.monotonic()
        load = EngineLoad(BATCH, (BATCH - master.running) * SLOTS, STEP, STEP)

        def answered(renewed: Any) -> None:
            if renewed is None:
                raise Overrun(f"{lease.name} lost its lease")
            lease.version = renewed.version
            master.needs = renewed.needs or master.needs
            self._renewed(asked, lambda: self._renew(master))

        renewal = self._pool.renew(lease.name, lease.owner, lease.term, known=lease.version, load=load)
        self._ask(renewal, answered)

    def _renewed(self, asked: float, again: Callable[[], None]) -> None:
        now = time.monotonic()
        self._renewals.append(now - asked)
        self._at(now + RENEW_SECONDS, again)

    # -- endpoints and schedulers

    def _submit(self) -> None:
        request_id = f"request-{next(self._numbers):016}"
        self._submitted[request_id] = time.monotonic()

        call = {"deadline_in": 600.0, "detach_grace": 5.0, "attempt": 1_700_000_000_000_000, "max_waiting": 1 << 20}
        door = self._random.choice(self._doors)
        submit = self._pool.submit(request_id, PROMPT, "d" * 40, SLOTS, SLOTS, endpoint=door, new_tokens=TOKENS, **call)
        self._arrived[door].append(submit)
        if door not in self._submitting:
            self._submit_arrived(door)

    def _submit_arrived(self, door: str) -> None:
        """Requests that arrived while an endpoint's submit was under way go together, as `Pool` gathers them."""
        arrived = self._arrived[door]
        submits = [arrived.popleft() for _ in range(min(len(arrived), SUBMITTED_TOGETHER))]

        def answered(answers: Sequence[Any]) -> None:
            for submit, answer in zip(submits, answers, strict=True):
                try:
                    submit.send(answer)
                except StopIteration as done:
                    if not isinstance(done.value, Attached):
                        raise Overrun(f"a request was refused: {done.value}") from None
            self._submitting.discard(door)
            if arrived:
                self._submit_arrived(door)

        self._submitting.add(door)
        together = self._pool._submit_all([submit.send(None) for submit in submits])  # pyright: ignore[reportPrivateUsage]
        self._ask_in_turn(door, together, answered)

    def _deliver(self, name: str) -> None:
        began = time.monotonic()

        async def read() -> Any:
            key = self._keys.delivery(name)
            return await Exchange(pack_command(("XREAD", "COUNT", READ_ENTRIES, "STREAMS", key, self._read[name])))

        def answered(answer: Any) -> None:
            now = time.monotonic()
            if answer:
                entries: list[Any] = answer[0][1]
                self._read[name] = entries[-1][0]
                for _, (_, engine, _, packets) in entries:
                    self._delivered(self._named[engine].at, packets, now)
            self._at(max(began + READ_EVERY, now), lambda: self._deliver(name))

        self._ask(read(), answered)

    def _delivered(self, engine_at: float, packets: bytes, now: float) -> None:
        """Notes the delay of each iteration in the first packet of an entry."""
        _, id_size = ADDRESS.unpack_from(packets)
        content = ADDRESS.size + id_size
        count = CONTENT.unpack_from(packets, content)[1]
        iteration = content + CONTENT.size + ITERATION_AT
        first = int.from_bytes(packets[iteration : iteration + 8], "little")
        for made in range(first, first + count):
            self._delivery.append(now - engine_at - made * STEP)

    def _hear(self, owner: str) -> None:
        """Reads the hints for a scheduler's engines: one command, where a real master waits with one of its own."""
        mine = [master for master in self._masters if master.lease.owner == owner]
        streams = [self._keys.control(master.lease.name) for master in mine]

        async def read() -> Any:
            return await Exchange(
                pack_command(("XREAD", "STREAMS", *streams, *(self._hints.get(s, b"0") for s in streams)))
            )

        def answered(answer: Any) -> None:
            heard = {name.decode(): entries[-1][0] for name, entries in answer or ()}
            self._hints |= heard
            for master, stream in zip(mine, streams, strict=True):
                if stream in heard:
                    master.hinted = True
                    self._claim(master)
            self._at(time.monotonic() + STEP, lambda: self._hear(owner))

        if mine:
            self._ask(read(), answered)

    def _renew_endpoint(self, name: str) -> None:
        asked = time.monotonic()

        def answered(number: int | None) -> None:
            if number is None:
                raise Overrun(f"{name} lost its registration")
            self._renewed(asked, lambda: self._renew_endpoint(name))

        read = int(self._read[name].partition(b"-")[2])
        self._ask(self._pool.renew_endpoint(name, read=read), answered)

    def _renew_scheduler(self, name: str) -> None:
        asked = time.monotonic()
        self._ask(self._pool.renew_scheduler(name), lambda _: self._renewed(asked, lambda: self._renew_scheduler(name)))
