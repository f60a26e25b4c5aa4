"""The systems that the paper compares with, in virtual time: request-level batches, and BatchMaker's cells."""

from dataclasses import replace
from pathlib import Path

import pytest

from orca_lab.baseline.scheduler import (
    Arrived,
    BatchReturned,
    Cancelled,
    Finished,
    RequestLevel,
    RunBatch,
    Wake,
)
from orca_lab.baseline.selections import CELLS, any_policy
from orca_lab.baseline.simulated import Batched, simulate_requests
from orca_lab.cost import A100, Constant, Load
from orca_lab.record import Recorder
from orca_lab.replay import first_difference
from orca_lab.simulator import Engine, Ran, Simulation, simulate
from orca_lab.workload import AT_ONCE, POISSON, Asked, Lengths, Seeds, drawn
from orca_scheduler.core.request import Arrival


def arrivals(*claims: int) -> tuple[Arrival, ...]:
    return tuple(Arrival(claim, claim, 10, 5) for claim in claims)


def test_a_free_engine_gets_the_head_of_the_queue_whole() -> None:
    scheduler = RequestLevel(max_bs=2)
    assert scheduler.step(Arrived(0.0, arrivals(1))) == [RunBatch(arrivals(1))]
    assert scheduler.step(Arrived(1.0, arrivals(2, 3, 4))) == []
    assert scheduler.step(BatchReturned(2.0)) == [Finished((1,)), RunBatch(arrivals(2, 3))]
    assert scheduler.queue == list(arrivals(4))
    assert scheduler.step(Cancelled(2.5, (3, 4))) == []  # 3 stays as dead rows
    assert scheduler.step(BatchReturned(3.0)) == [Finished((2,))]
    assert scheduler.running == ()


def test_a_queue_delay_waits_for_a_full_batch() -> None:
    scheduler = RequestLevel(max_bs=2, delay=0.5)
    assert scheduler.step(Arrived(1.0, arrivals(1))) == []
    assert scheduler.wake_at == 1.5
    assert scheduler.step(Wake(1.25)) == []  # of an earlier batch
    assert scheduler.step(Wake(1.5)) == [RunBatch(arrivals(1))]
    assert scheduler.step(BatchReturned(1.75)) == [Finished((1,))]
    assert scheduler.step(Arrived(2.0, arrivals(2))) == []
    assert scheduler.step(Arrived(2.25, arrivals(3))) == [RunBatch(arrivals(2, 3))]
    late = simulate_requests(Constant(1.0), 2, 2, [Asked(0.0, 4, 1), Asked(3.0, 4, 1)], delay=0.5)
    assert [one.began for one in late.requests] == [0.5, 3.5]


def test_figure_3() -> None:
    """Four iterations of two rows, two of them dead, and "you" reaches its client only with "great"."""
    result = simulate_requests(Constant(1.0), 2, 2, [Asked(0.0, 2, 4), Asked(0.0, 2, 2)])
    assert (result.iterations, result.rows) == (4, 8)
    assert result.rows - sum(one.asked.output_tokens for one in result.requests) == 2
    assert [one.ended for one in result.requests] == [4.0, 4.0]


def test_the_first_iteration_runs_at_the_shortest_prompt() -> None:
    loads = list[Load]()

    class Seen(Constant):
        def stage(self, stage: int, load: Load) -> float:
            loads.append(load)
            return 1.0

    assert Batched(Seen(1.0), 2).seconds([(5, 3), (9, 2)], lambda *_: None) == 4 + 2
    assert loads[0] == Load(2, 0, 0, 10, 50, 10, 2)
    assert [load.context for load in loads[1:]] == [2 * n for n in (6, 7, 8, 9, 10)]


