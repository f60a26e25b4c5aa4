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
GZIP = http2.header("grpc-encoding", "gzip")


def opening(stream: int, path: str = CHECK) -> bytes:
    return http2.frame(http2.HEADERS, http2.END_HEADERS, stream, http2.call(path))


def rest(stream: int, raw: bytes = b"") -> bytes:
    return http2.frame(http2.DATA, http2.END_STREAM, stream, http2.message(raw))


async def until_end(client: Http2, stream: int) -> bytes:
    """Reads until a stream has its trailers, and returns them."""
    async with asyncio.timeout(10):
        async for frame in client.frames():
            if (frame.kind, frame.stream) == (http2.HEADERS, stream) and frame.flags & http2.END_STREAM:
                return frame.payload
    raise AssertionError("the connection ended without a status")


async def goaway(client: Http2, acknowledge: bool = True) -> int:
    """The last stream that the next GOAWAY names."""
    async with asyncio.timeout(10):
        async for frame in client.frames(acknowledge):
            if frame.kind == http2.GOAWAY:
                assert frame.payload[4:8] == bytes(4)  # no error
                return int.from_bytes(frame.payload[:4])
    raise AssertionError("the connection ended without GOAWAY")


async def test_a_call_that_crosses_goaway_is_served(orca: World) -> None:
    """A connection is told of its age. Before it has answered the ping that follows, it sends another call."""
    async with (
        serving(orca.redis_url, orca.name, orca.model, connection_age=0.2) as other,
        Http2.connected(other.addresses["grpc"]) as client,
    ):
        client.write(opening(1))
        assert await goaway(client, acknowledge=False) == 2**31 - 1
        client.write(opening(3), rest(3))
        await until_end(client, 3)
        client.write(rest(1))
        await until_end(client, 1)


async def test_a_client_that_says_goaway_hears_the_end_of_its_calls(orca: World) -> None:
    """As a Java client's `shutdown`: it opens nothing more, and waits for what it has opened."""
    async with Http2.connected(orca.serving.addresses["grpc"]) as client:
        client.write(opening(1, MODEL), http2.frame(http2.GOAWAY, 0, 0, bytes(8)))
        client.write(http2.frame(http2.PING, 0, 0, b"12345678"), rest(1))
        await until_end(client, 1)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests_are_refused(orca: World, compression: grpc.Compression) -> None:
    """4 KB may become 4 MB. The same call goes well without compression."""
    with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
        await collect(orca.stub.Generate(generation([5] * 100, max_new_tokens=1), compression=compression))
    async with orca.background(lambda record: [7]):
        answers = await collect(orca.stub.Generate(generation([5] * 100, max_new_tokens=1)))
    assert answers[-1].HasField("finished")


@pytest.mark.parametrize(("encoding", "status"), [("gzip", b"12"), ("snappy", b"13")])
async def test_a_compression_by_its_header_alone(orca: World, encoding: str, status: bytes) -> None:
    """UNIMPLEMENTED by gRPC's protocol, INTERNAL by C-core for one that it does not know. Both sentences say why."""
    async with Http2.connected(orca.serving.addresses["grpc"]) as client:
        headers = http2.call(MODEL, http2.header("grpc-encoding", encoding))
        client.write(http2.frame(http2.HEADERS, http2.END_HEADERS, 1, headers))
        client.write(http2.frame(http2.DATA, http2.END_STREAM, 1, b"\1" + bytes(3) + b"\1x"))
        trailers = dict(Decoder().decode(await until_end(client, 1), raw=True))
        assert trailers[b"grpc-status"] == status
        assert b"encoding" in trailers[b"grpc-message"] or b"gzip" in trailers[b"grpc-message"]


async def test_calls_that_end_while_they_are_answered(orca: World, caplog: pytest.LogCaptureFixture) -> None:
    """By their clients or by C-core, at any step. None is an error of ours."""
    async with (
        serving(orca.redis_url, orca.name, orca.model, trusted_proxies="127.0.0.1") as other,
        Http2.connected(other.addresses["grpc"]) as client,
    ):
        for first in range(1, 4001, 40):
            for stream in range(first, first + 36, 4):
                packed = http2.frame(http2.HEADERS, http2.END_HEADERS, stream, http2.call(MODEL) + GZIP)
                client.write(packed, rest(stream), opening(stream + 2, MODEL), rest(stream + 2))
                await asyncio.sleep(0)
                client.write(http2.frame(http2.RST_STREAM, 0, stream + 2, (8).to_bytes(4)))
            client.write(opening(first + 38, MODEL), rest(first + 38))
            await until_end(client, first + 38)
        await other.quiet()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_burst_of_calls_waits_and_is_served(orca: World) -> None:
    """2,000 calls of eight connections at once. C-core would drop some of those above 1,000 that wait to be begun."""
    address, streams = orca.serving.addresses["grpc"], range(1, 501, 2)

    async def statuses() -> set[str]:
        found, ended, decoder = set[str](), 0, Decoder()
        async with Http2.connected(address) as client:
            client.write(*(opening(stream, MODEL) + rest(stream) for stream in streams))
            async for frame in client.frames():
                if frame.kind == http2.HEADERS:
                    fields = {str(name): str(value) for name, value in decoder.decode(frame.payload)}
                    if frame.flags & http2.END_STREAM:
                        found.add(fields["grpc-status"])
                        ended += 1
                elif frame.kind == http2.RST_STREAM:
                    found.add("reset")
                    ended += 1
                if ended == len(streams):
                    break
        return found

    assert await asyncio.gather(*(statuses() for _ in range(8))) == [{"0"}] * 8
