"""Hostile clients of a gRPC server: raw frames against a connection of ours, on a real socket."""

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import http2
import pytest
from endpoint.harness import until
from http2 import Frame, Http2

from orca_common import http2_connection
from orca_common.compression import inflated
from orca_common.errors import InvalidArgument
from orca_common.grpc_call import GrpcCall
from orca_common.http2_connection import Headers, Http2Bounds, Http2Connection
from orca_common.http2_frames import FIELDS, fields

PATH = "/test.Echo/Echo"
STREAMS, HEADER_BYTES = 8, 16_384
CALM, SIZE = b"\0\0\0\x0b", b"\0\0\0\x06"  # codes of GOAWAY
PRIORITY, UNKNOWN, HEADER_TABLE = 2, 0xBE, 1
GZIP = http2.header("grpc-encoding", "gzip")


class Place:
    def leave(self) -> None:
        pass


class Server:
    """Answers each call with its message when `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.connections: set[Http2Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.begun = 0
        self.wrong: list[dict[str, Any]] = []
        self.address = ""
        self.header_seconds = 10.0

    def connection(self) -> Http2Connection:
        bounds = Http2Bounds(STREAMS, HEADER_BYTES, self.header_seconds, 0)
        return Http2Connection(bounds, Place(), self.begin, self.connections)

    def begin(self, connection: Http2Connection, number: int, headers: Headers) -> GrpcCall:
        self.begun += 1
        call = GrpcCall(connection, number, headers, 1 << 20)
        if call.content_type != "application/grpc":
            asyncio.get_running_loop().call_soon(call.refuse, 415)
            return call
        call.task = asyncio.get_running_loop().create_task(self.serve(call))
        self.tasks.add(call.task)
        call.task.add_done_callback(self.tasks.discard)
        return call

    async def serve(self, call: GrpcCall) -> None:
        await call.read()
        await self.go.wait()
        await call.write(b"answer")
        call.end()

    @property
    def one(self) -> Http2Connection:
        (connection,) = self.connections
        return connection


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """Whatever a client did, nothing of it is left, and nothing went wrong at our side."""
    made, loop = Server(), asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: made.wrong.append(context))
    listening = await loop.create_server(made.connection, "127.0.0.1", 0)
    made.address = "{}:{}".format(*listening.sockets[0].getsockname())
    yield made
    listening.close()
    await until(lambda: not made.connections and not made.tasks)
    assert made.wrong == []


def begin(stream: int, *more: bytes, path: str = PATH) -> bytes:
    return http2.frame(http2.HEADERS, http2.END_HEADERS, stream, http2.call(path, *more))


def call(stream: int) -> bytes:
    return begin(stream) + http2.frame(http2.DATA, http2.END_STREAM, stream, http2.message(b"question"))


def goaway() -> bytes:
    return http2.frame(http2.GOAWAY, 0, 0, bytes(8))


@asynccontextmanager
async def patience() -> AsyncIterator[None]:
    async with asyncio.timeout(10):
        yield


async def until_frame(client: Http2, kind: int, flags: int = 0) -> Frame:
    """Reads until such a frame comes."""
    async with patience():
        async for frame in client.frames():
            if frame.kind == kind and frame.flags & flags == flags:
                return frame
    raise AssertionError("the connection has ended")


async def the_end(client: Http2) -> bytes:
    """Reads until the server closes the connection. The code of its GOAWAY; empty without one."""
    code = b""
    async with patience():
        async for frame in client.frames():
            if frame.kind == http2.GOAWAY:
                code = frame.payload[4:8]
    return code


FLOODS = {
    "ping": http2.frame(http2.PING, 0, 0, b"12345678"),
    "ping ack": http2.frame(http2.PING, http2.ACK, 0, b"12345678"),
    "settings": http2.frame(http2.SETTINGS, 0, 0),
    "windows": http2.frame(http2.SETTINGS, 0, 0, http2.setting(http2.INITIAL_WINDOW, 0)),
    "settings ack": http2.frame(http2.SETTINGS, http2.ACK, 0),
    "window": http2.frame(http2.WINDOW_UPDATE, 0, 0, b"\0\0\0\1"),
    "window of a stream": http2.frame(http2.WINDOW_UPDATE, 0, 1, b"\0\0\0\1"),
    "priority": http2.frame(PRIORITY, 0, 1, bytes(4) + b"\1"),
    "empty data": http2.frame(http2.DATA, 0, 1),
    "padding": http2.frame(http2.DATA, 0x8, 1, b"\1\0"),
    "unknown": http2.frame(UNKNOWN, 0, 0, b"x"),
    "reset": http2.frame(http2.RST_STREAM, 0, 1, bytes(4)),
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_ends_its_connection(server: Server, flood: str) -> None:
    server.go.clear()
    async with Http2.connected(server.address) as client:
        client.write(begin(1), FLOODS[flood] * 4000)
        assert await the_end(client) == CALM
    server.go.set()


async def test_streams_beyond_the_bound_cost_little(server: Server) -> None:
    """Whoever goes on to open streams that are refused is told to go."""
    server.go.clear()
    async with Http2.connected(server.address) as client:
        client.write(*[begin(1 + 2 * n) for n in range(2000)])
        assert await the_end(client) == CALM
    assert server.begun == STREAMS
    server.go.set()


async def test_a_client_that_works_may_say_much(server: Server) -> None:
    """Calls, each with what careful clients say beside: its windows and a ping."""
    around = FLOODS["window"] + FLOODS["window of a stream"] + FLOODS["ping"]
    async with Http2.connected(server.address) as client, patience():
        ended, stream = 0, 1
        client.write(call(stream), around)
        async for frame in client.frames():
            if frame.kind == http2.HEADERS and frame.flags & http2.END_STREAM:
                ended, stream = ended + 1, stream + 2
                if ended == 1000:
                    break
                client.write(call(stream), around)
        assert ended == 1000
        assert len(server.one._h2.streams) < 3
        assert len(server.one._h2._closed_streams) <= 1024


async def test_a_frame_that_is_too_long_is_not_waited_for(server: Server) -> None:
    async with Http2.connected(server.address) as client:
        client.write(http2.frame(http2.DATA, 0, 1, bytes(16_385))[:9])
        assert await the_end(client) == SIZE


def continued(block: bytes) -> bytes:
    """A header in frames of 16 KB."""
    pieces = [block[n : n + 16_384] for n in range(0, len(block), 16_384)]
    frames = [http2.frame(http2.CONTINUATION, 0, 1, piece) for piece in pieces[1:]]
    return b"".join([http2.frame(http2.HEADERS, 0, 1, pieces[0]), *frames])


@pytest.mark.parametrize(
    "block",
    [http2.call(PATH) + http2.header("x", "a" * 100_000), b"\x20" * 2000 + http2.call(PATH), b"\x01\x00" * 1000],
    ids=["long", "table sizes", "many fields"],
)
async def test_a_header_that_costs_too_much_is_not_decoded(server: Server, block: bytes) -> None:
    async with Http2.connected(server.address) as client:
        client.write(continued(block), http2.frame(http2.CONTINUATION, http2.END_HEADERS, 1))
        assert await the_end(client) == CALM
    assert not server.begun


async def test_headers_above_the_bound_are_refused_a_few_times(server: Server) -> None:
    """Each stream alone; 20 of them end the connection. They are short on the wire: an entry of the table, again and
    again."""
    entry = b"\x40\x01a" + http2.header("b", "x" * 3000)[3:]
    long = http2.call(PATH) + entry + b"\xbe" * 8
    again = http2.call(PATH) + b"\xbe" * 8
    async with Http2.connected(server.address) as client:
        for stream in range(1, 7, 2):
            client.write(http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, stream, long))
        await until(lambda: server.begun == 3)
        for stream in range(7, 107, 2):
            client.write(http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, stream, again))
        assert await the_end(client) == CALM


async def test_a_header_without_an_end_is_given_up(server: Server) -> None:
    """A client may send a header in pieces, and then has the time of a header for all of them."""
    server.header_seconds = 0.2
    block = http2.call(PATH)
    async with Http2.connected(server.address) as client:
        client.write(http2.frame(http2.HEADERS, 0, 1, block[:20]))
        client.write(http2.frame(http2.CONTINUATION, http2.END_HEADERS, 1, block[20:]))
        client.write(http2.frame(http2.DATA, http2.END_STREAM, 1, http2.message(b"question")))
        await until_frame(client, http2.HEADERS, http2.END_STREAM)
        client.write(http2.frame(http2.HEADERS, 0, 3, block[:20]))
        await until(lambda: not server.connections)


def test_fields_of_a_header_are_counted() -> None:
    block = http2.call(PATH, http2.header("x", "a" * 1000))
    assert fields(block) == 7
    assert fields(b"\x3f\xe1\x1f" + block) == 8
    assert fields(b"\x82\xff\x80\x01" + b"\x41\x01a") == 3
    assert fields(b"\x20" * 100_000) == FIELDS + 1
    assert fields(block[:3]) == 1
    assert fields(b"\xff" + b"\xff" * 100) < 20


async def test_our_table_of_headers_stays_small(server: Server) -> None:
    """Whatever the client allows: each header that is not in the table is looked for in all of it."""
    async with Http2.connected(server.address, http2.setting(HEADER_TABLE, (1 << 32) - 1)) as client:
        client.write(call(1))
        await until_frame(client, http2.HEADERS, http2.END_STREAM)
        assert server.one._h2.encoder.header_table_size == 4096


async def test_settings_that_nobody_knows_are_bounded(server: Server) -> None:
    async with Http2.connected(server.address) as client:
        for n in range(4):
            payload = b"".join(http2.setting(1000 + 60 * n + k, 1) for k in range(60))
            client.write(http2.frame(http2.SETTINGS, 0, 0, payload))
        assert await the_end(client) == CALM


async def test_a_client_that_leaves_is_served_to_the_end(server: Server) -> None:
    """GOAWAY with a stream open; h2 alone would not let us answer any more. More streams are refused."""
    server.go.clear()
    async with Http2.connected(server.address) as client:
        client.write(call(1), goaway(), FLOODS["ping"])
        await until_frame(client, http2.GOAWAY)
        client.write(call(3))
        frame = await until_frame(client, http2.RST_STREAM)
        assert frame.stream == 3
        server.go.set()
        assert (await until_frame(client, http2.HEADERS, http2.END_STREAM)).stream == 1
        assert await the_end(client) == b""
    assert server.begun == 1


async def test_what_is_no_call_and_is_taken_back(server: Server) -> None:
    """A content type that is not gRPC's, reset in the same breath."""
    other = b"".join(http2.header(*pair) for pair in {":method": "POST", ":scheme": "http", ":path": "/"}.items())
    async with Http2.connected(server.address) as client:
        client.write(
            http2.frame(http2.HEADERS, http2.END_HEADERS, 1, other + http2.header(":authority", "x")),
            FLOODS["reset"],
            call(3),
        )
        await until_frame(client, http2.HEADERS, http2.END_STREAM)


