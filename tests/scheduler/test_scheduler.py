"""The scheduler beside its masters, in this process, on a real pool: what it takes, and what its status port tells."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Never

import pytest
from metrics import Scrape
from servers import RedisServer, redis_server

from orca.v1.pool_pb2 import PoolRequest
from orca_common.metrics import Metrics
from orca_common.service import LoopPulse, StatusPort, cancel
from orca_common.telemetry import Telemetry
from orca_common.tls import Plaintext
from orca_pool.keys import Keys
from orca_pool.leases import GAP_SECONDS, LEASE_SECONDS, RENEW_SECONDS
from orca_pool.pool import Pool
from orca_pool.records import EngineInfo
from orca_scheduler import timers
from orca_scheduler.discovery.candidates import Candidate
from orca_scheduler.presence import Presence
from orca_scheduler.scheduler import Scheduler
from orca_scheduler.settings import SchedulerSettings

NOWHERE = "127.0.0.1:9"  # nothing listens there


class Told:
    """A discovery that tells what the test says."""

    unready: str | None = "the API server has not answered yet"
    notices: Sequence[str] = ()

    async def run(self, discovered: Callable[[Sequence[Candidate]], None]) -> Never:
        raise AssertionError("the test calls `discovered`")

    async def replace(self, engine: str) -> None:
        raise AssertionError(f"{engine} is not to be replaced")

    def unfinished(self, engine: str, seconds: float) -> None:
        raise AssertionError(f"{engine} has no pods to lose")

    async def close(self) -> None:
        pass


class Bench:
    """A scheduler at work, its pool and its status port."""

    def __init__(self, redis: RedisServer, pool: Pool, scheduler: Scheduler, status: StatusPort) -> None:
        self.redis, self.pool, self.scheduler, self._status = redis, pool, scheduler, status

    async def status(self) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._status.port}/readyz", timeout=5) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                return json.load(error)

        return await asyncio.to_thread(ask)

    async def gauges(self) -> Scrape:
        return await asyncio.to_thread(Scrape, f"127.0.0.1:{self._status.port}")

    async def until(self, **wanted: Any) -> dict[str, Any]:
        """Waits until the status port tells this; all that it tells."""
        async with asyncio.timeout(60):
            while (told := await self.status()) | wanted != told:
                await asyncio.sleep(0.02)
        return told

    async def owner(self, engine: str) -> str | None:
        return (await self.pool.renew_scheduler("observer"))[0][engine].owner


@asynccontextmanager
async def bench(looks: bool = True, ended: Callable[[str], bool] = lambda name: False) -> AsyncIterator[Bench]:
    """looks: whether it looks at the leases by itself."""
    with redis_server() as redis:
        async with Pool(redis.url, "bench", patience=2) as pool:
            settings, pulse, metrics = SchedulerSettings(workers=NOWHERE), LoopPulse(), Metrics("scheduler")
            scheduler = Scheduler("me", ended, pool, Told(), settings, Telemetry("test"), pulse, Plaintext(), metrics)
            engines = lambda: {"engines": scheduler.engines()}  # noqa: E731
            status = StatusPort("127.0.0.1", 0, scheduler.unready, pulse.alive, engines, metrics)
            running = asyncio.create_task(scheduler.run() if looks else asyncio.Event().wait())
            try:
                yield Bench(redis, pool, scheduler, status)
            finally:
                redis.thaw()
                await cancel(running)
                await scheduler.leave()
                status.close()


async def test_nothing_is_taken_or_retired_before_the_candidates_are_known() -> None:
    async with bench() as this:
        await this.pool.acquire("engine-0", "another", None)
        seen = (await this.pool.renew_scheduler("observer"))[0]["engine-0"]
        await this.pool.release("engine-0", "another", seen.term)
        told = await this.until(reason="the API server has not answered yet")
        assert (told["ok"], told["engines"]) == (False, {})
        assert await this.owner("engine-0") is None
        this.scheduler.discovered([Candidate("engine-1", ("",), "orca-worker-1 is Pending")])
        why = {"engine-1": "engine-1 cannot form: orca-worker-1 is Pending"}
        await this.until(ok=True, reason=None, engines=why)  # and engine-0 is retired
        assert "engine-0" not in (await this.pool.renew_scheduler("observer"))[0]


async def test_the_queue_is_seen_as_it_is_and_not_at_all_while_the_pool_is_away() -> None:
    """A stale number would have an autoscaler act on it."""

    async def seen(waiting: float) -> Scrape:
        async with asyncio.timeout(60):
            while (found := await this.gauges()).value("orca_num_requests_waiting") != waiting:
                await asyncio.sleep(0.02)
        return found

    async with bench() as this:
        this.scheduler.discovered([])
        await this.until(ok=True)
        assert (await seen(0)).value("orca_queue_oldest_age_seconds") == 0
        term = await this.pool.acquire("engine-0", "another", None)
        assert term is not None
        form = EngineInfo("engine-0", 1, 1, 64, 1)
        await this.pool.renew("engine-0", "another", term, epoch=1, form=form)
        await this.pool.renew_endpoint("test", register=True)
        began = time.monotonic()
        for name in ("a", "b"):
            await this.pool.submit(
                *(name, PoolRequest(request_id=name, prompt_ids=[1], max_new_tokens=1).SerializeToString(), "d", 2, 2),
                deadline_in=None,
                detach_grace=60,
                endpoint="test",
                attempt=1,
                max_waiting=9,
            )
        async with asyncio.timeout(60):
            while (age := (await seen(2)).value("orca_queue_oldest_age_seconds")) < 0.5:
                await asyncio.sleep(0.02)
        assert age <= time.monotonic() - began + 0.01, "two clocks"
        this.redis.freeze()
        async with asyncio.timeout(60):
            while (await this.gauges()).has("orca_num_requests_waiting"):
                await asyncio.sleep(0.05)
        assert not (await this.gauges()).has("orca_queue_oldest_age_seconds")
        this.redis.thaw()
        async with asyncio.timeout(60):
            while not (await this.gauges()).has("orca_num_requests_waiting"):
                await asyncio.sleep(0.05)


async def test_a_scheduler_without_an_engine_is_ready() -> None:
    async with bench() as this:
        this.scheduler.discovered([])
        assert (await this.until(ok=True)) == {"ok": True, "reason": None, "engines": {}}


async def test_an_engine_out_of_reach_is_given_up_to_another_scheduler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who reaches the pool and not the pods would keep the lease for ever. It then stands back for some time: the
    shares are computed without it, so the other one may take the engine."""
    monkeypatch.setattr(timers, "DIAL", 0.3)
    monkeypatch.setattr(timers, "UNREACHED", 0.5)
    async with bench() as this:
        this.scheduler.discovered([Candidate("engine-0", (NOWHERE,))])
        await this.until(engines={"engine-0": "engine-0 is being formed"})
        async with asyncio.timeout(60):  # alone, it goes on trying
            while (since := this.scheduler._masters["engine-0"][0].unreached_since) is None:
                await asyncio.sleep(0.02)
            while (this.scheduler._last_look or 0.0) <= since + timers.UNREACHED:
                await asyncio.sleep(0.02)
        assert "engine given up" not in caplog.text
        async with asyncio.timeout(60):
            while await this.owner("engine-0") is not None:  # which also says that another scheduler lives
                await asyncio.sleep(0.2)
        for _ in range(8):
            assert await this.owner("engine-0") is None
            await asyncio.sleep(0.2)
        async with asyncio.timeout(60):  # it renews, and leaves again
            while (await this.pool.renew_scheduler("observer"))[1] > 1:
                await asyncio.sleep(0.05)
        await this.pool.leave_scheduler("observer")
        async with asyncio.timeout(timers.WITHDRAWN / 4):
            while not this.scheduler.engines():  # there is nobody else any more
                await asyncio.sleep(0.05)


