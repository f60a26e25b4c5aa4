"""Connections to one Redis. Every exchange is bounded in time, and every lost connection is noticed.

A client library retries and reconnects without saying so. An endpoint must know when that happened, because Redis may
have forgotten something (docs/design.md, "The request pool"); so this module does both itself. Each exchange has a
connection of its own. A blocking read keeps one for as long as it waits; a cancelled exchange closes its own, so that
no caller can read an answer that was meant for another.

A bounded number of exchanges is under way at a time; the others wait for their turn. Renewals of leases do not: a lease
must not expire behind a storm of attaches.
"""

import asyncio
import errno
import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, cast

import hiredis
from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from orca_common.errors import ErrorReason, FailedPrecondition, Unavailable

from .primary import LOOK_AGAIN, Primary
from .redis_url import Address
from .scripts import Script
from .signing_in import options, redis_alone

# Error replies of a server that fails over or cannot write now. Some are known by their text alone.
NOT_CONNECTED = re.compile(r"Error ([0-9]+) connecting to (.+)\. Connect call failed \(.*\)\.?")  # in redis-py's words
NOT_NOW = (AskError, ClusterDownError, TryAgainError)
NOT_NOW_TEXTS = ("BUSY", "MISCONF", "NOREPLICAS", "UNBLOCKED")

# Seconds to the second look for a server that is away; each next pause is twice as long, up to LOOK_AGAIN. All streams
# wait for it, and one exchange of a process looks for all.
LOOK_SOON = 0.01

# Milliseconds. A replica that gets a write and the question at the same time answers before the write is on its disk.
# The next answer follows the next question, or comes after a second.
ASK_AGAIN = 20

# Seconds. An exchange that is later than this may wait for a primary that hands over, or whose node is gone.
DOUBT = 0.25

# An exchange begins again, with its whole bound, this often at most while the Sentinels replace the server it asked.
REPLACEMENTS = 3

# The oldest Redis that reads the first line of our scripts (`#!lua`). Every Valkey says that it is one of 7.2 or newer.
OLDEST = (7, 0)

Argument = str | bytes | int

# hiredis packs a commit of 32 rows in 40 us; the Python of the asyncio client takes 90. (Its stub takes tuples of one.)
pack_command: Callable[[tuple[Argument, ...]], bytes] = cast(Any, hiredis).pack_command


NEEDED = f"take {'.'.join(map(str, OLDEST))} or newer, or Valkey"


