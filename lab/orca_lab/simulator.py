"""A simulation: the scheduler's own core under a virtual clock, with stages as servers in a line and one modelled pool.

`Core`, its policies, its memory and every selection are the real ones. Only times are modelled: of a stage, a hop, the
host, a claim and a commit. Equal inputs give equal results to the bit: nothing here looks at a clock or draws a number.

An engine's batch passes its stages in order. A stage runs one batch at a time, in the order of issue, so a batch's
return is known when it is issued. With a run-ahead, stage 0 begins a batch when the tokens of its requests have left
the last stage.

Engines may have roles (docs/roles.md). A request that was handed over is claimed when its commit is done. An engine
pulls for one request at a time, and serves one pull at a time. Pulls do not fail, and a request waits for its engine
however long that takes.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

from orca_common.errors import FailedPrecondition
from orca_common.priorities import Priority, lift_of
from orca_common.reservation import Reservation
from orca_scheduler.core.core import (
    Action,
    Arrived,
    BatchReturned,
    Commit,
    Core,
    EngineReady,
    Event,
    GiveBack,
    HandOver,
    LetGo,
    Pull,
    Pulled,
    ScheduleBatch,
    Tick,
)
from orca_scheduler.core.policy import Policy
from orca_scheduler.core.request import Arrival
from orca_scheduler.core.roles import Role
from orca_scheduler.core.sets import PAPER

from .baseline.selections import core_of
from .cost import Cost, Load, load_of
from .workload import Asked, Workload

BLOCK_SIZE = 16
WORD, END = 0, 1  # tokens: any, and one that ends its request before its limit


@dataclass(frozen=True)
class Engine:
    """One engine of a simulation."""

    cost: Cost
    n_slots: int
    max_bs: int
    policy: Policy = PAPER
    block_size: int = BLOCK_SIZE
    run_ahead: int = 0
    role: Role = Role.MIXED

    @property
    def memory_slots(self) -> int:
        """Slots that memory holds, in whole blocks."""
        return self.n_slots // self.block_size * self.block_size

    def core(self) -> Core:
        return core_of(self.policy, self.max_bs, self.cost.stages, self.block_size, self.run_ahead, self.role)


@dataclass(frozen=True)
class Delays:
    """Seconds that the pool takes. `ahead`: the scheduler sees the whole queue when it selects, as in the paper's
    Algorithm 1; if not, it claims what it has room for (`Core.room`), and a place that an end-of-sequence token frees
    stays empty for an iteration, as live."""

    claim: float = 0.0
    commit: float = 0.0
    ahead: bool = True
    pull: float = 0.0  # beside the time of the bytes: two connections, and the messages around them


@dataclass
class Served:
    """A request's fate. Moments in seconds; a token counts when it was committed."""

    asked: Asked
    engine: int = 0
    began: float = 0.0  # its first iteration was issued
    first: float = 0.0  # its first token
    ended: float = 0.0
    came: list[float] | None = None  # all tokens, where they were asked for

    @property
    def latency(self) -> float:
        return self.ended - self.asked.at

    @property
    def normalized(self) -> float:
        """The paper's measure: seconds from arrival to end, for each token."""
        return self.latency / self.asked.output_tokens

    @property
    def first_token(self) -> float:
        return self.first - self.asked.at


class Ran(NamedTuple):
    """An iteration: its batch, and when each stage began and ended it."""

    engine: int
    batch: ScheduleBatch
    load: Load
    stages: tuple[tuple[float, float], ...]


