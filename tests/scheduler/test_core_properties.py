"""The core's invariants (docs/design.md, "Invariants") over random sequences of events. `world.py` has the checks."""

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from properties import examples
from scheduler.world import EOS, STOP, WAIT, WORD, Asked, World, made, storm

from orca_scheduler.core.core import Arrived, BatchReturned, Commit, Core, EngineReady, Flight, GiveBack, ScheduleBatch
from orca_scheduler.core.invariants import violations
from orca_scheduler.core.memory import Slots
from orca_scheduler.core.request import Arrival, Phase, Reason, Request
from orca_scheduler.core.selection import Limits, Stop

ASKED = st.builds(
    Asked,
    input_tokens=st.integers(1, 12),
    max_new_tokens=st.integers(1, 8),
    eos=st.booleans(),
    stop=st.booleans(),
    patience=st.none() | st.floats(0, 3),
)
TOKENS = st.lists(st.sampled_from((EOS, STOP, None, WAIT, WORD, WORD + 1, WORD + 2)), min_size=5, max_size=5)
INDEX = st.integers(0, 30)


class Schedules(RuleBasedStateMachine):
    """All events in any legal order. What `World` finds wrong fails the run, and hypothesis makes it short."""

    world: World
    n_slots: int

    @initialize(
        max_bs=st.integers(1, 5),
        n_workers=st.integers(1, 4),
        block_size=st.sampled_from((1, 4, 16)),
        run_ahead=st.integers(0, 1),
        n_slots=st.integers(16, 64),
        asked=st.lists(ASKED, max_size=6),
    )
    def start(
        self, max_bs: int, n_workers: int, block_size: int, run_ahead: int, n_slots: int, asked: list[Asked]
    ) -> None:
        self.n_slots = n_slots
        self.world = World(max_bs, n_workers, block_size, run_ahead)
        self.world.form(n_slots)
        self.world.arrive(*asked)

    @rule(asked=st.lists(ASKED, min_size=1, max_size=4))
    def arrive(self, asked: list[Asked]) -> None:
        self.world.arrive(*asked)

    @rule(asked=ASKED, generated=st.integers(0, 7))
    def detour(self, asked: Asked, generated: int) -> None:
        self.world.detour(asked, generated)

    @precondition(lambda self: self.world.queue)
    @rule(index=INDEX)
    def again(self, index: int) -> None:
        self.world.again(index)

    @precondition(lambda self: self.world.lives)
    @rule(index=INDEX)
    def echo(self, index: int) -> None:
        self.world.echo(index)

    @precondition(lambda self: self.world.in_flight)
    @rule(tokens=TOKENS)
    def back(self, tokens: list[int | None]) -> None:
        self.world.back(*tokens)

    @precondition(lambda self: self.world.in_flight)
    @rule(tokens=TOKENS, times=st.integers(2, 6))
    def backs(self, tokens: list[int | None], times: int) -> None:
        for _ in range(times):
            if self.world.in_flight:
                self.world.back(*tokens)

    @precondition(lambda self: self.world.lives)
    @rule(index=INDEX, twice=st.booleans())
    def cancel(self, index: int, twice: bool) -> None:
        claims = sorted(self.world.lives)
        claim = claims[index % len(claims)]
        self.world.cancel(*([claim, claim] if twice else [claim]))

    @rule(claim=st.integers(0, 99))
    def cancel_anybody(self, claim: int) -> None:
        self.world.cancel(claim)

    @rule(seconds=st.floats(0, 2))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @precondition(lambda self: len(self.world.record) % 8 == 7)  # rarely: or everything is short
    @rule()
    def lose(self) -> None:
        self.world.lose()

    @precondition(lambda self: not self.world.formed)
    @rule(gap=st.integers(1, 5))
    def form(self, gap: int) -> None:
        self.world.form(self.n_slots, gap)

    @precondition(lambda self: len(self.world.record) % 25 == 24)
    @rule()
    def drain(self) -> None:
        self.world.drain()

    def teardown(self) -> None:
        if hasattr(self, "world") and self.world.sound:  # or what failed would be hidden by what failed then
            self.world.quiesce()


