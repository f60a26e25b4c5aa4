"""A gRPC client for the bench: streams of Generate over one connection, by the library h2.

A client takes its time from the cores that it measures. For a token grpc.aio's takes 30 us, this one 8 us.
"""

import asyncio
from collections.abc import Callable
from typing import cast
from urllib.parse import unquote

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.exceptions import ProtocolError

from orca_common.address import split_address

HEADERS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/orca.v1.Orca/Generate"),
    (":authority", "orca"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)
PREFIX = 5  # bytes before a message
WINDOW = 1 << 30  # bytes: the bench reads all that comes


class CallStream:
    """One call. `heard` is told of what comes, which need not be whole messages."""

    def __init__(self, heard: Callable[[bytes], None]) -> None:
        self.heard = heard
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it failed; "": it did not

    def end(self, error: str) -> None:
        if not self.over.done():
            self.over.set_result(error)


async def connect(address: str) -> "Connection":
    """A connection to a server in plaintext. Raises OSError."""
    host, port = split_address(address)
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    return connection


class Connection(asyncio.Protocol):
    """The client's side of HTTP/2."""

    def __init__(self) -> None:
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, CallStream] = {}
        self._flushing = False
        self._room = asyncio.Event()
        self._lost = "the connection has ended"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.set()
        for stream in self._streams.values():
            stream.end(self._lost)
        self._streams.clear()

    def close(self) -> None:
        self._transport.close()

    async def call(self, request: bytes, heard: Callable[[bytes], None]) -> CallStream:
        """Begins a call, as soon as the server lets this connection have another one."""
        stream = CallStream(heard)
        while not self._transport.is_closing():
            if self._h2.open_outbound_streams < self._h2.remote_settings.max_concurrent_streams:
                break
            self._room.clear()
            await self._room.wait()
        else:
            stream.end(self._lost)
            return stream
        number = self._h2.get_next_available_stream_id()
        self._streams[number] = stream
        self._h2.send_headers(number, HEADERS)
        self._h2.increment_flow_control_window(WINDOW, number)
        data = b"\0" + len(request).to_bytes(4) + request
        while data:
            room = min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size)
            if not room:
                self._room.clear()
                await self._room.wait()
                if number not in self._streams:
                    break
                continue
            piece, data = data[:room], data[room:]
            self._h2.send_data(number, piece, end_stream=not data)
        self._flush_soon()
        return stream

    def cancel(self, stream: CallStream) -> None:
        """The server need not go on with this call."""
        for number, known in list(self._streams.items()):
            if known is stream:
                del self._streams[number]
                self._h2.reset_stream(number, ErrorCodes.CANCEL)
                self._flush_soon()

    def data_received(self, data: bytes) -> None:
        try:
            for event in self._h2.receive_data(data):
                self._hear(event)
        except ProtocolError as error:
            self._lost = f"the server does not keep to HTTP/2: {error}"
            self._transport.abort()
            return
        self._flush_soon()

    def _hear(self, event: Event) -> None:
        match event:
            case DataReceived():
                if stream := self._streams.get(event.stream_id):
                    stream.heard(event.data)
            case ResponseReceived() | TrailersReceived():
                said = dict(event.headers or ())
                if said.get(b"grpc-status", b"0") != b"0" and (stream := self._streams.get(event.stream_id)):
                    why = unquote(said.get(b"grpc-message", b"").decode())
                    stream.end(f"{grpc_name(said[b'grpc-status'].decode())}: {why}")
            case StreamEnded() | StreamReset():
                if stream := self._streams.pop(event.stream_id, None):
                    stream.end("" if isinstance(event, StreamEnded) else "the server has reset the stream")
                self._room.set()
            case _:  # a window, a setting
                self._room.set()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)


def grpc_name(number: str) -> str:
    """The name of a status."""
    return next((code.name for code in grpc.StatusCode if str(code.value[0]) == number), number)  # type: ignore[index]


def split_messages(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole messages at the begin of what came, and the rest."""
    found: list[bytes] = []
    while len(data) >= PREFIX and len(data) >= (end := PREFIX + int.from_bytes(data[1:PREFIX])):
        found.append(data[PREFIX:end])
        data = data[end:]
    return found, data
