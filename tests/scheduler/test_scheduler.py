"""The scheduler beside its masters, in this process, on a real pool: what it takes, and what its status port tells."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Never

import pytest
from servers import redis_server

from orca_common.service import LoopPulse, StatusPort, cancel
from orca_common.telemetry import Telemetry
from orca_pool.pool import Pool
from orca_scheduler import timers
from orca_scheduler.discovery.candidates import Candidate
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

    async def close(self) -> None:
        pass


class Bench:
    """A scheduler at work, its pool and its status port."""

    def __init__(self, pool: Pool, scheduler: Scheduler, status: StatusPort) -> None:
        self.pool, self.scheduler, self._status = pool, scheduler, status

    async def status(self) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._status.port}/readyz", timeout=5) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                return json.load(error)

        return await asyncio.to_thread(ask)

    async def until(self, **wanted: Any) -> dict[str, Any]:
        """Waits until the status port tells this; all that it tells."""
        async with asyncio.timeout(20):
            while (told := await self.status()) | wanted != told:
                await asyncio.sleep(0.02)
        return told

    async def owner(self, engine: str) -> str | None:
        return (await self.pool.renew_scheduler("observer"))[0][engine].owner


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    with redis_server() as redis:
        async with Pool(redis.url, "bench", patience=2) as pool:
            settings, pulse = SchedulerSettings(workers=NOWHERE), LoopPulse()
            scheduler = Scheduler("me", pool, Told(), settings, Telemetry("test"), pulse)
            engines = lambda: {"engines": scheduler.engines()}  # noqa: E731
            status = StatusPort("127.0.0.1", 0, scheduler.unready, pulse.alive, engines)
            running = asyncio.create_task(scheduler.run())
            try:
                yield Bench(pool, scheduler, status)
            finally:
                await cancel(running)
                await scheduler.leave()
                status.close()
                pulse.close()


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


async def test_a_scheduler_without_an_engine_is_ready() -> None:
    async with bench() as this:
        this.scheduler.discovered([])
        assert (await this.until(ok=True)) == {"ok": True, "reason": None, "engines": {}}


async def test_an_engine_out_of_reach_is_given_up_to_another_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reaches the pool and not the pods would keep the lease for ever. It then stands back for some time: the
    shares are computed without it, so the other one may take the engine."""
    monkeypatch.setattr(timers, "DIAL", 0.3)
    monkeypatch.setattr(timers, "UNREACHED", 0.5)
    async with bench() as this:
        this.scheduler.discovered([Candidate("engine-0", (NOWHERE,))])
        await this.until(engines={"engine-0": "engine-0 is being formed"})
        async with asyncio.timeout(20):  # alone, it goes on trying
            while (since := this.scheduler._masters["engine-0"][0].unreached_since) is None:
                await asyncio.sleep(0.02)
            while asyncio.get_running_loop().time() - since < 2 * timers.UNREACHED:
                await asyncio.sleep(0.02)
        assert this.scheduler.engines()
        async with asyncio.timeout(20):
            while await this.owner("engine-0") is not None:  # which also says that another scheduler lives
                await asyncio.sleep(0.2)
        for _ in range(8):
            assert await this.owner("engine-0") is None
            await asyncio.sleep(0.2)
        async with asyncio.timeout(5):  # it renews, and leaves again
            while (await this.pool.renew_scheduler("observer"))[1] > 1:
                await asyncio.sleep(0.05)


async def test_an_engine_that_cannot_form_leaves_its_scheduler_ready() -> None:
    async with bench() as this:
        this.scheduler.discovered([Candidate("engine-0", (NOWHERE,))])
        await this.until(ok=True, engines={"engine-0": "engine-0 is being formed"})
        this.scheduler.discovered([Candidate("engine-0", ("",), "orca-worker-0 is being deleted")])
        await this.until(ok=True, engines={"engine-0": "engine-0 cannot form: orca-worker-0 is being deleted"})