Schedules.TestCase.settings = settings(
    max_examples=examples(400),
    stateful_step_count=50,
    database=None,
    report_multiple_bugs=False,  # the first one, made short soon
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedules = Schedules.TestCase


STORMS = 150  # the fewest that reach every case often enough


AHEAD = {
    "n_workers + 1 batches",
    "newcomers beside those ahead",
    "INCREMENTs that waited",
    "ahead while a worker idles",
    "ahead of the slots",
    "EOS found late",
    "STOP_TOKEN found late",
    "DEADLINE found late",
    "NOT_FINITE found late",
    "STUCK found late",
    "cancelled in two batches",
    "lost in two batches",
    "void",
}


def test_storms_reach_everything() -> None:
    """Sequences that are longer than hypothesis makes, with small slots, meet every case that the checks are about,
    with and without a run-ahead; at their end everything ends."""
    worlds = [storm(random.Random(seed), 250) for seed in range(max(STORMS, examples(400)))]
    for run_ahead in (0, 1):
        these = [world for world in worlds if world.run_ahead == run_ahead]
        stops = sum((world.stops for world in these), Counter[Stop]())
        ahead = sum((world.ahead for world in these), Counter[str]())
        finishes: Counter[Reason | None] = Counter()
        given: Counter[bool] = Counter()
        past_blocked = 0  # increments in a batch from which an initiation was kept out by the slots
        for action in [action for world in these for _, actions in world.record for action in actions]:
            if isinstance(action, Commit):
                finishes.update(outcome.finish for outcome in action.outcomes)
            elif isinstance(action, GiveBack):
                given.update(running for _, running in action.requests)
            elif isinstance(action, ScheduleBatch):
                phases = {member.phase for member in action.members}
                past_blocked += action.stop == Stop.SLOTS and Phase.INCREMENT in phases
        assert set(stops) == {Stop.BATCH_FULL, Stop.SLOTS, Stop.POOL}
        assert set(finishes) == {None, *Reason}
        assert set(given) == {True, False}
        assert min(*stops.values(), *finishes.values(), *given.values(), past_blocked) >= 20
        assert max(world.n_workers for world in these) == 4
        assert set(ahead) == (AHEAD if run_ahead else set())
        assert min(ahead.values(), default=5) >= 5
    for world in worlds:
        world.quiesce()


@pytest.mark.parametrize("seed", range(20))
def test_arrivals_within_room_never_wait_for_slots(seed: int) -> None:
    """`room` is what may be claimed: who comes within it can start as soon as a batch may be scheduled."""
    draw = random.Random(seed)
    world = World(draw.randint(1, 5), draw.randint(1, 4), draw.choice((1, 4, 16)), run_ahead=seed % 2)
    world.form(world.block_size * draw.randint(3, 20))
    came = 0
    for _ in range(300):
        room = world.core.room()
        if draw.random() < 0.5 and room.requests and room.slots > 1:
            total = draw.randint(2, min(room.slots, 24))
            inputs = draw.randint(1, total - 1)
            world.arrive(Asked(inputs, total - inputs))
            came += 1
        elif world.in_flight:
            world.back(*[WORD] * world.max_bs)
    assert came > 20
    assert world.stops[Stop.SLOTS] == 0
    world.quiesce()


def test_the_same_events_give_the_same_actions() -> None:
    for seed in range(30):
        world = storm(random.Random(seed), 150)
        again = world.fresh()
        for event, actions in world.record:
            assert again.step(event) == actions


def test_claims_that_reach_a_lost_engine_are_given_back() -> None:
    """A claim's answer may come after the loss; the request is not the engine's to end."""
    world = World(2, 1, 1, run_ahead=1)
    world.form(8)
    world.lose()
    world.arrive(Asked(2, 2))
    assert world.record[-1][1] == [GiveBack(((1, False),))]
    world.form(8)
    world.again(0)
    world.quiesce()


# -- invariants.violations finds planted damage


def a_busy_core(run_ahead: int = 0) -> Core:
    """Two workers, max_bs 2, blocks of 4: claims 1 and 2 in flight as increments, 3 as initiation; 4 does not fit.

    With a run-ahead, claim 3 is in flight twice: [3], [1, 2], [3].
    """
    core = Core(max_bs=2, n_workers=2, block_size=4, run_ahead=run_ahead)
    core.step(EngineReady(0.0, 32, 1))
    core.step(Arrived(0.0, tuple(Arrival(n, n, 4, 4) for n in (1, 2, 3))))
    core.step(Arrived(0.0, (Arrival(4, 4, 4, 12),)))
    core.step(BatchReturned(0.0, 1, made(WORD, WORD)))
    return core


def flying(core: Core, n: int, *requests: Request) -> Flight:
    """The n-th batch in flight with other requests."""
    return Flight(core.in_flight[n].iteration, requests, (1,) * len(requests))


def a_batch_too_many(core: Core) -> None:
    core.n_workers = 1


def a_batch_above_max_bs(core: Core) -> None:
    core.limits = Limits(1)


def an_empty_batch(core: Core) -> None:
    core.in_flight[0] = flying(core, 0)
    for request in core.requests:
        request.in_flight = sum(request in flight.requests for flight in core.in_flight)


def in_flight_twice(core: Core) -> None:
    core.in_flight[0] = flying(core, 0, core.requests[2], core.requests[0])


def twice_in_a_batch(core: Core) -> None:
    core.in_flight[1] = flying(core, 1, core.requests[0], core.requests[0])


def in_flight_thrice(core: Core) -> None:
    core.in_flight[1] = flying(core, 1, core.requests[0], core.requests[2])


def two_batches_too_many(core: Core) -> None:
    core.in_flight.extend(core.in_flight)


def in_flight_and_not_running(core: Core) -> None:
    core.in_flight[0].requests[0].in_flight -= 1


def running_and_not_in_flight(core: Core) -> None:
    core.in_flight.popleft()


def released_too_early(core: Core) -> None:
    row = core.requests[0].row
    assert row is not None
    core.memory.release(row)


def never_released(core: Core) -> None:
    core.memory.admit([core.requests[0]])


def a_block_with_two_holders(core: Core) -> None:
    first, second = core.requests[:2]
    assert isinstance(core.memory, Slots)
    assert first.row is not None
    assert second.row is not None
    core.memory._rows[second.row] = core.memory._rows[first.row]


def a_block_that_does_not_exist(core: Core) -> None:
    first = core.requests[0]
    assert isinstance(core.memory, Slots)
    assert first.row is not None
    core.memory._rows[first.row] = (99, *core.memory._rows[first.row][1:])


def more_reserved_than_needed(core: Core) -> None:
    first = core.requests[0]
    first.arrived = replace(first.arrived, max_new_tokens=0)


def a_later_one_ran_more(core: Core) -> None:
    core.requests[1].iterations += 5


def ended_and_kept(core: Core) -> None:
    core.requests[3].ended = True


def computed_without_a_row(core: Core) -> None:
    core.requests[3].computed = 1


def computed_behind_its_slots(core: Core) -> None:
    core.requests[0].known = core.requests[0].computed = 9


def computed_without_its_token(core: Core) -> None:
    core.requests[0].known = core.requests[0].computed


DAMAGE: list[tuple[Callable[[Core], None], str]] = [
    (a_batch_too_many, r"2 batches are in flight, n_workers is 1"),
    (a_batch_above_max_bs, r"iteration \d has 2 requests"),
    (an_empty_batch, r"iteration \d has 0 requests"),
    (in_flight_twice, r"a request is in flight twice"),
    (in_flight_and_not_running, r"RUNNING requests are not those in flight"),
    (running_and_not_in_flight, r"RUNNING requests are not those in flight"),
    (released_too_early, r"slots are held by rows \[1, 2\], live requests have \[0, 1, 2\]"),
    (never_released, r"slots are held by rows \[0, 1, 2, 3\], live requests have \[0, 1, 2\]"),
    (a_block_with_two_holders, r"24 slots are reserved, rows hold 16"),
    (a_block_that_does_not_exist, r"a row has a block twice, or one that does not exist"),
    (more_reserved_than_needed, r"24 slots are reserved, live requests need 20"),
    (a_later_one_ran_more, r"claim 2 ran 7 iterations, claim 1 before it 2"),
    (ended_and_kept, r"claim 4 ended and was kept"),
    (computed_without_a_row, r"claim 4 has 1 positions in 0 slots"),
    (computed_behind_its_slots, r"claim 1 has 9 positions in 8 slots"),
    (computed_without_its_token, r"claim 1 has computed 5 of 5 positions"),
]
DAMAGE_AHEAD: list[tuple[Callable[[Core], None], str]] = [
    (a_batch_too_many, r"3 batches are in flight, n_workers is 1"),
    (two_batches_too_many, r"6 batches are in flight, n_workers is 2"),
    (a_batch_above_max_bs, r"iteration \d has 2 requests"),
    (an_empty_batch, r"iteration \d has 0 requests"),
    (twice_in_a_batch, r"a request is in flight twice"),
    (in_flight_thrice, r"a request is in flight twice"),
    (in_flight_and_not_running, r"RUNNING requests are not those in flight"),
    (running_and_not_in_flight, r"RUNNING requests are not those in flight"),
    (released_too_early, r"slots are held by rows \[1, 2\], live requests have \[0, 1, 2\]"),
    (a_later_one_ran_more, r"claim 2 ran 7 iterations, claim 1 before it 2"),
    (ended_and_kept, r"claim 4 ended and was kept"),
]


def test_the_busy_core_is_well() -> None:
    for run_ahead in (0, 1):
        core = a_busy_core(run_ahead)
        assert violations(core) == []
        assert [request.in_flight for request in core.requests] == [1, 1, 1 + run_ahead, 0]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGE, ids=lambda value: getattr(value, "__name__", ""))
