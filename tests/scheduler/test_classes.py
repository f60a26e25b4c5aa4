"""Requests of classes in one engine: higher ones take places of lower ones, which pause with their slots and go on."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_common.priorities import FAIR, Priority
from orca_scheduler.core.core import Arrived, BatchReturned, Core, EngineReady, ScheduleBatch
from orca_scheduler.core.invariants import violations
from orca_scheduler.core.request import Arrival
from orca_scheduler.core.sets import policy_named

POLICIES = ("paper", "balanced,positions=9", "fill=even", "fill=paper,kv=on-demand")
SLOTS = 400


class Engine:
    """A core, and a queue from which it claims as the pool's script lets it."""

    def __init__(self, max_bs: int, n_workers: int, policy: str) -> None:
        self.core = Core(max_bs, n_workers, 4, policy=policy_named(policy))
        self.core.step(EngineReady(0.0, SLOTS, 1))
        self.places = max_bs * n_workers
        self.queue: list[Arrival] = []
        self.flying = deque[ScheduleBatch]()
        self.claims = 0
        self.done: list[int] = []  # by claim, in their order

    def submit(self, order: int, priority: int, inputs: int, new: int) -> int:
        self.claims += 1
        self.queue.append(Arrival(self.claims, order, inputs, new, priority=priority))
        self.queue.sort(key=lambda one: one.arrival)
        self.claim()
        return self.claims

    def claim(self) -> None:
        """Claims as claim.lua does."""
        room, yielding, taken = self.core.room(), self.core.yielding(), list[Arrival]()
        count, slots = room.requests, room.slots
        while self.queue:
            head = self.queue[0]
            if head.max_tokens + 3 > slots:  # whole blocks
                break
            if not count:
                priority, order = yielding.pop(0) if yielding else (0, 0)
                if head.arrival >= order or not (head.priority < priority or head.priority == priority == FAIR):
                    break
            count, slots = max(count - 1, 0), slots - head.max_tokens - 3
            taken.append(self.queue.pop(0))
        if taken:
            self._step(Arrived(0.0, tuple(taken)))

    def turn(self) -> ScheduleBatch | None:
        """The oldest batch in flight returns."""
        if not self.flying:
            return None
        batch = self.flying.popleft()
        made = tuple((7,) for member in batch.members for _ in range(member[4] > 0))
        self._step(BatchReturned(0.0, batch.iteration, made))
        self.claim()
        return batch

    def _step(self, event: Arrived | BatchReturned) -> None:
        for action in self.core.step(event):
            if isinstance(action, ScheduleBatch):
                self.flying.append(action)
            for outcome in getattr(action, "outcomes", ()):
                if outcome.finish is not None:
                    self.done.append(outcome.claim)
        assert violations(self.core) == []
        assert sum(request.goes_on for request in self.core.requests) <= 2 * self.places


def test_a_higher_one_runs_at_once_and_the_lower_one_goes_on() -> None:
    engine = Engine(2, 1, "paper")
    low = [engine.submit(100 + n, Priority.LOW, 8, 20) for n in range(2)]
    assert [sorted(m[0] for m in batch.members) for batch in engine.flying] == [low[:1]] or low
    for _ in range(3):
        engine.turn()
    urgent = engine.submit(50, Priority.URGENT, 8, 2)
    engine.turn()
    assert [member[0] for member in engine.flying[0].members] == [urgent, low[0]]
    assert len(engine.core.requests) == 3, "the lower one pauses, with its slots"
    while engine.turn():
        pass
    assert engine.done == [urgent, low[0], low[1]]


def test_a_higher_one_comes_before_one_that_was_claimed_while_the_last_token_was_made() -> None:
    """It joins the next iteration, as beside any full engine."""
    engine = Engine(1, 1, "paper")
    first = engine.submit(100, Priority.LOW, 8, 2)
    engine.turn()
    low = engine.submit(200, Priority.LOW, 8, 20)
    assert not engine.queue, "it has the place of one that ends"
    urgent = engine.submit(50, Priority.URGENT, 8, 2)
    engine.turn()
    assert [member[0] for member in engine.flying[0].members] == [urgent]
    while engine.turn():
        pass
    assert engine.done == [first, urgent, low]


@pytest.mark.parametrize("policy", [*POLICIES, "stall-free", "split-fuse"])
@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_place_is_taken_whatever_fills_iterations(policy: str, n_workers: int) -> None:
    """Where increments go before prompts, too; and of a request that is at its prompt, where prompts run in parts."""
    for inputs, turns in ((8, 4 * n_workers), (90, n_workers)):
        engine = Engine(2, n_workers, policy)
        low = [engine.submit(100 + n, Priority.LOW, 8, 40) for n in range(engine.places - 1)]
        low.append(engine.submit(200, Priority.LOW, inputs, 40))
        for _ in range(turns):
            engine.turn()
        urgent = engine.submit(50, Priority.URGENT, 8, 2)
        for _ in range(3 * (n_workers + 2)):
            engine.turn()
        assert engine.done == [urgent]
        while engine.turn():
            pass
        assert sorted(engine.done) == [*low, urgent]


def test_an_equal_one_waits() -> None:
    engine = Engine(2, 1, "paper")
    for n in range(2):
        engine.submit(100 + n, Priority.NORMAL, 8, 20)
    engine.turn()
    engine.submit(50, Priority.NORMAL, 8, 2)  # given back by another engine, say
    assert len(engine.core.requests) == 2
    assert len(engine.queue) == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n_workers", [1, 2])
@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 32))
def test_no_request_starves_and_none_is_lost(policy: str, n_workers: int, seed: int) -> None:
    """Whatever comes: all end, each iteration's requests are the first of those that may run, and a request whose order
    is before all others runs within as many iterations as batches are in flight, and one."""
    draw = random.Random(seed)
    engine = Engine(draw.choice((1, 2, 4)), n_workers, policy)
    fair, clock, asked = draw.random() < 0.3, 1000, set[int]()
    for _ in range(60):
        clock += draw.randint(1, 30)
        if draw.random() < 0.4:
            priority = FAIR if fair else draw.choice([*Priority])
            order = clock + (draw.randint(-200, 200) if fair else (priority - 3) * 60)
            asked.add(engine.submit(max(order, 1), priority, draw.randint(1, 12), draw.randint(1, 20)))
        else:
            engine.turn()
    first = engine.submit(0, FAIR if fair else Priority.URGENT, 4, 3)
    asked.add(first)
    waited, most = 0, 3 * (n_workers + 2)
    if (
        "positions" in policy
    ):  # prompts that have begun in parts go on before it, and share an iteration with increments
        most += 12 * engine.places
    while first not in engine.done and engine.core.requests and any(r.claim == first for r in engine.core.requests):
        engine.turn()
        waited += 1
        assert waited <= most, "it is before all others"
    while engine.turn():
        pass
    assert sorted(engine.done) == sorted(asked)
    assert not engine.queue
