"""The door behind the proxies of `examples/proxy`: attacks end there, and what honest clients say passes unchanged."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from endpoint.harness import World, collect, field_of, generation, ids_of, make_model, read, until, world
from hostile.attacks import ATTACKS
from hostile.proxies import PROXIES, installed, proxy
from hostile.stage import Endpoint, attacked, endpoint, engine
from hostile.test_attacks import BEHIND_PROXY, CROWDED, check
from properties import PART, covering
from servers import redis_server

from orca.v1 import orca_pb2 as pb
from orca.v1.orca_pb2_grpc import OrcaStub
from orca_pool.records import Reason

SECONDS = 0.7  # of each attack
DEADLINE = 10.0  # seconds of an honest call
QUIET = {  # short times that count for clients, so that a stream which waits in the queue is silent for longer
    "nginx": {"client_body_timeout 30s": "client_body_timeout 1s", "keepalive_timeout 60s": "keepalive_timeout 1s"},
    "haproxy": {
        "timeout client 60s": "timeout client 1s",
        "timeout http-keep-alive 60s": "timeout http-keep-alive 1s",
    },
}
SILENCE = 2.5  # seconds of such a stream

# Long: `make hostile` runs them alone, for an attack takes both cores.
pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module", params=PROXIES)
def kind(request: pytest.FixtureRequest) -> str:
    """A proxy that is installed."""
    if not installed(request.param):
        pytest.skip(f"{request.param} is not installed")
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def orca(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """An endpoint whose engine the test plays."""
    model = make_model(Path(tmp_path_factory.mktemp("checkpoint")) / "tiny")
    with redis_server() as redis:
        async with world(redis.url, model) as started:
            yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Endpoint]:
    """An endpoint process, and an engine that answers all its requests. The proxy tells it whose call it is."""
    model = make_model(Path(tmp_path_factory.mktemp("checkpoint")) / "tiny")
    with redis_server() as redis:
        settings = {"redis_url": redis.url, "pool": "proxied", "model": model, "trusted_proxies": "127.0.0.1"}
        async with engine(redis.url, "proxied"), endpoint(settings) as one:
            yield one


# CI sends all attacks but BEHIND_PROXY without a proxy, in `test_attacks.py`; through one those that need it, and half
# of the others.
NEED = (*CROWDED, *BEHIND_PROXY)
THROUGH = [*NEED, *[name for name in ATTACKS if name not in NEED][:: 1 if PART == 1 else 2]]


@pytest.mark.parametrize(("kind", "name"), covering(list(PROXIES), THROUGH, strength=1), indirect=["kind"])
async def test_another_host_is_served(started: Endpoint, kind: str, name: str) -> None:
    """An attack for a moment, each through each proxy in the night: honest clients and the endpoint notice nothing of
    it."""
    async with proxy(kind, started.addresses["grpc"]) as address:
        check(await attacked(started, name, SECONDS, address=address, deadline=DEADLINE, after=0))


async def test_a_stream_that_is_silent_for_long(orca: World, kind: str) -> None:
    """It waits for longer than the proxy waits for clients. Then its tokens come one by one, and its end."""
    async with (
        proxy(kind, orca.serving.addresses["grpc"], QUIET[kind]) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = OrcaStub(channel).Generate(generation(max_new_tokens=3))
        claimed = await orca.engine.claim()
        assert (await read(call, 1))[0].HasField("accepted")
        for n, token in enumerate((10, 11)):
            await asyncio.sleep(SILENCE / 2)
            await orca.engine.commit(claimed, n, [token])
            assert ids_of(await read(call, 1)) == [token]
        await orca.engine.commit(claimed, 2, [12], Reason.LENGTH)
        assert ids_of(await collect(call)) == [12]
        assert await call.code() is grpc.StatusCode.OK


async def test_an_error_keeps_its_details(orca: World, kind: str) -> None:
    """Its status, its sentence, and google.rpc's details."""
    async with proxy(kind, orca.serving.addresses["grpc"]) as address, grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as direct:
            await collect(orca.stub.Generate(generation(max_new_tokens=0)))
        with pytest.raises(grpc.aio.AioRpcError) as proxied:
            await collect(OrcaStub(channel).Generate(generation(max_new_tokens=0)))
    assert proxied.value.code() is direct.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert proxied.value.details() == direct.value.details()
    assert field_of(proxied.value) == field_of(direct.value) == "max_new_tokens"


async def test_a_deadline_passes(orca: World, kind: str) -> None:
    """The endpoint has it too: its call ends, though no client cancels it."""
    async with proxy(kind, orca.serving.addresses["grpc"]) as address, grpc.aio.insecure_channel(address) as channel:
        call = OrcaStub(channel).Generate(generation(max_new_tokens=3), timeout=1.0)
        await orca.engine.claim()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: orca.serving.app.delivery.count == 0)


async def test_a_cancellation_passes(orca: World, kind: str) -> None:
    """A client that leaves ends its call at the endpoint."""
    async with proxy(kind, orca.serving.addresses["grpc"]) as address, grpc.aio.insecure_channel(address) as channel:
        call = OrcaStub(channel).Generate(generation(max_new_tokens=3))
        await orca.engine.claim()
        assert (await read(call, 1))[0].HasField("accepted")
        assert orca.serving.app.delivery.count == 1
        call.cancel()
        await until(lambda: orca.serving.app.delivery.count == 0)


async def test_a_large_message_passes(orca: World, kind: str) -> None:
    """One of more bytes than any buffer of a proxy: the endpoint reads it whole, and says what is wrong with it."""
    async with proxy(kind, orca.serving.addresses["grpc"]) as address, grpc.aio.insecure_channel(address) as channel:
        request = pb.GenerateRequest(text="x" * 1_000_000, max_new_tokens=1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(OrcaStub(channel).Generate(request))
        assert "positions" in (caught.value.details() or "")


async def test_an_endpoint_that_is_away(kind: str) -> None:
    """Clients hear UNAVAILABLE, and may call again."""
    async with proxy(kind, "127.0.0.1:9") as address, grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await OrcaStub(channel).GetModel(pb.GetModelRequest(), timeout=DEADLINE)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
