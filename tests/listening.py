"""Servers and proxies of tests, which end with all their connections."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
TURNS = 4  # of the loop, until a connection that was just accepted is served


@asynccontextmanager
async def listening(serve: Serve, context: ssl.SSLContext | None = None) -> AsyncGenerator[int]:
    """A server at a port of 127.0.0.1, which it yields. At its end each `serve` is cancelled, its connection aborted.

    One that stays open, as of a client that dials once more, becomes a warning of the test that runs when it is
    collected. A TLS handshake that is under way then is not known here.
    """
    serving: dict[asyncio.Future[None], asyncio.StreamWriter] = {}

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(serve(reader, writer))
        serving[task] = writer
        await asyncio.wait([task])

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        for listener in server.sockets:
            asyncio.get_running_loop().remove_reader(listener.fileno())
        for _ in range(TURNS):
            await asyncio.sleep(0)
        server.close()
        for task, writer in serving.items():
            task.cancel()
            if not writer.is_closing():
                writer.transport.abort()
        ends = await asyncio.gather(*serving, return_exceptions=True)
    # A reader may find that the other side has left.
    for end in ends:
        if isinstance(end, Exception) and not isinstance(end, OSError | EOFError):
            raise end


@asynccontextmanager
async def forwarding(
    port: Callable[[], int], context: ssl.SSLContext | None = None, changed: Callable[[bytes], bytes] = bytes
) -> AsyncGenerator[int]:
    """A proxy at a port of 127.0.0.1, which it yields. port: where a new connection leads. changed: makes what comes on
    either way into what goes on."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while data := await reader.read(1 << 16):
                    writer.write(changed(data))
                    await writer.drain()
        finally:
            if not writer.is_closing():
                writer.transport.abort()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port())
        await asyncio.gather(copy(reader, back), copy(there, writer))

    async with listening(serve, context) as front:
        yield front
