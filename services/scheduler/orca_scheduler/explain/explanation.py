"""Explains one request: its time from submission to its end, in parts that follow each other without a gap.

Pure: journals and the pool's word come in, parts come out. Each part says what the request waited for, or what was done
for it, and in how many iterations of the engine. The parts add up to the request's time exactly, because each begins
where the one before ended; moments of several machines agree as well as their clocks do.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from orca_pool.records import Standing

from ..core.request import Phase
from ..core.selection import Stop
from .history import ELSEWHERE, GIVEN_BACK, HANDED_OVER, SECOND, TO_DECODE, History, State, Stay, Turn

GOES_ON = (GIVEN_BACK, HANDED_OVER, TO_DECODE)  # it left, and its time went on


class Kind(StrEnum):
    """The ways for a request's time to go by."""

    UNSEEN = "unseen"  # no journal tells
    FORMING = "forming"  # queued: the engine was not formed
    PLACES = "places"  # queued: the engine had as many requests as it takes
    SLOTS = "slots"  # queued, or claimed: too few slots were free
    PREFIX = "prefix"  # queued: another engine had its prefix, and it waited for that engine
    CLAIM = "claim"  # queued: the engine had room, and its claim was on the way
    TAKEN_OVER = "taken over"  # claimed: the engine's scheduler was gone
    FULL = "full"  # claimed: max_bs requests before it in the order were selected
    POSITIONS = "positions"  # claimed: requests before it had all positions of the iteration
    PREEMPTED = "preempted"  # claimed: it gave up its slots for an earlier request
    PIPELINE = "pipeline"  # claimed: as many batches were in flight as there may be
    BEHIND = "behind"  # claimed: the pool had not kept what was made before
    SCHEDULER = "scheduler"  # claimed: the scheduler's own time between two iterations
    PULL = "pull"  # claimed: its keys and values were pulled from the engine that had begun it
    RUN = "run"  # in iterations
    LOST = "lost"  # in an iteration that never returned
    COMMIT = "commit"  # its last token was on the way to the pool


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a request's time. Moments in ns of the wall clock."""

    kind: Kind
    begin: int
    end: int
    engine: str = ""
    queued: bool = False  # it was in the queue; otherwise an engine had it
    iterations: int = 0  # of the engine: those that it waited for, or ran in
    first: int | None = None  # of these iterations, for RUN and LOST
    last: int | None = None
    by: Mapping[str, int] = field(default_factory=dict[str, int])  # request -> iterations for which it was in the way
    ahead: int = 0  # requests before it in the queue at most
    initiations: int = 0  # of the iterations that it ran in
    positions: int = 0  # computed in these
    batches: tuple[int, int] = (0, 0)  # the smallest and the largest of these batches
    why: str = ""  # for which the engine was lost

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / SECOND


@dataclass(frozen=True, slots=True)
class Explanation:
    """The story of a request. Moments in ns of the wall clock."""

    request: str
    state: str  # queued, running, finished, or how else it ended: in small letters
    submitted: int
    end: int  # of the request, or of what is known of it
    position: int | None  # in the queue as it came: 1 is the first
    position_now: int | None  # where it waits still
    tokens: int
    engines: tuple[str, ...]  # that claimed it, one after the other
    prefix_at: str  # the engine that had its prefix as it was submitted; "" for none
    overtaken: int  # how many were taken before it as it waited for that engine
    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        return (self.end - self.submitted) / SECOND

    @property
    def unseen(self) -> float:
        """Seconds about which no journal says anything."""
        return sum(part.seconds for part in self.parts if part.kind is Kind.UNSEEN)


def explain(request: str, histories: Iterable[History], standing: Standing | None, now: int) -> Explanation | None:
    """Explains a request from its engines' histories and the pool's word. None: neither knows it.

    request: its id, or the X-Request-Id that it came with; of several of these the one that ended last. now: ns of the
    wall clock, the end of a request that lives.
    """
    found = list(histories)
    return _Story(request if standing is not None else _id_of(request, found), found, standing, now).explanation()


