"""Requests that no gRPC client sends, by raw frames: what C-core makes of each, and that neighbours stay."""

import asyncio
import gzip
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import http2
import pytest
from endpoint.harness import World, collect, generation, ids_of
from hpack import Decoder
from http2 import Frame, Http2

from orca.v1 import orca_pb2 as pb
from orca_pool.records import Reason

MODEL, GENERATE = "/orca.v1.Orca/GetModel", "/orca.v1.Orca/Generate"
NEIGHBOURS = 5
FIRST = 1 + 2 * NEIGHBOURS  # the stream of the malformed request


def headers(fields: bytes, stream: int = FIRST, flags: int = http2.END_HEADERS) -> bytes:
    return http2.frame(http2.HEADERS, flags, stream, fields)


def body(raw: bytes, stream: int = FIRST) -> bytes:
    return http2.frame(http2.DATA, http2.END_STREAM, stream, raw)


class Client:
    """A connection that keeps what the server said of each stream."""

    def __init__(self, http: Http2) -> None:
        self.http, self._decoder = http, Decoder()
        self.fields: dict[int, dict[str, str]] = {}
        self.reset: dict[int, int] = {}
        self.data: dict[int, bytes] = {}
        self.ended = False

    async def hear(self) -> None:
        async for frame in self.http.frames():
            self._take(frame)
        self.ended = True

    def _take(self, frame: Frame) -> None:
        if frame.kind == http2.HEADERS:
            said = {str(name): str(value) for name, value in self._decoder.decode(frame.payload)}
            self.fields.setdefault(frame.stream, {}).update(said)
        elif frame.kind == http2.DATA:
            self.data[frame.stream] = self.data.get(frame.stream, b"") + frame.payload
        elif frame.kind == http2.RST_STREAM:
            self.reset[frame.stream] = int.from_bytes(frame.payload)

    async def end_of(self, stream: int) -> str:
        """How a stream has ended: a gRPC status, an HTTP status, a reset, or with its connection."""
        async with asyncio.timeout(10):
            while True:
                fields = self.fields.get(stream, {})
                if "grpc-status" in fields:
                    return f"status {fields['grpc-status']}"
                if fields.get(":status", "200") != "200":
                    return f"HTTP {fields[':status']}"
                if stream in self.reset:
                    return f"reset {self.reset[stream]}"
                if self.ended:
                    return "the connection has ended"
                await asyncio.sleep(0.01)


@asynccontextmanager
async def connected(orca: World) -> AsyncIterator[Client]:
    async with Http2.connected(orca.serving.addresses["grpc"]) as http:
        client = Client(http)
        hearing = asyncio.create_task(client.hear())
        try:
            yield client
        finally:
            hearing.cancel()


OK, INVALID, UNIMPLEMENTED, INTERNAL = (f"status {number}" for number in (0, 3, 12, 13))
EMPTY = http2.message(b"")
PACKED = gzip.compress(b"")
MALFORMED = {  # frames of one request, and how it ends
    "a space behind the metadata": ([headers(http2.call(MODEL) + http2.header("x", "a ")), body(EMPTY)], OK),
    "300 fields of metadata": (
        [headers(http2.call(MODEL) + b"".join(http2.header(f"x-{n}", "a") for n in range(300))), body(EMPTY)],
        OK,
    ),
    "a content-length that is too long": (
        [headers(http2.call(MODEL) + http2.header("content-length", "7")), body(EMPTY)],
        OK,  # C-core does not look at it; the message has a length of its own
    ),
    "GET": ([headers(http2.call(MODEL, method="GET")), body(EMPTY)], "reset 2"),
    "PUT": ([headers(http2.call(MODEL, method="PUT")), body(EMPTY)], "reset 2"),
    # C-core takes any content type: what counts is that the body is gRPC's.
    "application/grpcfoo": ([headers(http2.call(MODEL, kind="application/grpcfoo")), body(EMPTY)], OK),
    "application/grpc-web": ([headers(http2.call(MODEL, kind="application/grpc-web")), body(EMPTY)], OK),
    "application/json": ([headers(http2.call(MODEL, kind="application/json")), body(b"{}")], INVALID),
    "application/grpc+proto": ([headers(http2.call(MODEL, kind="application/grpc+proto")), body(EMPTY)], OK),
    # It takes a message with an unknown compression flag for an empty one. GetModel's is empty; others name a field.
    "a compression flag of 2": ([headers(http2.call(MODEL)), body(b"\2" + bytes(4))], OK),
    "a compression flag of 255": ([headers(http2.call(MODEL)), body(b"\xff" + bytes(3) + b"\1x")], OK),
    "gzip that was not announced": (
        [headers(http2.call(MODEL)), body(b"\1" + struct.pack(">I", len(PACKED)) + PACKED)],
        INTERNAL,
    ),
    "gzip, and junk behind it": (
        [
            headers(http2.call(MODEL) + http2.header("grpc-encoding", "gzip")),
            body(b"\1" + struct.pack(">I", len(PACKED) + 4) + PACKED + b"junk"),
        ],
        UNIMPLEMENTED,
    ),
    "a second message": ([headers(http2.call(MODEL)), body(EMPTY + EMPTY)], INVALID),
    "no message": ([headers(http2.call(MODEL), flags=http2.END_HEADERS | http2.END_STREAM)], INVALID),
    "half a message": ([headers(http2.call(MODEL)), body(EMPTY[:3])], INVALID),
}


