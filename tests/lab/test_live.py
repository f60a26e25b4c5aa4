"""The lab on real stacks of the demo model, with a few requests: counts, orders, files and columns, and no times."""

import asyncio
import csv
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from stacks import folder_in_memory, running
from typer.testing import CliRunner

from orca_bench import real
from orca_bench.cases import Request
from orca_bench.checks import Checked, orders
from orca_bench.live import BLOCK_SIZE, Layout, Live, Setting, Usage, foreign, slots_for, stack_of, usage_of
from orca_bench.measures import Answer, lag
from orca_bench.real import QUICK, Real, add_ratio, figure_10, highest
from orca_cli.main import app
from orca_common.errors import FailedPrecondition, InvalidArgument, Unavailable
from orca_lab import report
from orca_lab.calibration import Calibration, disturbed
from orca_lab.cost import Calibrated
from orca_lab.experiments import SHARES, Found, Number, Point
from orca_lab.real_claims import said
from orca_lab.replay import first_difference
from orca_lab.sequence import Compared, compare
from orca_lab.workload import AT_ONCE, Lengths, Seeds, drawn
from orca_local.stack import DEMO_MODEL
from orca_scheduler.core.core import Arrived, Commit, Tick
from orca_scheduler.master.journal import CoreStep, read, scheduled

LAYOUT = Layout(dtype="float32")
SMALL = replace(QUICK, requests=5, queued=10, divide=16)


def orca_lab(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["lab", *map(str, arguments)])


def test_the_guards_rule() -> None:
    assert disturbed(10.0, 10.9, 0.04) == ""
    assert disturbed(10.0, 9.0, 0.0) == ""
    assert disturbed(10.0, 11.1, 0.04) == "its iterations took +11% against the calibration"
    assert disturbed(10.0, 10.0, 0.06) == "other processes took 6% of the cores' time"
    assert disturbed(0.0, 0.0, 0.5) == "other processes took 50% of the cores' time"
    assert disturbed(10.0, 20.0, 0.5).count(" and ") == 1
    assert disturbed(0.0, 0.0, 0.0, late=0.02) == ""
    assert disturbed(0.0, 0.0, 0.0, late=0.021) == "arrivals were 21 ms late at p99"
    assert lag([Answer(Request([1], 1), due, sent=due + 0.03) for due in (0.0, 1.0)]) == pytest.approx(0.03)
    cores = foreign(Usage(0.0, 0.0), Usage(10.0, 4.0), 1.0)
    assert foreign(Usage(5.0, 1.0), Usage(15.0, 5.0), 2.0) == pytest.approx(cores / 2)
    assert foreign(Usage(0.0, 0.0), Usage(1.0, 2.0), 1.0) == 0.0


def test_the_processor_time_of_a_process_is_the_user_s_and_the_system_s() -> None:
    before, found, after = os.times(), usage_of([os.getpid()]), os.times()
    assert before.user + before.system <= found.ours <= after.user + after.system


def test_a_calibration_is_one_file(tmp_path: Path) -> None:
    cost = Calibrated(((1e-3, 0, 0, 0, 0, 0, 1e-4),) * 2, 1e-3, 2e-4)
    found = Calibration(cost, ((0.03, -0.01), (0.04, 0.0)), 2e-3, 3e-3, 640, 1000, {"commit": "abc", "isa": "amx"})
    path = tmp_path / "folder" / "calibration.json"
    found.write(path)
    assert Calibration.read(path) == found
    path.write_text("{}")
    with pytest.raises(FailedPrecondition, match="`orca lab calibrate` makes one"):
        Calibration.read(path)


