"""The connections of orca_pool.link while Redis is away, frozen, killed or restarted, and when reads are cancelled."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
from listening import forwarding, listening
from pool.lab import tokens_of
from redis import Redis
from redis.exceptions import ResponseError
from servers import KINDS, RedisServer, redis_server

from orca_common.errors import FailedPrecondition, Unavailable
from orca_pool.pool import Pool
from orca_pool.records import Attached, CommitRow, EngineInfo, Reason, Refusal
from orca_pool.scripts import SCHEMA
from orca_pool.wire import pack_tokens

CALL = {"deadline_in": None, "detach_grace": 0.0, "endpoint": "e", "attempt": 1, "max_waiting": 8}


@pytest.fixture(params=KINDS)
def own(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server that the test may break, with `appendfsync always`."""
    with redis_server(request.param) as server:
        yield server


@pytest.fixture
async def pool(own: RedisServer) -> AsyncIterator[Pool]:
    async with Pool(own.url, "link", patience=1) as pool:
        await pool.renew_endpoint("e", register=True)
        term = await pool.acquire("g", "s", None)
        assert term is not None
        await pool.renew("g", "s", term, form=EngineInfo("g", 1, 1, 64, 0))
        yield pool


async def start_request(pool: Pool) -> CommitRow:
    """A claimed request, as the first row that its engine will commit."""
    assert isinstance(await pool.submit("r", b"record", "d", 8, 8, **CALL), Attached)
    term = (await pool.renew_scheduler("s"))[0]["g"].term
    answer = await pool.claim("g", "s", term, 0, count=1, slots=64, total=64)
    assert answer is not None
    return CommitRow("r", answer.requests[0].claim, 0, pack_tokens(tokens_of(0, 2)), None)


async def commit(pool: Pool, row: CommitRow) -> list[int] | None:
    term = (await pool.renew_scheduler("s"))[0]["g"].term
    answer = await pool.commit("g", "s", term, [row])
    return None if answer is None else answer.rows


async def test_a_read_waits_for_the_commit(pool: Pool) -> None:
    row = await start_request(pool)
    reading = asyncio.create_task(pool.read("e", None, wait=20))
    await asyncio.sleep(0)
    assert await commit(pool, row) == [-1]
    [entry] = await reading
    assert entry.number == 1
    assert entry.packets[0].tokens == tokens_of(0, 2)
    assert await pool.read("e", entry.cursor, wait=0.01) == []


async def test_hints_wait_and_are_told_once(pool: Pool) -> None:
    cursor, hints = await pool.hints("g", None, wait=0)
    assert (cursor, hints) == (b"0", [])
    term = (await pool.renew_scheduler("s"))[0]["g"].term
    await pool.claim("g", "s", term, 0, count=1, slots=64, total=64)  # finds nothing, and so asks for a hint
    waiting = asyncio.create_task(pool.hints("g", None, wait=20))
    await asyncio.sleep(0)
    await start_request(pool)
    cursor, hints = await waiting
    assert hints == [""]
    await pool.cancel("r")
    assert (await pool.hints("g", cursor, wait=1))[1] == ["r"]


async def test_a_cancelled_read_disturbs_nothing(pool: Pool) -> None:
    row = await start_request(pool)
    readings = [asyncio.create_task(pool.read("e", None, wait=20)) for _ in range(5)]
    await pool.cancel("nobody")
    for reading in readings:
        reading.cancel()
    assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*readings, return_exceptions=True))
    assert await commit(pool, row) == [-1]
    assert [entry.number for entry in await pool.read("e", None, wait=5)] == [1]
    assert pool.generation == 0


async def test_a_cancelled_operation_leaves_no_answer_for_another(pool: Pool) -> None:
    await start_request(pool)
    for _ in range(20):
        task = asyncio.create_task(pool.attach("r", endpoint="e", attempt=1))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await pool.cancel("nobody") is None


async def test_a_killed_redis_kept_all_it_acknowledged(own: RedisServer, pool: Pool) -> None:
    row = await start_request(pool)
    assert await commit(pool, row) == [-1]
    own.restart()
    found = await pool.attach("r", endpoint="e", attempt=2)
    assert isinstance(found, Attached)
    assert found.tokens == tokens_of(0, 2)
    assert pool.generation == 1
    assert await commit(pool, CommitRow("r", row.claim, 2, pack_tokens(tokens_of(2, 1)), Reason.LENGTH)) == [-1]
    assert pool.generation == 1


