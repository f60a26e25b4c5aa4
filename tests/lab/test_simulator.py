"""The simulator: the live core under a virtual clock, against queueing theory, its journals and a pool seen whole."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from orca_bench import schedule
from orca_common.errors import FailedPrecondition
from orca_lab import simulator
from orca_lab.cost import Constant, load_of
from orca_lab.record import Recorder
from orca_lab.simulator import Delays, Engine, Ran, Result, Served, Simulation, simulate
from orca_lab.timeline import read_run
from orca_lab.workload import AT_ONCE, PAPER, POISSON, Asked, Lengths, Seeds, Workload, drawn
from orca_scheduler.core.core import Core, HandOver, Member, Pull, ScheduleBatch
from orca_scheduler.core.request import Phase
from orca_scheduler.core.roles import Role
from orca_scheduler.core.sets import PAPER as PAPERS_POLICY
from orca_scheduler.core.sets import POLICIES, policy_named
from orca_scheduler.master import journal
from orca_scheduler.settings import SchedulerSettings

LIVE = Delays(claim=0.002, commit=0.003, ahead=False)
SMALL = Lengths((3, 40), (1, 12))


def test_live_simulated_and_replaying_drivers_run_one_core() -> None:
    assert type(SchedulerSettings.load(workers="worker:1").core()) is journal.Core is schedule.Core is Core
    assert type(Simulation([Engine(Constant(1.0), 64, 1)]).cores[0]) is Core


@pytest.mark.parametrize(("requests", "near"), [(20_000, 0.1), pytest.param(200_000, 0.05, marks=pytest.mark.long)])
@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_one_token_requests_wait_as_in_an_m_d_1_queue(rho: float, requests: int, near: float) -> None:
    seconds = 0.25
    workload = drawn(Lengths((1, 1), (1, 1)), POISSON, rho / seconds, requests, Seeds.of(1))
    result = simulate(Engine(Constant(seconds), 64, 1), workload)
    waits = [one.began - one.asked.at for one in result.requests]
    assert sum(waits) / len(waits) == pytest.approx(rho * seconds / (2 * (1 - rho)), rel=near)
    assert result.busy[0][0] == pytest.approx(requests * seconds)
    assert all(one.latency == pytest.approx(one.began - one.asked.at + seconds) for one in result.requests[:1000])


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_equal_stages_with_a_full_queue_return_a_batch_each_stage_time(pp: int) -> None:
    workload = [Asked(0.0, 10, 5)] * (8 * pp * 4)
    ran = list[Ran]()
    engine = Engine(Constant(0.125, stages=pp), 8 * pp * 16, 8)
    result = Simulation([engine], watch=ran.append).run(workload)
    assert {one.load.rows for one in ran} == {8}
    assert [one.stages[-1][1] for one in ran] == [0.125 * (n + pp) for n in range(5 * 4 * pp)]
    assert result.seconds == 0.125 * (5 * 4 * pp + pp - 1)
    assert result.busy == [[0.125 * 5 * 4 * pp] * pp]  # no stage idles but to fill and to drain the pipeline


def test_a_run_ahead_hides_the_host() -> None:
    workload = [Asked(0.0, 10, 9)]
    engine = Engine(Constant(0.5, host=0.25), 64, 1)
    assert simulate(engine, workload).seconds == 9 * 0.75
    ahead = simulate(replace(engine, run_ahead=1), workload)
    assert ahead.seconds == 0.25 + 9 * 0.5
    assert ahead.requests[0].first == 0.75


def recorded(folder: Path, engines: list[Engine], workload: Workload, delays: Delays) -> tuple[Result, list[bytes]]:
    folder.mkdir()
    recorder = Recorder(folder, engines, workload)
    result = Simulation(engines, delays, recorder.listener, recorder.watch, tokens=True).run(workload)
    recorder.close()
    return result, [path.read_bytes() for path in recorder.paths]


@pytest.mark.parametrize("name", [*POLICIES, "fill=even,kv=on-demand"])
@pytest.mark.parametrize(("pp", "run_ahead", "engines"), [(1, 0, 1), (2, 1, 1), (3, 0, 2)])
def test_a_simulations_journal_replays_and_repeats(
    tmp_path: Path, name: str, pp: int, run_ahead: int, engines: int
) -> None:
    policy = policy_named(name if "balanced" not in name else "balanced,positions=24")
    workload = [one._replace(limit=12) for one in drawn(SMALL, POISSON, 40, 60, Seeds.of(pp))]
    engine = Engine(Constant(0.01, pp, host=0.001, hop_seconds=0.002), 160, 3, policy, 4, run_ahead)
    delays = LIVE if engines > 1 else Delays()
    result, files = recorded(tmp_path / "a", [engine] * engines, workload, delays)
    again = recorded(tmp_path / "b", [engine] * engines, workload, delays)
    assert again == (result, files)  # the same seed, the same bytes
    for path in sorted((tmp_path / "a").iterdir()):
        steps = list(journal.replay(path))
        assert all(step.actions == tuple(actions) for step, actions in steps)
    assert len(result.requests) == 60
    assert all(len(one.came or ()) == one.asked.output_tokens for one in result.requests)
    assert all(one.asked.at <= one.began < one.first <= one.ended for one in result.requests)
    reports = [read_run(tmp_path / "a", f"engine-{n}").last for n in range(engines)]
    assert sum(len(life.iterations) for life in reports if life is not None) == result.iterations


def test_a_request_changes_engines_and_waits_for_its_bytes(tmp_path: Path) -> None:
    cost = Constant(0.5, pull=0.01)
    engines = [Engine(cost, 64, 1, block_size=4, role=role) for role in (Role.PREFILL, Role.DECODE)]
    delays = Delays(claim=0.125, commit=0.25, ahead=False, pull=0.5)
    result, _ = recorded(tmp_path / "a", engines, [Asked(0.0, 5, 3)], delays)
    first = 0.125 + 0.5 + 0.25
    pulled = first + 0.125 + 0.5 + 8 * 0.01  # two whole blocks
    assert result.requests[0].came == pytest.approx([first, pulled + 0.75, pulled + 1.25])


@pytest.mark.parametrize("name", ["paper", "stall-free,positions=24", "balanced,positions=24"])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_simulation_with_roles_replays_and_repeats(tmp_path: Path, name: str, pp: int) -> None:
    workload = [one._replace(limit=12) for one in drawn(SMALL, POISSON, 40, 60, Seeds.of(pp))]
    engine = Engine(Constant(0.01, pp, 0.001, 0.002, pull=1e-4), 160, 3, policy_named(name), 4)
    engines = [replace(engine, role=role) for role in (Role.PREFILL, Role.DECODE, Role.DECODE)]
    result, files = recorded(tmp_path / "a", engines, workload, LIVE)
    assert recorded(tmp_path / "b", engines, workload, LIVE) == (result, files)  # the same seed, the same bytes
    decoded, handed, pulls = list[Member](), 0, 0
    for number, path in enumerate(sorted((tmp_path / "a").iterdir())):
        for step, actions in journal.replay(path):
            assert step.actions == tuple(actions)
            for action in step.actions:
                handed += len(action.requests) if isinstance(action, HandOver) else 0
                pulls += isinstance(action, Pull)
                decoded += action.members if number and isinstance(action, ScheduleBatch) else ()
    assert handed == pulls == sum(one.asked.output_tokens > 1 for one in result.requests)
    assert "balanced" in name or {member.phase for member in decoded} == {Phase.INCREMENT}
    assert all(len(one.came or ()) == one.asked.output_tokens for one in result.requests)
    assert all(one.asked.at <= one.began < one.first <= one.ended for one in result.requests)


class SeesAll(Simulation):
    """The whole queue is in the core."""

    def _room(self, engine: simulator.Running) -> int:
        return 1 << 30


@pytest.mark.parametrize("slots", [120, 4000])
@pytest.mark.parametrize("pp", [1, 3])
def test_a_few_requests_ahead_are_as_good_as_the_whole_queue(slots: int, pp: int) -> None:
    for seed in range(8):
        chance = random.Random(seed)
        arrivals = AT_ONCE if seed % 2 else POISSON
        workload = drawn(SMALL, arrivals, 60, 80, Seeds.of(seed))
        engine = Engine(Constant(0.01, pp), slots, chance.randint(1, 6))
        few, all_of_it = list[Ran](), list[Ran]()
        assert Simulation([engine], watch=few.append).run(workload) == SeesAll([engine], watch=all_of_it.append).run(
            workload
        )
        assert few == all_of_it
        assert max(one.batch.reserved for one in few) <= engine.memory_slots


def test_a_claim_by_room_fills_a_place_in_time_where_it_knows_of_the_end() -> None:
    """An end by length costs no place, one by an end-of-sequence token does so for an iteration."""
    engine = Engine(Constant(1.0), 64, 2)
    for limit, began in ((1, 1.0), (5, 2.0)):
        workload = [Asked(0.0, 4, 1, limit=limit), Asked(0.0, 4, 3), Asked(0.0, 4, 1)]
        assert [one.began for one in simulate(engine, workload).requests] == [0.0, 0.0, 1.0]
        live = simulate(engine, workload, Delays(claim=0.1, ahead=False))
        assert [one.began for one in live.requests] == pytest.approx([0.1, 0.1, began + 0.1])


def test_equal_requests_with_a_full_queue_fill_every_iteration() -> None:
    """Figure 11 live: six requests are claimed, and two more while they run. So their ends lie apart, and still each
    iteration has max_bs rows until the queue is empty."""
    workload = [Asked(0.0, 8, 8)] * 6 + [Asked(0.3, 8, 8)] * 74
    sizes = list[int]()
    engine = Engine(Constant(1.0), 4000, 8)
    Simulation([engine], Delays(claim=0.2, ahead=False), watch=lambda ran: sizes.append(ran.load.rows)).run(workload)
    assert sizes[:1] + sizes[-1:] == [6, 2]
    assert set(sizes[1:-1]) == {8}


def test_engines_share_one_queue() -> None:
    workload = drawn(SMALL, AT_ONCE, 1, 200, Seeds.of(4))
    engine = Engine(Constant(0.01), 640, 4)
    one, two = (Simulation([engine] * n, LIVE).run(workload) for n in (1, 2))
    assert one.seconds / two.seconds == pytest.approx(2, rel=0.1)
    assert min(Counter(request.engine for request in two.requests).values()) > 80
    assert sum(request.asked.output_tokens for request in two.requests) == two.rows


def test_a_growing_backlog_can_be_given_up() -> None:
    workload = drawn(SMALL, POISSON, 1000, 500, Seeds.of(4))
    result = Simulation([Engine(Constant(1.0), 640, 4)]).run(workload, lambda now, waiting: waiting > 50)
    assert result.stopped
    assert len(result.requests) < 60


def test_a_backlog_is_looked_at_when_requests_come() -> None:
    """Two run at a time. Those that came together are looked at together, before any of them is claimed."""
    looks = list[tuple[float, int]]()

    def look(now: float, waiting: int) -> bool:
        looks.append((now, waiting))
        return len(looks) == 4

    workload = [Asked(at, 4, 2) for at in (0.0, 0.0, 0.25, 0.5, 0.5, 0.5, 8.5)]
    result = Simulation([Engine(Constant(1.0), 64, 1)], Delays(ahead=False)).run(workload, look)
    assert looks == [(0.0, 2), (0.25, 2), (0.5, 5), (8.5, 2)]
    assert result.stopped
    assert [one.ended for one in result.requests] == [2.0, 4.0, 6.0, 8.0]
    assert (result.seconds, result.iterations, result.rows, result.mean_batch) == (8.0, 9, 9, 1.0)


def test_requests_that_were_handed_over_are_backlog() -> None:
    """Four have their first token after a second. One of them decodes, and one waits at its engine."""
    engines = [Engine(Constant(1.0), 64, size, role=role) for size, role in ((4, Role.PREFILL), (1, Role.DECODE))]
    looks = list[tuple[float, int]]()
    workload = [*[Asked(0.0, 4, 9)] * 4, Asked(3.5, 4, 1)]
    Simulation(engines, Delays(ahead=False)).run(workload, lambda *look: bool(looks.append(look)))
    assert looks == [(0.0, 4), (3.5, 1 + 3)]


def test_the_measures_of_a_request_and_of_a_result() -> None:
    served = [Served(Asked(1.0, 9, 4), began=1.5, first=2.0, ended=3.0 + n) for n in range(21)]
    assert (served[0].latency, served[0].normalized, served[0].first_token) == (2.0, 0.5, 1.0)
    result = Result(served, 30.0, 4, 10, [[1.0]])
    assert result.warm == served[2:]
    assert result.mean_batch == 2.5
    assert replace(result, iterations=0).mean_batch == 0.0
    assert not result.stopped


def test_a_block_is_the_least_that_memory_holds() -> None:
    assert Engine(Constant(1.0), 127, 1).memory_slots == 112
    assert Engine(Constant(1.0), 127, 1, block_size=10).memory_slots == 120


def test_pulls_wait_for_each_other() -> None:
    """An engine pulls for one request at a time: the second one's bytes begin when the first one's have come."""
    cost = Constant(0.5, pull=0.01)
    engines = [Engine(cost, 64, 2, block_size=4, role=role) for role in (Role.PREFILL, Role.DECODE)]
    delays = Delays(claim=0.125, commit=0.25, ahead=False, pull=0.5)
    result = Simulation(engines, delays, tokens=True).run([Asked(0.0, 5, 2), Asked(0.0, 5, 2)])
    first = 0.125 + 0.5 + 0.25
    pulled = first + 0.125 + 0.5 + 8 * 0.01
    assert [one.came for one in result.requests] == [
        pytest.approx([first, pulled + 0.75]),
        pytest.approx([first, pulled + 0.58 + 0.75]),
    ]
    assert [one.engine for one in result.requests] == [1, 1]
    assert (result.iterations, result.rows) == (3, 4)


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match="slots: a request needs 200; an engine has 112"):
        simulate(Engine(Constant(1.0), 127, 1), [Asked(0.0, 100, 1, limit=100)])


def test_the_sums_of_a_batch() -> None:
    members = [
        Member(1, 0, 0, 7, 1, (), None),  # an initiation
        Member(2, 1, 8, 4, 0, (), None),  # a part of a prompt
        Member(3, 2, 30, 1, 1, (), 5),  # an increment, which reads its own position too
        Member(4, 3, 0, 1, 1, (), None),  # the initiation of one token
    ]
    assert load_of(members) == (4, 1, 31, 12, 49 + 48 + 1, 7 + 12 + 1, 3)
    assert load_of(members).tokens == 13


def test_the_papers_policy_serves_the_papers_load() -> None:
    result = simulate(Engine(Constant(0.01), 8000, 8, PAPERS_POLICY), drawn(PAPER, AT_ONCE, 1, 100, Seeds.of(1)))
    assert result.rows == sum(one.asked.output_tokens for one in result.requests)
    assert 7 < result.mean_batch <= 8