def test_systems_by_their_labels() -> None:
    for text, setting in (
        *(("orca(8)", Setting(8)), ("ft(8,4)", Setting(8, 4)), ("ft(1,1)", Setting(1, 1))),
        ("ft(8,4,0.25)", Setting(8, 4, delay=0.25)),
    ):
        assert Setting.read(text) == setting
        assert setting.label == text
    assert Setting.read("batchmaker").label == "batchmaker"
    for text in ("orca(0)", "ft(4,8)", "ft(4,0)", "ft(4,2,-1)", "orca", "vllm(8)"):
        with pytest.raises(InvalidArgument, match="there are orca"):
            Setting.read(text)


def test_too_much_memory_is_refused_with_both_numbers() -> None:
    small = Layout(dtype="float32", memory=10**7)
    with pytest.raises(
        FailedPrecondition, match=r"memory: 8 sequences of 512 tokens take 0\.\d+ GB of a rank .* 0.01 GB"
    ):
        stack_of(small, Setting(8, 4))
    settings, program = stack_of(LAYOUT, Setting(8, 4))
    assert settings.environment()["ORCA_SLOTS"] == str(8 * 512)
    assert program is not None
    assert program.arguments == ["--lab-selection", "request-level,mbs=4,longest=512"]
    assert stack_of(small, Setting(8))[1] is None  # Orca reserves what requests need


def test_the_rate_at_a_latency_lies_on_the_curve() -> None:
    assert highest([(1.0, 10.0), (2.0, 30.0)], 20.0) == 1.5
    assert highest([(1.0, 10.0), (2.0, 15.0)], 20.0) == 2.0
    assert highest([(1.0, 25.0)], 20.0) == highest([], 20.0) == 0.0
    found = Found(10, real={"model": "demo"})
    for system, latencies in (("orca(8)", (10, 10, 40)), ("ft(1,1)", (15, 25, 90))):
        for x, ms in zip((1.0, 2.0, 3.0), latencies, strict=True):
            found.points.append(Point(10, "demo", system, 1.0, 1, x, x, float(ms), float(ms), sustained=True))
        found.numbers[f"demo {system} sustained, req/s"] = Number.of([2.5])
    found.points.append(Point(10, "demo", "ft(8,8)", 1.0, 1, 1.0, 1.0, 15.0, 15.0, sustained=True))  # then it failed
    add_ratio(found, "demo")
    assert found.numbers["demo orca over ft"].mean == pytest.approx((2 + 10 / 30) / 1.5)
    found.numbers["demo, simulated orca over ft"] = Number.of([1.5])
    assert said("10b", "that is 36.9 times as much", {10: found}).startswith("1.56 times at twice")
    assert said("10b", "that is 36.9 times as much", {}) == "not run"


async def test_figures_3_and_8b_on_a_stack() -> None:
    """Microbatches of one request on two stages. All of an answer is in the commit that ends its batch; the requests of
    a batch run in turn. The journal replays, and is the simulated one."""
    _, program = stack_of(LAYOUT, Setting(2, 1))
    sizes = [40, 2, 3, 9]
    with folder_in_memory() as folder:
        slots = slots_for(2, 512, BLOCK_SIZE)
        async with running(
            Path(folder), DEMO_MODEL, scheduler=program, pp=2, slots=slots, max_batch_size=2, block_size=BLOCK_SIZE
        ) as stack:
            answers = await asyncio.gather(*(stack.tokens([n, 5], count) for n, count in enumerate(sizes)))
            assert [len(tokens) for tokens in answers] == sizes
        [path] = Path(folder).glob("journal-*.jsonl")
        steps = [line for line in read(path) if isinstance(line, CoreStep)]
        order = [batch.members[0].claim for batch in scheduled(steps)]
        commits = [action for step in steps for action in step.actions if isinstance(action, Commit)]
        assert sorted(len(order) for order in by_claim(commits).values()) == sorted(sizes)
        assert 2 <= len(commits) <= len(sizes)
        for commit in commits:  # each is a batch: its iterations alternate between its requests, dead rows and all
            batch = {outcome.claim for outcome in commit.outcomes}
            ran = [claim for claim in order if claim in batch]
            longest = max(Counter(outcome.claim for outcome in commit.outcomes).values())
            assert ran == ran[: len(batch)] * longest
            assert set(ran[: len(batch)]) == batch
        assert first_difference(path) is None
        assert compare(path) == Compared(len(order), 0)


