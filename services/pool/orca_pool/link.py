"""Connections to one Redis. Every exchange is bounded in time, and every lost connection is noticed.

A client library retries and reconnects without saying so. An endpoint must know when that happened, because Redis may
have forgotten something (docs/design.md, "The request pool"); so this module does both itself. Each exchange has a
connection of its own. A blocking read keeps one for as long as it waits; a cancelled exchange closes its own, so that
nobody can read an answer that was meant for another.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast

import hiredis
from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterDownError,
    ConnectionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from orca_common.errors import ErrorReason, Unavailable

from .scripts import Script

# Error replies of a server that fails over or cannot write now. Some are known by their text alone.
NOT_NOW = (ClusterDownError, OutOfMemoryError, ReadOnlyError, TryAgainError)
NOT_NOW_TEXTS = ("BUSY", "MISCONF", "NOREPLICAS", "UNBLOCKED")

Argument = str | bytes | int

# hiredis packs a commit of 32 rows in 40 us; the Python of the asyncio client takes 90. (Its stub takes tuples of one.)
pack_command: Callable[[tuple[Argument, ...]], bytes] = cast(Any, hiredis).pack_command


class Connection(Protocol):
    """What the link uses of redis.asyncio's connections, which are typed only in part."""

    @property
    def is_connected(self) -> bool: ...
    async def connect(self) -> None: ...
    async def disconnect(self, nowait: bool = False) -> None: ...
    async def on_connect(self) -> None: ...
    async def send_command(self, *args: Argument, check_health: bool) -> None: ...
    async def send_packed_command(self, command: bytes, check_health: bool = True) -> None: ...
    async def read_response(self) -> Any: ...


class Link:
    """Sends commands to Redis and returns its answers. Raises Unavailable while Redis is away or answers too late.

    generation: grows with each connection that was lost and made again, and with each new server process.
    """

    def __init__(self, url: str, patience: float = 2.0, width: int = 32) -> None:
        """Connects at the first command.

        patience: seconds that one exchange may take. width: exchanges at the same time, blocking reads not counted.
        """
        connections = cast(Any, ConnectionPool).from_url(
            url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=None, redis_connect_func=self._on_connect
        )
        self._new_connection: Callable[[], Connection] = connections.make_connection
        self._patience = patience
        self._turns = asyncio.Semaphore(width)
        self._idle: list[Connection] = []
        self._closed = False
        self._run_id: bytes | None = None  # of the server process
        self._lost = False  # a connection broke, and no new one was made since
        self.generation = 0

    async def close(self) -> None:
        """Closes all connections; those in use close at the end of their exchange."""
        self._closed = True
        while self._idle:
            await self._idle.pop().disconnect()

    async def run(self, script: Script, *args: Argument) -> Any:
        """Runs a script. args: the number of keys, the keys, the arguments. Sends the text only when Redis lacks it."""
        try:
            return await self.command("EVALSHA", script.sha, *args)
        except NoScriptError:
            return await self.command("EVAL", script.text, *args)

    async def command(self, *args: Argument) -> Any:
        """Sends one command and returns its answer. Raises Unavailable."""
        async with self._turns:
            return await self._exchange_twice(args, self._patience)

    async def blocking(self, *args: Argument, wait: float) -> Any:
        """Like `command`, for a command that Redis itself may answer up to `wait` seconds late."""
        return await self._exchange_twice(args, self._patience + wait)

    async def _exchange_twice(self, args: tuple[Argument, ...], limit: float) -> Any:
        """Sends once more after a broken connection: an idle one may be older than the last restart of Redis."""
        try:
            return await self._exchange(args, limit)
        except ConnectionError:
            await self._lose()
        try:
            return await self._exchange(args, limit)
        except ConnectionError as error:
            await self._lose()
            raise Unavailable(f"the request pool is away: {error}", reason=ErrorReason.POOL_AWAY) from None

    async def _exchange(self, args: tuple[Argument, ...], limit: float) -> Any:
        connection = self._idle.pop() if self._idle else self._new_connection()
        try:
            async with asyncio.timeout(limit):
                if not connection.is_connected:
                    await connection.connect()
                await connection.send_packed_command(pack_command(args), check_health=False)
                answer = await connection.read_response()
        except ResponseError as error:
            await self._keep(connection)
            if isinstance(error, NOT_NOW) or str(error).startswith(NOT_NOW_TEXTS):
                raise Unavailable(f"the request pool cannot serve now: {error}", reason=ErrorReason.POOL_AWAY) from None
            raise
        except (TimeoutError, RedisTimeoutError):
            await connection.disconnect(nowait=True)
            await self._lose()
            raise Unavailable(
                f"the request pool did not answer within {limit:g} s", reason=ErrorReason.POOL_AWAY
            ) from None
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        await self._keep(connection)
        return answer

    async def _keep(self, connection: Connection) -> None:
        """Keeps a connection for the next exchange."""
        if self._closed:
            await connection.disconnect()
        else:
            self._idle.append(connection)

    async def _lose(self) -> None:
        """Notes that a connection broke, and drops the idle ones, which may be broken too."""
        self._lost = True
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)

    async def _on_connect(self, connection: Connection) -> None:
        """Signs in on a new connection, and tells a new server process from the one before by its run id."""
        await connection.on_connect()
        await connection.send_command("INFO", "server", check_health=False)
        info: bytes = await connection.read_response()
        run_id = next(line for line in info.splitlines() if line.startswith(b"run_id:"))
        if self._lost or self._run_id not in (None, run_id):
            self.generation += 1
        self._lost, self._run_id = False, run_id
