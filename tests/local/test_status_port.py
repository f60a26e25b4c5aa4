"""Asking a process how it is: whatever it answers, or does not, is told and breaks nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from listening import listening

from orca_local import status_port


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """The address of a server that answers with these bytes and closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with listening(serve) as port:
        yield f"127.0.0.1:{port}"


@pytest.mark.parametrize("status", [200, 503])
async def test_a_whole_answer(status: int) -> None:
    async with answering(b'HTTP/1.0 %d X\r\ncontent-length: 16\r\n\r\n{"reason": null}' % status) as address:
        assert await asyncio.to_thread(status_port.ask, address) == {"reason": None}


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0\r\n",
        b"HTTP/1.0 200 OK\r\ncontent-length: 100\r\n\r\n{",  # the process died meanwhile
        b"HTTP/1.0 503 X\r\ncontent-length: 100\r\n\r\n{",
        b"HTTP/1.0 200 OK\r\n\r\n<html>",
    ],
)
async def test_no_answer(answer: bytes) -> None:
    """Half an answer ended the start of `orca serve`, and `orca status`, with a traceback."""
    async with answering(answer) as address:
        with pytest.raises(OSError, match=r"."):
            await asyncio.to_thread(status_port.ask, address)
