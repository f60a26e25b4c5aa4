"""A gRPC client for streams of small messages: one connection, over HTTP/2 by the library h2.

A message is sent in the turn of the loop in which it was made, and handed on in the turn in which it came. grpc.aio has
threads and queues between, which take 30 to 50 us for each message on each side.

It sends no pings: whoever calls finds a silent server. `connect` waits under its caller's bound, `ask` has its own, and
who keeps a stream open counts the other side's answers (docs/decisions/control-lanes.md says who does).
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar, cast
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message
from h2.config import H2Configuration
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from hyperframe.frame import Frame, GoAwayFrame

from .address import split_address
from .grpc_message import PREFIX, framed
from .http2_data import Http2

M = TypeVar("M", bound=Message)
Metadata = Sequence[tuple[str, str]]

WINDOW = 1 << 30  # bytes that the server may send ahead: all that comes is read
MAX_UNSENT = 64 << 20  # bytes of a call that wait for room, beyond one message
MAX_RECEIVED = 64 << 20  # bytes of a message that comes: as many as a rank takes
LEAVING = "the server is leaving"
CODES = {str(code.value[0]): code for code in grpc.StatusCode}  # type: ignore[index]
RESETS: Mapping[int | None, grpc.StatusCode] = {  # what a stream's reset means to a call (gRPC over HTTP/2, "Errors")
    ErrorCodes.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    ErrorCodes.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCodes.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCodes.INADEQUATE_SECURITY: grpc.StatusCode.PERMISSION_DENIED,
}
ANSWERS = {  # what HTTP's own status means to a call
    "400": grpc.StatusCode.INTERNAL,
    "401": grpc.StatusCode.UNAUTHENTICATED,
    "403": grpc.StatusCode.PERMISSION_DENIED,
    "404": grpc.StatusCode.UNIMPLEMENTED,
    **dict.fromkeys(("429", "502", "503", "504"), grpc.StatusCode.UNAVAILABLE),
}


class Status(NamedTuple):
    """How a call has ended."""

    code: grpc.StatusCode
    details: str

    def __str__(self) -> str:
        return f"{self.code.name}: {self.details}"


CANCELLED = Status(grpc.StatusCode.CANCELLED, "by this side")


class CallFailed(Exception):
    """A call has not ended with OK."""

    def __init__(self, status: Status) -> None:
        super().__init__(str(status))
        self.status = status


class Tls(NamedTuple):
    """The client's context, and the name that the server's certificate must have."""

    context: ssl.SSLContext
    name: str


class Opened(Http2):
    """h2 takes a connection for closed when the other side says GOAWAY. By RFC 9113, 6.8, the calls that are open are
    still answered."""

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        leaving = ConnectionTerminated()
        leaving.last_stream_id = frame.last_stream_id
        return [], [leaving]


class ClientCall:
    """One call. `heard` takes each message in the turn of the loop in which it comes. `taken` ends when the server has
    begun to answer; `over` ends with the status, or with what `heard` has raised."""

    def __init__(self, connection: "GrpcConnection", number: int, heard: Callable[[bytes], None]) -> None:
        """number: of its stream."""
        self._connection, self._number, self._heard = connection, number, heard
        self._came, self._unsent = bytearray(), bytearray()
        self._closing = False  # nothing follows what is unsent
        self.closed = False  # all was sent, and the server knows that nothing follows
        loop = asyncio.get_running_loop()
        self.taken: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[Status] = loop.create_future()
        self.over.add_done_callback(lambda over: self.begun())

    @property
    def waits(self) -> bool:
        """Whether a part of what was sent waits for room."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Sends a message without waiting: what there is no room for follows as there is. Nothing when it is over.

        A server that has not taken MAX_UNSENT bytes of earlier messages loses the call.
        """
        if len(self._unsent) > MAX_UNSENT:
            self.cancel(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{len(self._unsent)} bytes wait for room"))
        if not self.over.done():
            self._unsent += framed(message)
            self.opened()

    def close(self) -> None:
        """Nothing more will be sent."""
        self._closing = True
        self.opened()

    def cancel(self, why: Status = CANCELLED) -> None:
        """Gives the call up, unless it is over."""
        if not self.over.done():
            self.over.set_result(why)
            self._connection.reset(self._number)

    # -- for the connection
    def opened(self) -> None:
        """There may be room for more to send."""
        if not self.over.done() and not self.closed:
            self.closed = self._connection.send(self._number, self._unsent, last=self._closing)
            self._connection.flush()

    def begun(self) -> None:
        if not self.taken.done():
            self.taken.set_result(None)

    def received(self, data: bytes) -> None:
        came = self._came
        came += data
        while not self.over.done() and len(came) >= PREFIX:
            size = int.from_bytes(came[1:PREFIX])
            if size > MAX_RECEIVED:
                problem = f"a message has {size} bytes; at most {MAX_RECEIVED}"
                self.cancel(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, problem))
                return
            end = PREFIX + size
            if len(came) < end:
                return
            compressed, message = came[0], bytes(came[PREFIX:end])
            del came[:end]
            if compressed:
                self.cancel(Status(grpc.StatusCode.INTERNAL, "a message is compressed, which was not offered"))
                return
            try:
                self._heard(message)
            except Exception as error:
                self._connection.reset(self._number)
                if not self.over.done():
                    self.over.set_exception(error)

    def end(self, status: Status) -> None:
        if not self.over.done():
            self.over.set_result(status)


async def connect(address: str, tls: Tls | None) -> "GrpcConnection":
    """A connection to a server that speaks HTTP/2: its settings have come. Raises OSError (ssl.SSLError is one)."""
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    secure = {} if tls is None else {"ssl": tls.context, "server_hostname": tls.name}
    _, connection = await loop.create_connection(GrpcConnection, host, port, **secure)
    try:
        await connection.greeted
    except BaseException:
        connection.close()
        raise
    return connection


class GrpcConnection(asyncio.Protocol):
    """The client's side of a connection."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._h2 = Opened(H2Configuration(client_side=True, header_encoding="latin-1"))
        self._calls: dict[int, ClientCall] = {}
        self._flushing = self._paused = False
        self._lost = ""  # why no call can be made any more
        self.greeted: asyncio.Future[None] = self._loop.create_future()

    # -- calls
    def call(self, path: str, heard: Callable[[bytes], None], metadata: Metadata = ()) -> ClientCall:
        """Begins a call. One that cannot be made is over at once."""
        lost = self._lost
        if not lost and self._h2.open_outbound_streams >= self._h2.remote_settings.max_concurrent_streams:
            lost = "the server takes no more calls on this connection"
        if lost:
            call = ClientCall(self, 0, heard)
            call.end(Status(grpc.StatusCode.UNAVAILABLE, lost))
            return call
        number = self._h2.get_next_available_stream_id()
        call = self._calls[number] = ClientCall(self, number, heard)
        headers = [
            (":method", "POST"),
            (":scheme", self._scheme),
            (":path", path),
            (":authority", "orca"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *metadata,
        ]
        self._h2.send_headers(number, headers)
        self._h2.increment_flow_control_window(WINDOW, number)
        self._flush_soon()
        return call

    async def ask(self, path: str, request: Message, answer: type[M], timeout: float) -> M:
        """A call with one message each way. Raises CallFailed; DEADLINE_EXCEEDED after `timeout` seconds."""
        came: list[bytes] = []
        call = self.call(path, came.append, [("grpc-timeout", f"{round(timeout * 1000)}m")])
        call.send(request.SerializeToString())
        call.close()
        try:
            async with asyncio.timeout(timeout):
                status = await call.over
        except TimeoutError:
            status = Status(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout:g} s")
        finally:
            call.cancel()
        if status.code is grpc.StatusCode.OK:
            try:
                [one] = came
                return answer.FromString(one)
            except (ValueError, DecodeError):
                status = Status(grpc.StatusCode.INTERNAL, f"the answer is no {answer.DESCRIPTOR.name}")
        raise CallFailed(status)

    @property
    def max_calls(self) -> int:
        """Calls that the server takes at a time."""
        return self._h2.remote_settings.max_concurrent_streams

    @property
    def lost(self) -> bool:
        """Whether no call can be begun any more: the server is leaving, or the connection has ended."""
        return bool(self._lost)

    @property
    def closed(self) -> bool:
        """Whether the connection has ended, or is about to."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Ends the connection at once, and the calls that it has."""
        self.flush()
        self._transport.abort()

    # -- the transport
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type
        self._scheme = "https" if transport.get_extra_info("ssl_object") else "http"
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = self._lost or (f"the connection was lost ({exc})" if exc else "the connection has ended")
        if not self.greeted.done():
            self.greeted.set_exception(exc if isinstance(exc, OSError) else ConnectionAbortedError(self._lost))
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(Status(grpc.StatusCode.UNAVAILABLE, self._lost))

    def data_received(self, data: bytes) -> None:
        try:
            for event in self._h2.receive_data(data):
                self._hear(event)
        except ProtocolError as error:
            self._lost = f"the server does not keep to HTTP/2: {error}"
            self.close()
            return
        if self._h2.unsent:  # else the loop would turn for nothing
            self._flush_soon()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._opened()

    # -- what comes in
    def _hear(self, event: Event) -> None:
        match event:
            case DataReceived():
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                if call := self._calls.get(event.stream_id):
                    call.received(event.data)
            case ResponseReceived() | TrailersReceived():
                self._told(event)
            case StreamEnded():
                if call := self._calls.get(event.stream_id):
                    call.end(Status(grpc.StatusCode.INTERNAL, "the server has told no status"))
                    self.reset(event.stream_id)
            case StreamReset():
                if call := self._calls.pop(event.stream_id, None):
                    code = RESETS.get(event.error_code, grpc.StatusCode.INTERNAL)
                    call.end(Status(code, "the server has reset the call"))
            case WindowUpdated(stream_id=number) if number:
                if call := self._calls.get(number):
                    call.opened()
            case WindowUpdated():
                self._opened()
            case RemoteSettingsChanged():
                if not self.greeted.done():
                    self.greeted.set_result(None)
                self._opened()
            case ConnectionTerminated():
                self._lost = self._lost or LEAVING
                for number in [number for number in self._calls if number > (event.last_stream_id or 0)]:
                    self._calls.pop(number).end(Status(grpc.StatusCode.UNAVAILABLE, LEAVING))  # nobody answers it
            case _:
                pass

    def _told(self, event: ResponseReceived | TrailersReceived) -> None:
        """Headers: a status is among those that end the stream."""
        call = self._calls.get(event.stream_id or 0)
        if call is None:
            return
        said = {str(name): str(value) for name, value in event.headers or ()}
        if (http := said.get(":status", "200")) != "200":
            call.end(Status(ANSWERS.get(http, grpc.StatusCode.UNKNOWN), f"HTTP status {http}"))
        elif (number := said.get("grpc-status")) is not None:
            code = CODES.get(number, grpc.StatusCode.UNKNOWN)
            call.end(Status(code, unquote(said.get("grpc-message", ""))))
        else:
            call.begun()

    def _opened(self) -> None:
        for call in list(self._calls.values()):
            call.opened()

    # -- what goes out, for the calls
    def send(self, number: int, data: bytearray, *, last: bool) -> bool:
        """Sends what there is room for, and takes it from `data`. last: nothing follows it.

        Returns whether the call is closed on this side.
        """
        while not self._paused and (data or last) and self._stands(number):
            room = self._h2.room(number)
            if data and room <= 0:
                return False
            piece = bytes(data[:room])
            del data[:room]
            self._h2.send_data(number, piece, end_stream=last and not data)
            if not data:
                return last
        return False

    def reset(self, number: int) -> None:
        """Forgets a stream, and takes it back if the server would still hear or say something on it."""
        if self._calls.pop(number, None) is not None and self._stands(number):
            self._h2.reset_stream(number, ErrorCodes.CANCEL)
            self._flush_soon()

    def _stands(self, number: int) -> bool:
        """Whether h2 lets something be sent on a stream. It does not when bytes that are being heard end it later."""
        stream = self._h2.streams.get(number)
        return stream is not None and not stream.closed

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hands the transport what is to be sent."""
        self._flushing = False
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)
