"""The modelled Redis: the pool as plain Python (pool/model.py) behind connections that delay, break and lie still.

The real Link speaks to it. A command names an operation by its number; the server does it when the command arrives.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from pool.model import Model, Request
from redis.exceptions import ConnectionError, ReadOnlyError

from orca_common.errors import FailedPrecondition
from orca_pool.gathering import Gathering
from orca_pool.link import Link
from orca_pool.pool import ATTACHED_TOGETHER
from orca_pool.records import Attached, CommitRow, Delivery, ModelIdentity, Refusal
from orca_pool.scripts import Constants, Script

from .oracle import Oracle
from .processes import Process, World

READ_ENTRIES = 256
Attach = tuple[str, dict[str, Any]]  # the request, and the arguments by their names


@dataclass
class Operation:
    """What a client asks for."""

    process: Process
    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def wait(self) -> float:
        return self.options.get("wait", 0.0)


@dataclass
class Faults:
    """What the network between processes and Redis does to exchanges, as probabilities, while faults last."""

    reset: float = 0.0  # the connection breaks: before or after the command was done
    late: float = 0.0  # a command or an answer takes up to 6 s
    delay: float = 0.001  # seconds that a message takes at most, otherwise


@dataclass(eq=False)
class Reader:
    """A blocking read that waits."""

    connection: "Connection"
    operation: Operation
    until: float


class PoolModel(Model):
    """The pool, with streams that can be read, and the model's digest."""

    def __init__(self, constants: Constants) -> None:
        super().__init__(constants)
        self.identified: tuple[str, int, int] | None = None

    def identify(self, digest: str, max_positions: int, vocab_size: int) -> str:
        self.identified = self.identified or (digest, max_positions, vocab_size)
        return self.identified[0]

    def identity(self) -> ModelIdentity | None:
        return None if self.identified is None else ModelIdentity(*self.identified, self.largest)

    def number(self, last: int) -> int:
        return self._number(last)

    def attach_all(self, calls: Sequence[Attach]) -> list[Attached | Refusal]:
        return [self.attach(request_id, **options) for request_id, options in calls]

    def read(self, endpoint: str, cursor: bytes | None, *, wait: float) -> list[Delivery]:
        """A cursor is the number of an entry."""
        if endpoint not in self.endpoints:
            return []
        after = int(cursor or b"0")
        entries = [entry for entry in self.endpoints[endpoint].stream if entry[0] > after]
        return [Delivery(b"%d" % number, number, packets) for number, packets in entries[:READ_ENTRIES]]

    def _hint(self, engine: str, text: str) -> None:
        """A hint has a number, as an entry of Redis has the time: it grows, whatever was forgotten."""
        hints: list[Any] = self.engines[engine].hints
        hints.append((max(self.now, hints[-1][0] + 1 if hints else 0), text))
        del hints[: -self.constants.control_length]

    def hints(self, engine: str, cursor: bytes | None, *, wait: float) -> tuple[bytes, list[str]]:
        hints: list[Any] = self.engines[engine].hints if engine in self.engines else []
        new = [hint for hint in hints if hint[0] > int(cursor or b"0")]
        last = b"%d" % new[-1][0] if new else cursor or b"0"
        return last, list(dict.fromkeys(text for _, text in new))

    def live(self) -> list[Request]:
        return [r for r in self.requests.values() if r.state != "ended"]