async def test_a_queue_delay_on_a_stack() -> None:
    """A request alone begins by a tick, when it has waited for the delay. The journal is the simulated one."""
    _, program = stack_of(LAYOUT, Setting(2, 2, delay=0.2))
    with folder_in_memory() as folder:
        slots = slots_for(2, 512, BLOCK_SIZE)
        async with running(
            Path(folder), DEMO_MODEL, scheduler=program, slots=slots, max_batch_size=2, block_size=BLOCK_SIZE
        ) as stack:
            assert len(await stack.tokens([7, 5], 3)) == 3
            answers = await asyncio.gather(*(stack.tokens([n, 5], 4) for n in range(5)))
            assert [len(tokens) for tokens in answers] == [4] * 5
        [path] = Path(folder).glob("journal-*.jsonl")
        steps = [line for line in read(path) if isinstance(line, CoreStep)]
        alone = next(step.event for step in steps if isinstance(step.event, Arrived))
        tick, *_ = [step for step in steps if list(scheduled([step]))]
        assert isinstance(tick.event, Tick)
        assert tick.event.now >= alone.now + 0.2
        assert first_difference(path) is None
        assert compare(path).different == 0


def by_claim(commits: Sequence[Commit]) -> dict[int, list[int]]:
    """The indexes of each request's tokens."""
    found = dict[int, list[int]]()
    for outcome in (outcome for commit in commits for outcome in commit.outcomes):
        found.setdefault(outcome.claim, []).append(outcome.base)
    return found


def test_batchmaker_live(tmp_path: Path) -> None:
    """Its mean batch is near 1, and its iterations are the simulated ones."""
    journal = tmp_path / "journal-engine-0-1.jsonl"
    with Live(LAYOUT, Setting.read("batchmaker"), keep=journal) as live:
        result = live.serve(drawn(Lengths((4, 400), (1, 20)), AT_ONCE, 1.0, 20, Seeds.of(2)))
    assert all(one.came for one in result.requests)
    assert result.rows == sum(one.asked.output_tokens for one in result.requests)
    assert 1 <= result.mean_batch < 1.3
    assert compare(journal).different == 0
    assert first_difference(journal) is None