def _id_of(name: str, histories: Iterable[History]) -> str:
    """The id of the request that has this id, or came with this X-Request-Id."""
    stays = [stay for history in histories for stay in history.stays]
    came = [stay for stay in stays if stay.exchange == name]
    if not came or any(stay.request == name for stay in stays):
        return name
    return max(came, key=lambda stay: math.inf if stay.left is None else stay.left).request


class _Story:
    """Collects the parts of one request's time."""

    def __init__(self, request: str, histories: list[History], standing: Standing | None, now: int) -> None:
        self._request, self._histories, self._standing, self._now = request, histories, standing, now
        found = [(history, stay) for history in histories for stay in history.stays if stay.request == request]
        found.sort(key=lambda one: one[1].claimed)
        last = max((stay.submitted or 0 for _, stay in found), default=0)
        if standing is not None and standing.times.submitted * 1000 > last:
            last = standing.times.submitted * 1000
        # An id may come again when the pool has forgotten it: the last submission is meant.
        self._stays = [(history, stay) for history, stay in found if (stay.submitted or 0) == last]
        stay = self._last
        if standing is not None and stay is not None and stay.left is None and stay.claimed > standing.now * 1000:
            self._standing = standing._replace(position=0)  # the journals were read after the pool
        self._submitted = last
        self._parts: list[Part] = []
        self._cursor = last

    def explanation(self) -> Explanation | None:
        if not self._stays and self._standing is None:
            return None
        if not self._submitted:
            self._submitted = self._cursor = self._stays[0][1].claimed
        end = self._end()
        for n, (history, stay) in enumerate(self._stays):
            before = self._stays[n - 1][1] if n else None
            if before is not None and before.why == HANDED_OVER:
                self._add(Part(Kind.TAKEN_OVER, self._cursor, stay.claimed, engine=history.engine))
            else:
                self._queued(history, stay.claimed, stay)
            until = self._stays[n + 1][1].claimed if n + 1 < len(self._stays) else end
            self._at_engine(history, stay, until)
        if self._cursor < end:
            self._rest(end)
        state = self._state()
        parts = tuple(_merged(self._parts))
        standing = self._standing
        waits = standing is not None and standing.position > 0
        return Explanation(
            self._request,
            state,
            self._submitted,
            end,
            self._position(),
            standing.position if standing is not None and waits else None,
            self._tokens(),
            tuple(history.engine for history, _ in self._stays),
            *self._prefix(),
            parts,
        )

    # -- its beginning and end

    @property
    def _last(self) -> Stay | None:
        return self._stays[-1][1] if self._stays else None

    def _end(self) -> int:
        """When it ended: by the pool, by the journal, or not yet."""
        standing, last = self._standing, self._last
        if standing is not None and standing.times.finished:
            return max(standing.times.finished * 1000, self._submitted)
        if last is not None and last.left is not None and last.why not in GOES_ON:
            return last.left
        if standing is not None:
            return max(self._now, self._submitted)
        return max([history.end for history, _ in self._stays] + [self._submitted])  # the journals' end

    def _state(self) -> str:
        standing, last = self._standing, self._last
        if standing is not None:
            if standing.reason is not None:
                return _state_of(standing.reason.name)
            return "queued" if standing.position else "running" if last is not None and last.turns else "claimed"
        assert last is not None
        if last.left is None:
            return "running" if last.turns else "claimed"
        if last.why in GOES_ON:
            return "queued" if last.why == GIVEN_BACK else "running"
        return "ended" if last.why == ELSEWHERE else _state_of(last.why)

    def _tokens(self) -> int:
        return max([stay.tokens for _, stay in self._stays] + [self._standing.tokens if self._standing else 0])

    def _prefix(self) -> tuple[str, int]:
        about = self._standing if self._standing is not None else self._last
        return (about.prefix_at, about.overtaken) if about is not None else ("", 0)

    def _position(self) -> int | None:
        """Its place in the queue as it came: before it stood those that came earlier, and were claimed later."""
        if not self._stays:
            return None
        mine = self._stays[0][1]
        if mine.submitted is None or not mine.arrival:
            return None
        return 1 + len(self._ahead(mine.arrival, self._submitted))

    def _ahead(self, arrival: int, at: int) -> list[Stay]:
        """The requests before it in the queue at a moment: each by the stay that took it from there."""
        return [stay for stay in self._later(arrival, at) if stay.claimed > at and (stay.submitted or at + 1) <= at]

    def _later(self, arrival: int, at: int) -> list[Stay]:
        found = (stay for history in self._histories for stay in history.stays)
        return [stay for stay in found if 0 < stay.arrival < arrival and stay.claimed > at]

    # -- in the queue

    def _queued(self, history: History, until: int, stay: Stay | None) -> None:
        """Tells the time in the queue: from where the story stands until a claim of this engine, or until now."""
        begin, end = self._cursor, until
        if end <= begin:
            return
        arrival = stay.arrival if stay is not None else self._standing.order if self._standing else 0
        about = stay if stay is not None else self._standing
        need = stay.need if stay is not None else self._standing.slots if self._standing else 0
        before = self._later(arrival, begin) if arrival else []
        waits_for = about.prefix_at if about is not None else ""
        holders = history.holders(begin, end)
        for state, left, right in history.states_between(begin, end):
            if left > self._cursor:
                self._add(Part(Kind.UNSEEN, self._cursor, left, queued=True))
            ahead = [one for one in before if one.claimed > left and (one.submitted or left) <= left]
            head = min(ahead, key=lambda one: one.arrival).need if ahead else need
            self._add(self._wait(history, state, left, right, head, holders, len(ahead), waits_for))
        if end > self._cursor:
            self._add(Part(Kind.UNSEEN, self._cursor, end, queued=True))

    def _wait(
        self,
        history: History,
        state: State,
        begin: int,
        end: int,
        need: int,
        holders: list[Stay],
        ahead: int,
        waits_for: str,
    ) -> Part:
        """Says why the head of the queue waited while the engine stood like this."""
        part = Part(Kind.CLAIM, begin, end, engine=history.engine, queued=True, ahead=ahead)
        if not state.formed:
            return replace(part, kind=Kind.FORMING, why=state.why)
        count = len(history.batches_between(begin, end))
        if state.live >= history.places:
            return replace(part, kind=Kind.PLACES, iterations=count)
        if need > state.room:
            by = _names(holders, begin, max(count, 1))
            return replace(part, kind=Kind.SLOTS, iterations=count, by=by)
        if waits_for not in ("", history.engine):
            return replace(part, kind=Kind.PREFIX, engine=waits_for, iterations=count)
        return replace(part, iterations=count)

    # -- at an engine

    def _at_engine(self, history: History, stay: Stay, until: int) -> None:
        """Tells the request's time at an engine: from its claim until it left, or until now."""
        left = min(stay.left, until) if stay.left is not None else until
        if self._standing is None and stay.left is None:
            left = min(left, history.end)
        for turn in stay.turns:
            batch = turn.batch
            begin = min(batch.scheduled, left)
            self._between(history, stay, begin, turn.admitted and turn is not stay.turns[0])
            if batch.returned is not None:
                self._add(_run(history, turn, self._cursor, min(batch.returned, left)))
            elif batch.lost is not None:
                self._add(replace(_run(history, turn, self._cursor, min(batch.lost, left)), kind=Kind.LOST))
            else:
                self._add(_run(history, turn, self._cursor, left))
        self._between(history, stay, left, stay.preempted)

    def _between(self, history: History, stay: Stay, end: int, preempted: bool) -> None:
        """The time until its next iteration: what else ran, or kept the engine from running it."""
        if stay.pull_ended is not None and self._cursor < stay.pull_ended < end:
            self._between(history, stay, stay.pull_ended, preempted)
        begin = self._cursor
        if end <= begin:
            return
        part = Part(Kind.SCHEDULER, begin, end, engine=history.engine)
        others = history.batches_between(begin, end)
        state = history.state_at(begin)
        before = next((turn.batch for turn in reversed(stay.turns) if turn.batch.returned == begin), None)

        def holders() -> dict[str, int]:
            return _names([one for one in history.holders(begin, end) if one is not stay], begin, len(others))

        if state is not None and not state.formed:
            part = replace(part, kind=Kind.FORMING, why=state.why)
        elif stay.pulled and (stay.pull_ended is None or begin < stay.pull_ended):
            part = replace(part, kind=Kind.PULL, iterations=len(others))
        elif preempted:
            part = replace(part, kind=Kind.PREEMPTED, iterations=len(others), by=holders())
        elif any(batch.stop in (Stop.BATCH_FULL, Stop.SHARE) for batch in others):
            part = replace(part, kind=Kind.FULL, iterations=len(others))
        elif any(batch.stop == Stop.POSITIONS for batch in others):
            part = replace(part, kind=Kind.POSITIONS, iterations=len(others))
        elif any(batch.stop == Stop.SLOTS for batch in others) and not stay.turns:
            part = replace(part, kind=Kind.SLOTS, iterations=len(others), by=holders())
        elif before is not None and before.late:
            part = replace(part, kind=Kind.BEHIND)
        elif history.in_flight(begin) >= history.n_workers:
            part = replace(part, kind=Kind.PIPELINE, iterations=len(others))
        else:
            part = replace(part, iterations=len(others))
        self._add(part)

    def _rest(self, end: int) -> None:
        """Tells the time from the last event in a journal until the request's end, or until now."""
        last = self._last
        if last is not None and last.left is not None and last.why not in (*GOES_ON, ELSEWHERE):
            self._add(Part(Kind.COMMIT, self._cursor, end, engine=self._stays[-1][0].engine))
            return
        engine = self._stays[-1][0] if self._stays else max(self._histories, key=_promise, default=None)
        if engine is None or (last is not None and last.left is None):
            self._add(Part(Kind.UNSEEN, self._cursor, end))
        else:
            self._queued(engine, end, None)

    def _add(self, part: Part) -> None:
        if part.end > part.begin:
            assert part.begin == self._cursor, "a part begins where the one before ended"
            self._parts.append(part)
            self._cursor = part.end