async def test_a_blocked_read_over_a_restart(own: RedisServer, pool: Pool) -> None:
    """A read that waits when Redis dies goes on at the new server, however long it took until that was there."""
    reading = asyncio.create_task(pool.read("e", None, wait=20))
    await pool.cancel("nobody")
    own.kill()
    with pytest.raises(Unavailable, match="the request pool is away: no server listens at"):
        await pool.cancel("unknown")
    assert not reading.done()
    own.restart()
    row = await start_request(pool)
    assert pool.generation == 1
    assert await commit(pool, row) == [-1]
    assert len(await reading) == 1
    assert pool.generation == 1


async def test_exchanges_of_an_outage_are_made_when_it_is_over(own: RedisServer) -> None:
    """A stream waits for the server's start, and not for a pause of ours behind it: none of them fails."""
    async with Pool(own.url, "outage", patience=60) as pool:
        await pool.cancel("unknown")
        own.kill()
        exchanges = [asyncio.create_task(pool.cancel("unknown")) for _ in range(64)]
        async with asyncio.timeout(20):
            while pool._link._unreached is None:
                await asyncio.sleep(0.01)
        own.restart()
        assert await asyncio.gather(*exchanges) == [None] * 64
        assert pool.generation == 1


@asynccontextmanager
async def closing_front() -> AsyncIterator[tuple[str, list[None]]]:
    """A server that takes each connection and closes it, as a balancer without servers does: its URL, and a list that
    grows with each connection."""
    dials: list[None] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dials.append(None)
        writer.close()

    async with listening(accept) as front:
        yield f"redis://127.0.0.1:{front}", dials


async def test_one_exchange_looks_for_a_server_that_is_away() -> None:
    """All others wait for it, and those that wait for their turn say why, too."""
    async with closing_front() as (url, dials), Pool(url, "away", patience=0.5) as pool:
        ends = await asyncio.gather(*(pool.cancel("unknown") for _ in range(100)), return_exceptions=True)
    assert all(isinstance(end, Unavailable) and str(end).startswith("the request pool is away: ") for end in ends)
    assert 1 < len(dials) < 50


async def test_a_look_that_gets_no_answer_begins_again() -> None:
    """As at a node that is gone while its name leads to another one by now. A read may look for as long as it waits,
    and all other exchanges wait for its look."""
    dials, again, ended = 0, asyncio.Event(), asyncio.Semaphore(0)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal dials
        dials += 1
        if dials == 2:
            again.set()
        with suppress(ConnectionError):
            await reader.read()  # until the other side closes
        writer.transport.abort()
        ended.release()

    async with listening(accept) as front:
        url = f"redis://127.0.0.1:{front}"
        async with Pool(url, "silent", patience=0.2) as pool:
            reading = asyncio.create_task(pool.read("e", None, wait=3600))
            try:
                async with asyncio.timeout(10):
                    await again.wait()
            finally:
                reading.cancel()
                await asyncio.wait([reading])
                for _ in range(dials):
                    await ended.acquire()


async def test_a_frozen_redis_is_unavailable_in_time(own: RedisServer, pool: Pool) -> None:
    own.freeze()
    with pytest.raises(Unavailable, match=r"did not answer within 1 s"):
        await pool.cancel("nobody")
    own.thaw()
    await pool.cancel("nobody")
    assert pool.generation == 1


async def test_a_bound_holds_after_a_longer_one(own: RedisServer, pool: Pool) -> None:
    """The exchange before it, on the same connection, might have lasted for 21 s."""
    await commit(pool, await start_request(pool))
    async with Pool(own.url, "link", patience=1) as other:
        assert await other.read("e", None, wait=20)
        own.freeze()
        with pytest.raises(Unavailable, match=r"did not answer within 1 s"):
            async with asyncio.timeout(10):
                await other.cancel("nobody")
        own.thaw()


async def test_an_answer_after_the_timer_of_an_earlier_exchange(own: RedisServer, pool: Pool) -> None:
    """The timer that an exchange leaves behind ends no later one that has time."""
    await pool.cancel("nobody")  # its timer ends a second later
    async with asyncio.timeout(10):
        assert await pool.read("e", None, wait=1.5) == []
    assert pool.generation == 0


async def test_a_busy_server_is_away_for_a_new_connection_too(own: RedisServer) -> None:
    """It answers so to whatever the connection begins with."""
    asked = Redis(port=own.port)
    asked.config_set("busy-reply-threshold", 1)
    async with Pool(own.url, "busy", patience=60) as busy, Pool(own.url, "busy") as fresh:
        await busy.cancel("unknown")
        running = asyncio.create_task(busy._link.command("EVAL", "while true do end", 0))
        await asyncio.sleep(0)  # it is sent
        with pytest.raises(Unavailable, match="cannot serve now: BUSY"):
            await fresh.cancel("unknown")
        asked.script_kill()
        with pytest.raises(ResponseError):
            await running
        assert await fresh.cancel("unknown") is None


