"""The pool on what users have: a primary that Sentinel replaces, a cluster, and a server that may forget."""

import asyncio
import re
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from listening import forwarding
from pool.lab import tokens_of
from redis import Redis
from redis.exceptions import ConnectionError
from replicated import Server, sentinel, server, would_promote
from servers import redis_server

from orca_common.errors import FailedPrecondition, Unavailable
from orca_local import embedded_pool
from orca_pool.link import Link
from orca_pool.pool import Pool
from orca_pool.primary import Primary
from orca_pool.reach import check_reachable
from orca_pool.records import Attached, CommitRow, EngineInfo
from orca_pool.retry import reached
from orca_pool.wire import pack_tokens

CALL = {"deadline_in": None, "detach_grace": 60.0, "endpoint": "e", "attempt": 1, "max_waiting": 8}


def of_sentinel(port: int) -> Any:
    """A connection, whose answers redis-py types as what they are not."""
    return Redis(port=port, decode_responses=True)


async def until(condition: object, seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.05)


async def stream(pool: Pool) -> CommitRow:
    """A request with two tokens, which its client has seen. Returns the row after them."""
    assert await pool.renew_endpoint("e", register=True)
    term = await pool.acquire("g", "s", None)
    assert term is not None
    await pool.renew("g", "s", term, form=EngineInfo("g", 1, 1, 64, 0))
    assert isinstance(await pool.submit("r", b"record", "d", 8, 8, **CALL), Attached)
    answer = await pool.claim("g", "s", term, 0, count=1, slots=64, total=64)
    assert answer is not None
    claim = answer.requests[0].claim
    assert await pool.commit("g", "s", term, [CommitRow("r", claim, 0, pack_tokens(tokens_of(0, 2)), None)])
    [entry] = await pool.read("e", None, wait=1)
    assert entry.packets[0].tokens == tokens_of(0, 2)
    return CommitRow("r", claim, 2, pack_tokens(tokens_of(2, 1)), None)


async def test_what_a_client_saw_survives_the_primary(tmp_path: Path) -> None:
    """Sentinel makes the replica the primary. The pool finds it, and says that something may be lost."""
    with ExitStack() as servers:
        primary = servers.enter_context(server(tmp_path / "a"))
        replica = servers.enter_context(server(tmp_path / "b", *primary.as_replica))
        replica.wait_for_primary()
        port = servers.enter_context(sentinel(tmp_path / "s", primary.port))
        await until(lambda: would_promote(port, replica))
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/orca/0"
        async with Pool(url, "ha", replicas=1) as pool, Pool(url, "ha") as after:
            row = await stream(pool)
            assert await after.identity() is None
            generation = after.generation
            primary.kill()
            last = tokens_of(0, 2)[-1]
            found = await reached(lambda: after.attach("r", endpoint="e", attempt=2, known=2, last=last))
            assert isinstance(found, Attached)
            assert (found.first, found.tokens) == (2, [])  # nothing that was seen is lost
            assert after.generation > generation
            states, *_ = await after.renew_scheduler("s")
            answer = await after.commit("g", "s", states["g"].term, [row])
            assert answer is not None
            assert answer.rows == [-1]
            with pytest.raises(Unavailable, match="0 replicas that are up to date, 1 are asked for"):
                await pool.cancel("r")  # the new primary has no replica, so nothing can be promised


@asynccontextmanager
async def watched_pair(folder: Path) -> AsyncIterator[tuple[Server, int, Redis, str]]:
    """A primary, the port of its replica, a Sentinel that would make that the primary, and its URL."""
    with server(folder / "a") as primary, server(folder / "b", *primary.as_replica) as replica:
        replica.wait_for_primary()
        with sentinel(folder / "s", primary.port) as port:
            await until(lambda: would_promote(port, replica))
            yield primary, replica.port, of_sentinel(port), f"redis+sentinel://127.0.0.1:{port}/orca/0"


async def port_of(pool: Pool) -> int:
    return int((await pool._link.command("CONFIG", "GET", "port"))[1])


def killed(primary: Server, sentinel: Redis) -> None:
    primary.kill()


def silent(primary: Server, sentinel: Redis) -> None:
    """As one whose node is gone."""
    primary.send_signal(signal.SIGSTOP)


def handing_over(primary: Server, sentinel: Redis) -> None:
    """As one whose pod is deleted."""
    Redis(port=primary.port).client_pause(60_000, all=False)
    sentinel.execute_command("SENTINEL FAILOVER", "orca")