async def test_the_leases_of_an_ended_scheduler_run_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead scheduler's engines stood still for the 1.5 s of their leases, also where the kernel knew of its end."""
    monkeypatch.setattr("orca_scheduler.scheduler.LEASE_SECONDS", 600.0)
    with Presence() as other, Presence() as own:
        async with bench(ended=own.ended) as this:
            for engine in ("engine-0", "engine-1"):
                assert await this.pool.acquire(engine, other.name, None)
            await this.pool.renew_scheduler(other.name)
            this.scheduler.discovered([Candidate("engine-0", (NOWHERE,)), Candidate("engine-1", (NOWHERE,))])
            async with asyncio.timeout(60):
                while this.scheduler.unready() is not None:
                    await asyncio.sleep(0.02)
            assert await this.owner("engine-0") == other.name
            other.close()
            async with asyncio.timeout(60):
                while {await this.owner("engine-0"), await this.owner("engine-1")} != {"me"}:
                    await asyncio.sleep(0.02)
            assert (await this.pool.renew_scheduler("observer"))[1] == 2, "it is not counted any more"


async def test_streams_do_not_wait_for_a_scheduler_that_has_just_started() -> None:
    """It has no engine yet, so its share is free; but it must watch the silent lease first, and others have."""
    async with bench() as this:
        term = await this.pool.acquire("engine-1", "the dead one", None)
        this.scheduler.discovered([Candidate("engine-0", (NOWHERE,)), Candidate("engine-1", (NOWHERE,))])
        async with asyncio.timeout(60):
            while await this.owner("engine-1") == "the dead one":  # the observer counts as living, too
                await asyncio.sleep(0.1)
        assert term is not None
        assert await this.owner("engine-1") == await this.owner("engine-0") == "me"
        async with asyncio.timeout(60):  # and then it leaves the other one its share
            while "engine-1" in this.scheduler.engines() and "engine-0" in this.scheduler.engines():
                assert (await this.pool.renew_scheduler("observer"))[1] == 2
                await asyncio.sleep(0.1)