TAKEN_BACK = {  # what a client says on a stream in one write with its reset
    "many bytes": http2.frame(http2.DATA, 0, 3, b"\0\0\x0f\0\0" + bytes(16_000))
    + http2.frame(http2.DATA, 0, 3, bytes(16_384)) * 2,
    "a message": http2.frame(http2.DATA, 0, 3, http2.message(b"question")),
    "more room": http2.frame(http2.WINDOW_UPDATE, 0, 3, b"\0\0\0\1"),
}


@pytest.mark.parametrize("what", TAKEN_BACK)
async def test_a_stream_that_is_taken_back_at_once(server: Server, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls answer as messages come. The streams beside it go on."""

    async def echo(call: GrpcCall) -> None:
        over = asyncio.get_running_loop().create_future()
        call.begin()
        call.listen(call.send, over.set_result)
        await over
        call.end()

    monkeypatch.setattr(server, "serve", echo)
    async with Http2.connected(server.address, http2.setting(http2.INITIAL_WINDOW, 10)) as client:
        for stream in (1, 3):
            client.write(begin(stream))
            await until_frame(client, http2.HEADERS)
        client.write(http2.frame(http2.DATA, 0, 3, http2.message(b"question")))
        await until_frame(client, http2.DATA)  # its first bytes: the others wait for room
        reset = http2.frame(http2.RST_STREAM, 0, 3, b"\0\0\0\x08")
        client.write(TAKEN_BACK[what] + reset + begin(5))
        client.write(http2.frame(http2.DATA, http2.END_STREAM, 1))
        assert (await until_frame(client, http2.HEADERS, http2.END_STREAM)).stream == 1


async def test_a_stream_too_many_that_is_taken_back_at_once(server: Server) -> None:
    """The others go on, and it counts: whoever does it again and again is told to go."""
    server.go.clear()
    async with Http2.connected(server.address) as client:
        client.write(*[call(1 + 2 * n) for n in range(STREAMS)])
        await until(lambda: server.begun == STREAMS)

        def refused(first: int, many: int) -> list[bytes]:
            reset = [http2.frame(http2.RST_STREAM, 0, first + 2 * n, bytes(4)) for n in range(many)]
            return [begin(first + 2 * n) + reset[n] for n in range(many)]

        client.write(*refused(101, 2))
        client.write(FLOODS["ping"])
        await until_frame(client, http2.PING, http2.ACK)
        assert len(server.tasks) == STREAMS
        client.write(*refused(1001, 3000))
        assert await the_end(client) == CALM
    server.go.set()


async def test_calls_of_a_connection_that_breaks_the_rules_end_at_once(server: Server) -> None:
    """The client reads nothing, so the connection itself cannot end yet."""
    server.go.clear()
    async with Http2.connected(server.address) as client:
        client.write(call(1))
        await until(lambda: server.begun == 1)
        client.write(http2.frame(http2.PING, 0, 0, b"1"))  # eight bytes are the rule
        await until(lambda: not server.tasks)
        server.go.set()


async def test_a_client_that_takes_nothing_is_not_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing, so what is on its way out stays there."""
    monkeypatch.setattr(http2_connection, "ANSWER_SECONDS", 0.2)
    host, _, port = server.address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0))
    await until(lambda: len(server.connections) == 1)
    connection = server.one
    connection._transport.write(bytes(32 << 20))
    connection.close()
    await until(lambda: not server.connections)
    writer.close()


