"""The scheduler: takes leases of engines and has them mastered (docs/design.md, "Leases")."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orca_common.errors import Unavailable
from orca_common.service import LoopPulse
from orca_common.telemetry import Telemetry
from orca_pool.leases import GAP_SECONDS, LEASE_SECONDS, RENEW_SECONDS
from orca_pool.pool import Pool
from orca_pool.records import EngineState

from .discovery.candidates import Candidate, Discovery
from .master import EngineMaster
from .settings import SchedulerSettings

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Sight:
    """A lease as our reads saw it, and since when it has not moved."""

    state: EngineState
    since: float


class Scheduler:
    """Masters at most its share of the engines: ceil(engines / living schedulers)."""

    def __init__(
        self,
        name: str,
        pool: Pool,
        discovery: Discovery,
        settings: SchedulerSettings,
        telemetry: Telemetry,
        pulse: LoopPulse,
    ) -> None:
        self._name, self._pool, self._discovery = name, pool, discovery
        self._settings, self._telemetry, self._pulse = settings, telemetry, pulse
        self._candidates: dict[str, Candidate] | None = None  # None: not known yet
        self._masters: dict[str, tuple[EngineMaster, asyncio.Task[None]]] = {}
        self._sights: dict[str, Sight] = {}
        self._loop = asyncio.get_running_loop()
        self._last_look: float | None = None  # on the loop's clock
        self._reached = 0.0  # the same on the clock that the status port's thread may read

    def discovered(self, candidates: Sequence[Candidate]) -> None:
        """Takes the engines that there may be. Called again whenever discovery has other ones."""
        self._candidates = {candidate.engine: candidate for candidate in candidates}
        for engine, (master, _) in self._masters.items():
            master.candidate_changed(self._candidates.get(engine))

    def unready(self) -> str | None:
        """Why the scheduler is not ready; None when it is. May be called in any thread."""
        if self._last_look is None:
            return "the pool has not been reached yet"
        since = time.monotonic() - self._reached
        if since > 5:
            return f"the pool was last reached {since:.0f} s ago"
        if self._candidates is None:
            return self._discovery.unready or "the engines are not known yet"
        return None

    def engines(self) -> Mapping[str, str | None]:
        """The engines that this scheduler masters, each with the reason why it serves nothing; None: it runs.

        May be called in any thread.
        """
        return {engine: master.unready for engine, (master, _) in list(self._masters.items())}

    async def run(self) -> None:
        """Looks at the leases, again and again. Never returns; raises the error of a master that failed."""
        while True:
            try:
                await self._look()
            except Unavailable as away:
                self._sights.clear()  # a failed read starts every count again
                log.warning("pool away", extra={"why": str(away)})
            for engine, (_, task) in list(self._masters.items()):
                if task.done():
                    del self._masters[engine]
                    task.result()
            await asyncio.sleep(RENEW_SECONDS)

    async def leave(self) -> None:
        """Hands all engines over, and leaves."""
        for master, _ in self._masters.values():
            master.leave()
        ends = await asyncio.gather(*(task for _, task in self._masters.values()), return_exceptions=True)
        for error in (end for end in ends if isinstance(end, Exception)):
            log.error("a master failed while it left", exc_info=error)
        await self._pool.leave_scheduler(self._name)

    async def _look(self) -> None:
        engines, living = await self._pool.renew_scheduler(self._name)
        now = self._loop.time()
        if self._last_look is None or now - self._last_look > GAP_SECONDS:
            self._sights.clear()
        self._last_look, self._reached = now, time.monotonic()
        if self._candidates is None:
            return  # an engine that is not a candidate is retired: nobody knows yet which are
        known = sorted(engines.keys() | self._candidates.keys())
        share = -(-len(known) // max(1, living))
        for engine in known:
            if (
                engine not in self._masters
                and len(self._masters) < share
                and self._free(engine, engines.get(engine), now)
            ):
                await self._take(engine, engines.get(engine))

    def _free(self, engine: str, state: EngineState | None, now: float) -> bool:
        """Whether the lease is nobody's, or its owner has not renewed it for long enough."""
        if state is None or state.owner is None or state.owner == self._name:
            return True
        sight = self._sights.get(engine)
        if sight is None or sight.state != state:
            self._sights[engine] = Sight(state, now)
            return False
        return now - sight.since > LEASE_SECONDS

    async def _take(self, engine: str, state: EngineState | None) -> None:
        term = await self._pool.acquire(engine, self._name, state)
        if term is None:
            return  # another candidate was faster
        assert self._candidates is not None, "nothing is taken before the candidates are known"
        candidate = self._candidates.get(engine)
        # An engine that is only retired is not counted as taken over: its requests go back without a loss. Neither is
        # one that stands under our own name: the answer to an earlier acquire was lost.
        held_by_another = state is not None and state.owner not in (None, self._name)
        taken_over = candidate is not None and held_by_another
        log.info("engine acquired", extra={"engine": engine, "term": term, "taken_over": taken_over})
        master = EngineMaster(
            engine,
            candidate,
            self._name,
            term,
            taken_over,
            self._pool,
            self._discovery,
            self._settings,
            self._telemetry,
            self._pulse,
        )
        self._masters[engine] = master, asyncio.create_task(master.run(), name=f"master of {engine}")