@pytest.mark.parametrize("ends", [killed, silent, handing_over])
@pytest.mark.parametrize("connected", [True, False])
async def test_an_exchange_waits_for_the_next_primary(
    tmp_path: Path, ends: Callable[[Server, Redis], None], connected: bool
) -> None:
    """It goes on when the Sentinels name one, whatever the old server does."""
    async with watched_pair(tmp_path) as (primary, replica, asked, url), Pool(url, "next", patience=50) as pool:
        if connected:
            assert await pool.renew_endpoint("e", register=True)
        ends(primary, asked)
        assert await pool.renew_endpoint("e", register=True)
        assert await port_of(pool) == replica
        assert not connected or pool.generation == 1


async def test_a_read_goes_on_at_the_next_primary(tmp_path: Path) -> None:
    """It waits for tokens, so it is not late itself. Another exchange is."""
    async with watched_pair(tmp_path) as (primary, replica, asked, url), Pool(url, "next", patience=50) as pool:
        assert await pool.renew_endpoint("e", register=True)
        reading = asyncio.create_task(pool.read("e", None, wait=3600))
        await pool.cancel("unknown")
        handing_over(primary, asked)
        row = await stream(pool)
        [entry] = await reading
        assert entry.packets[0].request_id == "r"
        assert row.base == 2
        assert await port_of(pool) == replica


