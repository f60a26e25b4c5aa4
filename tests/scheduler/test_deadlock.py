"""Why slots are reserved (paper section 4.2): naive allocation deadlocks, Algorithm 1 does not.

The naive engine is the very loop of the core with another policy: it takes a slot when a token needs one.
"""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from orca_scheduler.core.core import Action, Arrived, BatchReturned, Commit, Core, EngineReady
from orca_scheduler.core.memory import Memory, Slots
from orca_scheduler.core.request import Arrival, Request
from orca_scheduler.core.selection import Limits, Plan, Stop
from orca_scheduler.core.sets import FirstCome

WORD = 7


class OnDemand(Slots):
    """Memory without reservation: a token's slot is taken in the iteration that stores it."""

    grows = True

    def need(self, request: Request, count: int) -> int:
        held = len(self.rows().get(request.row, ())) if request.row is not None else 0
        return request.computed + count - held

    def size(self, request: Request) -> int:
        return request.known


class Naive(FirstCome):
    """A request runs when it finds slots now, by arrival; a failure stops no other."""

    @property
    def name(self) -> str:
        return "naive"

    def memory(self, n_slots: int, block_size: int) -> Memory:
        return OnDemand(n_slots, block_size)

    def plan(self, ready: Iterable[Request], live: Sequence[Request], limits: Limits, memory: Memory) -> Plan:
        batch: list[tuple[Request, int]] = []
        free = memory.free
        for request in ready:
            need = memory.need(request, request.remaining)
            if len(batch) < limits.max_bs and need <= free:
                free -= need
                batch.append((request, request.remaining))
        return Plan(tuple(batch), Stop.POOL)


def naive(max_bs: int, n_workers: int, run_ahead: int) -> Core:
    return Core(max_bs, n_workers, 1, run_ahead, Naive())


def run(core: Core, n_slots: int, requests: list[Arrival]) -> tuple[dict[int, int], int]:
    """Runs until nothing is in flight: the number of tokens of those who finished, and how many iterations it took."""
    tokens: dict[int, int] = {}
    finished: set[int] = set()

    def take(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Commit):
                for claim, _, token, finish in action.outcomes:
                    tokens[claim] = tokens.get(claim, 0) + (token is not None)
                    if finish is not None:
                        finished.add(claim)

    take(core.step(EngineReady(0.0, n_slots, 1)))
    take(core.step(Arrived(0.0, tuple(requests))))
    iterations = 0
    while core.in_flight:
        flight = core.in_flight[0]
        take(core.step(BatchReturned(0.0, flight.iteration, ((WORD,),) * len(flight.requests))))
        iterations += 1
        assert iterations < 10_000, "iterations return and requests do not advance"
    return {claim: tokens[claim] for claim in finished}, iterations


# x1 "my cat is", x2 "I": with six slots, both hold what they have after two iterations, and the third finds none.
EXAMPLE = [Arrival(1, 1, 3, 3), Arrival(2, 2, 1, 5)]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_naive_allocation_deadlocks(run_ahead: int) -> None:
    core = naive(2, 1, run_ahead)
    finished, iterations = run(core, 6, EXAMPLE)
    assert finished == {}
    assert iterations == 2
    assert [len(blocks) for blocks in core.memory.rows().values()] == [4, 2]
    assert core.memory.free == 0
    assert [request.generated for request in core.requests] == [2, 2]  # both wait for their next slot
    assert all(core.memory.need(request, request.remaining) == 1 for request in core.requests)
    assert core.step(Arrived(1.0, ())) == []  # and for ever


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_each_alone_fits_the_naive_engine(run_ahead: int) -> None:
    """It is the sharing that deadlocks: neither request is too large."""
    for request in EXAMPLE:
        assert run(naive(2, 1, run_ahead), 6, [request])[0] == {request.claim: request.max_new_tokens}


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_reservation_finishes_the_same_requests(run_ahead: int) -> None:
    core = Core(2, 1, 1, run_ahead)
    finished, iterations = run(core, 6, EXAMPLE)
    assert finished == {1: 3, 2: 5}
    assert iterations == 8
    assert core.memory.reserved == 0


REQUESTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 8)), min_size=1, max_size=12)


@settings(max_examples=examples(160), database=None)
@given(
    sizes=REQUESTS,
    max_bs=st.integers(1, 5),
    n_workers=st.integers(1, 4),
    run_ahead=st.integers(0, 1),
    spare=st.integers(0, 6),
)
def test_reservation_never_deadlocks(
    sizes: list[tuple[int, int]], max_bs: int, n_workers: int, run_ahead: int, spare: int
) -> None:
    """Any requests, with memory for little more than the largest of them."""
    requests = [Arrival(n, n, inputs, new) for n, (inputs, new) in enumerate(sizes, 1)]
    n_slots = max(request.max_tokens for request in requests) + spare
    core = Core(max_bs, n_workers, 1, run_ahead)
    finished, _ = run(core, n_slots, requests)
    assert finished == {request.claim: request.max_new_tokens for request in requests}
    assert core.memory.reserved == 0


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_naive_allocation_deadlocks_in_a_pipeline_too(run_ahead: int) -> None:
    """Figure 8's engine, three workers: equal requests grow alike until no one can."""
    requests = [Arrival(n, n, 4, 8) for n in range(1, 7)]
    core = naive(2, 3, run_ahead)
    finished, _ = run(core, 36, requests)  # each alone needs 11, reserved 12
    assert finished == {}
    assert core.memory.free == 0
    assert len(core.requests) == 6
    assert run(Core(2, 3, 1, run_ahead), 36, requests)[0] == dict.fromkeys(range(1, 7), 8)