@pytest.mark.parametrize(("released", "wanted", "losses"), [(True, True, 0), (False, True, 1), (False, False, 0)])
async def test_a_takeover_counts_a_loss_and_a_hand_over_none(released: bool, wanted: bool, losses: int) -> None:
    """What an owner who vanished had claimed may have been RUNNING, and may be why the owner vanished. Where the engine
    is not wanted any more, its owner went with it."""
    async with bench() as this:
        term = await this.pool.acquire("engine-0", "another", None)
        assert term is not None
        await this.pool.renew("engine-0", "another", term, form=EngineInfo("engine-0", 1, 1, 64, 0))
        await this.pool.renew_endpoint("e", register=True)
        await this.pool.submit(
            *("r", PoolRequest(request_id="r").SerializeToString(), "digest", 8, 8),
            deadline_in=None,
            detach_grace=60,
            endpoint="e",
            attempt=1,
            max_waiting=9,
        )
        assert await this.pool.claim("engine-0", "another", term, 0, count=1, slots=64, total=64) is not None
        if released:
            await this.pool.release("engine-0", "another", term)
        this.scheduler.discovered([Candidate("engine-0", (NOWHERE,))] if wanted else [])
        key = f"{Keys('bench').prefix}request:r"
        async with asyncio.timeout(60):
            while await this.pool._link.command("HGET", key, "state") != b"waiting":
                await asyncio.sleep(0.05)
        assert int(await this.pool._link.command("HGET", key, "losses")) == losses


async def test_a_lease_that_is_renewed_is_not_taken() -> None:
    async with bench(looks=False) as this:
        term = await this.pool.acquire("engine-0", "another", None)
        assert term is not None
        this.scheduler.discovered([Candidate("engine-0", (NOWHERE,))])
        for _ in range(10):
            this.scheduler._last_look = asyncio.get_running_loop().time() - GAP_SECONDS
            await this.scheduler._look()
            await this.pool.renew("engine-0", "another", term)
        assert 10 * RENEW_SECONDS > 2 * LEASE_SECONDS
        assert not this.scheduler.engines()