@pytest.mark.parametrize("what", MALFORMED)
async def test_a_malformed_request_ends_alone(orca: World, what: str) -> None:
    """Five streams of the same connection, as other clients of a proxy have them, go on to their end."""
    frames, end = MALFORMED[what]
    async with connected(orca) as client:
        request = http2.message(generation(max_new_tokens=2).SerializeToString())
        for stream in range(1, FIRST, 2):
            client.http.write(headers(http2.call(GENERATE), stream), body(request, stream))
        claimed = [await orca.engine.claim() for _ in range(NEIGHBOURS)]
        for one in claimed:
            await orca.engine.commit(one, 0, [7])
        client.http.write(*frames)
        assert await client.end_of(FIRST) == end
        for one in claimed:
            await orca.engine.commit(one, 1, [8], Reason.LENGTH)
        assert [await client.end_of(stream) for stream in range(1, FIRST, 2)] == [OK] * NEIGHBOURS
        assert not client.ended


@pytest.mark.parametrize("timeout", ["", "soon", "1", "-1S", "1s", "1.5S"])
async def test_a_malformed_deadline(orca: World, timeout: str) -> None:
    """C-core ends the call, and its sentence names the field. No engine sees the request."""
    async with connected(orca) as client:
        request = http2.message(generation(max_new_tokens=1).SerializeToString())
        client.http.write(headers(http2.call(GENERATE) + http2.header("grpc-timeout", timeout), 1), body(request, 1))
        assert await client.end_of(1) == INTERNAL
        assert client.fields[1]["grpc-message"] == "Error parsing 'grpc-timeout' metadata"


@pytest.mark.parametrize(("timeout", "end"), [("50m", "status 4"), ("999999999S", OK), ("1 H", OK)])
async def test_a_deadline(orca: World, timeout: str, end: str) -> None:
    """A call ends with it. Two that gRPC's protocol does not have, C-core takes for what they say."""
    async with connected(orca) as client:
        request = http2.message(generation(max_new_tokens=1).SerializeToString())
        client.http.write(headers(http2.call(GENERATE) + http2.header("grpc-timeout", timeout), 1), body(request, 1))
        if end == OK:  # on a busy machine the other one's deadline passes before the pool has the request
            await orca.engine.answer(await orca.engine.claim(), [7])
        assert await client.end_of(1) == end


async def test_a_client_of_the_status_port_that_leaves(orca: World, capfd: pytest.CaptureFixture[str]) -> None:
    """It resets its connection before the answer. No traceback is printed, and the next one is answered."""
    host, _, port = orca.serving.addresses["status"].rpartition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.sendall(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await asyncio.to_thread(answered, host, int(port))
    assert "Traceback" not in capfd.readouterr().err


def answered(host: str, port: int) -> None:
    """Asks the status port, and checks that it answers."""
    with socket.create_connection((host, port), timeout=10) as one:
        one.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        assert one.recv(64).startswith(b"HTTP/1.0 200")


async def test_an_honest_call_beside(orca: World) -> None:
    """The engine that this file plays answers."""
    call = orca.stub.Generate(generation(max_new_tokens=1))
    await orca.engine.answer(await orca.engine.claim(), [10])
    assert ids_of(await collect(call)) == [10]
    assert (await orca.stub.GetModel(pb.GetModelRequest())).name