@dataclass
class Result:
    """A simulation's end. `requests` are those that ended, in the order of the workload."""

    requests: list[Served]
    seconds: float  # of the virtual clock, until the last end
    iterations: int
    rows: int  # requests of all iterations
    busy: list[list[float]]  # seconds, by engine and stage
    stopped: bool = False  # before the workload's end, because `give_up` said so

    @property
    def warm(self) -> list[Served]:
        """The requests without the first tenth, in which nothing waits yet."""
        return self.requests[len(self.requests) // 10 :]

    @property
    def mean_batch(self) -> float:
        return self.rows / self.iterations if self.iterations else 0.0


Listener = Callable[[int, Event, Sequence[Action]], None]  # engine, event, actions: each step of a core
Watch = Callable[[Ran], None]


class Kind(IntEnum):
    """The kind of an event. Of events at the same moment those with the smaller number come first."""

    RETURN = 0
    CLAIMED = 1
    HANDED = 2
    PULLED = 3
    LET_GO = 4
    TICK = 5


@dataclass
class Running:
    """An engine's state beside its core."""

    number: int
    about: Engine
    core: Core
    free: list[float]  # when each stage is done with what it was given
    busy: list[float]
    sent: deque[float] = field(default_factory=deque[float])  # of batches in flight: when tokens leave the last stage
    flight: deque[tuple[int, tuple[int, ...]]] = field(default_factory=deque[tuple[int, tuple[int, ...]]])
    live: int = 0  # requests that the core has
    asking: bool = False  # a claim is under way
    linked: float = 0.0  # until when it pulls, or is pulled from
    tick_at: float | None = None  # as the core last named it


class Simulation:
    """Engines of one pool under one workload."""

    def __init__(
        self,
        engines: Sequence[Engine],
        delays: Delays = Delays(),
        listener: Listener | None = None,
        watch: Watch | None = None,
        tokens: bool = False,
        aging: float = 60.0,
    ) -> None:
        """listener and watch: told each step of a core, and each iteration. tokens: note the moment of each token.
        aging: seconds that a class of requests is ahead of the next."""
        assert engines, "a simulation has an engine"
        assert len(engines) == 1 or not delays.ahead, "engines that share a queue cannot see the whole of it"
        self._engines = [
            Running(n, one, one.core(), [0.0] * one.cost.stages, [0.0] * one.cost.stages)
            for n, one in enumerate(engines)
        ]
        self._delays, self._listener, self._watch, self._tokens = delays, listener, watch, tokens
        self._events: list[tuple[float, int, int, int, int]] = []  # moment, kind, order, engine, claim
        self._order = 0
        # Heaps: microseconds of arrival and class, number in the workload.
        self._queue, self._handed = list[tuple[int, int]](), list[tuple[int, int]]()
        # Handed over, by claim: its order, and the number of the engine that has its row.
        self._begun = dict[int, tuple[int, int]]()
        self._stops = set[int]()  # claims whose next token is their last, below their limit
        self._aging = aging
        self._served: list[Served] = []
        self._now = self._last = 0.0
        self._left = self._iterations = self._rows = 0
        self.cores = [one.core for one in self._engines]

    def run(self, workload: Workload, give_up: Callable[[float, int], bool] | None = None) -> Result:
        """Serves a workload to its end. give_up: of the moment and the requests in the queue, at each arrival."""
        largest = max((asked.limit or asked.output_tokens) + asked.input_tokens for asked in workload)
        smallest = min(one.memory_slots for one in (engine.about for engine in self._engines))
        if largest > smallest:
            raise FailedPrecondition(f"slots: a request needs {largest}; an engine has {smallest}")
        self._served = [Served(asked, came=[] if self._tokens else None) for asked in workload]
        self._left, stopped = len(workload), False
        for engine in self._engines:
            self._step(engine, EngineReady(0.0, engine.about.n_slots, 1))
        arrivals = iter(enumerate(workload))
        coming = next(arrivals, None)
        while self._left:
            if coming is not None and (not self._events or coming[1].at < self._events[0][0]):
                self._now = coming[1].at
                while coming is not None and coming[1].at == self._now:
                    order = round(coming[1].at * 1e6) + lift_of(Priority(coming[1].priority), self._aging)
                    heapq.heappush(self._queue, (order, coming[0]))
                    coming = next(arrivals, None)
                if give_up is not None and give_up(self._now, len(self._queue) + len(self._handed)):
                    stopped = True
                    break
                self._claim_all()
                continue
            if not self._events:
                raise RuntimeError(f"{self._left} requests are left, and none of them runs")
            self._now, kind, _, number, claim = heapq.heappop(self._events)
            engine = self._engines[number]
            match kind:
                case Kind.RETURN:
                    self._returned(engine)
                case Kind.CLAIMED:
                    engine.asking = False
                    self._take(engine)
                case Kind.HANDED:
                    heapq.heappush(self._handed, (self._begun[claim][0], claim - 1))
                    self._claim_all()
                case Kind.PULLED:
                    self._at(self._now + self._delays.commit, Kind.LET_GO, self._engines[self._begun[claim][1]], claim)
                    self._step(engine, Pulled(self._now, claim, done=True))
                case Kind.LET_GO:
                    self._step(engine, LetGo(self._now, (claim,)))
                    self._claim_all()
                case _:
                    self._tick(engine)
                    self._claim_all()
        ended = [one for one in self._served if one.ended] if stopped else self._served
        busy = [engine.busy for engine in self._engines]
        return Result(ended, self._last, self._iterations, self._rows, busy, stopped)

    # -- the pool

    def _claim_all(self) -> None:
        """The emptiest engine takes first: the pool's hint goes to it."""
        if not self._queue and not self._handed:
            return
        several = len(self._engines) > 1
        for engine in sorted(self._engines, key=lambda one: -one.core.room().slots) if several else self._engines:
            self._claim(engine)

    def _queue_of(self, engine: Running) -> list[tuple[int, int]]:
        return self._handed if engine.about.role is Role.DECODE else self._queue

    def _claim(self, engine: Running) -> None:
        if not self._queue_of(engine) or engine.asking:
            return
        if self._room(engine) <= 0 and not self._yielding(engine):
            return
        if self._delays.claim:
            engine.asking = True
            self._at(self._now + self._delays.claim, Kind.CLAIMED, engine)
        else:
            self._take(engine)

    def _room(self, engine: Running) -> int:
        """Requests that the engine may take from the queue."""
        if not self._delays.ahead:
            return engine.core.room().requests
        # Of these, n_workers batches may be running and one of them may end: a step begins at most as many again.
        return (2 * engine.core.n_workers + 1) * engine.about.max_bs - engine.live

    def _yielding(self, engine: Running) -> list[tuple[int, int]]:
        """Class and order of requests that may give way to the head of the queue, the last one first."""
        if not self._delays.ahead:
            return engine.core.yielding()
        return [(one.arrived.priority, one.arrived.arrival) for one in engine.core.requests[::-1]]

    def _take(self, engine: Running) -> None:
        """Takes the first requests that fit, until one does not."""
        queue, taken, about = self._queue_of(engine), list[Arrival](), engine.about
        slots = about.n_slots if self._delays.ahead else engine.core.room().slots
        reservation = Reservation(about.block_size, about.policy.reserves_output)
        room, yielding = self._room(engine), None
        while queue:
            (order, number), claim = queue[0], queue[0][1] + 1
            asked = self._served[number].asked
            if len(taken) >= room:
                yielding = self._yielding(engine) if yielding is None else yielding
                priority, last = yielding.pop(0) if yielding else (0, 0)
                if order >= last or asked.priority >= priority:
                    break
            limit = asked.limit or asked.output_tokens
            if not self._delays.ahead:
                slots -= reservation.upfront(asked.input_tokens, limit)
                if slots < 0:
                    break
            heapq.heappop(queue)
            ends = (END,) if limit > asked.output_tokens else ()
            if ends and asked.output_tokens == 1:
                self._stops.add(claim)
            arrival = Arrival(claim, order, asked.input_tokens, limit, eos_token_ids=ends, priority=asked.priority)
            if queue is self._handed:
                arrival = replace(arrival, generated=1, elsewhere=asked.input_tokens)
            taken.append(arrival)
            self._served[number].engine = engine.number
        if taken:
            engine.live += len(taken)
            self._step(engine, Arrived(self._now, tuple(taken)))
            if not self._delays.ahead:
                self._claim(engine)  # some of them may be in their last iteration

    # -- engines

    def _step(self, engine: Running, event: Event) -> None:
        actions = engine.core.step(event)
        if self._listener is not None:
            self._listener(engine.number, event, actions)
        for action in actions:
            match action:
                case ScheduleBatch():
                    self._issue(engine, action)
                case Commit():
                    self._commit(engine, action)
                case HandOver():
                    self._hand_over(engine, action)
                case Pull():
                    self._pull(engine, action)
                case GiveBack():
                    raise AssertionError("an engine that stays gives nothing back: its requests fit")
        if engine.core.tick_at != engine.tick_at:
            engine.tick_at = engine.core.tick_at
            self._await_tick(engine)

    def _await_tick(self, engine: Running) -> None:
        if engine.tick_at is not None:
            self._at(engine.tick_at, Kind.TICK, engine)

    def _tick(self, engine: Running) -> None:
        self._step(engine, Tick(self._now))

    def _issue(self, engine: Running, batch: ScheduleBatch) -> None:
        """Runs a batch through the stages, each as soon as it is free and has the batch's data."""
        cost, load = engine.about.cost, load_of(batch.members)
        there = self._now + cost.host
        hop = cost.hop(load) if cost.stages > 1 else 0.0
        if len(engine.sent) >= engine.core.n_workers:  # ahead of the tokens of the oldest batch
            there = max(there, engine.sent[0] + hop)
        times = list[tuple[float, float]]()
        for stage in range(cost.stages):
            begin = max(there, engine.free[stage])
            end = begin + cost.stage(stage, load)
            engine.free[stage] = end
            engine.busy[stage] += end - begin
            times.append((begin, end))
            there = end + hop
        engine.sent.append(times[-1][1])
        engine.flight.append((batch.iteration, tuple([member.claim for member in batch.members if member.outputs])))
        for member in batch.members[: batch.admitted]:
            served = self._served[member.claim - 1]
            served.began = served.began or times[0][0]
        self._iterations += 1
        self._rows += load.rows
        self._at(times[-1][1], Kind.RETURN, engine)
        if self._watch is not None:
            self._watch(Ran(engine.number, batch, load, tuple(times)))

    def _returned(self, engine: Running) -> None:
        engine.sent.popleft()
        iteration, claims = engine.flight.popleft()
        if self._stops:
            made = tuple([(END if claim in self._stops else WORD,) for claim in claims])
        else:
            made = ((WORD,),) * len(claims)
        self._step(engine, BatchReturned(self._now, iteration, made))
        if self._delays.ahead:
            self._claim(engine)
        else:
            self._claim_all()

    def _commit(self, engine: Running, commit: Commit) -> None:
        moment = self._now + self._delays.commit
        for claim, base, _, finish in commit.outcomes:
            served = self._served[claim - 1]
            if base == 0:
                served.first = moment
            if served.came is not None:
                served.came.append(moment)
            if finish is not None:
                served.ended = self._last = moment
                engine.live -= 1
                self._left -= 1
                self._stops.discard(claim)
            elif base + 2 == served.asked.output_tokens and served.asked.limit > served.asked.output_tokens:
                self._stops.add(claim)

    def _hand_over(self, engine: Running, action: HandOver) -> None:
        """Requests leave with their first token, and can be claimed when it is committed."""
        orders = {request.claim: request.arrived.arrival for request in engine.core.kept}
        for claim, _, _ in action.requests:
            engine.live -= 1
            self._begun[claim] = orders[claim], engine.number
            self._at(self._now + self._delays.commit, Kind.HANDED, engine, claim)

    def _pull(self, engine: Running, action: Pull) -> None:
        """Moves whole blocks, over one link of each engine."""
        source = self._engines[self._begun[action.claim][1]]
        block = engine.about.block_size
        positions = -(-action.positions // block) * block
        begin = max(self._now, engine.linked, source.linked)
        engine.linked = source.linked = begin + self._delays.pull + positions * engine.about.cost.pull
        self._at(engine.linked, Kind.PULLED, engine, action.claim)

    def _at(self, moment: float, kind: Kind, engine: Running, claim: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._events, (moment, kind, self._order, engine.number, claim))


def simulate(
    engine: Engine,
    workload: Workload,
    delays: Delays = Delays(),
    tokens: bool = False,
) -> Result:
    """Serves a workload by one engine."""
    return Simulation([engine], delays, tokens=tokens).run(workload)