async def test_a_redis_that_is_not_there_is_unavailable(own: RedisServer) -> None:
    own.kill()
    async with Pool(own.url, "link") as pool:
        with pytest.raises(Unavailable, match="away"):
            await pool.cancel("nobody")
        own.restart()
        await pool.cancel("nobody")


async def test_scripts_are_given_again_to_a_redis_that_lost_them(pool: Pool) -> None:
    await pool._link.command("SCRIPT", "FLUSH")
    assert await pool.cancel("nobody") is None


async def test_without_memory_what_is_there_goes_on(pool: Pool) -> None:
    """At `maxmemory`, new work is refused, and every other operation succeeds."""
    for request_id in ("r", "other"):
        assert isinstance(await pool.submit(request_id, b"record", "d", 8, 8, **CALL), Attached)
    await pool._link.command("CONFIG", "SET", "maxmemory", 1)
    assert await pool.submit("new", b"record", "d", 8, 8, **CALL) is Refusal.MEMORY
    assert isinstance(await pool.submit("r", b"record", "d", 8, 8, **CALL), Attached)  # its answer may have been lost
    engines, *_ = await pool.renew_scheduler("s")
    term = engines["g"].term
    answer = await pool.claim("g", "s", term, 0, count=8, slots=64, total=64)
    assert answer is not None
    claims = {held.request_id: held.claim for held in answer.requests}
    assert await commit(pool, CommitRow("r", claims["r"], 0, pack_tokens(tokens_of(0, 2)), Reason.LENGTH)) == [-1]
    await pool.give_back("g", "s", term, {"other": (claims["other"], False)})
    await pool.detach("other", attempt=1, grace=0.0)
    assert await pool.renew_endpoint("e") is not None
    assert await pool.renew("g", "s", term) is not None
    ended = await pool.attach("other", endpoint="e", attempt=2)
    assert isinstance(ended, Attached)
    assert ended.finish is not None
    await pool._link.command("CONFIG", "SET", "maxmemory", 0)
    assert isinstance(await pool.submit("new", b"record", "d", 8, 8, **CALL), Attached)


async def test_another_schema_is_refused(pool: Pool) -> None:
    await pool._link.command("HSET", "orca:{link}:pool", "schema", SCHEMA + 1)
    with pytest.raises(FailedPrecondition, match=f"schema {SCHEMA + 1}, this service works with {SCHEMA}"):
        await pool.renew_endpoint("e")


async def test_a_renewal_waits_for_no_turn(own: RedisServer, pool: Pool) -> None:
    """A storm of attaches fills the link. The lease of whoever sends it is renewed all the same."""
    await start_request(pool)
    async with Pool(own.url, "link", patience=60) as patient:
        await patient.attach("r", endpoint="e", attempt=1)  # Redis knows the script from here on
        attaches = [asyncio.create_task(patient.attach("r", endpoint="e", attempt=1)) for _ in range(1000)]
        await asyncio.sleep(0)  # all wait for a turn, or for an answer
        assert await patient.renew_endpoint("e") is not None
        assert sum(not attach.done() for attach in attaches) > 500
        await asyncio.gather(*attaches)


async def test_a_wait_for_a_turn_has_a_bound(own: RedisServer) -> None:
    """The exchanges ahead of it may each take as long as their own bound, which is longer here."""
    async with Pool(own.url, "turns", patience=20) as pool:
        await pool.cancel("unknown")
        own.freeze()
        ahead = [asyncio.create_task(pool.cancel("unknown")) for _ in range(100)]
        await asyncio.sleep(0)  # each has a turn, or waits for one
        pool._link._patience = 0.2
        with pytest.raises(Unavailable, match=r"there was no turn within 0\.2 s"):
            await pool.cancel("unknown")
        assert not any(task.done() for task in ahead)
        pool._link._patience = 20
        own.thaw()
        assert await asyncio.gather(*ahead) == [None] * 100


async def test_an_exchange_that_ends_after_close_leaves_no_connection(own: RedisServer, pool: Pool) -> None:
    """A read may be under way when its process leaves."""
    async with Pool(own.url, "other") as other:

        async def connections() -> list[bytes]:
            return [line for line in (await other._link.command("CLIENT", "LIST")).splitlines() if b"cmd=xread" in line]

        read = asyncio.create_task(pool.read("e", None, wait=0.3))
        async with asyncio.timeout(10):
            while not await connections():
                await asyncio.sleep(0.01)
            await pool.close()
            assert await read == []
            while await connections():
                await asyncio.sleep(0.01)


