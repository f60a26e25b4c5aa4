"""An endpoint that leaves: within its bound though Redis is frozen, and without a trace in the pool."""

import asyncio
import secrets
from pathlib import Path
from typing import Any

import grpc
import pytest
from endpoint.harness import World, collect, detail_of, generation, read, serving, until, world
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from redis.asyncio import Redis
from servers import redis_server

from orca_common.errors import Unavailable
from orca_endpoint.calls.delivery import Delivery
from orca_pool.pool import Pool

DRAIN, CHART = 0.2, 15.0  # seconds: CHART is what the chart gives beyond `drain_seconds`


async def test_a_drain_has_its_bound_though_redis_is_frozen(model: Path) -> None:
    """With a stream at each door."""
    with redis_server() as redis:
        async with world(redis.url, model, drain_seconds=DRAIN) as orca:
            stream = orca.stub.Generate(generation(max_new_tokens=3))
            await read(stream, 1)
            host, _, port = orca.serving.addresses["http"].rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            body = b'{"prompt": [5, 6], "max_tokens": 3, "stream": true}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: orca.serving.app.delivery.count == 2)
            redis.freeze()
            try:
                async with asyncio.timeout(DRAIN + CHART):
                    await orca.serving.app.drain()
                    await orca.serving.app.close()
            finally:
                redis.thaw()
                writer.close()
                stream.cancel()


async def test_streams_leave_an_endpoint_that_redis_refuses(model: Path) -> None:
    """The release has given Redis a password: the endpoint that leaves cannot ask who else is there. Its stream waited
    for the whole of `drain_seconds`."""
    with redis_server() as redis:
        async with world(redis.url, model, drain_seconds=3600) as orca:
            returning = orca.stub.Generate(generation(max_new_tokens=2, detach_grace=Duration(seconds=30)))
            request = await orca.engine.claim()
            await orca.engine.commit(request, 0, [10])
            await read(returning, 2)
            async with Redis.from_url(redis.url) as admin:
                await admin.config_set("requirepass", "new")
                await admin.client_kill_filter(_type="normal", skipme=True)
                draining = asyncio.create_task(orca.serving.app.drain())
                async with asyncio.timeout(CHART):
                    with pytest.raises(grpc.aio.AioRpcError) as ended:
                        await collect(returning)
                reason = detail_of(ended.value, error_details_pb2.ErrorInfo()).reason
                assert (ended.value.code(), reason) == (grpc.StatusCode.UNAVAILABLE, "ENDPOINT_LEAVING")
                await admin.config_set("requirepass", "")
            await draining


async def registered(orca: World) -> int:
    async with Redis.from_url(orca.redis_url) as redis:
        return await redis.zcard(f"orca:{{{orca.name}}}:endpoints")


async def test_an_endpoint_that_left_is_gone(orca: World) -> None:
    async with serving(orca.redis_url, orca.name, orca.model) as leaving:
        await leaving.app.drain()
        assert await registered(orca) == 1


class Held(Pool):
    """A pool whose renewals wait for `go`. `left`: somebody asked to remove a registration."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.go, self.asked = asyncio.Event(), asyncio.Event()
        self.go.set()
        self.left = False

    async def renew_endpoint(self, *arguments: Any, **more: Any) -> int | None:
        self.asked.set()
        await self.go.wait()
        return await super().renew_endpoint(*arguments, **more)

    async def leave_endpoint(self, incarnation: str) -> None:
        self.left = True
        await super().leave_endpoint(incarnation)


@pytest.mark.parametrize("late", [False, True], ids=["on its way", "after it"])
async def test_a_renewal_does_not_register_again(redis_url: str, late: bool) -> None:
    """Of an endpoint that leaves while a renewal is on its way, or is due just afterwards."""
    name = f"test-{secrets.token_hex(4)}"
    async with Held(redis_url, name) as pool, Redis.from_url(redis_url) as redis:
        delivery = Delivery(pool)
        renewing = asyncio.create_task(delivery.renew())
        try:
            await until(lambda: delivery.registered)
            if not late:
                pool.go.clear()
                pool.asked.clear()
                await pool.asked.wait()
            leaving = asyncio.create_task(delivery.leave())
            await asyncio.sleep(0)
            assert pool.left == late  # it waits for the renewal
            pool.go.set()
            async with asyncio.timeout(10):
                await leaving
                await renewing
            assert await redis.zcard(f"orca:{{{name}}}:endpoints") == 0
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)


class Away(Pool):
    """A pool that is away when an incarnation is to take the place of another one for the first time."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.refused, self.outages = False, 0

    @property
    def generation(self) -> int:
        return super().generation + self.outages

    async def renew_endpoint(self, *arguments: Any, **more: Any) -> int | None:
        if more.get("replaces") and not self.refused:
            self.refused = True
            raise Unavailable("away")
        return await super().renew_endpoint(*arguments, **more)


async def test_an_incarnation_replaces_the_one_before_it_at_the_second_try_too(redis_url: str) -> None:
    """Otherwise the streams of the one before would wait for the end of its lease."""
    name = f"test-{secrets.token_hex(4)}"
    async with Away(redis_url, name) as pool, Redis.from_url(redis_url) as redis:
        delivery = Delivery(pool)
        renewing = asyncio.create_task(delivery.renew())
        try:
            await until(lambda: delivery.registered)
            before = delivery.incarnation
            pool.outages += 1
            await until(lambda: pool.refused and delivery.registered and delivery.incarnation != before)
            registered: Any = await redis.zrange(f"orca:{{{name}}}:endpoints", 0, -1)
            assert registered == [delivery.incarnation.encode()]
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)


@pytest.mark.parametrize("steps", range(6))
async def test_renewals_end_when_cancelled_while_somebody_hurries_them(redis_url: str, steps: int) -> None:
    """`asyncio.wait_for` of Python 3.11 swallows a cancellation that comes as what it waits for ends."""
    async with Pool(redis_url, f"test-{secrets.token_hex(4)}") as pool:
        delivery = Delivery(pool)
        renewing = asyncio.create_task(delivery.renew())
        await until(lambda: delivery.registered)
        hurrying = asyncio.create_task(delivery.another(delivery.incarnation))
        for _ in range(1 + steps):
            await asyncio.sleep(0)
        renewing.cancel()
        ended, _ = await asyncio.wait([renewing], timeout=20)
        hurrying.cancel()
        renewing.cancel()
        assert ended
