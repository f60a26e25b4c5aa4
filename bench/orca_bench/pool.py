"""Measures Redis's CPU time under the request pool of 1 to 1,000 engines, and how many engines a core carries.

    python -m orca_bench.pool [--cases 1,1,1 8,2,2 64,8,4 256,32,8 1000,100,10] [--seconds 4]

A case is a number of engines, endpoints and schedulers. The engines compute nothing: every 1/50 s each of them commits
one token for each of its requests, 32 at most. Requests have 128 new tokens, a bit fewer run at once than the engines
could hold, and each one that ends is followed by another. Redis is real, without fsync.

The commands and answers are those of `orca_pool.pool.Pool`. Its coroutines are stepped by hand, so nothing but packing
and parsing is left of Python's cost, and many connections have a command under way at once, as in a busy release. One
process sends them as fast as it can, which for many engines is slower than the release: then it is the same work in
more time. Measured is Redis's CPU time, and from it follows

    engines that a core sustains = 1 / (CPU seconds that one engine costs in a second of 50 iterations)

That is derived, with a commit for each iteration. Beside it stands what came through while it was measured.

Time is counted in iterations: a round is 1/50 s of every engine. In it each engine commits a token for each of its
requests, each request that ended is followed by another, hints are read, and engines with room claim. The engines
commit in up to 8 groups, and after each of them every endpoint reads its stream: 400 times a second. Every 20 rounds
all leases are renewed. So however long a round takes here, the work of a second of the release is that of 50 rounds.

The floor is the cost of the bytes of a commit and their delivery as plain commands, without leases, queue and requests
that come and end.
"""

import argparse
import random
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import hiredis

from orca_local import embedded_pool
from orca_pool.link import Argument, pack_command
from orca_pool.pool import Pool
from orca_pool.records import Attached, ClaimAnswer, CommitRow, EngineInfo, EngineLoad, Reason
from orca_pool.scripts import Constants, Script
from orca_pool.wire import ADDRESS, CONTENT, TOKEN

T = TypeVar("T")
CASES = ("1,1,1", "8,2,2", "64,8,4", "256,32,8", "1000,100,10")
MOST = 12  # commands that are printed, those that take longest
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


class Wire:
    """One connection that sends ready bytes and waits for the answers. Costs the machine little beside Redis."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()

    def start(self, data: bytes) -> None:
        self._socket.sendall(data)

    def finish(self) -> Any:
        """The next answer. Raises hiredis's ReplyError."""
        while (answer := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(1 << 16))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def send(self, data: bytes, answers: int = 1) -> Any:
        """Returns the last of the answers."""
        self.start(data)
        return [self.finish() for _ in range(answers)][-1]

    def ask(self, *words: Argument) -> Any:
        return self.send(pack_command(words))

    def cpu(self) -> float:
        """Microseconds of CPU that Redis has spent."""
        lines = (line.partition(":") for line in self.ask("INFO", "cpu").decode().splitlines())
        values = {name: value for name, colon, value in lines if colon}
        return 1e6 * sum(float(values[f"used_cpu_{kind}_main_thread"]) for kind in ("user", "sys"))

    def close(self) -> None:
        self._socket.close()


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


class Drive:
    """The simulated masters, endpoints and schedulers of one case."""

    def __init__(self, port: int, engines: int, endpoints: int, schedulers: int) -> None:
        self.pool = Pool("redis://driven", "bench", constants=UNHURRIED)
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
        """Drives whole renewal periods for about this many seconds, after a shorter run that does not count."""
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
        """Renews all leases, as services do every 0.4 s."""
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


@contextmanager
def server() -> Iterator[str]:
    """A server of its own. Gives its URL."""
    with tempfile.TemporaryDirectory(prefix="orca-bench-pool-") as folder:
        child, url = embedded_pool.start(Path(folder), None)
        try:
            yield url
        finally:
            child.terminate()
            child.wait()


def spent(engines: int, endpoints: int, schedulers: int, seconds: float) -> tuple[Spent, float, dict[str, float]]:
    """Redis's CPU, the floor of a commit in microseconds, and the parts of its cost."""
    with server() as url:
        drive = Drive(urlsplit(url).port or 0, engines, endpoints, schedulers)
        found = drive.measure(seconds)
        parts = drive.parts(seconds / 2)
        floor = drive.floor(seconds / 2)
        drive.close()
        return found, floor, parts


def show(engines: int, found: Spent, floor: float, parts: dict[str, float]) -> None:
    """Prints what Redis spends on a case."""
    commit = found.share / PER_SECOND / engines
    print(f"  Redis at full speed: {found.share:.1%} of a core, {commit * 1e6:.0f} us a commit with all around it")
    print(f"  us a commit by part: {', '.join(f'{name} {us:.0f}' for name, us in parts.items())}")
    print(f"  floor: {floor:.0f} us for the bytes of a commit and their delivery as plain commands")
    print(f"  engines that a core sustains: {engines / found.share:.0f}, derived")
    print(
        f"  driven: {found.commits:.0f} commits a second at {found.busy:.0%} of a core, "
        f"as of {found.commits / PER_SECOND:.1f} engines"
    )
    ordered = sorted(found.calls.items(), key=lambda item: -item[1][0] * item[1][1])[:MOST]
    told = ", ".join(f"{name} {us:.1f} x {count:.2f}" for name, (us, count) in ordered)
    print(f"  commands, us x how many a commit (evalsha holds the others): {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="ENGINES,ENDPOINTS,SCHEDULERS")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    given = parser.parse_args()
    for text in given.cases:
        engines, endpoints, schedulers = map(int, text.split(","))
        print(f"{engines} engines, {endpoints} endpoints, {schedulers} schedulers", flush=True)
        show(engines, *spent(engines, endpoints, schedulers, given.seconds))


if __name__ == "__main__":
    main()