async def test_an_idle_connection_that_the_server_closed_is_no_outage(own: RedisServer, pool: Pool) -> None:
    """As Redis's own `timeout` does. It is the same server process, so it has forgotten nothing."""
    async with Pool(own.url, "other") as other:
        assert await other._link.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes") > 0
    for _ in range(3):
        assert await pool.renew_endpoint("e") is not None
    assert pool.generation == 0


async def test_a_node_that_went_away_is_forgotten(own: RedisServer, pool: Pool) -> None:
    """A cluster named it. The address of the URL tells who has the keys now."""
    own_primary = pool._link._primary
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        own_primary.moved(("127.0.0.1", closed.getsockname()[1]))
        await pool._link._drop_connections()
        assert await pool.cancel("nobody") is None


async def test_a_node_that_was_named_during_a_look_is_dialed(own: RedisServer) -> None:
    """A cluster's exchanges begin together. The URL's node says to one who has the keys, while another one dials that
    node: a third, which waits for both, does not dial it, since it would be sent away once more."""
    async with closing_front() as (url, dials), Pool(url, "link") as pool:
        link = pool._link
        async with link._looking:
            waiting = asyncio.create_task(pool.cancel("unknown"))
            await asyncio.sleep(0)  # it waits for the look
            link._finds += 1
            link._primary.moved(("127.0.0.1", own.port))
        assert await waiting is None
    assert not dials


@asynccontextmanager
async def service(*servers: RedisServer) -> AsyncIterator[tuple[str, Callable[[RedisServer], None]]]:
    """An address in front of these servers, as a Kubernetes Service: new connections go to the chosen one, and old ones
    stay where they are. Yields its URL and the choice."""
    chosen = servers[0]

    def choose(server: RedisServer) -> None:
        nonlocal chosen
        chosen = server

    async with forwarding(lambda: chosen.port) as front:
        yield f"redis://127.0.0.1:{front}", choose


async def follow(pool: Pool, primary: RedisServer) -> None:
    """Makes the pool's server a replica. By itself the primary waits 5 s for more of them before it gives its data."""
    async with Pool(primary.url, "primary") as other:
        await other._link.command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
    await pool._link.command("REPLICAOF", "127.0.0.1", primary.port)


async def test_a_demoted_server_is_left(own: RedisServer) -> None:
    """After a failover the old primary still answers, as a replica that takes no writes. The next connection finds the
    new one, whose dataset may lack the last second: that counts as an outage."""
    with redis_server() as primary:
        async with service(own, primary) as (url, choose), Pool(url, "failover") as pool:
            await asyncio.gather(*(pool.renew_endpoint("e", register=True) for _ in range(3)))
            choose(primary)
            async with Pool(own.url, "direct") as direct:
                await follow(direct, primary)
            reading = asyncio.create_task(pool.read("e", None, wait=0.3))  # a replica may be read
            await asyncio.sleep(0)
            await pool.renew_endpoint("e", register=True)
            await reading  # its connection leads to the old primary too, and was not idle when that was found out
            for _ in range(3):
                await pool.renew_endpoint("e", register=True)
            assert pool.generation == 1


async def test_an_exchange_with_a_demoted_server_waits_for_the_primary(own: RedisServer) -> None:
    """The address leads to the old server for a while, and then to the primary."""
    with redis_server() as primary:
        async with service(own, primary) as (url, choose), Pool(url, "failover", patience=60) as pool:
            assert await pool.renew_endpoint("e", register=True)
            async with Pool(own.url, "direct") as direct:
                await follow(direct, primary)
            renewing = asyncio.create_task(pool.renew_endpoint("e", register=True))
            async with asyncio.timeout(20):
                while str(pool._link._unreached) != "this server is a replica":
                    await asyncio.sleep(0.01)
            choose(primary)
            assert await renewing
            assert pool.generation == 1


async def test_another_dataset_in_the_same_process_is_an_outage(own: RedisServer, pool: Pool) -> None:
    """A primary that was a replica for a while has taken over another server's dataset."""
    async with Pool(own.url, "other") as other:
        for primary in (("127.0.0.1", own.port), ("NO", "ONE")):
            await other._link.command("REPLICAOF", *primary)
        await other._link.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert await pool.cancel("nobody") is None
    assert pool.generation == 1
