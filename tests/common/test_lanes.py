"""The lanes' client against grpc.aio's server and their own: messages, statuses, deadlines, broken connections."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue, UInt32Value
from hpack import Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from orca_common.errors import FailedPrecondition, Unavailable
from orca_common.lanes.client import CallFailed, LaneConnection, Status, connect
from orca_common.lanes.server import LaneCall, LaneServer, unary
from orca_common.roles import ANY, Role
from orca_common.tls import Certificates, MutualTls, Plaintext, Transport
from orca_local.authority import Authority

LARGE = 5 << 20  # bytes of a message that fills windows and frames many times


async def size(request: BytesValue) -> UInt32Value:
    if request.value == b"refuse":
        raise FailedPrecondition("an old term: 50 % too old")
    if request.value == b"wait":
        await asyncio.Event().wait()
    return UInt32Value(value=len(request.value))


@asynccontextmanager
async def ours(transport: Transport | None = None) -> AsyncIterator[str]:
    """Our server."""

    async def echo(call: LaneCall) -> None:
        over = asyncio.get_running_loop().create_future()
        call.listen(call.send, over.set_result)
        assert await over is None

    methods = {"/t/Size": unary(BytesValue, size), "/t/Echo": echo}
    server = LaneServer(methods, transport or Plaintext(), {"/t/": ANY}, Unavailable("leaving"))
    yield f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    await server.stop(0)


@asynccontextmanager
async def theirs() -> AsyncIterator[str]:
    """grpc.aio's server."""

    async def sized(request: bytes, context: Any) -> bytes:
        try:
            return (await size(BytesValue.FromString(request))).SerializeToString()
        except FailedPrecondition as refusal:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refusal))
            raise

    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handlers = {
        "Size": grpc.unary_unary_rpc_method_handler(sized),
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


Serve = Callable[[], Any]
both = pytest.mark.parametrize("serve", [ours, theirs])


@asynccontextmanager
async def connected(serve: Serve) -> AsyncIterator[LaneConnection]:
    async with serve() as address:
        connection = await connect(address, None)
        yield connection
        connection.close()


async def ask(connection: LaneConnection, value: bytes, timeout: float = 20.0) -> int:
    return (await connection.ask("/t/Size", BytesValue(value=value), UInt32Value, timeout)).value


async def failure(connection: LaneConnection, value: bytes, timeout: float = 20.0) -> Status:
    with pytest.raises(CallFailed) as failed:
        await ask(connection, value, timeout)
    return failed.value.status


@both
async def test_answers_and_statuses(serve: Serve) -> None:
    async with connected(serve) as connection:
        assert await ask(connection, b"abc") == 3
        assert await ask(connection, bytes(LARGE)) == LARGE
        assert await failure(connection, b"refuse") == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "an old term: 50 % too old",
        )
        assert (await failure(connection, b"wait", 0.05)).code is grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(CallFailed, match="UNIMPLEMENTED"):
            await connection.ask("/t/None", BytesValue(), UInt32Value, 20.0)
        assert await ask(connection, b"abcd") == 4, "the connection goes on"


@both
async def test_a_stream_both_ways(serve: Serve) -> None:
    """Messages of all sizes, some of which must wait for room, come back in their order; then both sides are done."""
    async with connected(serve) as connection:
        heard: list[bytes] = []
        call = connection.call("/t/Echo", heard.append)
        sent = [b"", b"a", bytes(LARGE), b"b", *(bytes([n]) * 3000 for n in range(200)), bytes(LARGE), b"end"]
        for message in sent:
            call.send(message)
        assert call.waits
        call.close()
        async with asyncio.timeout(30):
            status = await call.over
        assert (status.code, heard) == (grpc.StatusCode.OK, sent)
        assert call.closed


@both
async def test_a_call_that_is_given_up(serve: Serve) -> None:
    async with connected(serve) as connection:
        calls = [connection.call("/t/Echo", lambda message: None) for _ in range(3)]
        calls[0].cancel()
        assert (await calls[0].over).code is grpc.StatusCode.CANCELLED
        calls[0].send(b"not sent")
        assert await ask(connection, b"abc") == 3, "its place is free"


