"""Connections to one Redis: every exchange is bounded in time, and a lost connection is noticed.

A client library's own retries and reconnects are out of sight; here each is seen, because an endpoint must know that
Redis may have forgotten something (DESIGN section 4, "Delivering"). One exchange checks out one connection, so a
blocking read holds its own, and a cancelled one closes it: nobody can read an answer that was meant for another.
"""

import asyncio
from typing import Any

from hiredis import pack_command
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

from orca_common.errors import Unavailable

from .scripts import Script

# Error replies that say "not now": the server fails over or cannot write. Some have only a text.
NOT_NOW = (ClusterDownError, OutOfMemoryError, ReadOnlyError, TryAgainError)
NOT_NOW_TEXTS = ("BUSY", "MISCONF", "NOREPLICAS", "UNBLOCKED")

Argument = str | bytes | int


class Link:
    """`patience`: seconds that one exchange may take. `width`: exchanges under way at a time, blocking reads apart."""

    def __init__(self, url: str, patience: float = 2.0, width: int = 32) -> None:
        self._factory = ConnectionPool.from_url(
            url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=None, redis_connect_func=self._on_connect
        )
        self._patience = patience
        self._turns = asyncio.Semaphore(width)
        self._idle: list[Any] = []
        self._closed = False
        self._run_id: bytes | None = None
        self._lost = False
        self.generation = 0  # grows when a connection was lost and made again, or another server process is met

    async def close(self) -> None:
        self._closed = True
        while self._idle:
            await self._idle.pop().disconnect()

    async def run(self, script: Script, *args: Argument) -> Any:
        """Runs a script; args: the number of keys, keys, arguments. Redis is given the text when it lacks it."""
        try:
            return await self.command("EVALSHA", script.sha, *args)
        except NoScriptError:
            return await self.command("EVAL", script.text, *args)

    async def command(self, *args: Argument) -> Any:
        """One command and its answer. Raises Unavailable."""
        async with self._turns:
            return await self._persist(args, self._patience)

    async def blocking(self, *args: Argument, wait: float) -> Any:
        """A command that Redis itself may hold back for `wait` seconds."""
        return await self._persist(args, self._patience + wait)

    async def _persist(self, args: tuple[Argument, ...], limit: float) -> Any:
        """Sends once more on a fresh connection: the kept ones may be from before a restart of Redis."""
        try:
            return await self._exchange(args, limit)
        except ConnectionError:
            await self._lose()
        try:
            return await self._exchange(args, limit)
        except ConnectionError as error:
            await self._lose()
            raise Unavailable(f"the request pool is away: {error}") from None

    async def _exchange(self, args: tuple[Argument, ...], limit: float) -> Any:
        connection = self._idle.pop() if self._idle else self._factory.make_connection()
        try:
            async with asyncio.timeout(limit):
                if not connection.is_connected:
                    await connection.connect()
                # hiredis packs a commit of 32 rows in 40 us, the asyncio client's own Python in 90.
                packed = pack_command(args)  # pyright: ignore[reportArgumentType] (its stub says: a tuple of one)
                await connection.send_packed_command(packed, check_health=False)
                answer = await connection.read_response()
        except ResponseError as error:
            await self._keep(connection)
            if isinstance(error, NOT_NOW) or str(error).startswith(NOT_NOW_TEXTS):
                raise Unavailable(f"the request pool cannot serve now: {error}") from None
            raise
        except (TimeoutError, RedisTimeoutError):
            await connection.disconnect(nowait=True)
            await self._lose()
            raise Unavailable(f"the request pool did not answer within {limit:g} s") from None
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        await self._keep(connection)
        return answer

    async def _keep(self, connection: Any) -> None:
        if self._closed:
            await connection.disconnect()
        else:
            self._idle.append(connection)

    async def _lose(self) -> None:
        """A connection broke: the kept ones are not trusted either."""
        self._lost = True
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)

    async def _on_connect(self, connection: Any) -> None:
        await connection.on_connect()
        await connection.send_command("INFO", "server", check_health=False)
        info: bytes = await connection.read_response()
        run_id = next(line for line in info.splitlines() if line.startswith(b"run_id:"))
        if self._lost or self._run_id not in (None, run_id):
            self.generation += 1
        self._lost, self._run_id = False, run_id