def test_figure_8b() -> None:
    """Microbatches of 2 on three stages: AB, CD, then AB again only when its tokens are back. Stages idle 1 - 2/3."""
    passes = list[tuple[int, int, int, float, float]]()
    engine = Batched(Constant(1.0, stages=3), 2)
    seconds = engine.seconds([(4, 100)] * 4, lambda *one: passes.append(one))
    first = [(micro, iteration) for micro, iteration, stage, _, _ in passes if stage == 0]
    assert first[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [begin for micro, _, stage, begin, _ in passes if (micro, stage) == (0, 0)][:3] == [0.0, 3.0, 6.0]
    assert seconds == 3 * 100 + 1
    steady = [(begin, end) for _, _, stage, begin, end in passes if stage == 1 and 30 <= begin < 270]
    assert 1 - sum(end - begin for begin, end in steady) / 240 == pytest.approx(1 / 3)
    work = simulate(Engine(Constant(1.0, stages=3), 1000, 2), [Asked(0.0, 4, 100)] * 6)
    assert work.busy[0][0] == 300  # Orca has n_workers batches: no stage idles but for filling and draining
    assert work.seconds == 302


def test_memory_bounds_a_batch_of_the_baseline() -> None:
    assert A100.of_the_paper("13b").allocates(4)
    assert not A100.of_the_paper("13b").allocates(8)


def test_batchmaker_runs_equal_cells_alone(tmp_path: Path) -> None:
    workload = drawn(Lengths((3, 9), (1, 9)), AT_ONCE, 1, 60, Seeds.of(2))
    widths = dict[str, float]()
    for policy in CELLS.values():
        ran, engine = list[Ran](), Engine(Constant(0.1, 2), 640, 8, policy, 4)
        recorder = Recorder(tmp_path, [engine], workload)
        result = Simulation([engine], listener=recorder.listener, watch=ran.append, tokens=True).run(workload)
        recorder.close()
        assert {len({member[2:4] for member in one.batch.members}) for one in ran} == {1}
        assert any(one.load.rows > 1 for one in ran)
        assert all(len(one.came or ()) == one.asked.output_tokens for one in result.requests)
        assert any_policy(policy.name) == policy
        assert first_difference(recorder.paths[0]) is None
        widths[policy.name] = max(one.load.tokens / one.load.rows for one in ran)
    assert widths == {"batchmaker": 9.0, "batchmaker-strict": 1.0}


def test_batchmaker_hardly_batches_a_transformer() -> None:
    """Up to what it sustains it runs as orca(1): requests rarely have equal indexes."""
    cost = Constant(0.025, stages=2)
    engine = Engine(cost, 48_000, 32, any_policy("batchmaker"))
    one_by_one = 1 / (64.5 * 0.025)  # req/s: a batch of one request a stage time
    lengths = Lengths((32, 512), (1, 128))
    for share in (0.4, 0.9):
        workload = drawn(lengths, POISSON, share * one_by_one, 200, Seeds.of(1))
        result = simulate(engine, workload)
        assert 1 <= result.mean_batch < 1.1
        alone = simulate(replace(engine, policy=any_policy("paper"), max_bs=1), workload)
        assert result.seconds == pytest.approx(alone.seconds, rel=0.15)


def test_a_batch_alone_is_the_sum_of_its_iterations() -> None:
    """The short way of one microbatch is the pipeline's."""
    for name in ("101b", "175b", "341b"):
        cost = A100.of_the_paper(name, phi=1.25)
        for sizes in ([(40, 7)], [(33, 9), (32, 1), (60, 4)], [(5, 1)]):
            short = Batched(cost, 4).run(sizes)
            whole = Batched(cost, 4).run(sizes, lambda *_: None)
            assert short[0] == pytest.approx(whole[0], rel=1e-12)
            assert short[1] == pytest.approx(whole[1], rel=1e-12)


def test_request_level_waits_as_in_an_m_g_1_queue() -> None:
    """One request at a time: Pollaczek and Khinchine's mean wait, from the moments of the service times."""
    cost = A100.of_the_paper("341b", phi=1.47)
    workload = drawn(Lengths((32, 512), (1, 128)), POISSON, 0.096, 8_000, Seeds.of(1))
    times = [Batched(cost, 1).seconds([(64, one.output_tokens)]) for one in workload[:3000]]
    mean, square = (sum(x**n for x in times) / len(times) for n in (1, 2))
    wait = 0.096 * square / (2 * (1 - 0.096 * mean))
    served = simulate_requests(cost, 1, 1, workload).requests
    assert sum(one.began - one.asked.at for one in served) / len(served) == pytest.approx(wait, rel=0.1)
