"""The lifecycle's invariants, over random sequences of everything that may happen (`life_world` has the checks).

After every step:

- Every claim that the pool counts as this engine's has one owner: the lifecycle (`unadmitted`), the core, the way back
  to the queue, the commit of its end, or a message that was not taken yet. At a release the next master is handed what
  is left, as at a takeover. The lifecycle keeps claims only where ranks may still be found to stand, or for the next
  master: while it opens, greets (for no longer than `timers.KEEP_CLAIMS`), records and closes.
- No process that was fenced is fenced again, a fence names a process of this life, and none is sent before the pool
  has confirmed the lease in this life. The next life greets nobody while a fence is under way.
- An epoch is formed once, in the life to which the pool gave it, and none is recorded but the newest of the books.
- No iteration number is used twice, over all terms.
- An action names the life that is open: none comes of a life that was hung up, each life is hung up once, and its
  number is the one after the last. An event of an earlier life changes nothing at all.
- Nothing comes after Stop.
- No batch is scheduled unless the engine is Running, and the core hears EngineReady and EngineLost in turn.
- A Wake before its moment changes nothing; one at `wake_at` makes progress: no later one is due at the same moment.
- No engine runs whose scheduler leaves, which is not discovered any more, or whose pods are to be replaced: it
  drains at most.
- Pods are dialed when all have an address and none is to be replaced. They are replaced when nothing is open and
  every claim is on its way back, by the term alone that has the lease.
- A verdict names somebody.
- A request counts a loss only when it came from a takeover, or (the core's part) was RUNNING.

From every state, once the faults end, the engine runs within `life_world.STEPS` steps, if need be under the next
master, and every request that was accepted has ended. The events of every term, written as a journal writes them, give
the same actions again, from the beginning and from the middle.
"""

import random
from functools import cache
from typing import get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from scheduler.life_world import FAULTS, ORDINARY, SHAPES, LifeWorld, storm

from orca_scheduler.lifecycle import lifecycle
from orca_scheduler.lifecycle.events import Formation, LifeEvent
from orca_scheduler.lifecycle.places import Shape

PICK = st.integers(0, 999)


class Lives(RuleBasedStateMachine):
    """Everything in any order. What the world finds wrong fails the run, and hypothesis makes it short."""

    world: LifeWorld

    @initialize(shape=st.sampled_from(SHAPES), seed=st.integers(0, 99), pace=st.sampled_from((1, 2, 4, 12)))
    def start(self, shape: Shape, seed: int, pace: int) -> None:
        self.world = LifeWorld(shape, random.Random(seed))
        self.world.pace = pace

    @rule(name=st.sampled_from(ORDINARY), pick=PICK)
    def goes_on(self, name: str, pick: int) -> None:
        self.world.do(name, pick)

    @rule(name=st.sampled_from(FAULTS), pick=PICK)
    def fails(self, name: str, pick: int) -> None:
        self.world.do(name, pick)

    def teardown(self) -> None:
        if hasattr(self, "world") and self.world.sound:  # or what failed would be hidden by what failed then
            self.world.quiesce()


Lives.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLives = Lives.TestCase


SEEDS = range(3300, 4100)


@cache
def met_in(seed: int) -> tuple[frozenset[tuple[str, str]], str]:
    """The pairs (state, event) of a storm, and the state in which it ended. After it everything comes to its end."""
    world = storm(random.Random(seed), 100)
    met, end = frozenset(world.met), type(world.term.lifecycle.state).__name__
    world.quiesce()
    return met, end


@pytest.mark.parametrize("first", SEEDS[::100])
def test_long_storms(first: int) -> None:
    """Longer sequences than hypothesis makes; at their end the engine runs, and every request has ended."""
    for seed in range(first, first + 100):
        met_in(seed)


LIVE = {"Greeting", "Forming", "Recording", "Running", "Draining"}
ALIVE = {kind.__name__ for kind in get_args(lifecycle.State)} - {"Ended"}
TALKING = ALIVE - {
    "Opening",
    "Incomplete",
    "Replacing",
}  # where ranks and pods of the present or the last life are heard
EVERYWHERE = {  # what may happen in which states
    "LeaseLost": ALIVE,
    "Leave": ALIVE,
    "CandidateChanged": ALIVE,
    "Orphaned": ALIVE - {"Opening"},
    "PoolAway": ALIVE - {"Opening"},
    "PoolBack": ALIVE - {"Opening"},
    "Wake": ALIVE,
    "Suspected": TALKING,
    "PodSeen": TALKING,
    "PodAway": TALKING,
    "RankLeaving": TALKING,
    "Refused": TALKING,
    "Claimed": {"Running", "Lost"},
    "Gone": {"Greeting", "Lost", "Waiting", "Closing"},
    "Confirmed": {"Greeting", "Lost", "Waiting"},
    "Fenced": {"Lost"},
    "Replaced": {"Replacing", "Incomplete", "Greeting"},
    "EpochGiven": {"Greeting", "Forming", "Lost", "Running"},
    "RankFormed": {"Forming", "Lost", "Running"},
    "RankAllocated": {"Forming", "Recording", "Lost", "Running"},
    "Recorded": {"Recording", "Lost", "Running"},
    "StoreHosted": {"Forming", "Running"},
    "Hello": {"Greeting", "Forming", "Running", "Lost"},
}


def test_the_storms_meet_everything() -> None:
    """Losses, depositions, leaves and changed candidates in every state; late and doubled answers."""
    storms = [met_in(seed) for seed in SEEDS]
    met = frozenset[tuple[str, str]]().union(*(met for met, _ in storms))
    wanted = {(state, event) for event, states in EVERYWHERE.items() for state in states}
    assert wanted - met == set()
    assert {event for _, event in met} == {kind.__name__ for kind in get_args(LifeEvent)}
    assert {end for _, end in storms} >= ALIVE


def test_the_same_seed_is_the_same_storm() -> None:
    first, second = storm(random.Random(7), 100), storm(random.Random(7), 100)
    assert first.met == second.met
    assert first.term.record == second.term.record


def test_how_ranks_are_formed() -> None:
    """Stage-major; tokens return on the data plane in a run-ahead, unless one rank has its own."""
    life = lifecycle.Lifecycle("e", Shape(tp=2, pp=2, ranks_per_pod=1, block_size=4, run_ahead=1), None)
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [life.formation(n) for n in range(4)] == [Formation(2, 2, *place, 4, True) for place in places]
    alone = lifecycle.Lifecycle("e", Shape(tp=1, pp=1, ranks_per_pod=1, block_size=4, run_ahead=1), None)
    assert alone.formation(0) == Formation(1, 1, 0, 0, 4, False)
    paper = lifecycle.Lifecycle("e", Shape(tp=2, pp=1, ranks_per_pod=1, block_size=8), None)
    assert paper.formation(1) == Formation(2, 1, 0, 1, 8, False)
