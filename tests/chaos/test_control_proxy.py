"""The proxy of the control plane, in front of a real gRPC server: bytes, statuses and metadata pass, faults do harm."""

import asyncio
import threading
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import grpc
import pytest

from orca.v1 import worker_pb2 as pb
from orca.v1.worker_pb2_grpc import (
    ControllerServicer,
    ControllerStub,
    SupervisorServicer,
    SupervisorStub,
    add_ControllerServicer_to_server,
    add_SupervisorServicer_to_server,
)
from orca_chaos import network
from orca_chaos.links import Direction, Link
from orca_chaos.network import Network


class Rank(ControllerServicer):
    """Counts what comes, and echoes heartbeats."""

    def __init__(self) -> None:
        self.hellos: list[tuple[pb.HelloRequest, Any]] = []
        self.formations: list[pb.FormRequest] = []

    async def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloResponse:  # noqa: N802
        self.hellos.append((request, dict(context.invocation_metadata())))
        if request.engine == "refused":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "an old term", (("why", "because"),))
        return pb.HelloResponse(host=request.engine, pid=len(self.hellos))

    async def Form(self, request: pb.FormRequest, context: Any) -> pb.FormResponse:  # noqa: N802
        self.formations.append(request)
        return pb.FormResponse(slots=7)

    async def Run(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.Report]:  # noqa: N802
        async for message in request_iterator:
            yield pb.Report(heartbeat=message.heartbeat)


class Pod(SupervisorServicer):
    """Tells one table of two ranks."""

    def __init__(self, addresses: list[str]) -> None:
        self._entries = [pb.RankEntry(local_rank=n, address=a, pid=n + 1) for n, a in enumerate(addresses)]

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.RankTable]:  # noqa: N802
        yield pb.RankTable(ranks=self._entries)
        await asyncio.Event().wait()


class World:
    """A rank and its pod's supervisor, and how a scheduler reaches them."""

    def __init__(self) -> None:
        self.rank, self.network = Rank(), Network()
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> None:
        self.real = await self._serve(lambda server: add_ControllerServicer_to_server(self.rank, server))
        pod = await self._serve(
            lambda server: add_SupervisorServicer_to_server(Pod([self.real, "127.0.0.1:1"]), server)
        )
        self.supervisor = await self.network.route("scheduler-0", "supervisor-0", pod)
        self.address = await self.network.route("scheduler-0", "rank-0.0", self.real)
        self.link: Link = self.network.link("scheduler-0", "rank-0.0")
        self.channel = grpc.aio.insecure_channel(self.address)
        self.stub: Any = ControllerStub(self.channel)

    async def _serve(self, add: Any) -> str:
        server = grpc.aio.server()
        add(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._servers.append(server)
        return f"127.0.0.1:{port}"

    async def die(self) -> None:
        """The rank's process ends."""
        await self._servers[0].stop(0)

    async def stop(self) -> None:
        self.network.heal()
        await self.channel.close()
        await self.network.close()
        for server in self._servers:
            await server.stop(0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.start()
    yield world
    await world.stop()


async def test_calls_pass_with_metadata_and_status(world: World) -> None:
    answer = await world.stub.Hello(pb.HelloRequest(engine="e", term=3), metadata=(("a", "b"),), timeout=10)
    assert (answer.host, answer.pid) == ("e", 1)
    assert world.rank.hellos[0][1]["a"] == "b"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await world.stub.Hello(pb.HelloRequest(engine="refused"), timeout=10)
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "an old term")
    assert ("why", "because") in list(refused.value.trailing_metadata() or ())


async def test_a_doubled_call_is_called_twice(world: World) -> None:
    world.link.double(1)
    assert (await world.stub.Hello(pb.HelloRequest(engine="e"), timeout=10)).pid == 2


async def test_a_lost_message_ends_its_call(world: World) -> None:
    world.link.lose(1)
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await world.stub.Hello(pb.HelloRequest(engine="e"), timeout=10)
    assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not world.rank.hellos


async def test_a_stream_is_doubled_held_and_cut(world: World) -> None:
    lane = world.stub.Run(timeout=20)
    await lane.write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=1)))
    assert (await lane.read()).heartbeat.number == 1
    world.link.double(1)
    await lane.write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=2)))
    assert [(await lane.read()).heartbeat.number for _ in range(2)] == [2, 2]
    world.link.hold(Direction.FROM)
    await lane.write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=3)))
    reading = asyncio.ensure_future(lane.read())
    assert not reading.done()
    world.link.release(Direction.FROM)
    assert (await reading).heartbeat.number == 3
    world.link.sever()
    with pytest.raises(grpc.aio.AioRpcError) as cut:
        await lane.read()
    assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError):
        await world.stub.Hello(pb.HelloRequest(engine="e"), timeout=10)


async def test_ranks_are_told_behind_proxies_to_schedulers_and_to_each_other(world: World) -> None:
    async with grpc.aio.insecure_channel(world.supervisor) as channel:
        table = await SupervisorStub(channel).Watch(pb.WatchRequest()).read()
    told = [entry.address for entry in table.ranks]
    assert told[0] == world.address
    assert told[1] not in ("127.0.0.1:1", told[0])
    await world.stub.Form(pb.FormRequest(controllers=told), timeout=10)
    [got] = world.rank.formations
    assert got.controllers[0] == told[0]  # itself
    assert got.controllers[1] not in (told[1], "127.0.0.1:1")  # its peer, by a way of its own
    assert [link.name for link in world.network.links if link.source == "rank-0.0"] == ["rank-0.0 > rank-0.1"]


async def test_a_proxy_listens_only_while_its_process_does(world: World) -> None:
    await world.die()
    host, port = world.address.split(":")

    async def refused() -> bool:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return True
        writer.close()
        return False

    async with asyncio.timeout(10):
        while not await refused():
            await asyncio.sleep(0.01)


async def test_a_look_that_began_before_a_proxy_was_made_says_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may have begun to listen since. The proxy would end for a moment, and its calls with it."""
    first, next_one, over = threading.Event(), threading.Event(), [threading.Event(), threading.Event()]
    listening, looks = network.listening, count(1)

    def look() -> frozenset[int]:
        ports, n = listening(), next(looks)
        if n == 1:
            first.set()
            over[0].wait(60)
        elif n == 4:  # the two before were of the proxies
            next_one.set()
            over[1].wait(60)
        return ports

    monkeypatch.setattr(network, "listening", look)
    world = World()
    assert await asyncio.to_thread(first.wait, 60)
    await world.start()
    over[0].set()
    try:
        assert await asyncio.to_thread(next_one.wait, 60)
        assert (await world.stub.Hello(pb.HelloRequest(engine="e"), timeout=10)).pid == 1
    finally:
        over[1].set()
        await world.stop()
