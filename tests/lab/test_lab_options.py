"""The options of `orca lab`: each reaches what carries the command out, and so does what holds without it."""

from collections.abc import Callable, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from typer.testing import CliRunner

from orca_bench import real
from orca_bench.live import Layout, Setting
from orca_bench.real import Real
from orca_cli.main import app
from orca_lab import experiments
from orca_lab.baseline.attention import By
from orca_lab.calibration import Calibration
from orca_lab.cost import Calibrated
from orca_lab.plan import MAX_BS, POSITIONS, Slo
from orca_lab.workload import PAPER, POISSON, Lengths, Seeds, drawn

COST = Calibrated(((1e-3, 0, 0, 0, 0, 0, 0),), 0.0)
ALONE = Calibration(COST, ((0.0, 0.0),), 0.0, 0.0, 64, 9, {"tp": 1, "pp": 1})
SIX = replace(ALONE, about={"tp": 2, "pp": 3})
PLAIN, GIVEN = Layout(None, "auto", 1, 1, None, 1), Layout("m", "float32", 2, 3, 1_500_000_000, 1)
LAYOUT = "--model m --dtype float32 --tp 2 --pp 3 --memory 1.5"


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Calibrations of one rank, and of six."""
    ALONE.write(tmp_path / "alone.json")
    SIX.write(tmp_path / "six.json")
    return f"{tmp_path}/alone.json", f"{tmp_path}/six.json"


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    def of(where: str | tuple[MutableMapping[int, Any], int], line: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Runs a command up to the function that carries it out. Returns with what that is called."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def ends(*given: Any, **named: Any) -> None:
            calls.append((given, named))
            raise SystemExit(0)

        if isinstance(where, str):
            monkeypatch.setattr(where, ends)
        else:
            monkeypatch.setitem(*where, ends)
        done = CliRunner().invoke(app, ["lab", *line.split()])
        assert done.exit_code == 0, done.output
        [call] = calls
        return call

    return of


def test_a_figure(handed: Any, files: tuple[str, str]) -> None:
    whole, quick = real.FULL, replace(real.QUICK, requests=30, queued=80)
    assert handed((real.FIGURES, 10), "figure 10 --real")[0] == (whole, Real(PLAIN, 3, None, By.KERNELS), ANY, [])
    given = f"{LAYOUT} --attempts 0 --attention torch --calibration {files[1]} --quick --requests 30"
    systems = [Setting(8), Setting(8, 4)]
    assert handed((real.FIGURES, 9), f"figure 9 --real {given} --system orca(8) --system ft(8,4)")[0] == (
        *(quick, Real(GIVEN, 0, SIX, By.TORCH)),
        *(ANY, systems),
    )
    assert handed((experiments.FIGURES, 11), "figure 11 --simulated")[0] == (experiments.FULL, ANY)
    assert handed((experiments.FIGURES, 9), "figure 9 --simulated --quick")[0] == (experiments.QUICK, ANY)


def test_the_baseline(handed: Any) -> None:
    where = "orca_bench.live.stack_of"
    ports = {"port": 50051, "http_port": 8000, "run_dir": None, "ui": False}
    assert handed(where, "baseline") == ((PLAIN, Setting(8, 8)), ports)
    assert handed(where, "baseline --max-bs 4 --mbs 9")[0][1] == Setting(4, 4)
    given = f"{LAYOUT} --max-bs 4 --mbs 2 --queue-delay 0.5 --port 1 --http-port 2 --run-dir r"
    ports = {"port": 1, "http_port": 2, "run_dir": "r", "ui": False}
    assert handed(where, f"baseline {given}") == ((GIVEN, Setting(4, 2, delay=0.5)), ports)


def test_a_calibration(handed: Any) -> None:
    where, about = "orca_bench.real.calibrate", {"command": ANY, "commit": ANY}
    assert handed(where, "calibrate")[0] == (Real(PLAIN, 0), Setting(32), PAPER, 400, about)
    given = f"{LAYOUT} --engines 2 --max-bs 4 --mbs 2 --quick --requests 30"
    assert handed(where, f"calibrate {given}")[0] == (
        *(Real(replace(GIVEN, engines=2), 0), Setting(4, 2)),
        *(real.QUICK.lengths(PAPER), 30, about),
    )
    assert handed(where, "calibrate --quick")[0][2:4] == (real.QUICK.lengths(PAPER), 160)


def test_validations(handed: Any, files: tuple[str, str]) -> None:
    alone, six = files
    quick = real.QUICK.lengths(PAPER)
    where = "orca_bench.real.validate"
    assert handed(where, f"validate --calibration {alone}")[0] == (
        *(Real(PLAIN, 3, ALONE), Setting(32), ALONE, PAPER, 200, 3),
        *(ANY, [0.3, 0.5, 0.7]),
    )
    given = f"{LAYOUT} --max-bs 4 --quick --requests 30 --attempts 0"
    assert handed(where, f"validate --calibration {six} {given} --runs 2 --shares 0.4")[0] == (
        *(Real(GIVEN, 0, SIX), Setting(4), SIX, quick, 30, 2),
        *(ANY, [0.4]),
    )
    where = "orca_bench.checks.check_whatif"
    assert handed(where, f"validate-whatif --calibration {alone}")[0] == (
        *(Real(PLAIN, 3, ALONE), ALONE, 8, [4, 16, 32]),
        *(PAPER, 200, ANY),
    )
    given = f"{LAYOUT} --max-bs 2,6 --quick --requests 30 --attempts 0 --recorded 3"
    assert handed(where, f"validate-whatif --calibration {six} {given}")[0] == (
        *(Real(GIVEN, 0, SIX), SIX, 3, [2, 6]),
        *(quick, 30, ANY),
    )
    where = "orca_bench.checks.check_plan"
    assert handed(where, f"validate-plan --calibration {alone}")[0] == (PLAIN, 3, [ALONE], PAPER, 200, ANY)
    given = "--model m --dtype float32 --memory 1.5 --quick --requests 30 --attempts 0"
    assert handed(where, f"validate-plan --calibration {six} --calibration {alone} {given}")[0] == (
        *(replace(GIVEN, tp=1, pp=1), 0, [SIX, ALONE]),
        *(quick, 30, ANY),
    )


def test_a_plan(handed: Any) -> None:
    where = "orca_lab.plan.plan"
    (costs, *rest), _ = handed(where, "plan --gap 0.5")
    assert costs
    load = drawn(PAPER, POISSON, 1.0, 1000, Seeds.of(1))
    assert rest == [load, Slo(0.0, 0.0, 0.5, 0.99), 32, 40, MAX_BS, ANY, POSITIONS, []]
    (_, *rest), _ = handed(
        where,
        "plan --model 175b --hardware a100-80 --rate 3 --lengths 8-16,2-4 --requests 20 --first-token 1 --normalized 2 "
        "--gap 3 --percentile 0.5 --gpus 7 --max-bs 4,8 --positions 64,128 --seed 2",
    )
    load = drawn(Lengths((8, 16), (2, 4)), POISSON, 3.0, 20, Seeds.of(2))
    assert rest == [load, Slo(1.0, 2.0, 3.0, 0.5), 7, 96, [4, 8], ANY, [64, 128], []]
