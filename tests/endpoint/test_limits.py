"""What strangers may cost an endpoint, at both doors: each bound with a client that goes beyond it.

Most tests share one endpoint whose bounds are small.
"""

import asyncio
import gc
import json
import resource
import socket
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import http2
import pytest
from endpoint.harness import World, collect, generation, until, world
from endpoint.lines import lines_of
from hpack import Decoder
from http2 import Http2

import orca_client
from orca.v1 import orca_pb2 as pb
from orca_client import AsyncOrcaClient
from orca_common.errors import InvalidArgument, OrcaError, ResourceExhausted, Unavailable
from orca_endpoint.http.bodies import MAX_VALUES, check_values
from orca_endpoint.requests.limits import Limits
from orca_endpoint.requests.threads import Threads
from orca_endpoint.settings import EndpointSettings
from orca_pool.records import Reason

PATH = "/orca.v1.Orca/Generate"
SMALL = {
    "max_connections": 8,
    "max_peer_connections": 4,
    "max_peer_calls": 6,
    "max_streams": 3,
    "max_header_bytes": 4096,
    "max_body_bytes": 300_000,
    "write_timeout": 0.5,
}
HASTY: dict[str, Any] = SMALL | {"header_seconds": 0.8, "body_seconds": 0.6}


@pytest.fixture
async def small(redis_url: str, model: Path) -> AsyncIterator[World]:
    async with world(redis_url, model, **SMALL) as started:
        yield started


@pytest.fixture
async def hasty(redis_url: str, model: Path) -> AsyncIterator[World]:
    """Requests have little time to come, so no test of a count uses it."""
    async with world(redis_url, model, **HASTY) as started:
        yield started


