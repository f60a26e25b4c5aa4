"""The gRPC door over HTTP/2, where gRPC's Python client does not take it: GOAWAY of both sides, and compression."""

import asyncio

import grpc
import http2
import pytest
from endpoint.harness import World, collect, generation, serving
from hpack import Decoder
from http2 import Http2

CHECK = "/grpc.health.v1.Health/Check"
MODEL = "/orca.v1.Orca/GetModel"


def opening(stream: int, path: str = CHECK) -> bytes:
    return http2.frame(http2.HEADERS, http2.END_HEADERS, stream, http2.call(path))


def rest(stream: int, raw: bytes = b"") -> bytes:
    return http2.frame(http2.DATA, http2.END_STREAM, stream, http2.message(raw))


async def until_end(client: Http2, stream: int, acknowledge: bool = True) -> bytes:
    """Reads until a stream has its trailers, and returns them."""
    async with asyncio.timeout(10):
        async for frame in client.frames(acknowledge):
            if (frame.kind, frame.stream) == (http2.HEADERS, stream) and frame.flags & http2.END_STREAM:
                return frame.payload
    raise AssertionError("the connection ended without a status")


async def goaway(client: Http2) -> int:
    """The last stream that the next GOAWAY names."""
    async with asyncio.timeout(10):
        async for frame in client.frames():
            if frame.kind == http2.GOAWAY:
                assert frame.payload[4:8] == bytes(4)  # no error
                return int.from_bytes(frame.payload[:4])
    raise AssertionError("the connection ended without GOAWAY")


async def test_a_call_that_crosses_goaway_is_served(orca: World) -> None:
    """The only stream of an aged connection ends. Before the client knows of the age, it sends another one."""
    async with (
        serving(orca.redis_url, orca.name, orca.model, connection_age=0.2) as other,
        Http2.connected(other.addresses["grpc"]) as client,
    ):
        client.write(opening(1))
        assert await goaway(client) == 2**31 - 1
        client.write(rest(1))
        await until_end(client, 1, acknowledge=False)
        client.write(opening(3), rest(3))
        await until_end(client, 3, acknowledge=False)
        client.write(http2.frame(http2.PING, http2.ACK, 0, b"leaving "))
        assert await goaway(client) == 3
        assert [frame async for frame in client.frames()] == []  # it is closed


async def test_a_client_that_says_goaway_hears_the_end_of_its_calls(orca: World) -> None:
    """As a Java client's `shutdown`: it opens nothing more, and waits for what it has opened."""
    async with Http2.connected(orca.serving.addresses["grpc"]) as client:
        client.write(opening(1, MODEL), http2.frame(http2.GOAWAY, 0, 0, bytes(8)))
        client.write(http2.frame(http2.PING, 0, 0, b"12345678"), rest(1))
        await until_end(client, 1)
        async with asyncio.timeout(10):
            assert [frame.kind async for frame in client.frames()] == []  # it is closed


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests(orca: World, compression: grpc.Compression) -> None:
    async with orca.background(lambda record: [7]):
        call = orca.stub.Generate(generation([5] * 100, max_new_tokens=1), compression=compression)
        assert (await collect(call))[-1].HasField("finished")


@pytest.mark.parametrize("encoding", ["snappy", "zstd"])
async def test_an_unknown_compression_is_unimplemented(orca: World, encoding: str) -> None:
    """By gRPC's protocol, and the answer says what there is."""
    async with Http2.connected(orca.serving.addresses["grpc"]) as client:
        headers = http2.call(MODEL, http2.header("grpc-encoding", encoding))
        client.write(http2.frame(http2.HEADERS, http2.END_HEADERS, 1, headers))
        client.write(http2.frame(http2.DATA, http2.END_STREAM, 1, b"\1" + bytes(3) + b"\1x"))
        trailers = dict(Decoder().decode(await until_end(client, 1), raw=True))
        assert trailers[b"grpc-status"] == b"12"
        assert trailers[b"grpc-accept-encoding"] == b"identity,deflate,gzip"
        assert encoding.encode() in trailers[b"grpc-message"]
