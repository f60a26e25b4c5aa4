"""A proxy in front of Redis that understands where a command and an answer end.

The processes of Orca send one command on a connection and wait for its answer. A command that comes twice is therefore
sent twice, and its first answer dropped: what a client sees that has sent it again. A lost command, or a lost answer,
takes the connection with it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

import hiredis

from orca_common.address import split_address

from .links import Broken, Direction, Link

T = TypeVar("T")
CHUNK = 1 << 16  # bytes of one read


class RedisProxy:
    """Listens on a free port of 127.0.0.1 and passes commands to a server, as its link lets it."""

    def __init__(self, link: Link, upstream: str) -> None:
        """upstream: "host:port" of the server, or "unix://" and the path of its socket."""
        self._link, self._upstream = link, upstream
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Returns the address at which it listens."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._link.sever()
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up: asyncio.StreamWriter | None = None
        with contextlib.suppress(OSError, Broken):
            try:
                if self._link.broken:
                    raise Broken
                answers, up = await self._connect()
                await _first(self._exchanges(reader, writer, answers, up), self._link.breaks())
            finally:
                for end in (writer, up):
                    if end is not None:
                        end.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        path = self._upstream.removeprefix("unix://")
        if path != self._upstream:
            return await asyncio.open_unix_connection(path)
        return await asyncio.open_connection(*split_address(self._upstream))

    async def _exchanges(
        self,
        commands: asyncio.StreamReader,
        replies: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
        server: asyncio.StreamWriter,
    ) -> None:
        """Passes commands and their answers on, until one side closes its connection."""
        while True:
            sent, count = await _messages(commands, 1)
            gone = asyncio.ensure_future(_closed(commands))
            try:
                copies = await _unless(gone, self._link.carry(Direction.TO))
                for copy in range(copies):
                    server.write(sent)
                    answer, _ = await _unless(gone, _messages(answers, count))
                    if copy + 1 < copies:
                        continue
                    await _unless(gone, self._link.carry(Direction.FROM, may_double=False))
                    replies.write(answer)
                    await replies.drain()
            finally:
                gone.cancel()


async def _messages(reader: asyncio.StreamReader, count: int) -> tuple[bytes, int]:
    """At least `count` whole messages of the Redis protocol, and how many these are. Raises Broken at the end."""
    parser, raw, complete = hiredis.Reader(), b"", 0
    while complete < count or parser.has_data():
        chunk = await reader.read(CHUNK)
        if not chunk:
            raise Broken
        raw += chunk
        parser.feed(chunk)
        while parser.gets() is not False:
            complete += 1
    return raw, complete


async def _closed(reader: asyncio.StreamReader) -> None:
    """Returns when the process has closed its connection while it waited for an answer: it says nothing meanwhile."""
    while not reader.at_eof():
        await asyncio.sleep(0.05)


async def _unless(gone: asyncio.Future[None], work: Awaitable[T]) -> T:
    """The result of the work. Raises Broken when `gone` is done first."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Broken
        return task.result()
    finally:
        task.cancel()


async def _first(*works: Awaitable[None]) -> None:
    """Runs until the first of them ends, and ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, (OSError, Broken)):
            raise result