def _promise(history: History) -> tuple[bool, int]:
    """Chooses the engine whose state explains a request's wait: one that runs, with the most room."""
    state = history.states[-1] if history.states else None
    return (state.formed, state.room) if state is not None else (False, 0)


def _run(history: History, turn: Turn, begin: int, end: int) -> Part:
    batch, initiation = turn.batch, turn.phase is Phase.INITIATION
    return Part(
        Kind.RUN,
        begin,
        max(end, begin),
        engine=history.engine,
        iterations=1,
        first=batch.iteration,
        last=batch.iteration,
        initiations=int(initiation),
        positions=turn.count if initiation else 0,
        batches=(batch.size, batch.size),
    )


def _names(holders: Sequence[Stay], at: int, count: int) -> dict[str, int]:
    """The requests that held slots at a moment, each for this many iterations."""
    return {
        stay.request: count
        for stay in holders
        if stay.turns[0].batch.scheduled <= at and (stay.left is None or stay.left > at)
    }


def _state_of(reason: str) -> str:
    """Names a request's end, by one word where there is one."""
    return {
        "LENGTH": "finished",
        "EOS": "finished",
        "STOP_TOKEN": "finished",
        "STOP": "finished",
        "CANCELLED": "cancelled",
        "DEADLINE": "expired",
        "DETACHED": "abandoned",
    }.get(reason, f"failed ({reason})")


def _merged(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of one kind become one part."""
    found: list[Part] = []
    for part in parts:
        before = found[-1] if found else None
        if before is not None and _same(before, part):
            found[-1] = _joined(before, part)
        else:
            found.append(part)
    return found


def _same(a: Part, b: Part) -> bool:
    return (a.kind, a.engine, a.queued, a.why) == (b.kind, b.engine, b.queued, b.why)


def _joined(a: Part, b: Part) -> Part:
    sizes = [size for part in (a, b) for size in part.batches if size]
    return replace(
        a,
        end=b.end,
        iterations=a.iterations + b.iterations,
        first=a.first,
        last=b.last,
        by=dict((Counter(a.by) + Counter(b.by)).most_common()),
        ahead=max(a.ahead, b.ahead),
        initiations=a.initiations + b.initiations,
        positions=a.positions + b.positions,
        batches=(min(sizes, default=0), max(sizes, default=0)),
    )
