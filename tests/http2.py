"""A raw HTTP/2 client for tests: it writes the frames that it is told to, whatever a decent client would do."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW, MAX_STREAMS = 4, 3  # numbers of settings
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass(frozen=True)
class Frame:
    """One frame that the server sent."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame in its binary form."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def setting(name: int, value: int) -> bytes:
    """One setting of a SETTINGS frame."""
    return struct.pack(">HI", name, value)


def header(name: str, value: str | bytes) -> bytes:
    """A header field in HPACK: a literal without indexing, without Huffman."""
    return b"\0" + _string(name.encode()) + _string(value if isinstance(value, bytes) else value.encode())


def _string(raw: bytes) -> bytes:
    if len(raw) < 127:
        return bytes([len(raw)]) + raw
    rest, out = len(raw) - 127, bytearray([127])
    while rest >= 128:
        out.append(rest % 128 + 128)
        rest //= 128
    out.append(rest)
    return bytes(out) + raw


def call(path: str, *more: bytes, method: str = "POST", kind: str = "application/grpc") -> bytes:
    """The header block of a gRPC call. kind: the content type."""
    fields = {":method": method, ":scheme": "http", ":path": path, ":authority": "test"}
    fields |= {"content-type": kind, "te": "trailers"}
    return b"".join(header(name, value) for name, value in fields.items()) + b"".join(more)


def message(raw: bytes) -> bytes:
    """A gRPC message: not compressed, its length, its bytes."""
    return b"\0" + struct.pack(">I", len(raw)) + raw


class Http2:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    @asynccontextmanager
    async def connected(cls, address: str, *settings: bytes) -> AsyncIterator[Self]:
        """A connection that has said hello with these settings."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(PREFACE + frame(SETTINGS, 0, 0, b"".join(settings)))
            yield cls(reader, writer)
        finally:
            writer.close()

    def write(self, *frames: bytes) -> None:
        """Sends frames."""
        self._writer.write(b"".join(frames))

    async def drain(self) -> None:
        """Waits until the server has taken most of what was written."""
        await self._writer.drain()

    async def frames(self, acknowledge: bool = True) -> AsyncIterator[Frame]:
        """What the server sends, until it closes the connection. acknowledge: settings and pings."""
        while True:
            try:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3]))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            kind, flags, stream = struct.unpack(">BBI", head[3:])
            if acknowledge and kind in (SETTINGS, PING) and not flags & ACK:
                self.write(frame(kind, ACK, 0, payload if kind == PING else b""))
            yield Frame(kind, flags, stream, payload)