async def http(orca: World, raw: bytes, *, eof: bool = False, source: str = "127.0.0.1") -> bytes:
    """What the HTTP door answers to these bytes until it closes the connection; empty when it resets it."""
    host, _, port = orca.serving.addresses["http"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    try:
        writer.write(raw)
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def connections(orca: World) -> Counter[str]:
    """HTTP connections that are open, by peer."""
    return orca.serving.app._http.connections.peers


def post(body: bytes, length: int | None = None, header: str = "") -> bytes:
    size = len(body) if length is None else length
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{header}"
    return f"{head}content-length: {size}\r\n\r\n".encode() + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


# -- a client that does not read
async def test_a_grpc_client_that_does_not_read_loses_its_calls(small: World) -> None:
    """Its window is 0, so nothing can be written to it. Its calls end and detach; others are served all the while."""
    async with Http2.connected(small.serving.addresses["grpc"], http2.setting(http2.INITIAL_WINDOW, 0)) as client:
        body = http2.message(generation(max_new_tokens=1).SerializeToString())
        for stream in (1, 3):
            client.write(
                http2.frame(http2.HEADERS, http2.END_HEADERS, stream, http2.call(PATH)),
                http2.frame(http2.DATA, http2.END_STREAM, stream, body),
            )
        for _ in range(2):
            claimed = await small.engine.claim()
            await small.engine.commit(claimed, 0, [7], Reason.LENGTH)
        await until(lambda: small.serving.app.delivery.count == 0)
        async with small.background(lambda record: [7]):
            responses = await collect(small.stub.Generate(generation(max_new_tokens=1)))
            assert responses[-1].HasField("finished")


@pytest.mark.usefixtures("punctual")
async def test_a_grpc_client_that_stops_reading_has_left(small: World) -> None:
    """A stream with more text than the window holds. The request ends as that of a client that left."""
    window = http2.setting(http2.INITIAL_WINDOW, 60)
    async with Http2.connected(small.serving.addresses["grpc"], window) as client:
        body = http2.message(generation(max_new_tokens=40).SerializeToString())
        client.write(
            http2.frame(http2.HEADERS, http2.END_HEADERS, 1, http2.call(PATH)),
            http2.frame(http2.DATA, http2.END_STREAM, 1, body),
        )
        claimed = await small.engine.claim()
        for n in range(20):
            await small.engine.commit(claimed, n, [7])
        await until(lambda: small.serving.app.delivery.count == 0)
        await small.serving.quiet()
        assert await small.pool.cancel(claimed.request_id) is False  # it has ended: its detach grace is 0


@pytest.mark.parametrize("path", ["/orca.v1.Orca/GetModel", "/grpc.health.v1.Health/Check"])
async def test_an_answer_that_is_not_taken_is_given_up(small: World, path: str) -> None:
    """Its client hears so when it reads again. C-core cannot end its stream before, so the call stays counted."""
    host, door, limits = small.serving.addresses["grpc"], small.serving.app._grpc, small.serving.app.limits
    async with Http2.connected(host, http2.setting(http2.INITIAL_WINDOW, 0)) as client:
        client.write(
            http2.frame(http2.HEADERS, http2.END_HEADERS, 1, http2.call(path)),
            http2.frame(http2.DATA, http2.END_STREAM, 1, http2.message(b"")),
        )

        async def status() -> None:
            async for frame in client.frames():
                if frame.kind == http2.HEADERS and frame.flags & http2.END_STREAM:
                    return
            raise AssertionError("the connection ended without a status")

        told = asyncio.create_task(status())
        await until(lambda: any(call._end for call in door._calls.open))
        assert (limits._calls.total(), told.done()) == (1, False)
        client.write(http2.frame(http2.WINDOW_UPDATE, 0, 1, (1 << 16).to_bytes(4)))
        async with asyncio.timeout(10):
            await told
    await until(lambda: not limits._calls)


async def test_an_http_client_that_does_not_read_is_cut_off(small: World) -> None:
    """It sends requests ahead, and the buffers of both systems fill with answers. Then nothing of it is left.

    Those of the systems are small here: 4 MB and more would hold all answers.
    """
    host, _, port = small.serving.addresses["http"].rpartition(":")
    listening = small.serving.app._http._socket
    assert listening is not None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    body = json.dumps({"prompt": [5, 6], "max_tokens": 150, "stream": True, "ignore_eos": True, "logprobs": 1})

    async def play() -> None:
        while True:
            claimed = await small.engine.claim()
            for first in range(0, 150, 50):
                await small.engine.commit(claimed, first, [7] * 50, Reason.LENGTH if first == 100 else None)

    playing = asyncio.create_task(play())
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.connect((host, int(port)))
    _, writer = await asyncio.open_connection(sock=client, limit=1)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    for _ in range(12):
        writer.write(post(body.encode()))
    await until(lambda: connections(small).total() > 0)
    await until(lambda: connections(small).total() == 0)
    writer.close()
    await small.serving.quiet()
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)


# -- sizes
async def test_a_long_header_is_refused_in_no_time(small: World) -> None:
    answer = await http(small, b"GET /v1/models HTTP/1.1\r\nx: " + b"a" * 8192)
    assert status_of(answer) == 431
    assert b"4096 bytes" in answer


async def test_a_header_below_the_bound_is_served_with_a_large_body_behind_it(small: World) -> None:
    """Header and body arrive in one piece: only the header counts."""
    body = json.dumps({"prompt": "x" * 100_000, "max_tokens": 1}).encode()
    answer = await http(small, post(body, header="connection: close\r\n"))
    assert status_of(answer) == 400
    assert b"positions" in answer


