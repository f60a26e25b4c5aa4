"""The proxy in front of a real Redis: commands come twice, answers get lost, connections break."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from servers import RedisServer, redis_server

from orca_chaos.links import Direction, Link
from orca_chaos.redis_proxy import RedisProxy
from orca_common.errors import Unavailable
from orca_pool.link import Link as PoolLink


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
async def way(server: RedisServer) -> AsyncIterator[tuple[Link, PoolLink]]:
    """The link that a test disturbs, and a client behind it."""
    link = Link("client", "redis")
    proxy = RedisProxy(link, f"127.0.0.1:{server.port}")
    client = PoolLink(f"redis://{await proxy.start()}/0", patience=2)
    await client.command("DEL", "n")
    yield link, client
    link.heal()
    await client.close()
    await proxy.stop()


async def test_a_doubled_command_is_done_twice_and_answered_once(way: tuple[Link, PoolLink]) -> None:
    link, client = way
    link.double(1)
    assert await client.command("INCR", "n") == 2
    assert await client.command("INCR", "n") == 3
    long = "x" * 300_000  # more than one read
    link.double(1)
    assert await client.command("SET", "long", long) == b"OK"
    assert await client.command("GET", "long") == long.encode()


async def test_a_lost_command_is_sent_again_by_the_client(way: tuple[Link, PoolLink]) -> None:
    link, client = way
    link.lose(1)
    assert await client.command("INCR", "n") == 1


async def test_a_held_answer_is_no_answer_though_the_command_was_done(way: tuple[Link, PoolLink]) -> None:
    link, client = way
    link.hold(Direction.FROM)
    with pytest.raises(Unavailable):
        await client.command("INCR", "n")
    link.release(Direction.FROM)
    assert await client.command("GET", "n") == b"1"


async def test_a_severed_link_takes_no_connection_until_it_is_mended(way: tuple[Link, PoolLink]) -> None:
    link, client = way
    waiting = asyncio.create_task(client.blocking("BLPOP", "nothing", 30, wait=30))
    async with asyncio.timeout(10):
        while b"blocked_clients:1" not in await client.command("INFO", "clients"):
            await asyncio.sleep(0.01)
    link.sever()
    with pytest.raises(Unavailable):
        await client.command("PING")
    link.mend()
    assert await client.command("PING") == b"PONG"
    await client.command("LPUSH", "nothing", "one")
    assert await waiting == [b"nothing", b"one"], "the client has sent it again"
