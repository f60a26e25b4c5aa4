"""The scheduler: takes leases of engines and has them mastered (docs/design.md, "Leases")."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from orca_common.errors import Unavailable
from orca_common.metrics import Metrics
from orca_common.service import LoopPulse, in_thread
from orca_common.telemetry import Telemetry
from orca_common.tls import Transport
from orca_pool.leases import GAP_SECONDS, LEASE_SECONDS, RENEW_SECONDS
from orca_pool.outage import Outage
from orca_pool.pool import Pool
from orca_pool.records import EngineState, Standing

from . import timers
from .discovery.candidates import Candidate, Discovery
from .explain.explanation import Explanation, explain
from .explain.history import History
from .gauges import report
from .live import Live
from .master.journal import parse
from .master.master import EngineMaster
from .master.recent import Recent
from .settings import SchedulerSettings
from .share import holds_too_much, may_take

log = logging.getLogger(__name__)
RECENT = 32 << 20  # bytes of memory for the latest events of all engines
LISTED = 100  # requests
STALE = 2.0  # seconds after which what was seen of the queue says nothing of the queue now


@dataclass(slots=True)
class Sight:
    """A lease as our reads saw it, and for how many seconds of our looks it has not moved."""

    state: EngineState
    unmoved: float = 0.0


class Scheduler:
    """Masters its share of the engines (`share`), and releases what is beyond it when another scheduler has joined."""

    def __init__(
        self,
        name: str,
        ended: Callable[[str], bool],
        pool: Pool,
        discovery: Discovery,
        settings: SchedulerSettings,
        telemetry: Telemetry,
        pulse: LoopPulse,
        transport: Transport,
        metrics: Metrics,
    ) -> None:
        """ended: whether the scheduler of a name has ended for sure (`Presence`): its leases are not waited for."""
        self._ended = ended
        self._name, self._pool, self._discovery = name, pool, discovery
        self._settings, self._telemetry, self._pulse, self._transport = settings, telemetry, pulse, transport
        self._metrics, self._recent = metrics, Recent(RECENT)
        self.live = Live(name, self._recent, self._mastered, self.queue, settings.show_prompts)
        report(metrics, self._mastered, self.queue)
        self._candidates: dict[str, Candidate] | None = None  # None: not known yet
        self._masters: dict[str, tuple[EngineMaster, asyncio.Task[None]]] = {}
        self._explains = asyncio.Lock()
        self._sights: dict[str, Sight] = {}
        self._too_much: float | None = None  # since when it holds more than its share
        self._releasing: str | None = None  # the engine that goes to another scheduler
        self._given_up: set[str] = set()  # engines that are being released, because their pods cannot be reached
        self._withdrawn_until = 0.0  # until then it takes nothing, and is not counted
        self._loop = asyncio.get_running_loop()
        self._outage = Outage(self._loop.time)
        self._not_finite = 0  # that masters counted whose term is over
        self._last_look: float | None = None  # on the loop's clock
        self._generation = pool.generation  # of the connection to Redis, at that look
        self._reached = 0.0  # the same on the clock that the status port's thread may read
        self._waiting, self._oldest = 0, 0.0  # the queue then: its requests, and the age of the first one in seconds

    def discovered(self, candidates: Sequence[Candidate]) -> None:
        """Takes the engines that there may be. Called again whenever discovery has other ones."""
        before, self._candidates = self._candidates, {candidate.engine: candidate for candidate in candidates}
        for engine, (master, _) in self._masters.items():
            candidate = self._candidates.get(engine)
            if before is None or candidate != before.get(engine):
                master.candidate_changed(candidate)

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

    def policies(self) -> Sequence[str]:
        """The policies of these engines that run, each once. May be called in any thread."""
        return sorted({master.core.policy.name for master, _ in list(self._masters.values()) if master.unready is None})

    def refused(self) -> Mapping[str, str]:
        """Those of these engines whose ranks refuse to form, and why. May be called in any thread."""
        told = {engine: master.refusal for engine, (master, _) in list(self._masters.items())}
        return {engine: why for engine, why in told.items() if why is not None}

    @property
    def first(self) -> bool:
        """Whether it masters the first engine, and so decides what one scheduler alone may; or there is no engine."""
        if self._candidates is None:
            return False
        return not self._candidates or next(iter(self._candidates)) in self._masters

    @property
    def not_finite(self) -> int:
        """Rows of logits with NaN or infinity since this process began. May be called in any thread."""
        return self._not_finite + sum(master.not_finite for master, _ in list(self._masters.values()))

    def _mastered(self) -> list[EngineMaster]:
        """May be called in any thread."""
        return [master for master, _ in list(self._masters.values())]

    def queue(self) -> tuple[int, float] | None:
        """The number of requests that wait, and the first one's age in seconds; None while the pool does not answer.

        May be called in any thread.
        """
        since = time.monotonic() - self._reached
        if self._last_look is None or since > STALE:
            return None
        return self._waiting, self._oldest + since if self._waiting else 0.0

    def requests(self) -> list[dict[str, Any]]:
        """Returns the oldest requests that its engines have, LISTED of them. May be called in any thread."""
        found = [request for master, _ in list(self._masters.values()) for request in master.requests()]
        return sorted(found, key=lambda request: request["submitted"])[:LISTED]

    async def explain(self, request: str) -> tuple[Explanation | None, Standing | None]:
        """Explains a request, as far as the pool knows it, or it was on an engine of this scheduler.

        request: its id; or the X-Request-Id that it came with, once an engine has had it. Also returns the pool's word.
        Raises Unavailable while the pool is away.
        """
        async with self._explains:  # one at a time: the ranks wait for this process
            standing = await self._pool.look_up(request)
            since = standing.times.submitted * 1000 if standing is not None else 0
            lines = self._recent.lines(since)
            story = await in_thread(lambda: explanation_of(request, lines, standing, time.time_ns()))
            if story is not None and story.request != request:  # that was an X-Request-Id
                request = story.request
                standing = await self._pool.look_up(request)
                story = await in_thread(lambda: explanation_of(request, lines, standing, time.time_ns()))
            return story, standing

    async def run(self) -> None:
        """Looks at the leases, again and again. Never returns; raises the error of a master that failed."""
        while True:
            try:
                await self._look()
            except Unavailable as away:
                self._sights.clear()  # a failed read starts every count again
                self._outage.away(away)
            else:
                self._outage.back()
            for engine, (_, task) in list(self._masters.items()):
                if task.done():
                    self._not_finite += self._masters.pop(engine)[0].not_finite
                    self._given_up.discard(engine)
                    if engine == self._releasing:
                        self._releasing = None
                    task.result()
            await asyncio.sleep(RENEW_SECONDS)

    async def leave(self) -> None:
        """Hands all engines over, and leaves."""
        for master, _ in self._masters.values():
            master.leave()
        with contextlib.suppress(Unavailable):
            await self._pool.leave_scheduler(self._name)  # first: others may take as much as is released
        ends = await asyncio.gather(*(task for _, task in self._masters.values()), return_exceptions=True)
        for error in (end for end in ends if isinstance(end, Exception)):
            log.error("a master failed while it left", exc_info=error)

    async def _look(self) -> None:
        engines, living, waiting, oldest = await self._pool.renew_scheduler(self._name)
        now = self._loop.time()
        if self._pool.generation != self._generation:  # Redis was away: a lease that stood still says nothing
            self._generation = self._pool.generation
            self._sights.clear()
        elif self._last_look is not None:
            self._count(now - self._last_look)
        self._last_look, self._reached = now, time.monotonic()
        self._waiting, self._oldest = waiting, oldest
        if self._candidates is None:  # an engine that is no candidate would be retired, so nothing is taken yet
            await self._pool.leave_scheduler(self._name)  # so that the others keep no share free for this one
            return
        self._give_up_unreached(now, living)
        if now < self._withdrawn_until and living > 1:
            await self._pool.leave_scheduler(self._name)
            return
        known = sorted(engines.keys() | self._candidates.keys())
        others = [engine for engine in known if engine not in self._masters]
        owners = {state.owner for state in engines.values()} - {None, self._name}
        for owner in filter(self._ended, cast(set[str], owners)):
            await self._pool.leave_scheduler(owner)  # so that the others count on it for no engine
        free = [engine for engine in others if self._free(engine, engines.get(engine))]
        held = Counter(filter(None, (engines[engine].owner for engine in others if engine not in free)))
        held[self._name] = len(self._masters)
        beyond = False  # whether one was taken beyond the share
        for engine in free:
            state = engines.get(engine)
            if not may_take(self._name, held, len(known), living):
                # Streams wait for an engine whose master is silent, and a scheduler that has just started must first
                # watch the lease. A scheduler that has watched it takes one at a look; hand-over evens shares out.
                if beyond or state is None or state.owner in (None, self._name):
                    continue
                beyond = True
            await self._take(engine, state)
            held[self._name] = len(self._masters)
        if free or not holds_too_much(self._name, held, len(known), living):
            self._too_much = None
        else:
            self._release_one(now)

    def _count(self, seconds: float) -> None:
        """Adds the time since the look before to each lease's silence.

        A late look counts as one renewal's time, so that looks which are always late still find a dead master; after a
        longer pause than a lease every count starts again (`sweep_gap` of docs/pool.md is the same for processes).
        """
        if seconds > GAP_SECONDS:
            log.warning("late look at the leases", extra={"seconds": round(seconds, 2)})
        if seconds > LEASE_SECONDS:
            self._sights.clear()
        for sight in self._sights.values():
            sight.unmoved += seconds if seconds <= GAP_SECONDS else RENEW_SECONDS

    def _give_up_unreached(self, now: float, living: int) -> None:
        """Releases engines whose pods this scheduler cannot reach: it may be cut off from them, and another one not."""
        if living < 2:
            return
        for engine, (master, _) in self._masters.items():
            since = master.unreached_since
            if since is not None and now - since > timers.UNREACHED and engine not in self._given_up:
                log.warning("engine given up: its pods cannot be reached from here", extra={"engine": engine})
                self._given_up.add(engine)
                self._withdrawn_until = now + timers.WITHDRAWN
                master.leave()

    def _release_one(self, now: float) -> None:
        """Releases an engine to another scheduler, an idle one first, when that has been due for a lease's time.

        So long a scheduler that has died is counted as living.
        """
        self._too_much = now if self._too_much is None else self._too_much
        if self._releasing is not None or now - self._too_much <= LEASE_SECONDS:
            return
        self._releasing = max(self._masters, key=lambda engine: (self._masters[engine][0].unready is not None, engine))
        log.info("engine released to another scheduler", extra={"engine": self._releasing})
        self._masters[self._releasing][0].leave()

    def _free(self, engine: str, state: EngineState | None) -> bool:
        """Whether the lease has no owner, or one that has ended or not renewed it for long enough."""
        if state is None or state.owner is None or state.owner == self._name or self._ended(state.owner):
            return True
        sight = self._sights.get(engine)
        if sight is None or sight.state != state:
            self._sights[engine] = Sight(state)
            return False
        return sight.unmoved > LEASE_SECONDS

    async def _take(self, engine: str, state: EngineState | None) -> None:
        term = await self._pool.acquire(engine, self._name, state)
        if term is None:
            return  # another candidate was faster
        assert self._candidates is not None, "nothing is taken before the candidates are known"
        candidate = self._candidates.get(engine)
        # An engine that is only retired is not counted as taken over: its requests go back without a loss. Neither is
        # one that stands under our own name: the answer to an earlier acquire was lost.
        silent_term = state.term if state is not None and state.owner not in (None, self._name) else None
        taken_over = candidate is not None and silent_term is not None
        log.info("engine acquired", extra={"engine": engine, "term": term, "taken_over": taken_over})
        master = EngineMaster(
            engine,
            candidate,
            self._name,
            term,
            silent_term,
            self._pool,
            self._discovery,
            self._settings,
            self._telemetry,
            self._pulse,
            self._transport,
            self._metrics,
            self._recent.of(engine),
        )
        self._masters[engine] = master, asyncio.create_task(master.run(), name=f"master of {engine}")


def explanation_of(
    request: str, lines: Mapping[str, Sequence[bytes]], standing: Standing | None, now: int
) -> Explanation | None:
    """Explains a request from the lines of each engine's journals."""
    histories = [History(engine) for engine in lines]
    for history in histories:
        history.take(map(parse, lines[history.engine]))
    return explain(request, histories, standing, now)