async def test_a_process_that_stood_still_asks_before_it_gives_a_client_up(server: Server) -> None:
    """Nobody was asked meanwhile: the client is pinged, and its silence counts from there."""
    async with Http2.connected(server.address) as client:
        client.write(call(1))
        await until_frame(client, http2.HEADERS, http2.END_STREAM)
        server.one._heard -= 1000  # so long ago the client was last heard, by a clock that went on
        server.one._look()
        async with patience():
            async for frame in client.frames(acknowledge=False):
                if frame.kind == http2.PING and not frame.flags & http2.ACK:
                    break
            else:
                raise AssertionError("the connection was ended")
        server.one._heard -= 1000
        server.one._look()
        assert await the_end(client) == b"", "it has not answered"


async def test_a_client_that_is_told_to_go_and_answers_no_ping(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_connection, "ANSWER_SECONDS", 0.2)
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0))
    await until(lambda: len(server.connections) == 1)
    server.one.go_away()
    async with patience():
        await reader.read()
    writer.close()


async def test_streams_on_their_way_are_served_when_the_client_is_told_to_go(server: Server) -> None:
    """The last open stream ends before the client has heard of it; another one is under way."""
    server.go.clear()
    async with Http2.connected(server.address) as client:
        client.write(call(1))
        await until(lambda: server.begun == 1)
        server.one.go_away()
        server.go.set()
        await until(lambda: not server.tasks)
        client.write(call(3))
        streams = set[int]()
        async with patience():
            async for frame in client.frames():
                if frame.kind == http2.HEADERS and frame.flags & http2.END_STREAM:
                    streams.add(frame.stream)
        assert streams == {1, 3}


# -- compressed messages
@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_compressed_message(encoding: str, pack: Any) -> None:
    packed = pack(b"x" * 1000)
    assert inflated(packed, encoding, 1000) == b"x" * 1000
    with pytest.raises(InvalidArgument, match="at most 999"):
        inflated(packed, encoding, 999)
    with pytest.raises(InvalidArgument, match="ends in its middle"):
        inflated(packed[:-6], encoding, 1000)
    with pytest.raises(InvalidArgument, match=f"is no {encoding}"):
        inflated(b"x" + packed, encoding, 1000)
    with pytest.raises(InvalidArgument, match="header does not tell"):
        inflated(packed, "identity", 1000)