async def test_long_metadata_is_refused(small: World) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(small.stub.Generate(generation(), metadata=(("x", "a" * 8192),)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "metadata size exceeds" in (caught.value.details() or "")  # C-core's own answer


async def test_bodies_in_memory_are_bounded(small: World) -> None:
    """Half-sent bodies hold their bytes, at most 300,000, and no more of one host than stays free for others."""
    writers = []
    host, _, port = small.serving.addresses["http"].rpartition(":")
    limits: Limits = small.serving.app.limits
    small_body = post(b" " * 30_000, header="connection: close\r\n")

    async def hold(size: int, source: str) -> None:
        _, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
        held = limits._bytes
        writer.write(post(b" " * size, length=size + 9))
        writers.append(writer)
        await until(lambda: limits._bytes == held + size)

    for _ in range(2):
        await hold(60_000, "127.0.0.1")
    assert status_of(await http(small, small_body)) == 400, "150,000 are half"
    await hold(20_000, "127.0.0.1")
    assert b"of this host" in (refused := await http(small, small_body))
    assert status_of(refused) == 429
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(small.stub.Generate(pb.GenerateRequest(text="x" * 30_000, max_new_tokens=1)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status_of(await http(small, small_body, source="127.0.0.2")) == 400, "others have room"
    await hold(140_000, "127.0.0.2")  # a host's only body may take what is there
    refused = await http(small, small_body, source="127.0.0.3")
    assert status_of(refused) == 429
    assert b"of this host" not in refused
    for writer in writers:
        writer.close()
    await until(lambda: limits._bytes == 0)
    assert not limits._host_bytes


@pytest.mark.parametrize("method", ["Generate", "GenerateText"])
async def test_a_grpc_body_counts_until_the_pool_has_its_request(small: World, method: str) -> None:
    """However long its answer takes."""
    limits: Limits = small.serving.app.limits
    call = getattr(small.stub, method)(generation([5] * 100, max_new_tokens=1))
    await small.engine.claim()
    await until(lambda: limits._calls.total() == 1 and limits._bytes == 0)
    call.cancel()


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}], ids=str)
async def test_an_http_body_counts_until_the_pool_has_its_requests(small: World, more: dict[str, object]) -> None:
    """However long its answer takes."""
    limits: Limits = small.serving.app.limits
    host, _, port = small.serving.addresses["http"].rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(post(json.dumps({"prompt": [5] * 100, "max_tokens": 1, **more}).encode()))
    await small.engine.claim()
    await until(lambda: limits._calls.total() == 1 and limits._bytes == 0)
    writer.close()
    await small.serving.quiet()


async def test_a_stream_gets_no_window_beyond_its_message(orca: World) -> None:
    """A client that sends fast is not taken at its word: gRPC's probes of the network are off."""
    piece = http2.frame(http2.DATA, 0, 1, b"x" * 16_000)
    async with Http2.connected(orca.serving.addresses["grpc"]) as client:
        client.write(http2.frame(http2.HEADERS, http2.END_HEADERS, 1, http2.call(PATH)))
        client.write(http2.frame(http2.DATA, 0, 1, http2.message(b"")[:1] + (1 << 20).to_bytes(4)))
        windows, sent = [65_535], 5
        async with asyncio.timeout(20):
            async for frame in client.frames():
                pairs = [frame.payload[n : n + 6] for n in range(0, len(frame.payload), 6)]
                if frame.kind == http2.SETTINGS and not frame.flags & http2.ACK:
                    windows += [int.from_bytes(p[2:]) for p in pairs if int.from_bytes(p[:2]) == http2.INITIAL_WINDOW]
                if frame.kind == http2.WINDOW_UPDATE and frame.stream == 1:
                    while sent + 16_000 < 1 << 20:
                        client.write(piece)
                        sent += 16_000
                    client.write(http2.frame(http2.PING, 0, 0, b"barriers"))
                elif frame.kind == http2.PING and frame.payload == b"barriers":
                    break
        assert max(windows) < 1 << 17


async def test_large_inputs_wait_in_a_queue_with_a_size() -> None:
    threads, go = Threads("tokenizing", 1, 1, 9), threading.Event()
    try:
        running, waiting = (asyncio.create_task(threads.run(go.wait)) for _ in range(2))
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted, match="1 large inputs of this caller") as refused:
            await threads.run(go.wait)
        assert refused.value.reason == "ENDPOINT_FULL"
        go.set()
        assert await running
        assert await waiting
        assert await threads.run(go.wait)
    finally:
        go.set()
        threads.close()


class Input:
    """A large input; a bytes object would take no weak reference."""

    def read(self) -> None:
        """What a thread does with it."""


async def come_and_go(threads: Threads, inputs: list[Input], kept: weakref.WeakSet[Input]) -> None:
    kept.update(inputs)
    waiting = [asyncio.create_task(threads.run(one.read)) for one in inputs]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)


