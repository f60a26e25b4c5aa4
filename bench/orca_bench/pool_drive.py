"""What Redis spends on a case of `orca_bench.pool`, driven as fast as one process can: simulated masters and endpoints.

The commands and answers are those of `orca_pool.pool.Pool`. Its coroutines are stepped by hand, so nothing but packing
and parsing is left of Python's cost, and many connections have a command under way at once, as in a busy release.

Time is counted in iterations: a round is 1/50 s of every engine. In it each engine commits a token for each of its
requests, each request that ended is followed by another, hints are read, and who has room claims. The engines commit in
up to 8 groups, and after each of them every endpoint reads its stream: 400 times a second. Every 20 rounds all leases
are renewed. So however long a round takes here, the work of a second of the release is that of 50 rounds.
"""

import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from orca_bench.commit import Wire
from orca_pool.link import Argument, pack_command
from orca_pool.pool import Pool
from orca_pool.records import Attached, ClaimAnswer, CommitRow, EngineInfo, EngineLoad, Reason
from orca_pool.scripts import Constants, Script
from orca_pool.wire import ADDRESS, CONTENT, TOKEN

T = TypeVar("T")
PER_SECOND = 50  # iterations of an engine
RENEWED = 20  # rounds from one renewal to the next: 0.4 s
BATCH, TOKENS, SLOTS = 32, 128, 160  # requests of an engine at a time; new tokens of a request; its slots
FILLED = 0.9  # of what the engines could hold
GROUPS = 8
PROMPT = b"\x08" * 600  # the bytes of a record with a prompt of some hundred tokens
BYTES = TOKEN.pack(7, -0.5, 1)
AT_ONCE = 256  # commands under way while the case is set up
UNHURRIED = Constants(lease=3600.0, sweep_gap=3600.0)  # leases are renewed by rounds, which may take long


class Spent(NamedTuple):
    """Seconds of Redis's CPU for a second of the release, and how the measurement went."""

    share: float
    commits: float  # a second, as driven
    busy: float  # Redis's share of a core while it was driven
    calls: dict[str, tuple[float, float]]  # command -> microseconds of one, and how many of them a commit


