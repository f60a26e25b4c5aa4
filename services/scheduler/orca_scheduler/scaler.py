"""Has the workers scaled as `Scaling` wishes, by the one scheduler that masters the first engine."""

import asyncio
import logging
from typing import Never, Protocol

from orca_common.errors import Unavailable
from orca_common.metrics import Metrics, Reading
from orca_pool.pool import Pool
from orca_pool.records import EngineUse

from .discovery.candidates import Scaled
from .discovery.engines import engine_name
from .scaling import Bounds, Load, Scaling, Seen, Wish

log = logging.getLogger(__name__)
LOOK = 1.0  # seconds between two looks


class Decider(Protocol):
    """The scheduler of this process."""

    @property
    def first(self) -> bool:
        """Whether it is the one that decides."""
        ...

    def queue(self) -> tuple[int, float] | None:
        """The number of requests that wait, and the first one's age in seconds; None while the pool does not answer."""
        ...


class Scaler:
    """Looks at the queue and the engines, again and again."""

    def __init__(
        self,
        pool: Pool,
        scaled: Scaled,
        scheduler: Decider,
        bounds: Bounds,
        pods_per_engine: int,
        metrics: Metrics,
    ) -> None:
        self._pool, self._scaled, self._scheduler = pool, scaled, scheduler
        self._bounds, self._pods_per_engine = bounds, pods_per_engine
        self._scaling: Scaling | None = None  # None: another scheduler decides
        self._generation = pool.generation
        self._wanted = 0  # engines, as it decided last
        self._said: Wish | None = None  # the wish that the log has told last
        self._trouble = ""  # the same
        self._loop = asyncio.get_running_loop()
        metrics.read("orca_engines_wanted", lambda: self._reading(1))
        metrics.read("orca_worker_pods_wanted", lambda: self._reading(pods_per_engine))

    def _reading(self, each: int) -> Reading:
        """Called in the status port's thread."""
        return () if self._scaling is None else [((), self._wanted * each)]

    async def run(self) -> Never:
        """Looks once a second. A look that fails because something is away is repeated."""
        while True:
            try:
                await self._look()
                self._trouble = ""
            except Unavailable as away:
                if str(away) != self._trouble:
                    self._trouble = str(away)
                    log.warning("engines are not scaled now", extra={"why": self._trouble})
            await asyncio.sleep(LOOK)

    async def _look(self) -> None:
        size, queue = self._scaled.size, self._scheduler.queue()
        # No pods at all is a person's wish.
        if not self._scheduler.first or size is None or not size.pods:
            self._scaling = None
            return
        if queue is None:
            return  # the pool is away
        uses = await self._pool.engine_uses()
        scaling, generation = self._scaling, self._pool.generation
        if scaling is None or generation != self._generation:  # after an outage the queue is as old as it was long
            scaling, self._generation = Scaling(self._bounds), generation
        names = {number: engine_name(number) for number in range(size.engines)}
        loads = {number: load_of(uses[name]) for number, name in names.items() if name in uses}
        wish = scaling.step(Seen(self._loop.time(), size.engines, size.beginning, *queue, loads))
        self._wanted, self._scaling = wish.engines, scaling
        if wish[:2] == (size.engines, size.beginning) and size.pods == size.engines * self._pods_per_engine:
            return
        why = wish.why or "pods that make no whole engine are no use"
        if self._said is None or self._said[:2] != wish[:2]:
            self._said = wish
            log.info("engines are scaled", extra={"to": wish.engines, "beginning": wish.beginning, "why": why})
        await self._scaled.resize(size, wish.engines, wish.beginning, why)


def load_of(use: EngineUse) -> Load:
    """An engine's load as `Scaling` counts it. One that begins nothing now does not say what it has reserved."""
    reserved = use.slots - use.free if use.rows else 0
    return Load(use.requests, use.rows, reserved, use.slots)