def test_a_system_that_fails_ends_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of others stay, which took minutes: also where it fails as it starts or as its reports are read."""

    def fails(layout: Layout, setting: Setting) -> None:
        raise Unavailable("4 of 4 requests failed")

    monkeypatch.setattr(real, "Live", fails)
    found = figure_10(SMALL, Real(LAYOUT, attempts=0), lambda said: None, [Setting(4), Setting(2, 1)])
    panel = "demo_model tp 1 pp 1"
    assert found.real["failed"] == [f"{panel} {label}: 4 of 4 requests failed" for label in ("orca(4)", "ft(2,1)")]
    assert not found.points


def points(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "points.csv").read_text().splitlines()))


@pytest.mark.long
def test_real_figures_and_their_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "ROUNDS", 1)
    done = orca_lab("figure", 9, "--real", "--quick", "--dtype", "float32", "--out", tmp_path)
    assert done.exit_code == 0, done.stderr
    rows = points(tmp_path / "figure-9-real")
    assert list(rows[0]) == list(Point._fields)
    assert len(rows) == 2 * 6 * 2 * 1  # inputs, batches, engines, rounds
    found = figure_10(SMALL, Real(LAYOUT, attempts=0), lambda said: None, [Setting(4), Setting(2, 1)])
    report.write(tmp_path / "figure-10-real", found, SMALL, "orca lab figure 10 --real", "abc")
    again = report.read(tmp_path / "figure-10-real", 10)
    assert again.numbers == found.numbers
    for system in ("orca(4)", "ft(2,1)"):  # so that a reader simulates the figure again
        assert again.real["calibrations"][system].keys() >= {"cost", "errors", "way_in", "way_out"}
    panels = {point.panel for point in found.points}
    assert panels == {"demo_model tp 1 pp 1", "demo_model tp 1 pp 1, simulated"}
    assert len(found.points) == 2 * 2 * len(SHARES)
    # Whether a system ever stays below twice the unloaded latency, and so has a ratio, is a matter of times.
    for panel, system in product(panels, ("orca(4)", "ft(2,1)")):
        assert any(name.startswith(f"{panel} {system} at ") for name in found.numbers)
    table = (tmp_path / "figure-10-real" / "table.md").read_text()
    assert "Guard: off." in table
    assert said("9a", "on 13B, Orca's", report.real_figures_in(tmp_path)).startswith("Orca's engine takes ")
    tiny = ("--quick", "--requests", 5, "--attempts", 0, "--system", "orca(1)", "--out", tmp_path)
    done = orca_lab("figure", 11, "--real", *tiny)
    assert done.exit_code == 0, done.stderr
    assert {row["system"] for row in points(tmp_path / "figure-11-real")} == {"orca(1)"}
    assert "name one of them" in orca_lab("figure", 9).stderr
    monkeypatch.setattr(real, "BATCHES", (1, 2))
    by_torch = ("--dtype", "float32", "--attention", "torch", "--out", tmp_path / "by-torch")
    done = orca_lab("figure", 9, "--real", "--quick", *by_torch)
    assert done.exit_code == 0, done.stderr
    run = json.loads((tmp_path / "by-torch" / "figure-9-real" / "run.json").read_text())
    assert run["real"]["attention"] == "torch"
    assert (
        "Torch batches the baseline's attention." in (tmp_path / "by-torch" / "figure-9-real" / "table.md").read_text()
    )
    done = orca_lab("figure", 9, "--real", "--quick", "--dtype", "float32", "--pp", 2, "--out", tmp_path / "pp-2")
    assert done.exit_code == 0, done.stderr
    assert {row["panel"] for row in points(tmp_path / "pp-2" / "figure-9-real")} == {"demo_model tp 1 pp 2"}


def test_calibrate_and_validate(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    given = ("--quick", "--dtype", "float32", "--max-bs", 4)
    done = orca_lab("calibrate", *given, "--requests", 10, "--out", path)
    assert done.exit_code == 0, done.stderr
    about = json.loads(path.read_text())["about"]
    assert about.keys() >= {"command", "commit", "machine", "isa", "model", "dtype", "tp", "pp", "system"}
    done = orca_lab("validate", "--calibration", path, *given, "--requests", 5, "--runs", 1, "--attempts", 0)
    assert done.exit_code == 0, done.stderr
    head, *rows, bound, same = done.stdout.splitlines()
    assert re.split(r"  +", head.strip())[:3] == ["share", "run", "throughput"]
    assert [row.split()[0] for row in rows] == ["30%", "50%", "70%"]
    assert bound.split() == ["bound", "2%", "4%", "10%", "8%", "20%"]
    assert same.endswith(", 0 of them with another batch than simulated")


def test_a_calibration_is_of_the_layout_that_runs(tmp_path: Path) -> None:
    """Two engines by a calibration would be compared with one."""
    path = tmp_path / "calibration.json"
    cost = Calibrated(((1e-9, 0, 0, 0, 0, 0, 0),), 0.0)
    Calibration(cost, ((0.0, 0.0),), 0.0, 0.0, 640, 100, {"tp": 1, "pp": 1, "max_bs": 4, "engines": 2}).write(path)
    for command in ("validate", "validate-whatif"):
        done = orca_lab(command, "--calibration", path)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr == f"calibration: {path} is of 2 x (tp 1, pp 1), and 1 x (tp 1, pp 1) runs\n"


@pytest.mark.parametrize("shares", ["0", "-1", "0.5,nan", "inf", "half"])
def test_shares_that_are_none_are_refused_at_once(shares: str, tmp_path: Path) -> None:
    done = orca_lab("validate", "--calibration", tmp_path / "none.json", "--shares", shares)
    assert done.exit_code == 2
    assert "--shares" in done.stderr


def iterations_in(journal: Path) -> int:
    return sum(1 for _ in scheduled(read(journal)))


def test_the_guard_marks_live_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are slower than their calibration, which here says that iterations take no time, and those that have a
    busy process beside them."""
    cost = Calibrated(((1e-9, 0, 0, 0, 0, 0, 0),), 0.0)
    calibration = Calibration(cost, ((0.0, 0.0),), 0.0, 0.0, 640, 100, {"tp": 1, "pp": 1, "max_bs": 4})
    path = tmp_path / "calibration.json"
    calibration.write(path)
    given = ("--quick", "--dtype", "float32", "--max-bs", 4, "--requests", 5, "--runs", 1, "--shares", 0.5)
    done = orca_lab("validate", "--calibration", path, *given, "--attempts", 2)
    assert done.exit_code == 1
    marked = [line for line in done.stderr.splitlines() if " run " in line]
    assert [line.split(" was ")[0] for line in marked] == ["orca(4): run 1 of 2", "orca(4): run 2 of 2"]
    assert all(re.search(r"its iterations took \+\d+% against the calibration", line) for line in marked)
    assert done.stderr.endswith("orca(4) was disturbed 2 times\n")
    said, load = list[str](), drawn(Lengths((4, 40), (1, 20)), AT_ONCE, 1.0, 20, Seeds.of(1))
    seen, whys = list[tuple[float, ...]](), iter(["late", "", "x", "y"])
    calibration = replace(calibration, cost=Calibrated(((1.0, 0, 0, 0, 0, 0, 0),), 0.0))  # an iteration takes 1 s
    with Live(LAYOUT, Setting(4)) as live:
        live.serve(load)
        ran = [iterations_in(live.journal)]

        def why(*given: float) -> str:
            seen.append(given)
            ran.append(iterations_in(live.journal))
            return next(whys)

        with monkeypatch.context() as patch:
            patch.setattr("orca_bench.live.REPORTS", 60.0)
            patch.setattr("orca_bench.live.disturbed", why)
            result = live.guarded(load, calibration, 3, said.append)
            assert result is not None
            assert live.pace == pytest.approx(seen[1][1] / seen[1][0])
            assert live.guarded(load, None, 2, said.append) is None
        runs = [("1 of 3", "late"), ("1 of 2", "x"), ("2 of 2", "y")]
        assert said == [f"orca(4): run {run} was disturbed: {told}" for run, told in runs]
        assert result.rows == sum(one.output_tokens for one in load), "of this run alone"
        assert [one.first for one in result.requests] == [min(one.came or ()) for one in result.requests]
        assert result.seconds == max(one.ended for one in result.requests)
        for (predicted, took, *_), (before, after) in zip(seen[:2], pairwise(ran), strict=False):
            assert 0 < predicted <= after - before, "and so are the iterations"
            assert took > 0
        assert seen[1][0] >= result.iterations
        assert [one[:2] for one in seen[2:]] == [(0.0, 0.0)] * 2
        assert live.pace is None, "without a calibration"
        assert {late for *_, late in seen} == {0.0}, "one client sends those in turn that are due at once"
        said.clear()
        loop = [sys.executable, "-c", "while True: pass"]
        busy = [subprocess.Popen(loop) for _ in range(0, os.cpu_count() or 1, 8)]  # an eighth of the cores at least
        try:
            assert live.guarded(load, None, 1, said.append) is None
        finally:
            for process in busy:
                process.kill()
                process.wait()
    [line] = said
    assert re.fullmatch(r"orca\(4\): run 1 of 1 was disturbed: other processes took \d+% of the cores' time", line)


