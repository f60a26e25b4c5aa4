"""One HTTP/2 connection of gRPC, of either side. The library h2 keeps the protocol's states, windows and headers."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Protocol, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import ProtocolError, StreamClosedError
from h2.settings import SettingCodes, Settings

Headers = Iterable[tuple[str, str]]

WINDOW = 1 << 30  # bytes that the peer may send ahead: all that comes is read
MAX_CALLS = 100  # of one connection at a time
SILENT_SECONDS, PROBE_SECONDS, PROBES = 30, 5, 2  # TCP asks a silent peer, and gives up one whose host is gone
LEAVING = "the server is leaving"


class Stream(Protocol):
    """A connection's events for one of its calls."""

    def headers(self, fields: dict[str, str]) -> None:
        """The other side's header, or its trailers."""

    def data(self, data: bytes) -> None:
        """Bytes of messages."""

    def ended(self) -> None:
        """The other side has sent all."""

    def room(self) -> None:
        """There may be room for more to send."""

    def lost(self, why: str, code: int | None = None) -> None:
        """The stream is no more: it was reset with this code, or its connection has ended."""


class Connection(asyncio.Protocol):
    """The connection. A server's gives each call that a client begins to `begin`, which returns its stream."""

    def __init__(
        self,
        begin: "Callable[[Connection, int, dict[str, str]], Stream] | None" = None,
        others: "set[Connection] | None" = None,
    ) -> None:
        """begin: None for the client's side. others: a server's connections, which this one joins."""
        self._begin, client = begin, begin is None
        self._others = set[Connection]() if others is None else others
        self._loop = asyncio.get_running_loop()
        self._h2 = H2Connection(H2Configuration(client_side=client, header_encoding="latin-1"))
        self._h2.local_settings = Settings(
            client=client,
            initial_values={
                SettingCodes.INITIAL_WINDOW_SIZE: WINDOW,
                SettingCodes.MAX_CONCURRENT_STREAMS: MAX_CALLS,
                SettingCodes.ENABLE_PUSH: 0,
            },
        )
        self._streams: dict[int, Stream] = {}
        self._flushing = self._paused = False
        self.why_lost = ""  # why no call can be made any more
        self.greeted: asyncio.Future[None] = self._loop.create_future()  # the other side's settings have come
        self.greeted.add_done_callback(lambda greeted: greeted.exception())  # perhaps nobody waits for it

    # -- the transport
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type
        self._others.add(self)
        its_socket = transport.get_extra_info("socket")
        its_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        its_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS)
        its_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
        its_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        self.secure: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.discard(self)
        self._lose(f"the connection was lost ({exc})" if exc else "the connection has ended")
        if not self.greeted.done():
            self.greeted.set_exception(exc if isinstance(exc, OSError) else ConnectionAbortedError(self.why_lost))

    def data_received(self, data: bytes) -> None:
        try:
            for event in self._h2.receive_data(data):
                self._hear(event)
        except ProtocolError as error:
            self._lose(f"the other side does not keep to HTTP/2: {error}")
            self.close()
        else:
            self.flush()  # at once: another turn of the loop would cost more than to look

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._room()

    def close(self) -> None:
        """Ends the connection at once, and its calls."""
        self.flush()
        self._transport.abort()

    @property
    def closed(self) -> bool:
        """Whether the connection has ended, or is about to."""
        return self._transport.is_closing()

    def _lose(self, why: str) -> None:
        self.why_lost = self.why_lost or why
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.lost(self.why_lost)

    # -- what comes in
    def _hear(self, event: Event) -> None:
        match event:
            case DataReceived(stream_id=number, data=data):
                self._h2.acknowledge_received_data(event.flow_controlled_length, number)
                if stream := self._streams.get(number):
                    stream.data(data)
            case RequestReceived(stream_id=number) if self._begin is not None:
                self._streams[number] = self._begin(self, number, fields(event.headers))
            case ResponseReceived(stream_id=number) | TrailersReceived(stream_id=number):
                if stream := self._streams.get(number or 0):
                    stream.headers(fields(event.headers))
            case StreamEnded(stream_id=number):
                if stream := self._streams.get(number):
                    stream.ended()
            case StreamReset(stream_id=number):
                if stream := self._streams.pop(number, None):
                    stream.lost("the other side has reset the call", event.error_code)
            case WindowUpdated(stream_id=number) if number:
                if stream := self._streams.get(number):
                    stream.room()
            case WindowUpdated():
                self._room()
            case RemoteSettingsChanged():
                if not self.greeted.done():
                    self.greeted.set_result(None)
                self._room()
            case ConnectionTerminated():  # h2 takes nothing more, although the server could still answer open calls
                self._lose(LEAVING)
                self.close()
            case _:
                pass

    def _room(self) -> None:
        for stream in list(self._streams.values()):
            stream.room()

    # -- what goes out, for the calls
    def send_headers(self, number: int, headers: Headers, *, last: bool = False) -> None:
        """Sends a header, or trailers. last: nothing follows."""
        try:
            self._h2.send_headers(number, list(headers), end_stream=last)
        except StreamClosedError:  # h2 has already read its reset, which `_hear` has not handled yet
            return
        self._flush_soon()

    def send(self, number: int, data: bytearray, *, last: bool = False) -> bool:
        """Sends what there is room for, and takes it from `data`. last: nothing follows it.

        Returns whether all of it was sent. It leaves at once.
        """
        try:
            while not self._paused and (data or last):
                room = min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size)
                if data and room <= 0:
                    break
                piece = bytes(data[:room])
                del data[:room]
                self._h2.send_data(number, piece, end_stream=last and not data)
                last = last and bool(data)
        except StreamClosedError:  # as above
            return False
        self.flush()
        return not data and not last

    def forget(self, number: int, code: ErrorCodes = ErrorCodes.CANCEL) -> None:
        """Drops a stream, and resets it if the other side may still send or expect something on it."""
        if self._streams.pop(number, None) is not None and not self.closed:
            try:
                self._h2.reset_stream(number, code)
            except StreamClosedError:
                return
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hands h2's pending bytes to the transport."""
        self._flushing = False
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)


def fields(headers: Iterable[tuple[object, object]] | None) -> dict[str, str]:
    """Header fields by their names."""
    return {str(name): str(value) for name, value in headers or ()}