def too_old(version: str) -> bool:
    """Whether our scripts do not run on a Redis of this version. False where it names none."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return major.isdecimal() and minor.isdecimal() and (int(major), int(minor)) < OLDEST


class Connection(Protocol):
    """A connection of redis.asyncio, which is typed only in part. It carries one exchange at a time."""

    host: str
    port: int

    async def connect(self) -> None: ...
    async def on_connect(self) -> None: ...
    async def send_command(self, *args: Argument, check_health: bool) -> None: ...
    async def send_packed_command(self, command: bytes, check_health: bool) -> None: ...
    async def read_response(self) -> Any: ...
    async def disconnect(self, nowait: bool) -> None: ...


class _Line(NamedTuple):
    """A connection, the server that it leads to, and how many had been lost when it was made."""

    connection: Connection
    address: Address | None  # None: the URL's
    losses: int

    async def ask(self, *args: Argument) -> Any:
        """Sends a command and returns the answer. After a cancellation the connection must be closed."""
        await self.connection.send_packed_command(pack_command(args), check_health=False)
        return await self.connection.read_response()

    async def close(self) -> None:
        await self.connection.disconnect(nowait=True)


class NoAnswer(Unavailable):
    """No answer came in time, and so no reason."""


class Replaced(Exception):
    """The Sentinels name another primary than the one that was asked."""


class Link:
    """Sends commands to Redis and returns its answers. Raises Unavailable while Redis is away or answers too late.

    generation: grows with each outage, and with each change to another server process or dataset. A connection that the
    same server closed, as it does with an idle one after its `timeout`, is made again without a word.
    """

    def __init__(
        self,
        url: str,
        patience: float = 2.0,
        width: int = 32,
        *,
        password: str | None = None,
        tls_dir: str | None = None,
    ) -> None:
        """Connects at the first command. Raises FailedPrecondition for a URL that is none.

        patience: seconds that one exchange may take, and seconds that it may wait for its turn. width: exchanges at the
        same time, blocking reads and renewals not counted. password: of Redis, where the URL has none, and of its
        Sentinels. tls_dir: for rediss://; each new connection reads its files.
        """
        try:
            signing_in = options(url, password, tls_dir)
            self._primary = Primary(url, patience, signing_in)
            connections = cast(Any, ConnectionPool).from_url(
                self._primary.url,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=None,
                redis_connect_func=self._on_connect,
                **signing_in,
            )
        except ValueError as error:
            raise FailedPrecondition(f"redis_url: {error}") from None
        self._new_connection: Callable[[], Connection] = connections.make_connection
        self._patience = patience
        self._turns = asyncio.Semaphore(width)
        self._idle: list[_Line] = []
        self._losses = 0  # of connections: those that were made before the last one are not used again
        self._closed = False
        self._server: list[bytes | None] | None = None  # the server process, and the history of its dataset
        self._version = b""  # that the server named last
        self._away = False  # Redis was away, and no connection was made since
        self._looking = asyncio.Lock()  # one exchange looks for the server, and the others wait
        self._finds = 0  # how often one has found it
        self._found: Address | None = None  # where
        self._asked = dict[asyncio.Timeout, Address | None]()  # the server of each exchange that is under way
        self._lookout: asyncio.Task[None] | None = None
        self._look_until = 0.0  # on the loop's clock: an exchange is late
        self._unreached: ConnectionError | None = None  # why the last look found none
        self.generation = 0

    async def close(self) -> None:
        """Closes all connections; those in use close at the end of their exchange."""
        self._closed = True
        if self._lookout is not None:
            self._lookout.cancel()
        while self._idle:
            await self._idle.pop().close()
        await self._primary.close()

    async def run(self, script: Script, *args: Argument, renewal: bool = False, replicas: int = 0) -> Any:
        """Runs a script. args: the number of keys, the keys, the arguments. Sends the text only when Redis lacks it.
        Raises FailedPrecondition where Redis is too old for it.

        renewal: waits for no turn. replicas: so many have what the script wrote on disk when this returns.
        """
        if renewal:
            return await self._run(script, args, replicas)
        await self._take_turn()
        try:
            return await self._run(script, args, replicas)
        finally:
            self._turns.release()

    async def _run(self, script: Script, args: tuple[Argument, ...], replicas: int) -> Any:
        try:
            return await self._exchange_twice(("EVALSHA", script.sha, *args), self._patience, replicas)
        except NoScriptError:
            self.check_version()
            return await self._exchange_twice(("EVAL", script.text, *args), self._patience, replicas)

    def check_version(self) -> None:
        """Raises FailedPrecondition when the server that was reached last is too old for our scripts."""
        if too_old(self._version.decode()):
            raise FailedPrecondition(f"redis_url: Redis {self._version.decode()} is too old; {NEEDED}")

    async def command(self, *args: Argument, replicas: int = 0) -> Any:
        """Sends one command and returns its answer. replicas: as in `run`. Raises Unavailable."""
        await self._take_turn()
        try:
            return await self._exchange_twice(args, self._patience, replicas)
        finally:
            self._turns.release()

    async def _take_turn(self) -> None:
        """One of the `width` exchanges at the same time. Raises Unavailable when none ends in time."""
        if not self._turns.locked():  # nothing is waited for, and a timer costs more than the turn
            await self._turns.acquire()
            return
        try:
            async with asyncio.timeout(self._patience):
                await self._turns.acquire()
        except TimeoutError:
            if self._unreached is not None:  # the exchanges that have their turn wait for it
                raise unavailable(self._unreached) from None
            raise Unavailable(f"the request pool is busy: there was no turn within {self._patience:g} s") from None

    async def blocking(self, *args: Argument, wait: float) -> Any:
        """Like `command`, for a command that Redis itself may answer up to `wait` seconds late."""
        return await self._exchange_twice(args, self._patience + wait)

    async def _exchange_twice(self, args: tuple[Argument, ...], limit: float, replicas: int = 0) -> Any:
        """Sends once more after a broken connection: the server closed an idle one, or started again, or moved."""
        broken, replacements = False, 0
        while True:
            try:
                return await self._exchange(args, limit, replicas)
            except Replaced:
                replacements += 1
                if replacements > REPLACEMENTS:
                    text = "the request pool is away: its Sentinels name one primary after the other"
                    raise Unavailable(text, reason=ErrorReason.POOL_AWAY) from None
                continue
            except ConnectionError as error:
                if broken:
                    await self._lose()
                    raise unavailable(error) from None
            broken = True
            await self._drop_connections()

    async def _exchange(self, args: tuple[Argument, ...], limit: float, replicas: int) -> Any:
        loop = asyncio.get_running_loop()
        due = loop.time() + limit
        bound = asyncio.timeout_at(due)
        doubt = loop.call_at(due - self._patience + DOUBT, self._doubt) if self._primary.watched else None
        try:
            async with bound:
                try:
                    if self._idle:
                        line = self._idle.pop()
                    else:
                        line = await self._line(bound)
                        if limit > self._patience:  # Redis takes its time, however long the search took
                            due = loop.time() + limit
                            bound.reschedule(due)
                    self._asked[bound] = line.address
                    return await self._answer(line, args, limit, replicas)
                finally:
                    self._asked.pop(bound, None)
        except (TimeoutError, RedisTimeoutError):
            if bound.when() != due:
                raise Replaced from None
            await self._lose()
            if self._unreached is not None:
                raise unavailable(self._unreached) from None
            raise NoAnswer(
                f"the request pool did not answer within {limit:g} s", reason=ErrorReason.POOL_AWAY
            ) from None
        except AuthenticationError as error:  # a second try would end the same way
            await self._lose()
            raise unavailable(error) from None
        except ResponseError as error:
            if isinstance(error, NOT_NOW) or str(error).startswith(NOT_NOW_TEXTS):
                raise Unavailable(f"the request pool cannot serve now: {error}", reason=ErrorReason.POOL_AWAY) from None
            raise
        except OSError as error:  # no descriptor is left, the name is unknown, and what else the system refuses
            raise ConnectionError(str(error)) from error
        finally:
            if doubt is not None:
                doubt.cancel()

    def _doubt(self) -> None:
        """An exchange is late, and may be as late as its patience."""
        self._look_until = asyncio.get_running_loop().time() + self._patience
        if not self._closed and (self._lookout is None or self._lookout.done()):
            self._lookout = asyncio.ensure_future(self._look_out())

    async def _look_out(self) -> None:
        """While an exchange is late, ends those with a server that the Sentinels have replaced."""
        loop = asyncio.get_running_loop()
        while loop.time() < self._look_until:
            named = None
            with suppress(ConnectionError):  # they have not agreed yet
                named = await self._primary.find()
            if named is not None and any(asked != named for asked in self._asked.values()):
                await self._drop_connections()
                for bound, asked in self._asked.items():
                    if asked != named and not bound.expired():
                        bound.reschedule(loop.time())
            await asyncio.sleep(LOOK_AGAIN)

    async def _answer(self, line: _Line, args: tuple[Argument, ...], limit: float, replicas: int) -> Any:
        try:
            answer = await line.ask(*args)
            if replicas:
                await self._copied(line, replicas, limit)
        except MovedError as error:
            # Not an outage: the node that was asked does not hold the pool's keys, and says which one does.
            await line.close()
            host, port = str(cast(Any, error).host), int(error.port)
            self._primary.moved((host, port))
            raise ConnectionError(f"the pool's keys are at {host}:{port}") from None
        except ReadOnlyError as error:
            # A failover: this server is a replica now. The same address, or Sentinel, leads to the new primary.
            await line.close()
            await self._lose()
            raise ConnectionError(str(error)) from None
        except ResponseError:
            await self._keep(line)
            raise
        except BaseException:
            await line.close()
            raise
        await self._keep(line)
        return answer

    async def _copied(self, line: _Line, replicas: int, limit: float) -> None:
        """Returns when what this connection wrote, and all before it, is on the disks of the server and its replicas.

        Raises Unavailable when it is not in time: the caller asks again.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + limit / 2
        while True:
            here, there = await line.ask("WAITAOF", 1, replicas, ASK_AGAIN)
            if here >= 1 and there >= replicas:
                return
            if loop.time() > end:
                raise Unavailable(
                    f"the request pool has {there} replicas that are up to date, {replicas} are asked for",
                    reason=ErrorReason.POOL_AWAY,
                )

    async def _keep(self, line: _Line) -> None:
        """Keeps a connection for the next exchange, unless others of its time were lost."""
        if self._closed or line.losses != self._losses:
            await line.close()
        else:
            self._idle.append(line)

    async def _lose(self) -> None:
        """Notes that Redis is away."""
        self._away = True
        self._primary.forget()
        await self._drop_connections()

    async def _drop_connections(self) -> None:
        """Closes the idle connections, which may be broken or lead to the wrong server. The busy ones follow."""
        self._losses += 1
        while self._idle:
            await self._idle.pop().close()

    async def _line(self, bound: asyncio.Timeout) -> _Line:
        """A new connection to the server, signed in. Raises what redis-py raises. bound: of the exchange.

        One exchange looks for it, and those that wait meanwhile connect to what it has found, all at once: a server
        that is away is not dialed by thousands, and Sentinels of which one is silent take 50 ms for a question.
        """
        finds = self._finds
        async with self._looking:
            if self._finds == finds:
                return await self._look(bound)
        # A node of a cluster may have said since where the pool is.
        self._asked[bound] = address = self._found if self._primary.watched else await self._primary.find()
        return await self._dial(address)

    async def _look(self, bound: asyncio.Timeout) -> _Line:
        """Waits until a server is there, because it will be soon, and all streams wait for it."""
        pause = LOOK_SOON
        while True:
            try:
                async with asyncio.timeout(self._patience):
                    self._asked[bound] = address = await self._primary.find()
                    line = await self._dial(address)
                self._finds, self._found, self._unreached = self._finds + 1, address, None
                return line
            except AuthenticationError:
                raise
            except ConnectionError as error:
                self._unreached = error
                await self._lose()
            except TimeoutError:  # a blocking read has longer; by now the same name may lead to another node
                await self._lose()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LOOK_AGAIN)

    async def _dial(self, address: Address | None) -> _Line:
        """A connection to a server, signed in. None: to the URL's. Raises what redis-py raises."""
        line = _Line(self._new_connection(), address, self._losses)
        if address is not None:
            line.connection.host, line.connection.port = address
        redis_alone(line.connection)
        try:
            await line.connection.connect()
        except BaseException:
            await line.close()
            raise
        return line

    async def _on_connect(self, connection: Connection) -> None:
        """Signs in on a new connection, and tells another server process or dataset from the one before.

        Raises ConnectionError for a server that reads its file, or is a replica: soon it, or another one, takes writes.
        """
        await connection.on_connect()
        lines = list[bytes]()
        for section in ("server", "replication", "persistence"):
            await connection.send_command("INFO", section, check_health=False)
            lines += cast(bytes, await connection.read_response()).splitlines()
        said = dict(line.split(b":", 1) for line in lines if b":" in line)
        self._version = said.get(b"redis_version", self._version)
        if said.get(b"loading") == b"1":
            raise ConnectionError("it reads its file")
        # A cluster's replica says where the primary is.
        if said.get(b"role") == b"slave" and said.get(b"redis_mode") != b"cluster":
            raise ConnectionError("this server is a replica")
        server = [said.get(b"run_id"), said.get(b"master_replid")]
        if self._away or self._server not in (None, server):
            self.generation += 1
        self._away, self._server = False, server


def unavailable(error: ConnectionError) -> Unavailable:
    """The error of an exchange that found no server."""
    return Unavailable(f"the request pool is away: {why(error)}", reason=ErrorReason.POOL_AWAY)


def why(error: ConnectionError) -> str:
    """Why there is no connection, in plain words where redis-py has a number and the system's own."""
    refused = NOT_CONNECTED.fullmatch(str(error))
    if refused is None:
        return str(error)
    number, address = int(refused[1]), refused[2]
    return f"no server listens at {address}" if number == errno.ECONNREFUSED else f"{address}: {os.strerror(number)}"