async def test_one_call_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orca_common.lanes.connection.MAX_CALLS", 3)
    async with connected(ours) as connection:
        calls = [connection.call("/t/Echo", lambda message: None) for _ in range(4)]
        assert [call.over.done() for call in calls] == [False, False, False, True]
        assert calls[3].over.result().code is grpc.StatusCode.UNAVAILABLE


async def test_what_the_hearer_raises_ends_the_call() -> None:
    def refuse(message: bytes) -> None:
        raise ValueError(message)

    async with connected(ours) as connection:
        call = connection.call("/t/Echo", refuse)
        call.send(b"one")
        call.send(b"two")
        with pytest.raises(ValueError, match="one"):
            await call.over
        assert await ask(connection, b"abc") == 3


async def test_a_server_that_takes_nothing_loses_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orca_common.lanes.call.MAX_UNSENT", 1 << 20)
    async with connected(theirs) as connection:
        call = connection.call("/t/Nobody", lambda message: None)
        call.send(bytes(LARGE))
        call.send(b"one more")
        assert (await call.over).code is grpc.StatusCode.RESOURCE_EXHAUSTED


class Scripted(asyncio.Protocol):
    """A server that says what a test gives it."""

    def __init__(self, greeting: bytes) -> None:
        self._greeting = greeting

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self._greeting)


@asynccontextmanager
async def scripted(greeting: bytes) -> AsyncIterator[tuple[str, list[Scripted]]]:
    made: list[Scripted] = []

    def make() -> Scripted:
        made.append(Scripted(greeting))
        return made[-1]

    listening = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}", made
    finally:
        for one in made:
            one.transport.abort()
        listening.close()


async def test_a_connection_that_breaks_ends_its_calls() -> None:
    async with scripted(SettingsFrame(0).serialize()) as (address, made):
        connection = await connect(address, None)
        call = connection.call("/t/Echo", lambda message: None)
        made[0].transport.abort()
        assert (await call.over).code is grpc.StatusCode.UNAVAILABLE
        assert (await failure(connection, b"abc")).code is grpc.StatusCode.UNAVAILABLE


async def test_goaway_ends_calls() -> None:
    """A server that says so is leaving. Its calls begin again elsewhere."""
    async with scripted(SettingsFrame(0).serialize()) as (address, made), asyncio.timeout(10):
        connection = await connect(address, None)
        call = connection.call("/t/Echo", lambda message: None)
        made[0].transport.write(GoAwayFrame(0, last_stream_id=1).serialize())
        assert await call.over == (grpc.StatusCode.UNAVAILABLE, "the server is leaving")
        assert await failure(connection, b"abc") == (grpc.StatusCode.UNAVAILABLE, "the server is leaving")
        assert connection.closed


@both
async def test_a_call_that_is_refused_while_it_sends(serve: Serve) -> None:
    """The server ends the stream and resets it in one write. Other calls of the connection go on."""
    async with connected(serve) as connection, asyncio.timeout(10):
        other = connection.call("/t/Echo", lambda message: None)
        call = connection.call("/t/None", lambda message: None)
        call.send(b"one of many")
        assert (await call.over).code is grpc.StatusCode.UNIMPLEMENTED
        assert await ask(connection, b"abc") == 3
        assert not other.over.done()


def written(*frames: Frame) -> bytes:
    return b"".join(frame.serialize() for frame in frames)


def headers(stream: int, *pairs: tuple[bytes, bytes], end: bool = False) -> HeadersFrame:
    flags = ["END_HEADERS", "END_STREAM"] if end else ["END_HEADERS"]
    return HeadersFrame(stream, Encoder().encode([(b":status", b"200"), *pairs], huffman=False), flags=flags)


def data(stream: int, message: bytes) -> DataFrame:
    return DataFrame(stream, b"\0" + len(message).to_bytes(4) + message)


