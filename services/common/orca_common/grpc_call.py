"""One gRPC call on a stream of HTTP/2: its messages, its deadline, and the status that it ends with."""

import asyncio
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from urllib.parse import quote

from .compression import inflated, too_large, unreadable
from .errors import Cancelled, ErrorReason, OrcaError, status_of
from .grpc_message import PREFIX, framed
from .http2_connection import WINDOW, Headers, Http2Connection

FIELD = 32  # bytes that each field of a header counts more, by HTTP/2
BEGIN_SECONDS = 1.0
IN_LOOP = 1 << 16  # bytes; a larger message is inflated in a thread. 4 MB may take 0.3 s.
UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}  # of grpc-timeout, in seconds
TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
BEGIN = (
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b"identity,deflate,gzip"),
)
DETAILS = b"grpc-status-details-bin"
OK = ((b"grpc-status", b"0"),)
PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")  # of a status's sentence, as it may be written


class GrpcCall:
    """The server's side of a call."""

    def __init__(self, connection: Http2Connection, number: int, headers: Headers, max_message_bytes: int) -> None:
        """number: of its stream. Raises nothing: a header that is none is looked at by those who need it."""
        self._connection, self._number, self._max = connection, number, max_message_bytes
        self._loop = asyncio.get_running_loop()
        pairs = list(headers)
        self.header_bytes = sum(len(name) + len(value) + FIELD for name, value in pairs)
        fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
        self.path = fields.get(":path", "")
        self.content_type = fields.get("content-type", "")
        self.metadata: Mapping[str, str] = {
            name: value for name, value in fields.items() if name[0] != ":" and not name.endswith("-bin")
        }
        self.deadline = self._deadline(fields.get("grpc-timeout", ""))
        self._encoding = fields.get("grpc-encoding", "identity")
        self._came = bytearray()
        self._window = WINDOW  # bytes that the client may still send
        self._heard = self._began = self.gone = False
        self._unsent = bytearray()
        self._listener: tuple[Callable[[bytes], None], Callable[[OrcaError | None], None]] | None = None
        self._news: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None  # that serves it

    def _deadline(self, timeout: str) -> float | None:
        told = TIMEOUT.fullmatch(timeout)
        return self._loop.time() + int(told[1]) * UNITS[told[2]] if told else None

    @property
    def peer(self) -> str:
        """The client's host, as limits know it."""
        return f"grpc {self._connection.host}"

    @property
    def address(self) -> str:
        return self._connection.peer

    def certificate_names(self) -> list[str]:
        return self._connection.certificate_names()

    # -- `Stream`
    def received(self, data: bytes, taken: int) -> None:
        self._window -= taken
        self._came += data
        self._tell()

    def ended(self) -> None:
        self._heard = True
        self._tell()

    def opened(self) -> None:
        if self._unsent and not self.gone:
            self._send_rest()
        _wake(self._room)

    def lost(self) -> None:
        self.gone = True
        if self.task is not None:
            self.task.cancel()

    # -- messages
    async def read(self) -> bytes | None:
        """The next message; None: there is no more. While nobody reads, the client may send its first window only.

        Raises InvalidArgument; Unimplemented for a compression that is not known.
        """
        while (need := self._missing()) > 0:
            if self._heard:
                if self._came:
                    raise unreadable("ends in its middle")
                return None
            if need > self._window:
                self._connection.grant(self._number, need - self._window)
                self._window = need
            self._news = self._loop.create_future()
            await self._news
        compressed, raw = self._take()
        if not compressed:
            return raw
        if len(raw) <= IN_LOOP:
            return inflated(raw, self._encoding, self._max)
        return await asyncio.to_thread(inflated, raw, self._encoding, self._max)

    def listen(self, heard: Callable[[bytes], None], ended: Callable[[OrcaError | None], None]) -> None:
        """Hands each message to `heard` in the turn of the loop in which it comes, instead of `read`.

        `ended` is told when there are no more, or why they cannot be read.
        """
        self._listener = heard, ended
        self._tell()

    def _tell(self) -> None:
        if self._listener is None:
            _wake(self._news)
            return
        heard, ended = self._listener
        try:
            while not self.gone and self._missing() <= 0:
                compressed, raw = self._take()
                heard(inflated(raw, self._encoding, self._max) if compressed else raw)
            need = max(self._missing(), WINDOW)
        except OrcaError as error:
            ended(error)
            return
        if self._heard:
            ended(unreadable("ends in its middle") if self._came else None)
        elif self._window < need // 2 and not self.gone:
            self._connection.grant(self._number, need - self._window)
            self._window = need

    def _take(self) -> tuple[int, bytes]:
        """The next message, which has come, and whether it is compressed."""
        compressed, size = self._came[0], int.from_bytes(self._came[1:PREFIX])
        raw = bytes(self._came[PREFIX : PREFIX + size])
        del self._came[: PREFIX + size]
        return compressed, raw

    @property
    def readable(self) -> bool:
        """Whether `read` returns, or raises, at once."""
        return self._heard or (len(self._came) >= PREFIX and self._missing() <= 0)

    def _missing(self) -> int:
        """Bytes that must come before there is a message."""
        if len(self._came) < PREFIX:
            return PREFIX - len(self._came)
        size = int.from_bytes(self._came[1:PREFIX])
        if size > self._max:
            raise too_large(size, self._max)
        return PREFIX + size - len(self._came)

    async def begun(self) -> None:
        """Waits, for a second at most, until something of the first message has come. A client of grpc.aio whose call
        is refused before it has written hears an internal error instead of the status."""
        if not (self._came or self._heard):
            self._news = self._loop.create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout(BEGIN_SECONDS):
                    await self._news

    async def write(self, message: bytes) -> None:
        """Sends a message. Waits for a client that takes no more; raises Cancelled when it takes too long."""
        self.begin()
        data = framed(message)
        if self._connection.send_whole(self._number, data):
            self._connection.flush_soon()
            return
        seconds = self._connection.bounds.write_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._write_pieces(data)
        except TimeoutError:
            raise Cancelled(f"the client read nothing for {seconds:g} s", reason=ErrorReason.CLIENT_LEFT) from None

    async def _write_pieces(self, data: bytes) -> None:
        connection, number = self._connection, self._number
        while (room := connection.room(number)) < len(data):
            if room > 0:
                connection.send(number, data[:room])
                connection.flush_soon()
                data = data[room:]
            else:
                self._room = self._loop.create_future()
                await self._room
        connection.send(number, data)
        connection.flush_soon()

    def begin(self) -> None:
        """Tells the client that its call is taken, before there is a message."""
        if not self._began:
            self._began = True
            self._connection.send_headers(self._number, BEGIN)

    def send(self, message: bytes) -> None:
        """Sends a message without waiting: what there is no room for follows as there is. Nothing after the end."""
        if not self.gone:
            self.begin()
            self._unsent += framed(message)
            self._send_rest()

    def _send_rest(self) -> None:
        while self._unsent and (room := self._connection.room(self._number)) > 0:
            self._connection.send(self._number, bytes(self._unsent[:room]))
            del self._unsent[:room]
        self._connection.flush()

    async def sent(self) -> None:
        """Waits until all that `send` was given is on its way."""
        while self._unsent and not self.gone:
            self._room = self._loop.create_future()
            await self._room

    # -- the end
    def end(self, error: OrcaError | None = None) -> None:
        """Ends the call with the error's status; OK without one. Nothing, when nobody hears it any more."""
        if self.gone:
            return
        self.gone = True
        trailers = OK if error is None else trailers_of(error)
        headers = trailers if self._began else (*BEGIN, *trailers)
        self._connection.finish(self._number, headers, heard=self._heard)

    def refuse(self, status: int) -> None:
        """Answers what is no call of gRPC, by a status of HTTP."""
        if self.gone:
            return
        self.gone = True
        self._connection.finish(self._number, ((b":status", str(status).encode()),), heard=self._heard)


Method = Callable[[GrpcCall], Awaitable[bytes | None]]  # reads its request; what it returns is written
Methods = Mapping[str, Method]  # by their paths


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


def trailers_of(error: OrcaError) -> Headers:
    """An error as gRPC's trailers: its status, its sentence, and what a program can read."""
    status = status_of(error)
    return (
        (b"grpc-status", str(status.code).encode()),
        (b"grpc-message", quote(str(error), safe=PLAIN).encode()),
        (DETAILS, b64encode(status.SerializeToString()).rstrip(b"=")),
    )
