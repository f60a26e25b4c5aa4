"""An engine's metrics: each iteration is observed once, when its tokens and the times of all its ranks are back."""

import pytest
from metrics import Scrape

from orca.v1 import worker_pb2 as pb
from orca_common.metrics import CAUSES, Metrics
from orca_pool.records import CommitRow, Committed
from orca_scheduler.core.core import Arrived, BatchReturned, Core, EngineReady, Member, ScheduleBatch
from orca_scheduler.core.request import Arrival, Phase
from orca_scheduler.core.roles import Role
from orca_scheduler.core.sets import FirstCome
from orca_scheduler.lifecycle.suspicions import Kind
from orca_scheduler.master.metrics import EngineMetrics
from orca_scheduler.master.output import new_tokens

SECOND = 1_000_000_000


class Clock:
    """The wall's clock in nanoseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100 * SECOND
        monkeypatch.setattr("orca_scheduler.master.metrics.time.time_ns", lambda: self.now)


def times(stage: int, tensor_rank: int, received: float, started: float, computed: float, sent: float) -> pb.StageTimes:
    at = [100 * SECOND + round(moment * SECOND) for moment in (received, started, computed, sent)]
    return pb.StageTimes(
        stage=stage, tensor_rank=tensor_rank, received=at[0], started=at[1], computed=at[2], sent=at[3]
    )


def batch(iteration: int, size: int) -> ScheduleBatch:
    """Of requests that run four positions each, one of which took its slots from another one."""
    members = tuple(Member(n, n, 0, 4, 1, (), None) for n in range(size))
    return ScheduleBatch(iteration, members, size, (), 0, "", (size,))


@pytest.mark.parametrize("times_first", [True, False])
def test_the_parts_of_an_iteration(monkeypatch: pytest.MonkeyPatch, times_first: bool) -> None:
    clock, metrics = Clock(monkeypatch), Metrics("scheduler")
    engine = EngineMetrics(metrics, "e", 2)
    engine.scheduled(batch(7, 3), now=50.0)
    ranks = [
        times(0, 0, received=0.25, started=1, computed=2, sent=2.5),
        times(0, 1, received=0.75, started=1, computed=3, sent=3.25),  # the slowest of its stage
        times(1, 0, received=0.5, started=4, computed=8, sent=8.5),
        times(1, 1, received=0.5, started=4, computed=6, sent=6.5),
    ]
    clock.now += 10 * SECOND
    if times_first:
        engine.timed(7, ranks)
    assert value(metrics, "orca_iteration_seconds_count", part="compute") == 0
    engine.returned(7, ago=1.0, stepped=0.125, now=59.0)
    if not times_first:
        engine.timed(7, ranks)
    engine.timed(7, ranks)  # of an iteration that has been observed
    seconds = {part: value(metrics, "orca_iteration_seconds_sum", part=part) for part in PARTS}
    # There: 0.25 s until the first controller had it. Back: from 8.5 to 9 s, when the tokens came.
    assert seconds == {"scheduler": 0.125, "control": 0.75, "data": 1.0, "compute": 6.0}
    assert all(value(metrics, "orca_iteration_seconds_count", part=part) == 1 for part in PARTS)
    assert value(metrics, "orca_stage_busy_seconds_total", stage="0") == 2.0
    assert value(metrics, "orca_stage_busy_seconds_total", stage="1") == 4.0
    assert value(metrics, "orca_engine_active_seconds_total") == 9.0
    assert value(metrics, "orca_batch_size_sum") == 3
    assert value(metrics, "orca_iteration_positions_sum") == 12
    assert value(metrics, "orca_preemptions_total") == 1


PARTS = ("scheduler", "control", "data", "compute")


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return Scrape.of(metrics.render("")[0].decode()).value(name, engine="e", **labels)


def test_an_engine_is_active_while_a_batch_is_in_flight() -> None:
    metrics = Metrics("scheduler")
    engine = EngineMetrics(metrics, "e", 1)
    engine.scheduled(batch(1, 1), now=10.0)
    engine.scheduled(batch(2, 1), now=11.0)
    engine.returned(1, 0.0, 0.0, now=12.0)
    engine.returned(2, 0.0, 0.0, now=14.0)
    assert value(metrics, "orca_engine_active_seconds_total") == 4.0
    engine.scheduled(batch(3, 1), now=20.0)  # whether the times of the others have come or not
    engine.returned(3, 0.0, 0.0, now=21.0)
    assert value(metrics, "orca_engine_active_seconds_total") == 5.0


def test_an_initiation_in_parts_is_one() -> None:
    """At an engine that decodes: of a request that it had when its master changed."""
    metrics, core = Metrics("scheduler"), Core(2, 1, 4, policy=FirstCome("stall-free", positions=4), role=Role.DECODE)
    engine = EngineMetrics(metrics, "e", 1, decodes=True)
    core.step(EngineReady(0.0, 64, 1))
    actions, parts = core.step(Arrived(0.0, (Arrival(1, 1, 21, 9, 1),))), 0
    for iteration in range(1, 10):
        [batch] = [action for action in actions if isinstance(action, ScheduleBatch)]
        engine.scheduled(batch, now=1.0)
        [member] = batch.members
        parts += member.phase is Phase.INITIATION
        actions = core.step(BatchReturned(0.0, iteration, ((7,),) if member.outputs else ()))
    assert parts > 1
    assert value(metrics, "orca_decode_initiations_total") == 1


def test_iterations_that_were_lost_are_not_observed() -> None:
    metrics = Metrics("scheduler")
    engine = EngineMetrics(metrics, "e", 1)
    engine.scheduled(batch(1, 1), now=10.0)
    engine.lost("gone")
    engine.timed(1, [times(0, 0, 0, 1, 2, 3)])
    assert value(metrics, "orca_iteration_seconds_count") == 0
    assert value(metrics, "orca_recoveries_total", cause="gone") == value(metrics, "orca_recoveries_total") == 1
    engine.scheduled(batch(2, 1), now=20.0)
    engine.returned(2, 0.0, 0.0, now=21.0)
    assert value(metrics, "orca_engine_active_seconds_total") == 1.0


def test_every_kind_of_suspicion_is_a_cause() -> None:
    assert {kind.name.lower() for kind in Kind} < set(CAUSES)


def test_a_commit_whose_answer_was_lost_counts_its_tokens_once() -> None:
    def row(base: int, tokens: int) -> CommitRow:
        return CommitRow("r", 1, base, b"x" * 16 * tokens, None, b"", b"")

    assert new_tokens([row(0, 2), row(5, 1)], [Committed.OK, Committed.OK]) == 3
    # It was applied, and is sent again with one token more: the pool tells its count, and then takes the rest.
    assert new_tokens([row(3, 3)], [5]) == 2
    assert new_tokens([row(5, 1)], [Committed.OK]) == 1
    assert new_tokens([row(3, 3), row(4, 1)], [Committed.GONE, 2]) == 0