@pytest.mark.parametrize("order", [1, -1])
async def test_the_sentinel_that_knows_of_the_last_failover_is_believed(
    tmp_path: Path, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one, which is cut off from it, names the primary of before."""
    monkeypatch.setattr("orca_pool.primary.LATE", 60.0)  # on a busy machine, too, its answer is waited for
    with (
        server(tmp_path / "a") as old,
        server(tmp_path / "b") as new,
        sentinel(tmp_path / "s", old.port) as late,
        sentinel(tmp_path / "t", new.port, epoch=1) as knows,
    ):
        addresses = ",".join(f"127.0.0.1:{port}" for port in [late, knows][::order])
        async with Pool(f"redis+sentinel://{addresses}/orca/0", "last") as pool:
            assert await port_of(pool) == new.port


async def test_the_primary_of_before_is_not_followed_while_the_last_one_is_missed(tmp_path: Path) -> None:
    """A Sentinel that is cut off from the others names it on, and who writes there loses it."""
    with (
        server(tmp_path / "a") as old,
        server(tmp_path / "b") as new,
        sentinel(tmp_path / "s", old.port) as late,
        sentinel(tmp_path / "t", new.port, quorum=2, epoch=1) as knows,
    ):
        new.kill()
        asked = of_sentinel(knows)
        await until(lambda: asked.sentinel_master("orca")["is_sdown"])
        found = Primary(f"redis+sentinel://127.0.0.1:{late},127.0.0.1:{knows}/orca/0", 60.0)
        with pytest.raises(ConnectionError, match="no Sentinel names a primary of orca"):
            await found.find()
        await found.close()


async def test_a_sentinel_that_replaces_the_primary_does_not_name_it(tmp_path: Path) -> None:
    """It does so, with the new epoch, until all replicas follow the next one. The others name that at once."""
    with ExitStack() as running:
        servers = [running.enter_context(server(tmp_path / f"{n}")) for n in range(3)]
        slow, replica, primary = sorted(servers, key=lambda one: one.port)  # the larger address must not win
        for n, one in enumerate((slow, replica)):
            Redis(port=one.port).config_set("replica-priority", n)  # 0: it never becomes the primary
            Redis(port=one.port).replicaof("127.0.0.1", primary.port)
            one.wait_for_primary()
        ports = [running.enter_context(sentinel(tmp_path / f"s{n}", primary.port, down_after=600)) for n in range(2)]
        leader, other = map(of_sentinel, ports)
        for port, asked in zip(ports, (leader, other), strict=True):
            await until(lambda asked=asked: len(asked.sentinel_sentinels("orca")) == 1)
            await until(lambda port=port: would_promote(port, slow, replica))
        leader.execute_command("SENTINEL", "SET", "orca", "failover-timeout", 600_000)
        slow.send_signal(signal.SIGSTOP)
        leader.execute_command("SENTINEL FAILOVER", "orca")
        await until(lambda: other.sentinel_get_master_addr_by_name("orca") == ("127.0.0.1", replica.port))
        said = leader.sentinel_master("orca")
        assert (said["port"], said["config-epoch"]) == (primary.port, other.sentinel_master("orca")["config-epoch"])
        found = Primary(f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in ports)}/orca/0", 60.0)
        assert await found.find() == ("127.0.0.1", replica.port)
        await found.close()


@contextmanager
def silent_sentinel() -> Iterator[socket.socket]:
    """Its node is gone, perhaps together with that of the primary."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        yield silent


@pytest.mark.parametrize("missed", [False, True])
async def test_a_silent_sentinel_delays_no_other(tmp_path: Path, missed: bool) -> None:
    """missed: the other one does not reach the primary, and will soon name the next one."""
    with (
        server(tmp_path / "a") as primary,
        sentinel(tmp_path / "s", primary.port, quorum=2) as port,
        silent_sentinel() as silent,
    ):
        if missed:
            primary.kill()
            asked = of_sentinel(port)
            await until(lambda: asked.sentinel_master("orca")["is_sdown"])
        addresses = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{port}"
        found = Primary(f"redis+sentinel://{addresses}/orca/0", 3600.0)
        async with asyncio.timeout(60):
            if missed:
                with pytest.raises(ConnectionError, match="no Sentinel names a primary of orca"):
                    await found.find()
            else:
                assert await found.find() == ("127.0.0.1", primary.port)
        await found.close()


async def test_those_that_wait_together_ask_once(tmp_path: Path) -> None:
    """Where a Sentinel is silent, a question takes 50 ms: one after the other they would be too late."""
    with (
        server(tmp_path / "a") as primary,
        sentinel(tmp_path / "s", primary.port) as port,
        silent_sentinel() as silent,
    ):
        silent.setblocking(False)
        link = Link(f"redis+sentinel://127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{port}/orca/0", 3600.0)
        lines = await asyncio.gather(*(link._line(asyncio.timeout(None)) for _ in range(9)))
        assert {line.address for line in lines} == {("127.0.0.1", primary.port)}
        assert len({line.connection for line in lines}) == 9
        silent.accept()[0].close()  # asked once
        with pytest.raises(BlockingIOError):
            silent.accept()
        for line in lines:
            await line.close()
        await link.close()


async def test_a_late_exchange_of_a_closed_link_asks_no_sentinel() -> None:
    link = Link("redis+sentinel://127.0.0.1:1/orca/0")
    await link.close()
    link._doubt()
    assert link._lookout is None


async def test_why_no_sentinel_names_a_primary(tmp_path: Path) -> None:
    said = "no Sentinel names a primary of orcas: No such master with that"
    with (
        server(tmp_path / "a") as primary,
        sentinel(tmp_path / "s", primary.port) as port,
        pytest.raises(FailedPrecondition, match=said),
    ):
        await check_reachable(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/orcas/0", 0.1)


async def test_a_replica_that_is_slow_is_asked_again(tmp_path: Path) -> None:
    """One that is asked while it writes to its disk answers too early; by itself it answers again after a second."""
    with server(tmp_path / "a") as primary, server(tmp_path / "b", *primary.as_replica) as replica:
        replica.wait_for_primary()
        asked = Redis(port=primary.port)
        async with Pool(f"redis://127.0.0.1:{primary.port}/0", "slow", patience=60) as pool:
            assert await pool._link.command("SET", "a", 1, replicas=1) == b"OK"
            replica.send_signal(signal.SIGSTOP)
            writing = asyncio.create_task(pool._link.command("SET", "a", 2, replicas=1))
            await until(lambda: writing.done() or asked.info("commandstats")["cmdstat_waitaof"]["calls"] >= 4)
            assert not writing.done()
            replica.send_signal(signal.SIGCONT)
            assert await writing == b"OK"


async def test_a_cluster_says_where_the_pool_is(tmp_path: Path) -> None:
    """Any node will do: MOVED names the one that has the pool's keys."""
    with ExitStack() as kept:
        buses = [str(kept.enter_context(embedded_pool.keep_port()).getsockname()[1]) for _ in range(2)]
        nodes = [("--cluster-enabled", "yes", "--cluster-port", bus) for bus in buses]
        a, b = (kept.enter_context(server(tmp_path / bus, *node)) for bus, node in zip(buses, nodes, strict=True))
        first, second = Redis(port=a.port), Redis(port=b.port)
        second.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        first.execute_command("CLUSTER", "MEET", "127.0.0.1", b.port, buses[1])
        for node in (first, second):
            await until(lambda node=node: "cluster_state:ok" in str(node.execute_command("CLUSTER", "INFO")))
        async with Pool(f"redis://127.0.0.1:{a.port}/0", "sharded") as pool:
            await stream(pool)
            await pool.renew_scheduler("s")
        assert first.dbsize() == 0
        assert all(key.startswith(b"orca:{sharded}:") for key in second.scan_iter())


def test_a_url_of_sentinels_names_the_service() -> None:
    with pytest.raises(ValueError, match="the name of the service is missing"):
        Primary("redis+sentinel://127.0.0.1:26379", 1.0)
    assert Primary("rediss+sentinel://user:word@one,two:7/orca/3", 1.0).url == "rediss://user:word@primary.invalid/3"


PASSWORD = "a b/c:d@e"  # no URL could hold it as it is


@pytest.mark.parametrize("protected", [True, False], ids=["with a password", "with none yet"])
async def test_a_password_of_redis_and_its_sentinels(tmp_path: Path, protected: bool) -> None:
    """It may be given before servers ask for one, so that a release can begin to have one."""
    with server(tmp_path / "a") as primary, sentinel(tmp_path / "s", primary.port) as port:
        if protected:
            Redis(port=port).execute_command("SENTINEL", "SET", "orca", "auth-pass", PASSWORD)
            for asked in (primary.port, port):
                Redis(port=asked).execute_command("ACL", "SETUSER", "default", "resetpass", f">{PASSWORD}")
        for url in (f"redis://127.0.0.1:{primary.port}/0", f"redis+sentinel://127.0.0.1:{port}/orca/0"):
            await check_reachable(url, 10.0, password=PASSWORD)
            if protected:
                with pytest.raises(FailedPrecondition, match="Authentication required"):
                    await check_reachable(url, 0.1)


async def test_sentinels_at_addresses_of_ipv6(tmp_path: Path) -> None:
    with server(tmp_path / "a") as primary, sentinel(tmp_path / "s", primary.port) as port:
        await check_reachable(f"redis+sentinel://[::1]:1,[::1]:{port}/orca", 5.0)


@contextmanager
def slow_reader(folder: Path) -> Iterator[str]:
    """A server that takes three seconds to read its file. Its URL."""
    first, url = embedded_pool.start(folder, None)
    first.kill()
    first.wait()
    port = int(url.rsplit(":", 1)[1].split("/")[0])
    with embedded_pool.keep_port(port):
        (file,) = folder.glob("appendonlydir/*.incr.aof")
        with file.open("ab") as log:
            log.write(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n" * 60_000)
        command = [*embedded_pool.command(folder, port), "--key-load-delay", "50"]  # us for each command
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
            try:
                yield url
            finally:
                child.kill()


async def test_a_redis_that_still_reads_its_file_is_not_refused(tmp_path: Path) -> None:
    """While it does, Valkey says that it had no append-only file. An exchange waits for the end, as for a start."""
    with slow_reader(tmp_path) as url:
        async with Pool(url, "safe", patience=60) as pool, asyncio.timeout(60):
            checking = asyncio.create_task(pool.check_durable(False))
            while str(pool._link._unreached) != "it reads its file":
                await asyncio.sleep(0.01)
            assert await checking is None


@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [("appendonly", "no", "no append-only file"), ("maxmemory-policy", "allkeys-lru", "evicts any key")],
)
async def test_a_redis_that_may_forget_is_refused(setting: str, value: str, problem: str) -> None:
    with redis_server() as redis:
        async with Pool(redis.url, "safe") as pool:
            assert await pool.check_durable(False) is None
            await pool._link.command("CONFIG", "SET", setting, value)
            with pytest.raises(FailedPrecondition, match=f"{problem}.*allow_volatile_redis"):
                await pool.check_durable(False)
            assert problem in (await pool.check_durable(True) or "")


@asynccontextmanager
async def of_version(port: int, old: bytes) -> AsyncIterator[str]:
    """A server that says it is one of another version, with as many digits. Yields its URL."""

    def changed(data: bytes) -> bytes:
        return re.sub(rb"(redis_version:)[\d.]{5}", rb"\g<1>" + old, data)

    async with forwarding(lambda: port, changed=changed) as front:
        yield f"redis://127.0.0.1:{front}/0"


async def test_a_redis_that_is_too_old() -> None:
    """Its scripts could not be compiled there, which a user read of as an error of the first call."""
    with redis_server() as redis:
        async with of_version(redis.port, b"7.0.0") as url, Pool(url, "new") as pool:
            await check_reachable(url, 5.0)
            assert await pool.renew_endpoint("e", register=True)
        Redis(port=redis.port).script_flush()
        said = r"redis_url: Redis 6\.2\.9 is too old; take 7\.0 or newer, or Valkey"
        async with of_version(redis.port, b"6.2.9") as url, Pool(url, "old") as pool:
            with pytest.raises(FailedPrecondition, match=f"^{said}$"):
                await check_reachable(url, 5.0)
            with pytest.raises(FailedPrecondition, match=f"^{said}$"):
                await pool.renew_endpoint("e", register=True)
