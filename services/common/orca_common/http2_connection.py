"""One connection of a gRPC server: the library h2 speaks HTTP/2, and the connection gives each stream what is its own.

h2 keeps the protocol's states, and refuses what breaks its rules. What one turn of the loop has to say on all streams
leaves in one write. Bounds on what a client may cost are here, where h2 has none.
"""

import asyncio
import random
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, cast

from h2.config import H2Configuration
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    PingAckReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError, StreamClosedError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame, SettingsFrame

from .address import join_address
from .http2_data import Http2
from .http2_frames import FRAMES_A_SECOND, Flood, Frames

Headers = Iterable[tuple[bytes, bytes]]

WINDOW = 65_535  # bytes that a stream may send before it is granted more: HTTP/2's default
SHARED = 4 << 20  # bytes that all streams of a connection may send before it is given back what has come
KEEPALIVE_SECONDS, ANSWER_SECONDS = 30.0, 10.0  # a silent client is pinged, and has so long to answer
GOODBYE_SECONDS = 1.0  # for a client that breaks the rules to hear so; TLS would read on from it
RESETS, RESETS_A_SECOND = 1000, 100  # streams that a client may take back, or open beyond the bound
LONG = 50  # resets that a stream with a header above the bound counts as
TABLE = 4096  # bytes of our table of headers. hpack reads all of it for a header that it does not find.
KNOWN_SETTINGS = 64  # h2 keeps what it does not know
LEAVING = b"leaving "  # what a ping says after which no stream is on its way
LAST_STREAM = (1 << 31) - 1
MEANT = 16  # bytes; a smaller frame of ours may be one that the client's window has cut
JITTER = 0.1  # of a connection's age, so that clients do not come again all at once
WIDER = 4  # times: longer headers end the connection


@dataclass(frozen=True)
class Http2Bounds:
    """What one connection may cost."""

    streams: int  # at a time
    header_bytes: int  # of one stream
    header_seconds: float  # for the connection's first frames, and for a header in several
    age: float  # seconds after which it takes no new streams; 0: never
    frames_a_second: int = FRAMES_A_SECOND  # small ones, beyond the first and those that we answer
    write_seconds: float = 30.0  # for the client to take a message


class Place(Protocol):
    """What a connection takes of a server's limits."""

    def leave(self) -> None: ...


class Stream(Protocol):
    """What a connection asks and tells one of its streams."""

    @property
    def header_bytes(self) -> int:
        """The size of its header, as HTTP/2 counts it."""
        ...

    def received(self, data: bytes, taken: int) -> None:
        """taken: bytes of the stream's window, with those that only pad."""

    def ended(self) -> None:
        """The client has said all."""

    def opened(self) -> None:
        """There may be room for more to send."""

    def lost(self) -> None:
        """The client took the stream back, or its connection has ended. Nothing can be sent any more."""


class Remembering(Http2):
    """h2 remembers how streams have ended, 65,536 of them: 8 MB for each connection."""

    MAX_CLOSED_STREAMS = 1024