@dataclass(eq=False)
class Server:
    """The one Redis. It may be paused, be down, and come back with an older state."""

    world: World
    oracle: Oracle
    constants: Constants = field(default_factory=Constants)
    faults: Faults = field(default_factory=Faults)
    # (process name, direction "to" or "from") -> what waits until the partition is over
    partitions: dict[tuple[str, str], list[Callable[[], object]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = PoolModel(self.constants)
        self.up, self.paused = True, False
        self.run_id = self.history = 1
        self.rollbacks = 0
        self._outages = 0.0  # seconds of those that are over
        self._away_since: float | None = None
        self.calm = False  # nothing keeps a living master from its lease
        self.operations: dict[int, Operation] = {}
        self.connections: set[Connection] = set()
        self.readers: list[Reader] = []
        self.terms: dict[tuple[str, int], str] = {}  # (engine, term) -> the master
        self._backlog: list[Callable[[], object]] = []  # while paused
        self._start = 1_700_000_000_000_000

    # -- the network
    def travel(self, process: Process, direction: str, what: Callable[[], object]) -> None:
        """A message goes to Redis or comes from it."""
        random, faults = self.world.random, self.faults
        held = self.partitions.get((process.name, direction))
        if held is not None:
            held.append(what)
            return
        delay = random.random() * faults.delay
        if faults.late and random.random() < faults.late:
            delay = random.uniform(0.1, 6.0)
        self.world.after(delay, what)

    def part(self, process: str, direction: str) -> None:
        self.partitions.setdefault((process, direction), [])

    def heal(self, process: str, direction: str) -> None:
        """What was held is delivered now: TCP has sent it again and again."""
        for what in self.partitions.pop((process, direction), []):
            self.world.after(self.world.random.random() * 0.2, what)

    # -- the life of the server
    def pause(self, seconds: float) -> None:
        if self.up and not self.paused:
            self.world.note("redis stands still", round(seconds, 3))
            self.paused = True
            self._away_since = self.world.now if seconds > self.constants.lease else None
            self.world.after(seconds, self._go_on)

    @property
    def outages(self) -> float:
        """Seconds so far in which it stood still, of the times that are longer than a lease."""
        return self._outages + (0.0 if self._away_since is None else self.world.now - self._away_since)

    def _go_on(self) -> None:
        self._outages, self._away_since = self.outages, None
        self.paused = False
        backlog, self._backlog = self._backlog, []
        for what in backlog:
            what()

    def fail_over(self, lag: float, down: float, demoted: bool) -> None:
        """A primary that is `lag` seconds older takes over, `down` seconds after this one was lost.

        demoted: the old server lives and answers READONLY; its connections stay open.
        """
        kept = copy.deepcopy(self.model)

        def lost() -> None:
            if not self.up or self.paused:
                return
            self.world.note("redis fails over", f"lag={lag:.3f} down={down:.3f} demoted={demoted}")
            self.up = False
            self.rollbacks += 1
            self.model = kept
            self.readers.clear()
            for connection in sorted(self.connections, key=lambda c: c.number):
                if demoted:
                    connection.demoted = True
                else:
                    connection.break_off()
            self.world.after(down, back)

        def back() -> None:
            self.up = True
            self.run_id += 1
            self.history += demoted
            self.world.note("redis is back")

        self.world.after(lag, lost)

    # -- operations
    def arrive(self, connection: "Connection", number: int) -> None:
        """A command has come over a connection, which may be closed meanwhile."""
        if self.paused:
            self._backlog.append(lambda: self.arrive(connection, number))
            return
        if (not self.up or connection.broken) and not connection.demoted:
            connection.break_off()
            return
        if connection.demoted:
            connection.answer(ReadOnlyError("You can't write against a read only replica."))
            return
        operation = self.operations[number]
        answer = self.do(operation)
        if operation.wait and not connection.closed and self._empty(operation, answer):
            reader = Reader(connection, operation, self.world.now + operation.wait)
            self.readers.append(reader)
            self.world.after(operation.wait, lambda: self._time_out(reader))
        else:
            connection.answer(answer)
        self._wake_readers()

    def do(self, operation: Operation) -> Any:
        """Does an operation, and checks what must hold after it."""
        model = self.model
        model.now = self._start + round(self.world.now * 1e6)
        method = getattr(model, operation.name)
        known = PARAMETERS.get(operation.name)
        if known is None:
            known = PARAMETERS[operation.name] = set(inspect.signature(method).parameters)
        answer = method(*operation.args, **{k: v for k, v in operation.options.items() if k in known})
        if operation.name not in ("read", "hints"):
            self.world.note(operation.process.name, operation.name, _short(operation), "->", _brief(answer))
        self._check(operation, answer)
        return answer

    def sweep(self) -> None:
        """Sweeps as the renewal of a scheduler does that leaves at once."""
        self.model.now = self._start + round(self.world.now * 1e6)
        self.model.renew_scheduler("the end")
        self.model.leave_scheduler("the end")

    def _check(self, operation: Operation, answer: Any) -> None:
        world, model = self.world, self.model
        match operation.name:
            case "commit":
                rows: list[CommitRow] = operation.args[3]
                for row in rows:
                    r = model.requests.get(row.request_id)
                    if r is not None:
                        have = [token.token_id for token in r.tokens]
                        made = self.oracle.made(row.request_id, have)
                        world.need(made, f"{row.request_id} has tokens {have}, which no model makes")
            case "acquire" if answer is not None:
                engine, owner, seen = operation.args
                if self.calm and seen is not None and seen.owner not in (None, owner):
                    living = any(process.name == seen.owner for process in world.processes)
                    world.need(not living, f"{engine} was taken from its living master {seen.owner}")
                master = self.terms.setdefault((engine, answer), owner)
                world.need(master == owner, f"term {answer} of {engine} was given to {master} and {owner}")
            case _:
                pass

    def _empty(self, operation: Operation, answer: Any) -> bool:
        return not (answer[1] if operation.name == "hints" else answer)

    def _wake_readers(self) -> None:
        for reader in list(self.readers):
            operation = reader.operation
            if reader.connection.closed:
                self.readers.remove(reader)
                continue
            answer = getattr(self.model, operation.name)(*operation.args, **operation.options)
            if not self._empty(operation, answer):
                self.readers.remove(reader)
                reader.connection.answer(answer)

    def _time_out(self, reader: Reader) -> None:
        if reader in self.readers:
            self.readers.remove(reader)
            operation = reader.operation
            reader.connection.answer(getattr(self.model, operation.name)(*operation.args, **operation.options))


PARAMETERS: dict[str, set[str]] = {}  # of the model's methods: what it does not know, as an engine's load, it ignores


class Connection:
    """One connection of a process to the server, as the Link uses its own."""

    host, port = "the only server", 0

    def __init__(self, server: Server, process: Process, link: "ModelLink") -> None:
        self._server, self._process, self._link = server, process, link
        self.number = next(server.world.numbers)
        self.broken = self.closed = self.demoted = False
        self._answer: Any = None  # the future of the present exchange
        self._info: bytes = b""
        self._greeting = (0, 0)

    async def connect(self) -> None:
        waiter = self._process.create_future()
        server = self._server

        def arrives() -> None:
            if server.paused:
                server._backlog.append(arrives)
                return
            up = server.up
            if up:
                self._greeting = (server.run_id, server.history)
                server.connections.add(self)
            server.travel(self._process, "from", lambda: waiter.done() or waiter.set_result(up))

        server.travel(self._process, "to", arrives)
        if not await waiter:
            raise ConnectionError("connection refused")
        await self._link.signed_in(self)

    async def disconnect(self, nowait: bool) -> None:
        self.closed = True
        self._answer = None
        self._server.connections.discard(self)

    async def on_connect(self) -> None:
        pass

    async def send_command(self, *args: Any, check_health: bool) -> None:
        run_id, history = self._greeting
        self._info = b"run_id:%d" % run_id if args[1] == "server" else b"master_replid:%d" % history

    async def read_response(self) -> Any:
        """The answer to the greeting, then the answer of the present exchange."""
        if self._info:
            info, self._info = self._info, b""
            return info
        answer = await self._answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def send_packed_command(self, command: bytes, check_health: bool) -> None:
        number = int(command[: command.rindex(b"\r\n")].rpartition(b"\r\n")[2])
        server, random = self._server, self._server.world.random
        self._answer = self._process.create_future()
        if server.faults.reset and random.random() < server.faults.reset:
            if random.random() < 0.5:  # the command arrives, its answer does not
                server.travel(self._process, "to", lambda: server.arrive(self, number))
                server.world.after(random.random() * 0.002, self.break_off)
            else:
                self.break_off()
        else:
            server.travel(self._process, "to", lambda: server.arrive(self, number))

    def answer(self, answer: Any) -> None:
        """The server's side: sends the answer of the present exchange."""
        future = self._answer
        if future is not None:
            self._server.travel(
                self._process, "from", lambda: self.broken or future.done() or future.set_result(answer)
            )

    def break_off(self) -> None:
        """The connection is lost."""
        future, self.broken = self._answer, True
        self._server.connections.discard(self)
        if future is not None and not future.done() and self._process.alive:
            future.set_result(ConnectionError("connection reset"))


class ModelLink(Link):
    """The real link, over modelled connections."""

    def __init__(self, server: Server, process: Process) -> None:
        super().__init__("redis://modelled")
        self._new_connection = lambda: cast(Any, Connection(server, process, self))

    async def signed_in(self, connection: Connection) -> None:
        await self._on_connect(connection)


class ModelledPool:
    """orca_pool.pool.Pool for one process: its operations go over a link of its own to the modelled Redis."""

    def __init__(self, server: Server, process: Process) -> None:
        self._server, self._process = server, process
        self._link = ModelLink(server, process)
        self._attaches = Gathering[Attach, Attached | Refusal](partial(self._do, "attach_all"), ATTACHED_TOGETHER)

    @property
    def generation(self) -> int:
        return self._link.generation

    async def identify(self, digest: str, max_positions: int, vocab_size: int) -> None:
        stands = await self._do("identify", digest, max_positions, vocab_size)
        if stands != digest:
            raise FailedPrecondition(f"the pool serves the model with digest {stands}")

    async def attach(self, request_id: str, **options: Any) -> Attached | Refusal:
        """Those that the real pool sends together go together."""
        if options["digest"] or not options["known"]:
            return await self._do("attach", request_id, **options)
        return await self._attaches.ask((request_id, options))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self._do(name, *args, **options)

    async def _do(self, name: str, *args: Any, **options: Any) -> Any:
        number = next(self._server.world.numbers)
        operation = self._server.operations[number] = Operation(self._process, name, args, options)
        if operation.wait:
            return await self._link.blocking("READ", number, wait=operation.wait)
        return await self._link.run(SCRIPT, number, renewal=name in RENEWALS)


SCRIPT = Script("", "an operation")
RENEWALS = {"renew_endpoint", "renew_scheduler", "renew"}


def _short(operation: Operation) -> str:
    """The arguments of an operation for the trace."""
    args = list(operation.args)
    if operation.name == "commit":
        args[3] = [(r.request_id, r.claim, r.base, len(r.tokens) // 16, r.finish and r.finish.name) for r in args[3]]
    elif operation.name == "submit":
        args[1:3] = []
    told = {
        k: v for k, v in operation.options.items() if v is not None and k not in ("load", "limits", "last", "digest")
    }
    return f"{args} {told}".replace("\n", " ")


def _brief(answer: Any) -> str:
    text = str(answer)
    return text if len(text) < 200 else f"{text[:200]}..."