UNKNOWN_CODE = 99
ENDS = {  # what a server says at once, and how the call that it ends has ended
    "reset for a reason that nobody knows": (
        [RstStreamFrame(1, error_code=UNKNOWN_CODE)],
        Status(grpc.StatusCode.INTERNAL, "the other side has reset the call"),
    ),
    "reset with more room to send": (
        [WindowUpdateFrame(1, 100_000), WindowUpdateFrame(0, 100_000), RstStreamFrame(1, error_code=8)],
        Status(grpc.StatusCode.INTERNAL, "the other side has reset the call"),
    ),
    "reset before it has begun": (
        [RstStreamFrame(1, error_code=7)],
        Status(grpc.StatusCode.UNAVAILABLE, "the other side has reset the call"),
    ),
    "an answer of HTTP alone": (
        [HeadersFrame(1, Encoder().encode([(b":status", b"404")]), flags=["END_HEADERS", "END_STREAM"])],
        Status(grpc.StatusCode.UNKNOWN, "HTTP status 404"),
    ),
    "a sentence that is no UTF-8": (
        [headers(1, (b"grpc-status", b"5"), (b"grpc-message", b"\xe9t\xe9"), end=True)],
        Status(grpc.StatusCode.NOT_FOUND, "\xe9t\xe9"),
    ),
}


@pytest.mark.parametrize("what", ENDS)
async def test_what_a_server_ends_alone(what: str) -> None:
    """One call is over, with its status, and the connection goes on."""
    frames, status = ENDS[what]
    async with scripted(SettingsFrame(0).serialize()) as (address, made), asyncio.timeout(10):
        connection = await connect(address, None)
        call = connection.call("/t/Echo", lambda message: None)
        call.send(bytes(100_000))
        assert call.waits
        made[0].transport.write(written(*frames))
        assert await call.over == status
        assert not connection.closed
        connection.close()


async def test_a_hearer_raises_at_a_call_that_is_reset() -> None:
    def refuse(message: bytes) -> None:
        raise ValueError(message)

    async with scripted(SettingsFrame(0).serialize()) as (address, made), asyncio.timeout(10):
        connection = await connect(address, None)
        call = connection.call("/t/Echo", refuse)
        made[0].transport.write(written(headers(1), data(1, b"one"), RstStreamFrame(1, error_code=8)))
        with pytest.raises(ValueError, match="one"):
            await call.over
        assert not connection.closed
        connection.close()


async def test_a_message_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by its length, before it has come."""
    monkeypatch.setattr("orca_common.lanes.call.MAX_RECEIVED", 100)
    heard: list[bytes] = []
    async with scripted(SettingsFrame(0).serialize()) as (address, made), asyncio.timeout(10):
        connection = await connect(address, None)
        call = connection.call("/t/Echo", heard.append)
        made[0].transport.write(written(headers(1), data(1, bytes(100)), DataFrame(1, b"\0" + (101).to_bytes(4))))
        assert await call.over == (grpc.StatusCode.RESOURCE_EXHAUSTED, "a message has 101 bytes; at most 100")
        assert heard == [bytes(100)]
        assert not connection.closed
        connection.close()


async def test_a_server_that_does_not_keep_to_http2() -> None:
    settings_of_a_stream = b"\0\0\0\4\0\0\0\0\1"
    async with scripted(settings_of_a_stream) as (address, _), asyncio.timeout(10):
        with pytest.raises(OSError, match="does not keep to HTTP/2"):
            await connect(address, None)


async def test_nobody_listens_or_nobody_speaks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await connect(address, None)
    with pytest.raises(ConnectionRefusedError):
        await connect(address, None)


async def test_by_certificates(tmp_path: Path) -> None:
    """Both sides show theirs, and the server's must have the name of its role."""
    authority = Authority(tmp_path / "ca")
    worker, scheduler = (MutualTls(Certificates(str(authority.issue(role)))) for role in (Role.WORKER, Role.SCHEDULER))
    async with ours(worker) as address:
        connection = await scheduler.connect(address, Role.WORKER)
        assert await ask(connection, bytes(LARGE)) == LARGE
        connection.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            await scheduler.connect(address, Role.ENDPOINT)
        with pytest.raises(ConnectionError):
            await Plaintext().connect(address, Role.WORKER)
        stranger = MutualTls(Certificates(str(Authority(tmp_path / "other").issue(Role.SCHEDULER))))
        with pytest.raises(ssl.SSLCertVerificationError):
            await stranger.connect(address, Role.WORKER)