class Exchange:
    """One command under way: `await` it where a link would send it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __await__(self) -> Generator[bytes, Any, Any]:
        return (yield self._data)


class Hand:
    """Stands for the link of a Pool whose coroutines are stepped by hand: each yields its command, and is sent the
    answer."""

    generation = 0

    async def run(self, script: Script, *args: Argument, renewal: bool = False, replicas: int = 0) -> Any:
        return await Exchange(pack_command(("EVALSHA", script.sha, *args)))

    async def command(self, *args: Argument, replicas: int = 0) -> Any:
        return await Exchange(pack_command(args))

    async def blocking(self, *args: Argument, wait: float) -> Any:
        return await Exchange(pack_command(args))


class Alone:
    """Stands for what gathers the operations of a Pool: each is sent by itself."""

    def __init__(self, send: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]) -> None:
        self._send = send

    async def ask(self, item: Any) -> Any:
        return (await self._send([item]))[0]


def together(work: Iterable[tuple[Wire, Coroutine[Any, Any, T]]]) -> list[T]:
    """Sends one command of each, then reads all answers. Returns what the coroutines return."""
    started = list(work)
    results: list[T] = []
    for wire, coroutine in started:
        wire.start(coroutine.send(None))
    for wire, coroutine in started:
        try:
            coroutine.send(wire.finish())
        except StopIteration as end:
            results.append(end.value)
    return results


@dataclass(slots=True)
class Engine:
    """A simulated master. held: claim -> [request id, tokens made, tokens left]."""

    name: str
    owner: str
    term: int
    wire: Wire
    heard: int = 0
    held: dict[int, list[Any]] = field(default_factory=dict[int, list[Any]])
    wants: bool = True  # to claim
    version: str = ""  # of the claims that a renewal told


class Drive:
    """The simulated masters, endpoints and schedulers of one case."""

    def __init__(
        self, port: int, engines: int, endpoints: int, schedulers: int, constants: Constants = UNHURRIED
    ) -> None:
        self.pool = Pool("redis://driven", "bench", constants=constants)
        self.pool._link = Hand()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        self.pool._submits = Alone(self.pool._submit_all)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        self.probe = Wire(port)
        self.probe.ask("CONFIG", "SET", "appendfsync", "no")
        for script in self.pool._scripts.values():  # pyright: ignore[reportPrivateUsage]
            self.probe.ask("SCRIPT", "LOAD", script.text)
        self._parts: dict[str, float] | None = None  # microseconds of Redis's CPU by part of the work, while asked for
        self._asking = 0.0  # what Redis spends on a question for its CPU time
        self._random = random.Random(1)
        self.submitted = 0
        self.schedulers = [(f"s{n}", Wire(port)) for n in range(schedulers)]
        self.doors = [(f"ep-{n:016}", Wire(port)) for n in range(endpoints)]
        self._read: dict[str, tuple[bytes | None, int]] = {name: (None, 0) for name, _ in self.doors}
        self._hinted: dict[str, bytes] = {}
        together((wire, self.pool.renew_endpoint(name, register=True)) for name, wire in self.doors)
        owners = [self.schedulers[n % schedulers][0] for n in range(engines)]
        wires = [Wire(port) for _ in range(engines)]
        work = ((wire, self.pool.acquire(f"g{n}", owners[n], None)) for n, wire in enumerate(wires))
        terms = together(work)
        self.engines = [Engine(f"g{n}", owners[n], terms[n] or 0, wires[n]) for n in range(engines)]
        self._renew(formed=True)
        waiting = round(FILLED * BATCH * engines)
        while waiting:
            some = min(waiting, AT_ONCE)
            self._submit(some)
            waiting -= some
        self._claim(self.engines)
        for engine in self.engines:  # requests of all ages, as they are after some time
            for one in engine.held.values():
                one[2] = self._random.randint(1, TOKENS)

    def close(self) -> None:
        for wire in [self.probe, *(w for _, w in self.schedulers + self.doors), *(e.wire for e in self.engines)]:
            wire.close()

    def measure(self, seconds: float) -> Spent:
        """Drives whole renewal periods for about so many seconds, and a shorter time before."""
        self._rounds(4, seconds / 3)
        self.probe.ask("CONFIG", "RESETSTAT")
        spent, began = self.probe.cpu(), time.monotonic()
        rounds = self._rounds(RENEWED, seconds)
        spent, took = self.probe.cpu() - spent, time.monotonic() - began
        commits = rounds * len(self.engines)
        return Spent(spent / 1e6 / rounds * PER_SECOND, commits / took, spent / 1e6 / took, self._calls(commits))

    def parts(self, seconds: float) -> dict[str, float]:
        """Microseconds of Redis's CPU a commit, by the part of the work. Each part is asked for by itself."""
        asked = [self.probe.cpu() for _ in range(200)]
        self._asking, self._parts = (asked[-1] - asked[0]) / (len(asked) - 1), defaultdict[str, float](float)
        rounds = self._rounds(RENEWED, seconds)
        found, self._parts = self._parts, None
        return {name: spent / rounds / len(self.engines) for name, spent in found.items()}

    @contextmanager
    def _part(self, name: str) -> Generator[None]:
        """Notes what Redis spends meanwhile, if that is asked for."""
        if self._parts is None:
            yield
            return
        before = self.probe.cpu()
        yield
        self._parts[name] += self.probe.cpu() - before - self._asking

    def floor(self, seconds: float) -> float:
        """Microseconds of Redis's CPU for the bytes of a commit and their delivery as plain commands: an APPEND for
        each request, an XADD for each endpoint, and the endpoints' reads. There are as many keys as in the case."""
        keys, size = self.pool._keys, -(-len(self.engines) // GROUPS)  # pyright: ignore[reportPrivateUsage]
        pipelines: list[tuple[Wire, bytes, int]] = []
        for engine in self.engines:
            commands: list[tuple[Argument, ...]] = []
            packets: dict[str, bytes] = {}
            for request_id, _, _ in engine.held.values():
                name, _ = self._random.choice(self.doors)
                commands.append(("APPEND", f"{keys.prefix}floor:{request_id}", BYTES))
                packets[name] = packets.get(name, b"") + b"p" * (ADDRESS.size + len(request_id) + CONTENT.size) + BYTES
            for name, packet in packets.items():
                commands.append(("XADD", keys.delivery(name), "MAXLEN", 65536, "0-*", "e", engine.name, "p", packet))
            pipelines.append((engine.wire, b"".join(map(pack_command, commands)), len(commands)))
        spent, until, rounds = self.probe.cpu(), time.monotonic() + seconds, 0
        while time.monotonic() < until:
            for first in range(0, len(pipelines), size):
                group = pipelines[first : first + size]
                for wire, data, _ in group:
                    wire.start(data)
                for wire, _, answers in group:
                    for _ in range(answers):
                        wire.finish()
                self._deliver()
            rounds += 1
        return (self.probe.cpu() - spent) / rounds / len(pipelines)

    def _calls(self, commits: int) -> dict[str, tuple[float, float]]:
        calls: dict[str, tuple[float, float]] = {}
        for line in self.probe.ask("INFO", "commandstats").decode().splitlines():
            if line.startswith("cmdstat_"):
                name, _, rest = line.removeprefix("cmdstat_").partition(":")
                values = dict(pair.split("=") for pair in rest.split(","))
                calls[name] = float(values["usec_per_call"]), int(values["calls"]) / commits
        return calls

    def _rounds(self, multiple: int, seconds: float) -> int:
        """Returns how many: a multiple of `multiple`."""
        until, rounds = time.monotonic() + seconds, 0
        while True:
            for n in range(multiple):
                self._round()
                if n == 0:
                    with self._part("leases"):
                        self._renew()
            rounds += multiple
            if time.monotonic() > until:
                return rounds

    def _round(self) -> None:
        ended, size = 0, -(-len(self.engines) // GROUPS)
        for first in range(0, len(self.engines), size):
            group = self.engines[first : first + size]
            with self._part("commits"):
                ended += self._commit(group)
            with self._part("deliveries"):
                self._deliver()
        with self._part("submits"):
            self._submit(ended)
        with self._part("hints"):
            self._hear()
        with self._part("claims"):
            self._claim([engine for engine in self.engines if engine.wants and len(engine.held) < BATCH])

    def _commit(self, engines: list[Engine]) -> int:
        """A token for each request of these engines. Returns how many requests ended."""
        work: list[tuple[Wire, Coroutine[Any, Any, Any]]] = []
        ended = 0
        for engine in engines:
            rows: list[CommitRow] = []
            for claim, one in list(engine.held.items()):
                request_id, made, left = one
                rows.append(CommitRow(request_id, claim, made, BYTES, Reason.LENGTH if left == 1 else None))
                one[1], one[2] = made + 1, left - 1
                if left == 1:
                    del engine.held[claim]
                    ended += 1
            work.append((engine.wire, self.pool.commit(engine.name, engine.owner, engine.term, rows)))
        for engine, answer in zip(engines, together(work), strict=True):
            assert answer is not None, f"{engine.name} lost its lease"
            assert set(answer.rows) <= {-1}, f"{engine.name} holds what the pool has not: {answer.rows}"
            engine.wants |= bool(answer.needs)
        return ended

    def _deliver(self) -> None:
        """Every endpoint reads its stream."""
        prefix = self.pool._keys  # pyright: ignore[reportPrivateUsage]
        for name, wire in self.doors:
            cursor = self._read[name][0] or b"0"
            wire.start(pack_command(("XREAD", "COUNT", 256, "STREAMS", prefix.delivery(name), cursor)))
        for name, wire in self.doors:
            if answer := wire.finish():
                entries: list[Any] = answer[0][1]
                self._read[name] = entries[-1][0], int(entries[-1][0].partition(b"-")[2])

    def _submit(self, count: int) -> None:
        work: list[tuple[Wire, Coroutine[Any, Any, Any]]] = []
        taken: set[str] = set()
        answers: list[Any] = []
        for _ in range(count):
            name, wire = self._random.choice(self.doors)
            if name in taken:  # Redis would read all of one connection at once, and queue them side by side
                answers += together(work)
                work.clear()
                taken.clear()
            taken.add(name)
            self.submitted += 1
            call = {"deadline_in": 600.0, "detach_grace": 5.0, "attempt": 1_700_000_000_000_000, "max_waiting": 1 << 20}
            request_id = f"request-{self.submitted:016}"
            work.append(
                (
                    wire,
                    self.pool.submit(
                        request_id, PROMPT, "d" * 40, SLOTS, SLOTS, endpoint=name, new_tokens=TOKENS, **call
                    ),
                )
            )
        for answer in answers + together(work):
            assert isinstance(answer, Attached), answer

    def _hear(self) -> None:
        """Reads the hints: one command for each scheduler, where a real master waits with one of its own."""
        keys = self.pool._keys  # pyright: ignore[reportPrivateUsage]
        for owner, wire in self.schedulers:
            mine = [engine for engine in self.engines if engine.owner == owner]
            if not mine:
                continue
            streams = [keys.control(engine.name) for engine in mine]
            cursors = [self._hinted.get(stream, b"0") for stream in streams]
            answer = wire.ask("XREAD", "STREAMS", *streams, *cursors)
            heard = {name.decode(): entries[-1][0] for name, entries in answer or ()}
            self._hinted |= heard
            for engine, stream in zip(mine, streams, strict=True):
                engine.wants |= stream in heard

    def _claim(self, engines: list[Engine]) -> None:
        """These engines claim what they have room for, one after the other."""
        for engine in engines:
            free = BATCH - len(engine.held)
            work = self.pool.claim(
                engine.name,
                engine.owner,
                engine.term,
                engine.heard,
                count=free,
                slots=free * SLOTS,
                total=BATCH * SLOTS,
            )
            [answer] = together([(engine.wire, work)])
            assert isinstance(answer, ClaimAnswer)
            engine.heard, engine.wants = answer.last_claim, bool(answer.needs)
            for one in answer.requests:
                engine.held[one.claim] = [one.request_id, 0, TOKENS]

    def _renew(self, formed: bool = False) -> None:
        """All leases, as every 0.4 s."""
        pool = self.pool
        together((wire, pool.renew_endpoint(name, read=self._read[name][1])) for name, wire in self.doors)
        together((wire, pool.renew_scheduler(name)) for name, wire in self.schedulers)
        work: list[tuple[Wire, Coroutine[Any, Any, Any]]] = []
        for engine in self.engines:
            free = BATCH - len(engine.held)
            load = EngineLoad(BATCH, free * SLOTS, 1 / PER_SECOND, 1 / PER_SECOND)
            form = EngineInfo(engine.name, 1, 1, BATCH * SLOTS, 0) if formed else None
            renewal = pool.renew(engine.name, engine.owner, engine.term, reserve=1 << 20, form=form, load=load)
            work.append((engine.wire, renewal))
        together(work)
