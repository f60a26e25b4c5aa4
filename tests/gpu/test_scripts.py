"""The scripts for machines with GPUs are rehearsed without one: no import, flag or path fails first on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = {
    "run.sh": ["first", "kernels", "graphs", "graphs--no-graphs", "times", "stacks", "memcheck"],
    "node.sh": [
        *("groups-2", "groups-4", "tokens", "tokens-graphs"),
        *("kills-tp", "kills-graphs", "kills-pp", "kills-both"),
    ],
}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("script", STEPS)
def test_every_step_runs_without_a_gpu(tmp_path: Path, script: str) -> None:
    environment = {**os.environ, "DEVICE": "cpu", "OUT": str(tmp_path), "PYTHON": sys.executable}
    ran = subprocess.run([ROOT / "tests/gpu" / script], env=environment, check=False)
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(row["step"], row["status"]) for row in rows] == [(name, 0) for name in STEPS[script]]
    assert all(row["torch"] and "driver" in row and "gpus" in row for row in rows)
    assert ran.returncode == 0


def test_a_step_says_what_became_of_it(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path)}
    step = [sys.executable, ROOT / "tests/gpu/step.py"]
    for seconds, command, status in (("60", ["true"], 0), ("60", ["false"], 1), ("0.1", ["sleep", "600"], 124)):
        assert subprocess.run([*step, "one", seconds, *command], env=environment, check=False).returncode == status
        row = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[-1])
        assert (row["step"], row["status"], row["command"]) == ("one", status, command)


def test_groups_are_timed() -> None:
    options = ["--ranks", "2", "--device", "cpu", "--bytes", "4096", "--epochs", "2"]
    ran = subprocess.run(
        [sys.executable, "-m", "orca_lab.groups", *options], capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [row["kind"] for row in rows] == ["all_reduce", "formation", "formation", "killed"]
    assert all(row["ranks"] == 2 for row in rows)
    assert all(row["formed_seconds"] > 0 for row in rows[1:])
