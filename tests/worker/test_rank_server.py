"""The server of a rank's lanes: who may call it, by certificates; its end."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from orca.v1 import worker_pb2 as pb
from orca.v1 import worker_pb2_grpc
from orca_common.address import split_address
from orca_common.errors import Unavailable
from orca_common.lanes.client import CallFailed
from orca_common.lanes.server import LaneCall, LaneServer, unary
from orca_common.protocol import CONTROLLER
from orca_common.roles import Role
from orca_common.tls import Certificates, MutualTls, Plaintext, Transport
from orca_local.authority import Authority
from orca_worker.rank.controller import ALLOWED, LEAVING


async def hello(request: pb.HelloRequest) -> pb.HelloResponse:
    return pb.HelloResponse(host=request.engine)


async def relay(call: LaneCall) -> bytes:
    over: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    call.listen(lambda message: None, over.set_result)
    assert await over is None
    return pb.RelayResponse().SerializeToString()


METHODS = {f"/{CONTROLLER}/Hello": unary(pb.HelloRequest, hello), f"/{CONTROLLER}/Relay": relay}  # that echo


@asynccontextmanager
async def serving(transport: Transport) -> AsyncIterator[tuple[LaneServer, str]]:
    server = LaneServer(METHODS, transport, ALLOWED, Unavailable(LEAVING))
    yield server, f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    await server.stop(1)


async def test_each_role_has_its_methods(tmp_path: Path) -> None:
    """A scheduler says Hello, a worker relays, for grpc.aio's client and for ours."""
    authority = Authority(tmp_path / "ca")
    tls = {role: MutualTls(Certificates(str(authority.issue(role)))) for role in (Role.SCHEDULER, Role.WORKER)}
    hello = pb.HelloRequest(engine="e-0")
    async with serving(tls[Role.WORKER]) as (_, address):
        for role, allowed in ((Role.SCHEDULER, True), (Role.WORKER, False)):
            connection = await tls[role].connect(address, Role.WORKER)
            asked = connection.ask(f"/{CONTROLLER}/Hello", hello, pb.HelloResponse, 10.0)
            relay = connection.call(f"/{CONTROLLER}/Relay", lambda answer: None)
            relay.close()
            async with tls[role].channel(address, Role.WORKER, ()) as channel:
                stub = worker_pb2_grpc.ControllerStub(channel)
                if allowed:
                    assert (await asked).host == (await stub.Hello(hello)).host == "e-0"
                else:
                    with pytest.raises(CallFailed, match="PERMISSION_DENIED"):
                        await asked
                    with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
                        await stub.Hello(hello)
            code = grpc.StatusCode.PERMISSION_DENIED if allowed else grpc.StatusCode.OK
            assert (await relay.over).code is code
            connection.close()


async def test_a_handshake_that_fails_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a client without a certificate, of one that speaks no TLS. One that leaves is none. The rank serves on."""
    caplog.set_level("INFO")
    authority = Authority(tmp_path / "ca")
    worker, scheduler = (MutualTls(Certificates(str(authority.issue(role)))) for role in (Role.WORKER, Role.SCHEDULER))
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    async with serving(worker) as (_, address), asyncio.timeout(10):
        host, port = split_address(address)
        for said, context in ((b"", None), (b"no TLS at all, but words", None), (b"hello", stranger)):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            writer.write(said)
            if said:
                with suppress(OSError):
                    assert await reader.read() == b""
            writer.close()
        connection = await scheduler.connect(address, Role.WORKER)
        hello = pb.HelloRequest(engine="e-0")
        assert (await connection.ask(f"/{CONTROLLER}/Hello", hello, pb.HelloResponse, 10.0)).host == "e-0"
        connection.close()
    told = [(record.levelname, record.msg, getattr(record, "error", "")) for record in caplog.records]
    assert told == [
        ("INFO", "a TLS handshake failed", error)
        for error in ("WRONG_VERSION_NUMBER", "PEER_DID_NOT_RETURN_A_CERTIFICATE")
    ]


async def test_iterations_without_an_answer() -> None:
    """Thousands of small messages, to which a rank in the middle says nothing."""
    async with serving(Plaintext()) as (_, address):
        connection = await Plaintext().connect(address, Role.WORKER)
        relay = connection.call(f"/{CONTROLLER}/Relay", lambda answer: None)
        for _ in range(10):
            for _ in range(500):
                relay.send(b"an iteration")
                connection.flush()
            await connection.ask(f"/{CONTROLLER}/Hello", pb.HelloRequest(), pb.HelloResponse, 10.0)
        relay.close()
        assert (await relay.over).code is grpc.StatusCode.OK
        connection.close()


async def test_a_stop_ends_what_is_left() -> None:
    async with serving(Plaintext()) as (server, address):
        connection = await Plaintext().connect(address, Role.WORKER)
        relay = connection.call(f"/{CONTROLLER}/Relay", lambda answer: None)
        relay.send(b"")
        async with asyncio.timeout(10):
            await server.stop(0)
            status = await relay.over
        assert status.code is grpc.StatusCode.UNAVAILABLE