@pytest.mark.long
def test_whatif_and_plan_beside_live_runs(tmp_path: Path) -> None:
    given = ("--quick", "--dtype", "float32")
    paths = [tmp_path / name for name in ("one.json", "two.json", "pp.json")]
    for path, layout in zip(paths, ((), ("--engines", 2), ("--pp", 2)), strict=True):
        done = orca_lab("calibrate", *given, *layout, "--max-bs", 4, "--requests", 10, "--out", path)
        assert done.exit_code == 0, done.stderr
    assert [Calibration.read(path).engines for path in paths] == [1, 2, 1]
    more = ("--requests", 20, "--attempts", 0)
    done = orca_lab("validate-whatif", "--calibration", paths[0], *given, *more, "--recorded", 2, "--max-bs", "1,4")
    assert done.exit_code == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["measure", "live", "predicted", "error", "bound", "within"]
    names = [re.split(r"  +", row)[0] for row in rows if "%" in row]
    assert names == [name for name in ("max_bs 2, the record", "max_bs 1", "max_bs 4") for _ in range(5)]
    of = [option for path in paths for option in ("--calibration", path)]
    done = orca_lab("validate-plan", *of, *given, *more)
    assert done.exit_code == 0, done.stderr
    _, *rows = done.stdout.splitlines()
    layouts = ("1 x (tp 1, pp 1)", "2 x (tp 1, pp 1)", "1 x (tp 1, pp 2)")
    assert [row.split(", max_bs")[0] for row in rows[:6]] == [layout for layout in layouts for _ in range(2)]
    assert {row.split(":")[0] for row in rows[6:]} == {"sustained, req/s", "normalized, s"}
    load = ("--lengths", "8-128,1-32", "--requests", 20, "--normalized", 10, "--max-bs", "4", "--rate", 0.5)
    done = orca_lab("plan", *(option for path in paths for option in ("--hardware", path)), *load)
    assert done.exit_code == 0, done.stderr
    for layout in layouts:
        assert layout in done.stdout


