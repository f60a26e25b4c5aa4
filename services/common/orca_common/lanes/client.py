"""The client of the lanes: it connects, calls, and says how a call has ended.

It sends no pings: callers notice a silent server. `connect` waits as long as its caller allows; `ask` has a timeout.
The owner of an open stream counts the other side's answers (docs/decisions/control-lanes.md names each of them).
"""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message
from h2.errors import ErrorCodes

from ..address import split_address
from .call import Call, Unreadable
from .connection import Connection

M = TypeVar("M", bound=Message)
Metadata = Sequence[tuple[str, str]]

CODES = {str(code.value[0]): code for code in grpc.StatusCode}  # type: ignore[index]


class Status(NamedTuple):
    """The end of a call."""

    code: grpc.StatusCode
    details: str

    def __str__(self) -> str:
        return f"{self.code.name}: {self.details}"


CANCELLED = Status(grpc.StatusCode.CANCELLED, "by this side")


class CallFailed(Exception):
    """A call ended with another status than OK."""

    def __init__(self, status: Status) -> None:
        super().__init__(str(status))
        self.status = status


class Tls(NamedTuple):
    """The client's context, and the name that the server's certificate must have."""

    context: ssl.SSLContext
    name: str


class ClientCall(Call):
    """One call. `heard` takes each message in the turn of the loop in which it comes. `taken` ends when the server
    has begun to answer; `over` ends with the status, or with what `heard` has raised."""

    def __init__(self, connection: Connection, number: int, heard: Callable[[bytes], None]) -> None:
        """number: of its stream."""
        super().__init__(connection, number)
        self._heard = heard
        loop = asyncio.get_running_loop()
        self.taken: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[Status] = loop.create_future()
        self.over.add_done_callback(self._ended)
        self.refused = False  # the server has not begun it, because of the calls that it has: it can be made again

    def send(self, message: bytes) -> None:
        """Sends a message without waiting. Sends nothing when the call is over.

        Gives the call up when the server has not taken MAX_UNSENT bytes of earlier messages.
        """
        if self.overfull():
            self.cancel(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{len(self._unsent)} bytes wait for room"))
        if not self.gone:
            self.put(message)

    def close(self) -> None:
        """Sends nothing more."""
        self._closing = True
        self.room()

    def cancel(self, why: Status = CANCELLED) -> None:
        """Gives the call up, unless it is over."""
        self._end(why)

    def _end(self, status: Status) -> None:
        if not self.over.done():
            self.gone = True
            self.over.set_result(status)
            self._connection.forget(self._number)

    def _ended(self, over: asyncio.Future[Status]) -> None:
        if not self.taken.done():
            self.taken.set_result(None)

    # -- for the connection
    def headers(self, fields: dict[str, str]) -> None:
        if (http := fields.get(":status", "200")) != "200":
            self._end(Status(grpc.StatusCode.UNKNOWN, f"HTTP status {http}"))
        elif (number := fields.get("grpc-status")) is not None:
            code = CODES.get(number, grpc.StatusCode.UNKNOWN)
            self._end(Status(code, unquote(fields.get("grpc-message", ""))))
        elif not self.taken.done():
            self.taken.set_result(None)

    def data(self, data: bytes) -> None:
        try:
            for message in self.messages(data):
                if self.gone:
                    return
                self._heard(message)
        except Unreadable as error:
            self.cancel(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)))
        except Exception as error:
            self.gone = True
            self._connection.forget(self._number)
            if not self.over.done():
                self.over.set_exception(error)

    def ended(self) -> None:
        self._end(Status(grpc.StatusCode.INTERNAL, "the server has told no status"))

    def lost(self, why: str, code: int | None = None) -> None:
        self.refused = code == ErrorCodes.REFUSED_STREAM
        away = code is None or self.refused  # with its connection, or before the server has begun it
        self._end(Status(grpc.StatusCode.UNAVAILABLE if away else grpc.StatusCode.INTERNAL, why))


class LaneConnection(Connection):
    """The client's side of a connection."""

    @property
    def max_calls(self) -> int:
        """Calls that the server takes at a time."""
        return self._h2.remote_settings.max_concurrent_streams

    def call(self, path: str, heard: Callable[[bytes], None], metadata: Metadata = ()) -> ClientCall:
        """Begins a call. One that cannot be made is over at once."""
        lost = self.why_lost
        if not lost and self._h2.open_outbound_streams >= self.max_calls:
            lost = "the server takes no more calls on this connection"
        if lost:
            call = ClientCall(self, 0, heard)
            call.lost(lost)
            return call
        number = self._h2.get_next_available_stream_id()
        call = self._streams[number] = ClientCall(self, number, heard)
        headers = [
            (":method", "POST"),
            (":scheme", "http" if self.secure is None else "https"),
            (":path", path),
            (":authority", "orca"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *metadata,
        ]
        self.send_headers(number, headers)
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


async def connect(address: str, tls: Tls | None, make: Callable[[], LaneConnection] = LaneConnection) -> LaneConnection:
    """A connection to a server that speaks HTTP/2: its settings have come. Raises OSError (ssl.SSLError is one)."""
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    secure = {} if tls is None else {"ssl": tls.context, "server_hostname": tls.name}
    _, connection = await loop.create_connection(make, host, port, **secure)
    try:
        await connection.greeted
    except BaseException:
        connection.close()
        raise
    return connection