async def test_large_inputs_of_clients_that_left_take_no_memory() -> None:
    """While the thread is busy they come and go: nothing of them stays, and their places are free."""
    threads, go = Threads("tokenizing", 1, 4, 9), threading.Event()
    try:
        busy = asyncio.create_task(threads.run(go.wait))
        kept: weakref.WeakSet[Input] = weakref.WeakSet()
        for _ in range(8):
            await come_and_go(threads, [Input() for _ in range(4)], kept)
        await asyncio.sleep(0)  # asyncio itself keeps the last ones until its next turn
        gc.collect()
        assert len(kept) == 0
        go.set()
        assert await busy
    finally:
        go.set()
        threads.close()


async def test_a_large_input_counts_until_its_thread_has_read_it() -> None:
    """Its client has left, but the thread cannot be stopped."""
    threads, begun, go = Threads("large-inputs", 1, 0, 9), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait()

    try:
        running = asyncio.create_task(threads.run(work))
        await until(begun.is_set)
        for _ in range(2):
            running.cancel()
            await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted):
            await asyncio.wait_for(threads.run(begun.is_set), 10)
        assert not running.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await threads.run(begun.is_set)
    finally:
        go.set()
        threads.close()


async def test_a_large_input_that_is_refused_behind_its_client_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Its error was logged with its traceback: "exception was never retrieved"."""
    threads, begun, go = Threads("large-inputs", 1, 0, 9), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait()
        raise InvalidArgument("body", "is no JSON")

    try:
        running = asyncio.create_task(threads.run(work))
        await asyncio.to_thread(begun.wait)
        running.cancel()
        await asyncio.sleep(0)  # its cancellation has come
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        del running
        gc.collect()
        assert not caplog.messages
    finally:
        go.set()
        threads.close()


async def test_large_inputs_that_wait_at_the_end_are_refused() -> None:
    threads, go = Threads("large-inputs", 1, 1, 9), threading.Event()
    running, waiting = (asyncio.create_task(threads.run(go.wait)) for _ in range(2))
    await asyncio.sleep(0)
    threads.close()
    go.set()
    assert await running
    with pytest.raises(Unavailable, match="leaving"):
        await waiting


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt":[' + b"7," * MAX_VALUES + b"7]}",
        b"[" + b'"",' * MAX_VALUES + b'""]',
        b'{"a":"\\"", "b":[' + b"7," * MAX_VALUES + b"7]}",
        b'"' * (5 * MAX_VALUES),
    ],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(raw: bytes) -> None:
    with pytest.raises(InvalidArgument, match=r"body: has too many values"):
        check_values(raw)


def test_commas_in_a_prompt_are_no_values() -> None:
    check_values(json.dumps({"prompt": 'a,"b\\' * MAX_VALUES}).encode())


@pytest.mark.parametrize("body", [{"x" * 9000: 1}, {"model": "x" * 9000, "prompt": [5]}, {"prompt": [10**4000]}])
async def test_errors_echo_little(orca: World, body: dict[str, object]) -> None:
    answer = await http(orca, post(json.dumps(body).encode(), header="connection: close\r\n"))
    assert status_of(answer) in (400, 404)
    assert len(answer.split(b"\r\n\r\n", 1)[1]) < 700
    assert len(str(OrcaError("x" * 9000))) == 600


async def test_errors_of_unknown_paths_echo_little(orca: World) -> None:
    answer = await http(orca, b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert status_of(answer) == 404
    assert len(answer) < 700


# -- times
async def test_half_a_header_is_given_up(hasty: World) -> None:
    answer = await http(hasty, b"GET /v1/models HTTP/1.1\r\nx: ")
    assert status_of(answer) == 408
    assert b"header" in answer
    assert status_of(await http(hasty, b"")) == 408  # and a connection that says nothing


async def test_half_a_body_is_given_up(hasty: World) -> None:
    """A stream whose body was whole before goes on."""
    body = json.dumps({"prompt": [5], "max_tokens": 2, "stream": True}).encode()
    stream = asyncio.create_task(http(hasty, post(body, header="connection: close\r\n")))
    request = await hasty.engine.claim()
    await hasty.engine.commit(request, 0, [10])
    answer = await http(hasty, post(b"{", length=100))
    assert status_of(answer) == 408
    assert b"body" in answer
    await hasty.engine.commit(request, 1, [11], Reason.LENGTH)
    assert b"[DONE]" in await stream


async def test_half_a_message_is_given_up(hasty: World) -> None:
    """A gRPC call whose message does not come ends DEADLINE_EXCEEDED."""
    async with Http2.connected(hasty.serving.addresses["grpc"]) as client:
        client.write(http2.frame(http2.HEADERS, http2.END_HEADERS, 1, http2.call(PATH)))
        client.write(http2.frame(http2.DATA, 0, 1, http2.message(generation().SerializeToString())[:7]))
        said = await trailers(client)
        assert (said["grpc-status"], said["grpc-message"]) == ("4", "the request did not come within 0.6 s")


async def trailers(client: Http2) -> dict[str, str]:
    """The trailers of the first call that the server ends."""
    async with asyncio.timeout(10):
        async for frame in client.frames():
            if frame.kind == http2.HEADERS and frame.flags & http2.END_STREAM:
                return {str(name): str(value) for name, value in Decoder().decode(frame.payload)}
    raise AssertionError("the connection ended without a status")


async def test_a_connection_that_never_says_hello_is_closed(hasty: World) -> None:
    host, _, port = hasty.serving.addresses["grpc"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(10):
        while await reader.read(1 << 16):
            pass
    writer.close()


# -- counts
async def test_streams_of_a_connection_are_bounded(small: World) -> None:
    """The server tells the bound, and refuses the streams of a client that does not care."""
    async with Http2.connected(small.serving.addresses["grpc"]) as client:
        for stream in range(1, 21, 2):
            client.write(http2.frame(http2.HEADERS, http2.END_HEADERS, stream, http2.call(PATH)))
        told, refused = 0, 0
        async with asyncio.timeout(10):
            async for frame in client.frames():
                if frame.kind == http2.SETTINGS and not frame.flags & http2.ACK:
                    pairs = [frame.payload[n : n + 6] for n in range(0, len(frame.payload), 6)]
                    told += sum(int.from_bytes(p[2:]) for p in pairs if int.from_bytes(p[:2]) == http2.MAX_STREAMS)
                refused += frame.kind == http2.RST_STREAM
                if told and refused >= 7:
                    break
        assert told == SMALL["max_streams"]


async def test_the_client_library_opens_a_connection_more(small: World) -> None:
    """Six streams, of which a connection carries three; and a Cancel, which none of them holds up."""
    async with AsyncOrcaClient(small.serving.addresses["grpc"]) as client:
        streams = [client.generate([5, 6], max_new_tokens=4) for _ in range(6)]
        for stream in streams:
            assert isinstance(await anext(stream), orca_client.Accepted)
        assert await streams[0].cancel()
        await client.get_model()
    await small.serving.quiet()


async def test_connections_of_a_peer_are_bounded(small: World) -> None:
    host, _, port = small.serving.addresses["http"].rpartition(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
    for _, writer in opened:
        writer.write(b"GET /v1/models HTTP/1.1\r\n")
    await until(lambda: connections(small).total() == 4)
    assert await http(small, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n") == b""
    for _, writer in opened:
        writer.close()
    await until(lambda: connections(small).total() == 0)
    assert (
        status_of(await http(small, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")) == 200
    )


async def test_grpc_connections_are_bounded(small: World, caplog: pytest.LogCaptureFixture) -> None:
    """Eight may be open, one of which is the test's own; the next is closed, and no other client notices.

    The log has a line when the door is full, and one when there is room again.
    """
    caplog.set_level("INFO", "orca_endpoint.requests.limits")
    host, _, port = small.serving.addresses["grpc"].rpartition(":")
    await small.stub.GetModel(pb.GetModelRequest())
    async with asyncio.timeout(10):
        held = await asyncio.gather(*(_hello(host, int(port)) for _ in range(12)))
    assert held.count(None) >= 5
    await until(lambda: "refusing: gRPC connections" in caplog.messages)
    for writer in filter(None, held):
        writer.close()
    await until(lambda: "no longer refusing: gRPC connections" in caplog.messages)
    await small.stub.GetModel(pb.GetModelRequest())


async def _hello(host: str, port: int) -> asyncio.StreamWriter | None:
    """A connection, which is held; None: the server has closed it without its settings."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0))
        if await reader.read(9):
            return writer
        writer.close()
    except ConnectionError:
        pass
    return None


