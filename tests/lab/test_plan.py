"""`orca lab plan`: what is dropped before a simulation, what holds, and that a larger load needs more."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orca_cli.main import app
from orca_lab.calibration import Calibration
from orca_lab.cost import A100_40, TABLE_1, Calibrated, Constant, Load
from orca_lab.plan import Layout, Slo, Way, holds, judge, layouts, on_gpus, plan, too_small, with_other_costs
from orca_lab.simulator import Served
from orca_lab.workload import AT_ONCE, POISSON, Asked, Lengths, Seeds, drawn

SHORT = Lengths((20, 60), (5, 20))


def orca_lab(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["lab", *map(str, arguments)])


@pytest.mark.parametrize("name", TABLE_1)
def test_the_papers_numbers_of_gpus_are_the_smallest(name: str) -> None:
    model, tp, pp = TABLE_1[name]
    costs = on_gpus(model, A100_40)
    assert all(isinstance(costs(one), str) for one in layouts(tp * pp // 2, (8,), model.layers))
    assert not isinstance(costs(Layout(tp, pp, 1, 8)), str)


def test_a_bound_that_is_not_given_is_none() -> None:
    slow = Served(Asked(0.0, 10, 2), first=2.0, ended=10.0)
    assert holds(slow, Slo())
    for bound in ({"first_token": 2.0}, {"normalized": 5.0}, {"gap": 8.0}):
        assert holds(slow, Slo(**bound))
        assert not holds(slow, Slo(**{name: 0.9 * value for name, value in bound.items()}))


def test_all_layouts_of_a_number_of_gpus() -> None:
    found = list(layouts(4, (8,), most=2))
    assert [(one.tp, one.pp, one.engines) for one in found] == [
        *((1, 1, 4), (1, 2, 2)),
        *((2, 1, 2), (2, 2, 1)),
        (4, 1, 1),
    ]
    assert {one.gpus for one in found} == {4}


def test_the_floor_drops_layouts() -> None:
    costs, layout = on_gpus(TABLE_1["13b"][0], A100_40), Layout(1, 1, 1, 8)
    made = costs(layout)
    assert not isinstance(made, str)
    load = drawn(SHORT, POISSON, 1000.0, 50, Seeds.of(1))
    assert too_small(layout, *made, load, Slo(gap=0.01)).startswith("reading the weights takes 17 ms")
    assert too_small(layout, *made, load, Slo(gap=1.0)).startswith("makes at most ")
    assert too_small(layout, made[0], 50, load, Slo()).startswith("a request needs ")
    slow = drawn(SHORT, POISSON, 0.1, 50, Seeds.of(1))
    assert too_small(layout, *made, slow, Slo(gap=1.0)) == ""


def test_more_load_needs_more_engines() -> None:
    """A stage takes 0.1 s whatever its batch: an engine with 4 rows makes 40 tokens a second."""

    def costs(layout: Layout) -> tuple[Constant, int] | str:
        return (Constant(0.1), 1000) if layout.tp * layout.pp == 1 else "one rank alone"

    slo = Slo(normalized=0.3, percentile=0.9)
    needed = list[int]()
    for rate in (1.0, 4.0, 9.0):
        found = plan(costs, drawn(SHORT, POISSON, rate, 150, Seeds.of(2)), slo, 8, 1, (4,), positions=())
        best, room = found.held[0]
        needed.append(best.layout.engines)
        assert best.worst <= 1 <= room
        assert {why for _, why in found.dropped} <= {"one rank alone"}
        assert all(one.layout.gpus < best.layout.gpus for one in found.failed if one.layout.way is Way.MIXED)
    assert needed == sorted(set(needed)), needed
    load = drawn(SHORT, AT_ONCE, 1.0, 400, Seeds.of(1))
    assert judge(Layout(1, 1, 1, 4), Constant(0.1), 1000, load, slo).why == "its backlog only grows"
    cheap, dear = with_other_costs(costs, Layout(1, 1, 2, 4), drawn(SHORT, POISSON, 3.0, 100, Seeds.of(2)), slo)
    assert (cheap[0], dear[0]) == (0.9, 1.1)
    assert cheap[1].worst < dear[1].worst


@dataclass(frozen=True)
class DearPrompts(Constant):
    """A prompt holds up the increments of its iteration."""

    def stage(self, stage: int, load: Load) -> float:
        return self.seconds + 0.001 * load.prompt


def test_it_chooses_between_mixed_chunked_and_split() -> None:
    """Gaps of 30 ms, and prompts that take 80 to 120: in parts of 16 tokens one engine holds, in parts of 128 none, and
    on engines of their own one of two does."""
    load = drawn(Lengths((80, 120), (5, 20)), POISSON, 2.0, 80, Seeds.of(2))
    slo = Slo(gap=0.03)

    def costs(layout: Layout) -> tuple[Constant, int] | str:
        return (DearPrompts(0.01), 2000) if layout.tp * layout.pp == 1 else "one rank alone"

    found = plan(costs, load, slo, 2, 1, (8,), positions=(16,))
    assert found.held[0][0].layout == Layout(1, 1, 1, 8, positions=16)
    assert found.best(Way.SPLIT) is None, "one engine cannot be split"
    assert "    policy: stall-free,positions=16\n" in found.held[0][0].layout.values()
    found = plan(costs, load, slo, 2, 1, (8,), positions=(8, 128))
    assert [one.layout for one, _ in found.held] == [Layout(1, 1, 2, 8, prefill=1)]
    assert found.held[0][0].inside == 1
    assert found.held[0][0].layout.values().endswith("    policy: paper\n    roles: prefill=1,decode=1\n")
    for way in (Way.MIXED, Way.CHUNKED):
        best = found.best(way)
        assert best is not None
        assert best[1] == 0
        assert best[0].layout.gpus == 2
        assert best[0].inside < 1
    assert [one.prefill for one in Layout(1, 1, 8, 64).others(())] == [2, 4, 6]
    assert not list(Layout(1, 1, 1, 64).others((64,))), "a batch of 64 needs 64 positions for its increments"


def test_the_command(tmp_path: Path) -> None:
    given = ("--lengths", "20-60,5-20", "--requests", 40, "--normalized", 0.1, "--max-bs", "8,16")
    done = orca_lab("plan", "--model", "101b", *given)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("dropped ")
    assert "weights take" in lines[0]
    head = next(n for n, line in enumerate(lines) if "layout" in line)
    assert " 8 " in lines[head + 1]
    assert {line.split()[0] for line in lines[head + 1 : head + 3]} == {"mixed", "chunked"}
    assert "split: no layout was tried" in lines
    assert next(line for line in lines if line.startswith("with all costs ")).startswith("with all costs -10% it ")
    assert "engine:\n  count: 1\n  tp: 8\n  pp: 1\nscheduler:\n  settings:\n    max_batch_size: " in done.stdout
    assert "give a bound" in orca_lab("plan").stderr
    assert "no layout of up to 1 holds" in orca_lab("plan", *given, "--model", "175b", "--gpus", 1).stderr
    path = tmp_path / "calibration.json"
    about = {"tp": 1, "pp": 1, "max_bs": 8}
    cost = Calibrated(((1e-3, 0, 0, 0, 0, 0, 1e-4),), 1e-3)
    Calibration(cost, ((0.0, 0.0),), 0.0, 0.0, 640, 100, about).write(path)
    done = orca_lab("plan", "--hardware", path, *given)
    assert done.exit_code == 0, done.stderr
    assert "dropped 1: batches of up to 8 were calibrated" in done.stdout
    done = orca_lab("plan", "--hardware", path, *given, "--normalized", 1e-4, "--gpus", 2)
    assert "no layout of up to 2 holds" in done.stderr
    assert "dropped 1: no transfer between engines was calibrated" in done.stdout


def test_two_calibrations_of_one_layout_are_refused(tmp_path: Path) -> None:
    """The first one was passed over in silence."""
    options = list[str]()
    for n, seconds in enumerate((1e-3, 5e-3)):
        cost = Calibrated(((seconds, 0, 0, 0, 0, 0, 0),), 0.0)
        path = tmp_path / f"{n}.json"
        Calibration(cost, ((0.0, 0.0),), 0.0, 0.0, 4000, 100, {"tp": 1, "pp": 1, "max_bs": 4}).write(path)
        options += ["--hardware", str(path)]
    done = CliRunner().invoke(app, ["lab", "plan", *options, "--normalized", "1"])
    assert (done.exit_code, done.stderr) == (1, "hardware: two calibrations are of 1 x (tp 1, pp 1)\n")