async def test_engines_go_to_another_scheduler_one_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    """The next one when the one before was released: what drains serves less."""
    caplog.set_level("INFO", "orca_scheduler.scheduler")
    released = lambda: [r for r in caplog.messages if r == "engine released to another scheduler"]  # noqa: E731
    async with bench() as this:
        scheduler = this.scheduler
        scheduler.discovered([Candidate(f"engine-{n}", (NOWHERE,)) for n in range(3)])
        async with asyncio.timeout(60):
            while len(scheduler.engines()) < 3:
                await asyncio.sleep(0.02)
            for count in (1, 2):
                scheduler._too_much = 0.0  # for long
                for _ in range(2):  # the master has not even heard that it is to leave
                    scheduler._release_one(asyncio.get_running_loop().time())
                assert len(released()) == count
                while scheduler._releasing is not None:
                    await asyncio.sleep(0.02)


async def test_a_lease_that_could_not_be_read_is_not_taken() -> None:
    """A hole that is longer than a lease, or a failed read, starts the count again: the owner may have renewed in it,
    and been forgotten. So does an outage that no read has seen, because its exchange waited for the end: no outage of
    Redis ends in a race for engines."""
    async with bench() as this:
        loop = asyncio.get_running_loop()
        assert await this.pool.acquire("engine-0", "another", None) is not None
        this.scheduler.discovered([Candidate("engine-0", (NOWHERE,))])
        async with asyncio.timeout(60):
            while "engine-0" not in this.scheduler._sights:
                await asyncio.sleep(0.02)
        for hole in ("late look", "failed read", "short outage"):
            sight = this.scheduler._sights["engine-0"]
            sight.unmoved = 2 * LEASE_SECONDS  # the next look would take it
            if hole == "late look":
                this.scheduler._last_look = loop.time() - 2 * GAP_SECONDS
            elif hole == "short outage":
                this.redis.restart()
            else:
                this.redis.freeze()
                async with asyncio.timeout(60):
                    while this.scheduler._sights:
                        await asyncio.sleep(0.02)
                this.redis.thaw()
            async with asyncio.timeout(60):
                while (again := this.scheduler._sights.get("engine-0")) is None or again is sight:
                    assert not this.scheduler.engines()
                    await asyncio.sleep(0.01)
            assert not this.scheduler.engines()
        while not this.scheduler.engines():
            await asyncio.sleep(0.01)
        assert again.unmoved > LEASE_SECONDS, "it is taken after a whole lease's silence"


async def test_looks_that_are_always_late_still_find_a_dead_master() -> None:
    """Where a scheduler waits for a core, each of its looks is late. Each counts as one renewal's time."""
    async with bench(looks=False) as this:
        assert await this.pool.acquire("engine-0", "another", None) is not None
        this.scheduler.discovered([Candidate("engine-0", (NOWHERE,))])
        looks = 0
        while not this.scheduler.engines():
            this.scheduler._last_look = asyncio.get_running_loop().time() - (GAP_SECONDS + LEASE_SECONDS) / 2
            await this.scheduler._look()
            looks += 1
            assert looks <= 2 + LEASE_SECONDS / RENEW_SECONDS
        assert looks > LEASE_SECONDS / RENEW_SECONDS


async def test_an_engine_that_cannot_form_leaves_its_scheduler_ready() -> None:
    async with bench() as this:
        this.scheduler.discovered([Candidate("engine-0", (NOWHERE,))])
        await this.until(ok=True, engines={"engine-0": "engine-0 is being formed"})
        this.scheduler.discovered([Candidate("engine-0", ("",), "orca-worker-0 is being deleted")])
        await this.until(ok=True, engines={"engine-0": "engine-0 cannot form: orca-worker-0 is being deleted"})