async def test_calls_of_a_peer_are_bounded() -> None:
    limits = Limits(EndpointSettings.load(model="m", max_peer_calls=1))
    with limits.call("a"), limits.call("b"), pytest.raises(ResourceExhausted, match="1 calls"), limits.call("a"):
        pass
    with limits.call("a"):
        pass


async def test_calls_of_a_grpc_peer_are_bounded(small: World) -> None:
    calls = [small.stub.Generate(generation()) for _ in range(3)]
    async with grpc.aio.insecure_channel(small.serving.addresses["grpc"], [("grpc.use_local_subchannel_pool", 1)]) as c:
        stub = type(small.stub)(c)
        calls += [stub.Generate(generation()) for _ in range(3)]
        for call in calls:
            assert (await call.read()).HasField("accepted")
        async with grpc.aio.insecure_channel(
            small.serving.addresses["grpc"], [("grpc.use_local_subchannel_pool", 1)]
        ) as d:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(type(small.stub)(d).Generate(generation()))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
    await small.serving.quiet()


@pytest.mark.parametrize("method", ["orca.v1.Orca/GetModel", "orca.v1.Orca/Cancel", "grpc.health.v1.Health/Check"])
async def test_half_sent_calls_of_a_grpc_peer_are_bounded(redis_url: str, model: Path, method: str) -> None:
    """Those of short methods count, too, with twice the room of streams: the fifth of a host that may have two ends.

    A stream is refused then, and served again when the half-sent calls have left.
    """
    async with world(redis_url, model, max_peer_calls=2) as orca:
        async with Http2.connected(orca.serving.addresses["grpc"]) as client:
            for stream in range(1, 11, 2):
                client.write(http2.frame(http2.HEADERS, http2.END_HEADERS, stream, http2.call(f"/{method}")))
                client.write(http2.frame(http2.DATA, 0, stream, http2.message(b"x")[:3]))
            said = await trailers(client)
            assert (said["grpc-status"], said["grpc-message"]) == ("8", "this peer has 4 calls here already")
            with pytest.raises(grpc.aio.AioRpcError, match="this peer has 4 calls here already"):
                await collect(orca.stub.Generate(generation(max_new_tokens=1)))
        await until(lambda: not orca.serving.app.limits._calls)
        async with orca.background(lambda record: [7]):
            assert (await collect(orca.stub.Generate(generation(max_new_tokens=1))))[-1].HasField("finished")


