"""The gRPC server of all services: its one interceptor, health, and its end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import http2
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http2 import Http2

from orca_common.errors import ErrorReason, NotFound, Unavailable
from orca_common.grpc_server import GrpcServer, Guard, ServerCall
from orca_common.tls import Plaintext

SERVICE = "t.Test"
LEAVING = Unavailable("this server is leaving", reason=ErrorReason.ENDPOINT_LEAVING)
Check = health_pb2.HealthCheckRequest


class Servicer:
    """Methods of all four kinds, as generated code has them. Each call waits for `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.running = self.read = 0

    async def unary(self, request: BytesValue, call: ServerCall) -> BytesValue:
        self.running += 1
        try:
            await self.go.wait()
        finally:
            self.running -= 1
        match request.value:
            case b"refuse":
                raise NotFound("naïve: 50 %\n")
            case b"break":
                raise ValueError("a bug")
            case b"abort":
                await call.abort(grpc.StatusCode.DATA_LOSS, "aborted")
            case b"none":
                return None  # type: ignore[return-value]
            case _:
                return request
        raise AssertionError("it was aborted")

    async def down(self, request: BytesValue, call: ServerCall) -> AsyncIterator[BytesValue]:
        yield request
        await self.unary(request, call)
        yield request

    async def up(self, requests: AsyncIterator[BytesValue], call: ServerCall) -> BytesValue:
        return BytesValue(value=b"".join([request.value async for request in requests]))

    async def both(self, requests: AsyncIterator[BytesValue], call: ServerCall) -> AsyncIterator[BytesValue]:
        async for request in requests:
            self.read += 1
            yield request

    def handlers(self) -> grpc.GenericRpcHandler:
        wire: dict[str, Any] = {
            "request_deserializer": BytesValue.FromString,
            "response_serializer": BytesValue.SerializeToString,
        }
        methods = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary, **wire),
            "Down": grpc.unary_stream_rpc_method_handler(self.down, **wire),
            "Up": grpc.stream_unary_rpc_method_handler(self.up, **wire),
            "Both": grpc.stream_stream_rpc_method_handler(self.both, **wire),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)


@asynccontextmanager
async def serving(
    write_seconds: float = 30.0, guard: Guard | None = None
) -> AsyncIterator[tuple[GrpcServer, Servicer, grpc.aio.Channel, str]]:
    servicer = Servicer()
    server = GrpcServer((SERVICE,), Plaintext(), {}, LEAVING, options=[], guard=guard, write_seconds=write_seconds)
    server.server.add_generic_rpc_handlers((servicer.handlers(),))
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options) as channel:
        yield server, servicer, channel, address
    await server.stop(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def ended(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str, str]:
    """The status of a call that fails: its code, its sentence, and the reason for programs."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error, info = caught.value, error_details_pb2.ErrorInfo()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status_pb2.Status.FromString(value).details[0].Unpack(info)  # type: ignore[arg-type]
    return error.code(), error.details() or "", info.reason


async def all_of(call: Any) -> list[bytes]:
    return [BytesValue.FromString(message).value async for message in call]


def wrapped(value: bytes) -> bytes:
    return BytesValue(value=value).SerializeToString()


async def test_methods_of_all_kinds() -> None:
    async with serving() as (_, _, channel, _):
        one, two = wrapped(b"one"), wrapped(b"two")
        assert await channel.unary_unary(f"/{SERVICE}/Unary")(one) == one
        assert await all_of(channel.unary_stream(f"/{SERVICE}/Down")(one)) == [b"one", b"one"]
        assert await channel.stream_unary(f"/{SERVICE}/Up")(iter([one, two])) == wrapped(b"onetwo")
        assert await all_of(channel.stream_stream(f"/{SERVICE}/Both")(iter([one, two]))) == [b"one", b"two"]


async def test_errors_are_statuses(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (_, _, channel, _):
        unary = channel.unary_unary(f"/{SERVICE}/Unary")
        refused = (grpc.StatusCode.NOT_FOUND, "naïve: 50 %\n", "UNKNOWN_REQUEST")
        assert await ended(unary(wrapped(b"refuse"))) == refused
        assert await ended(all_of(channel.unary_stream(f"/{SERVICE}/Down")(wrapped(b"refuse")))) == refused
        assert (await ended(unary(wrapped(b"abort"))))[:2] == (grpc.StatusCode.DATA_LOSS, "aborted")
        code, sentence, reason = await ended(unary(wrapped(b"break")))
        assert (code, reason) == (grpc.StatusCode.INTERNAL, "BUG")
        assert sentence.startswith("internal error (trace id ")
        assert "a bug" in caplog.text
        assert (await ended(channel.unary_unary(f"/{SERVICE}/Nothing")(b"")))[::2] == (
            grpc.StatusCode.UNIMPLEMENTED,
            "UNSUPPORTED",
        )


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "is missing"),
        ([wrapped(b"one"), wrapped(b"two")], "is followed by a second one; this method takes one"),
        ([b"\xff"], f"not a valid request of /{SERVICE}/Unary (text fields must be UTF-8)"),
    ],
)
async def test_a_single_request_is_one_message(messages: list[bytes], problem: str) -> None:
    async with serving() as (_, servicer, channel, _):
        answer = await ended(channel.stream_unary(f"/{SERVICE}/Unary")(iter(messages)))
        assert answer == (grpc.StatusCode.INVALID_ARGUMENT, f"message: {problem}", "UNREADABLE_MESSAGE")
        assert not servicer.running


async def test_a_stop_ends_calls_unavailable() -> None:
    """Streams and others, as their client is told; and so does a second stop that gives less grace."""
    async with serving() as (server, servicer, channel, _):
        servicer.go.clear()
        calls = [
            channel.unary_unary(f"/{SERVICE}/Unary")(wrapped(b"x")),
            all_of(channel.unary_stream(f"/{SERVICE}/Down")(wrapped(b"x"))),
            all_of(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")),
        ]
        ends = [asyncio.create_task(ended(call)) for call in calls]
        await until(lambda: servicer.running == 2 and len(server.clients) == 1)
        patient = asyncio.create_task(server.stop(600))
        await server.stop(0)
        left = (grpc.StatusCode.UNAVAILABLE, "this server is leaving", "ENDPOINT_LEAVING")
        assert await asyncio.gather(*ends) == [left] * 3
        await patient
        assert not servicer.running


async def test_a_call_that_is_cancelled_leaves_nothing() -> None:
    async with serving() as (server, servicer, channel, _):
        servicer.go.clear()
        call = channel.unary_unary(f"/{SERVICE}/Unary")(wrapped(b"x"))
        await until(lambda: servicer.running == 1)
        call.cancel()
        await until(lambda: not servicer.running and not server.clients)


async def test_health_of_clients_beside_one_that_reads_nothing() -> None:
    """grpcio's own servicer writes under a lock: while one client of Watch reads nothing, no status changes."""
    async with serving() as (server, _, channel, address):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(Check(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        async with Http2.connected(address, http2.setting(http2.INITIAL_WINDOW, 0)) as client:
            client.write(
                http2.frame(http2.HEADERS, http2.END_HEADERS, 1, http2.call("/grpc.health.v1.Health/Watch")),
                http2.frame(http2.DATA, http2.END_STREAM, 1, http2.message(b"")),
            )
            await until(lambda: len(server.clients) == 2)
            for yes in (True, False) * 3:
                server.serving(yes)
                status = health_pb2.HealthCheckResponse.SERVING if yes else health_pb2.HealthCheckResponse.NOT_SERVING
                async with asyncio.timeout(10):
                    assert (await watch.read()).status == status
                    assert (await stub.Check(Check())).status == status
        assert (await ended(stub.Check(Check(service="t.Unknown"))))[0] is grpc.StatusCode.NOT_FOUND


class Counting(Guard):
    """Counts the calls that use memory, and the messages that were waited for."""

    def __init__(self) -> None:
        self.calls = self.reads = 0

    def count(self, call: ServerCall) -> None:
        self.calls += 1

    def over(self, call: ServerCall) -> None:
        self.calls -= 1

    def reading(self, call: ServerCall) -> AbstractAsyncContextManager[object]:
        self.reads += 1
        return super().reading(call)


async def test_messages_of_a_client_that_reads_nothing_wait() -> None:
    """Each one is read when the client has taken the answer to the one before. So no answers pile up."""
    guard = Counting()
    async with serving(guard=guard) as (server, servicer, _, address):
        async with Http2.connected(address, http2.setting(http2.INITIAL_WINDOW, 0)) as client:
            client.write(
                http2.frame(http2.HEADERS, http2.END_HEADERS, 1, http2.call(f"/{SERVICE}/Both")),
                http2.frame(http2.DATA, http2.END_STREAM, 1, http2.message(wrapped(b"question")) * 100),
            )
            await until(lambda: bool(server.clients))
            [call] = server._calls.open
            await until(lambda: call._writing is not None)
            assert guard.reads == servicer.read == 1
        await until(lambda: not server.clients)


async def test_a_client_that_reads_nothing_loses_its_stream() -> None:
    """The method ends. C-core keeps the waiting message until the client reads or leaves, and the call counts."""
    guard = Counting()
    async with serving(write_seconds=0.2, guard=guard) as (server, servicer, _, address):
        async with Http2.connected(address, http2.setting(http2.INITIAL_WINDOW, 0)) as client:
            reading = asyncio.create_task(ignore(client))
            large = wrapped(b"x" * 10_000)
            client.write(
                http2.frame(http2.HEADERS, http2.END_HEADERS, 1, http2.call(f"/{SERVICE}/Down")),
                http2.frame(http2.DATA, http2.END_STREAM, 1, http2.message(large)),
            )
            await until(lambda: bool(server.clients))
            [call] = server._calls.open
            await until(lambda: call._end is not None)
            assert not servicer.running
            assert guard.calls == 1
            reading.cancel()
        await until(lambda: not server.clients and not guard.calls)


async def ignore(client: Http2) -> None:
    async for _ in client.frames():
        pass
