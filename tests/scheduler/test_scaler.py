"""The scaler on a real pool and an API server that speaks HTTP: it acts on what both say, where it decides."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from metrics import Scrape
from scheduler.discovery.api_server import refuses
from scheduler.discovery.manifests import pod, statefulset
from scheduler.discovery.test_statefulset import ENGINE_0, Watched, until, watched
from servers import RedisServer, redis_server

from orca_common.errors import Unavailable
from orca_common.metrics import Metrics
from orca_common.service import cancel
from orca_pool.pool import Pool
from orca_pool.records import FINISHING_LOAD, EngineInfo, EngineLoad
from orca_scheduler import scaler
from orca_scheduler.scaler import Scaler
from orca_scheduler.scaling import Bounds

BOUNDS = Bounds(least=1, most=3, queue_age=5.0, up_seconds=0.0, down_seconds=0.05, finish_seconds=100.0)


class Scheduler:
    """A scheduler's knowledge, as the test says it."""

    def __init__(self) -> None:
        self.first, self.seen = True, (0, 0.0)

    def queue(self) -> tuple[int, float] | None:
        return self.seen


class World:
    """A scaler at work."""

    def __init__(self, redis: RedisServer, pool: Pool, watched: Watched, bounds: Bounds) -> None:
        self.redis, self.pool, self.watched = redis, pool, watched
        self.scheduler, self._metrics = Scheduler(), Metrics("scheduler")
        self.scaler = Scaler(pool, watched.discovery, self.scheduler, bounds, 2, self._metrics)
        self._terms: dict[str, int] = {}

    @property
    def size(self) -> tuple[int, int, int] | None:
        """Pods, engines, and those that begin requests."""
        size = self.watched.discovery.size
        return None if size is None else (size.pods, size.engines, size.beginning)

    def wanted(self) -> tuple[float, float] | None:
        """Engines and pods, as a scrape reads them."""
        found = Scrape.of(self._metrics.render("")[0].decode())
        names = "orca_engines_wanted", "orca_worker_pods_wanted"
        return (found.value(names[0]), found.value(names[1])) if found.has(names[0]) else None

    async def engine(self, name: str, load: EngineLoad) -> None:
        """An engine with 64 slots says how it is."""
        if name not in self._terms:
            term = await self.pool.acquire(name, "s", None)
            assert term is not None
            self._terms[name] = term
            await self.pool.renew(name, "s", term, form=EngineInfo(name, 1, 1, 64, 0))
        await self.pool.renew(name, "s", self._terms[name], load=load)


IDLE = EngineLoad(8, 64, 0.1, 0.0)


@asynccontextmanager
async def world(folder: Path, bounds: Bounds = BOUNDS) -> AsyncIterator[World]:
    """One engine of two pods that is up and idle."""
    with redis_server() as redis:
        async with Pool(redis.url, "scaler", patience=2) as pool, watched(folder, scales=True) as this:
            await until(lambda: this.addresses == ENGINE_0)
            made = World(redis, pool, this, bounds)
            await made.engine("engine-0", IDLE)
            running = asyncio.create_task(made.scaler.run())
            try:
                yield made
            finally:
                await cancel(running)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler, "LOOK", 0.02)


async def test_engines_follow_the_load(tmp_path: Path) -> None:
    async with world(tmp_path) as this:
        this.scheduler.seen = 3, 5.1
        await until(lambda: this.size == (4, 2, 2))
        this.scheduler.seen = 0, 0.0
        assert this.wanted() == (2, 4)
        this.watched.server.put("pods", pod(2), pod(3))
        await this.engine("engine-1", IDLE)
        await until(lambda: this.size == (4, 2, 1))  # its master has not heard of it
        assert this.wanted() == (2, 4)
        await this.engine("engine-1", FINISHING_LOAD)
        await until(lambda: this.size == (2, 1, 1))
        await until(lambda: this.wanted() == (1, 2))


async def test_another_scheduler_decides(tmp_path: Path) -> None:
    async with world(tmp_path) as this:
        await until(lambda: this.wanted() == (1, 2))
        this.scheduler.first, this.scheduler.seen = False, (3, 99.0)
        await until(lambda: this.wanted() is None)
        this.watched.server.put("statefulsets", statefulset(3))
        await until(lambda: this.size == (3, 1, 1))
        assert not this.watched.server.asked("patch statefulsets/scale")
        this.scheduler.first = True
        await until(lambda: this.size == (4, 2, 2))


async def test_an_outage_begins_every_count_again(tmp_path: Path) -> None:
    """The queue is as old as the outage: engines are added when it is still old after their time to come up."""
    up, clock = 0.5, asyncio.get_running_loop().time
    async with world(tmp_path, Bounds(1, 3, 5.0, up, 1000.0, 0.0)) as this:
        await until(lambda: this.wanted() == (1, 2))
        since = clock()
        await until(lambda: clock() > since + up)
        this.redis.freeze()
        with pytest.raises(Unavailable):
            await this.pool.engine_uses()
        this.redis.thaw()
        this.scheduler.seen, back = (3, 600.0), clock()
        await until(lambda: this.size == (4, 2, 2))
        assert clock() - back >= up


@pytest.mark.parametrize(("pods", "whole"), [(1, 4), (3, 4), (5, 4), (8, 6)])
async def test_never_a_half_engine_and_never_beyond_the_bounds(pods: int, whole: int, tmp_path: Path) -> None:
    """An installation begins with one pod; a person may ask for any number."""
    async with world(tmp_path, Bounds(2, 3, 5.0, 0.0, 1000.0, 0.0)) as this:
        this.watched.server.put("statefulsets", statefulset(pods))
        await until(lambda: this.size == (whole, whole // 2, whole // 2))


async def test_no_pods_at_all_are_a_persons_wish(tmp_path: Path) -> None:
    async with world(tmp_path) as this:
        await until(lambda: this.wanted() == (1, 2))
        this.watched.server.put("statefulsets", statefulset(0))
        this.scheduler.seen = 3, 99.0
        await until(lambda: this.wanted() is None)
        assert this.size == (0, 0, 0)


async def test_what_fails_is_tried_again_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with world(tmp_path) as this:
        server = this.watched.server
        server.faults["patch statefulsets/scale"] = refuses(403, "is forbidden")
        this.scheduler.seen = 3, 9.0
        await until(lambda: len(server.asked("patch statefulsets/scale")) > 3)
        del server.faults["patch statefulsets/scale"]
        await until(lambda: this.size == (4, 2, 2))
        told = [record for record in caplog.records if record.getMessage() == "engines are not scaled now"]
        assert [record.__dict__["why"] for record in told] == [
            "Kubernetes does not scale the StatefulSet orca-worker: 403, is forbidden"
        ]