async def test_a_trusted_proxy_names_its_clients(redis_url: str, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each has the bounds of a host. A client that comes directly, not from a trusted proxy, has one name.

    The log has the name too, also one that begins like the proxy's address.
    """
    for proxies, codes in (("127.0.0.0/8, ::1", {"OK"}), ("10.0.0.0/8", {"OK", "RESOURCE_EXHAUSTED"})):
        async with world(redis_url, model, max_peer_calls=1, trusted_proxies=proxies) as orca:
            calls = [
                orca.stub.Generate(generation(), metadata=(("x-forwarded-for", f"1.1.1.1, 10.9.8.{n}"),))
                for n in range(4)
            ]
            found = set[str]()
            for call in calls:
                try:
                    await call.read()
                    found.add("OK")
                except grpc.aio.AioRpcError as error:
                    found.add(error.code().name)
            assert found == codes

            def peers() -> list[str]:
                return [line["peer"] for line in lines_of(caplog) if line["method"] == "GetModel"]

            caplog.clear()
            with caplog.at_level("INFO", "orca_endpoint.calls.line"):
                await orca.stub.GetModel(pb.GetModelRequest(), metadata=(("x-forwarded-for", "127.0.0."),))
                await until(lambda: bool(peers()))
            [peer] = peers()
            assert (peer == "127.0.0.") == (codes == {"OK"})
            for call in calls:
                call.cancel()


def test_trusted_proxies_are_addresses() -> None:
    with pytest.raises(SystemExit, match="trusted_proxies: 'proxy' does not appear to be an IPv4 or IPv6 network"):
        EndpointSettings.load(model="m", trusted_proxies="10.0.0.1, proxy")


def test_calls_that_must_be_possible_find_room_beside_streams() -> None:
    limits = Limits(EndpointSettings.load(model="m", max_open_calls=4))
    for n in range(4):
        limits.enter(f"host-{n}")
    for n in range(4):
        with pytest.raises(ResourceExhausted):
            limits.enter("other")
        limits.enter(f"host-{n}", room=2)
    with pytest.raises(ResourceExhausted):
        limits.enter("other", room=2)


async def test_a_limit_that_refuses_has_a_line_when_it_begins_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "orca_endpoint.requests.limits")
    limits = Limits(EndpointSettings.load(model="m", max_peer_calls=4))
    for _ in range(2):
        for _ in range(4):
            limits.enter("a")
        for _ in range(3):
            with pytest.raises(ResourceExhausted):
                limits.enter("a")
        limits.enter("a", room=2)
        for _ in range(5):
            limits.leave("a")
    told = [(record.getMessage(), getattr(record, "times", None)) for record in caplog.records]
    assert told == [("refusing: calls of a host", None), ("no longer refusing: calls of a host", 3)] * 2


def test_a_limit_that_is_full_again_at_once_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A host that ends calls and begins others cannot fill the log."""
    caplog.set_level("INFO", "orca_endpoint.requests.limits")
    limits = Limits(EndpointSettings.load(model="m", max_peer_calls=8))
    for _ in range(8):
        limits.enter("a")
    for _ in range(100):
        with pytest.raises(ResourceExhausted):
            limits.enter("a")
        limits.leave("a")
        limits.enter("a")
    assert caplog.messages == ["refusing: calls of a host"]
    for _ in range(8):
        limits.leave("a")
    assert caplog.messages[1:] == ["no longer refusing: calls of a host"]


async def test_rapid_reset_disturbs_nobody(orca: World) -> None:
    """One connection opens and resets streams as fast as it can. The calls of others all succeed."""
    ended = threading.Event()

    def attack() -> int:
        host, _, port = orca.serving.addresses["grpc"].rpartition(":")
        opened, stream = 0, 1
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0))
            while not ended.is_set():
                frames: list[bytes] = []
                for _ in range(200):
                    frames.append(http2.frame(http2.HEADERS, http2.END_HEADERS, stream, http2.call(PATH)))
                    frames.append(http2.frame(http2.RST_STREAM, 0, stream, b"\0\0\0\x08"))
                    stream += 2
                try:
                    connection.sendall(b"".join(frames))
                except OSError:  # the server has had enough
                    break
                opened += 200
        return opened

    attacking = asyncio.create_task(asyncio.to_thread(attack))
    async with orca.background(lambda record: [7]):
        for _ in range(30):
            responses = await collect(orca.stub.Generate(generation(max_new_tokens=1)))
            assert responses[-1].HasField("finished")
    ended.set()
    assert await attacking > 0


# -- descriptors
OUT_OF_DESCRIPTORS = """
import asyncio, os, resource, sys
from orca_common.errors import Unavailable
from orca_pool.link import Link

async def main():
    link = Link(sys.argv[1])
    held = []
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        await link.command("PING")
    except Unavailable as error:
        print("unavailable:", error)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    print(await link.command("PING"))
    await link.close()

asyncio.run(main())
"""


def test_a_link_without_descriptors_is_unavailable(redis_url: str) -> None:
    """It is served again as soon as there is one."""
    script = [sys.executable, "-c", OUT_OF_DESCRIPTORS, redis_url]
    done = subprocess.run(script, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("unavailable: the request pool is away: ")
    assert done.stdout.splitlines()[1] == "b'PONG'"


def test_descriptors_are_kept_in_reserve() -> None:
    """Connections of clients leave some for Redis and for files, whatever the settings say."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (300, 328))\n"
        "from orca_endpoint.requests.limits import connections_allowed\n"
        "print(connections_allowed(50), connections_allowed(4096), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["50", "100", "328"], done.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0