def test_the_order_of_a_plan() -> None:
    """Layouts that were measured within the bound of each other have no order."""
    rows = [Checked(of, "rate", live, said, 0.05) for of, live, said in (("a", 10, 9), ("b", 10.2, 8), ("c", 20, 30))]
    assert orders(rows) == ["rate: the order is the measured one (2 of 3 pairs differ by more than the bound)"]
    rows[2] = rows[2]._replace(said=8.5)
    assert orders(rows) == ["rate: a and c were predicted in the other order"]


@pytest.mark.long
async def test_the_baseline_serves_the_same_load_client() -> None:
    """`orca lab baseline` and `orca bench serve`, as processes."""
    with folder_in_memory() as folder:
        command = [sys.executable, "-m", "orca_cli", "lab", "baseline", "--max-bs", "4", "--mbs", "2", "--port", "0"]
        more = ["--http-port", "0", "--dtype", "float32", "--run-dir", f"{folder}/run"]
        pipe = asyncio.subprocess.PIPE
        server = await asyncio.create_subprocess_exec(*command, *more, stdout=pipe)
        try:
            assert server.stdout is not None
            address = ""
            async with asyncio.timeout(120):
                while not address:
                    line = (await server.stdout.readline()).decode()
                    assert line, "it ended"
                    if found := re.search(r"gRPC (\S+)", line):
                        address = found[1]
            client = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "orca_cli", "bench", "serve", "--address", address, "--rate", "50"),
                *("--requests", "10", "--lengths", "4-20,1-8"),
                stdout=pipe,
            )
            said, _ = await client.communicate()
            line = json.loads(said)
            assert (line["requests"], line["errors"]) == (10, 0)
        finally:
            server.terminate()
            await server.wait()
        [path] = Path(folder, "run").glob("journal-*.jsonl")
        assert first_difference(path) is None