class Http2Connection(asyncio.Protocol):
    """The server's side. `begin` makes the stream of each request; `others` are the connections that are open."""

    def __init__(
        self,
        bounds: Http2Bounds,
        place: Place,
        begin: "Callable[[Http2Connection, int, Headers], Stream]",
        others: "set[Http2Connection]",
    ) -> None:
        self.bounds, self._place, self._begin, self._others = bounds, place, begin, others
        self._loop = asyncio.get_running_loop()
        self._h2 = Remembering(H2Configuration(client_side=False, header_encoding=None))
        self._frames = Frames(WIDER * bounds.header_bytes, self._loop.time(), bounds.frames_a_second)
        self._streams: dict[int, Stream] = {}
        self._reading = False  # a turn of `_read` is due
        self._flushing = self._paused = False
        self._widened = False  # the client has widened the connection's window, or all windows
        self._unacknowledged = 0  # bytes of DATA that the connection's window is not yet given back
        self._asked = False  # a ping was sent to the client, which has been silent
        self._resets = 0
        self._newest = 0  # the last stream that was begun
        self._leaving = False  # the client was told to open no more streams
        self._last: int | None = None  # streams after it are refused
        self.peer = self.host = ""

    # -- the transport
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type
        self._others.add(self)
        peer = transport.get_extra_info("peername")
        self.host, self.peer = (str(peer[0]), join_address(*peer[:2])) if peer else ("", "")
        self._heard = self._began = self._loop.time()
        bounds = self.bounds
        # h2 would end a connection for one stream too many, or a header that is too long. It is given wider bounds than
        # the client is told of, and the stream alone is refused.
        self._h2.local_settings = Settings(client=False)
        self._h2.decoder.max_header_list_size = WIDER * bounds.header_bytes
        self._h2.initiate_connection()
        self._h2.clear_outbound_data_buffer()
        told: dict[int, int] = {
            SettingCodes.MAX_CONCURRENT_STREAMS: bounds.streams,
            SettingCodes.MAX_HEADER_LIST_SIZE: bounds.header_bytes,
        }
        self._h2.increment_flow_control_window(SHARED - WINDOW)
        self._transport.write(SettingsFrame(0, told).serialize() + self._h2.data_to_send())
        self._greeting = self._loop.call_later(bounds.header_seconds, self._abort)
        self._alive = self._loop.call_later(KEEPALIVE_SECONDS, self._look)
        age = bounds.age * random.uniform(1 - JITTER, 1 + JITTER)
        self._aging = self._loop.call_later(age, self.go_away) if age else None
        self._heading: asyncio.TimerHandle | None = None  # bounds a header that is not whole
        self._ending: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._greeting, self._alive, self._aging, self._heading, self._ending):
            if timer is not None:
                timer.cancel()
        self._place.leave()
        self._lose()
        self._others.discard(self)

    def _lose(self) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.lost()

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        self._frames.add(data)
        if not self._reading:
            self._read()

    def _read(self) -> None:
        """Hears what has come, as much as one turn of the loop has time for."""
        self._reading = False
        if self._transport.is_closing() or self._paused:
            return
        try:
            events = self._h2.receive_data(self._frames.turn(self._loop.time()))
            for event in events:  # h2 lets nothing be sent any more on a stream that these bytes take back at their end
                if isinstance(event, StreamReset):
                    self._take_back(event.stream_id)
            for event in events:
                self._hear(event)
        except Flood as flood:
            self._h2.close_connection(flood.code)
            self.close(GOODBYE_SECONDS)
            return
        except ProtocolError:  # h2 has put its reason on the wire
            self.close(GOODBYE_SECONDS)
            return
        if self._widened:
            self._widened = False
            self._opened()
        if self._frames.goaway:
            self._settle()
        if self._h2.unsent:
            self.flush_soon()
        if self._frames.heading and self._heading is None:
            self._heading = self._loop.call_later(self.bounds.header_seconds, self._abort)
        elif not self._frames.heading and self._heading is not None:
            self._heading.cancel()
            self._heading = None
        if self._frames.more:
            self._reading = True
            self._transport.pause_reading()
            self._loop.call_soon(self._read)
        elif not self._paused:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The client reads nothing. What it says makes answers, so it is not listened to either."""
        self._paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._opened()
        if not self._reading:
            self._read()

    def close(self, patience: float | None = None) -> None:
        """Ends the connection, after what is on its way out. Its streams end now: h2 lets them send no more.

        patience: seconds for a client that reads nothing, or sends on below TLS; ANSWER_SECONDS if not given.
        """
        if self._transport.is_closing():
            return
        self._flush()
        self._transport.close()
        self._alive.cancel()
        self._ending = self._loop.call_later(patience or ANSWER_SECONDS, self._abort)
        self._lose()

    def _abort(self) -> None:
        self._transport.abort()

    def _look(self) -> None:
        """Pings a client that has been silent, and gives up one that does not answer."""
        rest = KEEPALIVE_SECONDS - (self._loop.time() - self._heard)
        if rest <= 0 and self._asked:
            self._abort()
            return
        self._asked = rest <= 0
        if self._asked:
            self._h2.ping(b"orca    ")
            self.flush_soon()
        self._alive = self._loop.call_later(ANSWER_SECONDS if self._asked else rest, self._look)

    # -- what comes in
    def _hear(self, event: Event) -> None:
        match event:
            case DataReceived():
                self._give_back(event.flow_controlled_length)
                if stream := self._streams.get(event.stream_id):
                    stream.received(event.data, event.flow_controlled_length)
            case RequestReceived():
                self._request(event)
            case StreamEnded():
                if stream := self._streams.get(event.stream_id):
                    stream.ended()
            case StreamReset():
                self._take_back(event.stream_id)  # it has begun with these bytes
            case WindowUpdated(stream_id=number) if number:
                if stream := self._streams.get(number):
                    stream.opened()
            case WindowUpdated():
                self._widened = True
            case RemoteSettingsChanged():
                self._greeting.cancel()
                self._settings_came()
            case PingAckReceived(ping_data=data) if data == LEAVING and self._leaving:
                self._settle()
            case _:
                pass

    def _request(self, event: RequestReceived) -> None:
        number = event.stream_id
        if len(self._streams) >= self.bounds.streams or (self._last is not None and number > self._last):
            with suppress(StreamClosedError):  # the client has taken it back already
                self._h2.reset_stream(number, ErrorCodes.REFUSED_STREAM)
            self._count_reset()
            return
        self._newest = number
        stream = self._streams[number] = self._begin(self, number, event.headers)
        if stream.header_bytes > self.bounds.header_bytes:
            self._count_reset(LONG)

    def _take_back(self, number: int) -> None:
        """The client has reset a stream. Raises Flood."""
        if stream := self._forget(number):
            stream.lost()
            self._count_reset()

    def _settings_came(self) -> None:
        if len(self._h2.remote_settings) > KNOWN_SETTINGS:
            raise Flood
        if self._h2.encoder.header_table_size > TABLE:  # noqa: PLR1730 (to set it again would hide a change)
            self._h2.encoder.header_table_size = TABLE
        self._widened = True

    def _count_reset(self, many: int = 1) -> None:
        """A client that opens streams only to take them back costs us the work, and itself nothing. Raises Flood."""
        self._resets += many
        if self._resets > RESETS + RESETS_A_SECOND * (self._loop.time() - self._began):
            raise Flood

    def _forget(self, number: int) -> Stream | None:
        stream = self._streams.pop(number, None)
        if not self._streams:
            _ = self._h2.open_inbound_streams  # h2 lets go of closed streams only when it counts the open ones
        return stream

    def _give_back(self, size: int) -> None:
        """The connection's window is given back as data come, for a stream that nobody reads must not stop others."""
        self._unacknowledged += size
        if self._unacknowledged >= SHARED // 4:
            self._h2.increment_flow_control_window(self._unacknowledged)
            self._frames.earn()
            self._unacknowledged = 0

    def _opened(self) -> None:
        for stream in list(self._streams.values()):
            stream.opened()

    # -- what goes out, for the streams
    def certificate_names(self) -> list[str]:
        """The DNS names of the client's certificate; none without one."""
        tls: ssl.SSLObject | None = self._transport.get_extra_info("ssl_object")
        shown = tls.getpeercert() if tls is not None else None
        found: list[str] = []
        for pair in (shown or {}).get("subjectAltName", ()):
            match pair:
                case ("DNS", str(name)):
                    found.append(name)
        return found

    def room(self, number: int) -> int:
        """Bytes that may be sent on a stream now."""
        return 0 if self._paused else self._h2.room(number)

    def send(self, number: int, data: bytes) -> None:
        """Sends what there is room for. It leaves with the next flush."""
        self._h2.send_data(number, data)
        if len(data) >= MEANT:
            self._frames.earn()

    def send_whole(self, number: int, data: bytes) -> bool:
        """Sends all of it in one frame, if there is room for it. It leaves with the next flush."""
        if self._paused or not self._h2.send_plain(number, data):
            return False
        if len(data) >= MEANT:
            self._frames.earn()
        return True

    def send_headers(self, number: int, headers: Headers) -> None:
        self._h2.send_headers(number, headers)
        self._frames.earn()
        self.flush_soon()

    def grant(self, number: int, size: int) -> None:
        """The client may send so many bytes more on a stream."""
        self._h2.increment_flow_control_window(size, number)
        self._frames.earn()
        self.flush_soon()

    def finish(self, number: int, headers: Headers, *, heard: bool) -> None:
        """Ends a stream with these headers. heard: the client had said all; else it is told to say no more."""
        self._h2.send_headers(number, headers, end_stream=True)
        if not heard:
            self._h2.reset_stream(number, ErrorCodes.NO_ERROR)
        self._frames.earn()
        self._forget(number)
        self.flush_soon()
        self._close_if_idle()

    def flush(self) -> None:
        """Hands the transport at once what else would wait for the next turn: somebody waits for it."""
        self._flush()

    def flush_soon(self) -> None:
        """Hands the transport what is to be sent, as this turn of the loop ends."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    # -- the end
    def go_away(self) -> None:
        """Tells the client to open its next streams elsewhere. Those that are on their way are served: only after the
        client has answered a ping, or has not for a while, is the last one known."""
        if self._leaving or self._transport.is_closing():
            return
        self._leaving = True
        if self._aging is not None:
            self._aging.cancel()
        self._aging = self._loop.call_later(ANSWER_SECONDS, self._settle)
        self._transport.write(GoAwayFrame(0, last_stream_id=LAST_STREAM).serialize())
        self._h2.ping(LEAVING)
        self.flush_soon()

    def _settle(self) -> None:
        """No stream is begun any more."""
        if self._last is not None or self._transport.is_closing():
            return
        self._leaving, self._last = True, self._newest
        self._transport.write(GoAwayFrame(0, last_stream_id=self._last).serialize())
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._last is not None and not self._streams:
            self._loop.call_soon(self.close)