def test_damage_is_found(damage: Callable[[Core], None], sentence: str) -> None:
    core = a_busy_core()
    damage(core)
    found = violations(core)
    assert any(re.search(sentence, one) for one in found), found


@pytest.mark.parametrize(("damage", "sentence"), DAMAGE_AHEAD, ids=lambda value: getattr(value, "__name__", ""))
def test_damage_to_a_run_ahead_is_found(damage: Callable[[Core], None], sentence: str) -> None:
    core = a_busy_core(1)
    damage(core)
    found = violations(core)
    assert any(re.search(sentence, one) for one in found), found


def test_who_ends_with_what_is_in_flight_may_be_passed() -> None:
    """Claim 1 has its last iteration in flight, claim 2 is ahead of it: as it should be, and no violation."""
    core = Core(max_bs=2, n_workers=1, block_size=1, run_ahead=1)
    core.step(EngineReady(0.0, 32, 1))
    core.step(Arrived(0.0, (Arrival(1, 1, 4, 1), Arrival(2, 2, 4, 4))))
    assert [request.iterations for request in core.requests] == [1, 2]
    assert violations(core) == []
    core.requests[0].arrived = replace(core.requests[0].arrived, max_new_tokens=4)  # it goes on, and was passed over
    assert "claim 2 ran 2 iterations, claim 1 before it 1" in violations(core)


def test_a_cancelled_running_request_released_at_once_is_found() -> None:
    """The trap itself as damage: the pool forgets it while its batch, or the second of two, is in flight."""
    core = a_busy_core()
    core._remove(core.requests[0])
    assert "RUNNING requests are not those in flight" in violations(core)
    core = a_busy_core(1)
    twice = core.requests[2]
    core.in_flight.popleft()
    twice.in_flight -= 1
    assert violations(core) == []
    core._remove(twice)
    assert "RUNNING requests are not those in flight" in violations(core)
