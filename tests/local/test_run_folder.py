"""Run folders: their owner's alone, one run at a time, the last ten kept."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orca_common.errors import FailedPrecondition
from orca_local.run_folder import KEPT, RunFolder, all_runs, new_run


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_only_its_owner_may_look(tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs")
    with RunFolder(run) as folder:
        assert [mode(path) for path in (run, run / "logs")] == [0o700, 0o700]
        assert mode(run / "lock") == 0o600
        assert folder.log("redis").parent == run / "logs"


def test_a_run_is_named_after_the_time(tmp_path: Path) -> None:
    """And by a number where others have begun in the same second."""
    runs = [new_run(tmp_path) for _ in range(4)]
    first = runs[0].name
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d", first)
    same = [run.name for run in runs if run.name.startswith(first)]
    assert same == [first, *(f"{first}.{number}" for number in range(2, len(same) + 1))]


def test_a_folder_is_one_runs(tmp_path: Path) -> None:
    """It is free again when the run, and a child that writes into it, have ended."""
    first = RunFolder(tmp_path)
    with pytest.raises(FailedPrecondition, match=r"^run_dir: .* belongs to another `orca serve`"):
        RunFolder(tmp_path)
    sleeper = [sys.executable, "-c", "input()"]
    with subprocess.Popen(sleeper, stdin=subprocess.PIPE, pass_fds=[first.descriptor]) as child:
        first.close()
        with pytest.raises(FailedPrecondition):
            RunFolder(tmp_path)
        child.communicate(b"\n")
    RunFolder(tmp_path).close()


def test_the_last_runs_are_kept(tmp_path: Path) -> None:
    """And the one that still runs."""
    for number in range(KEPT + 3):
        (tmp_path / f"run-{number}").mkdir()
        os.utime(tmp_path / f"run-{number}", (number, number))
    with RunFolder(tmp_path / "run-0"):
        os.utime(tmp_path / "run-0", (0, 0))
        new = new_run(tmp_path)
    kept = [f"run-{number}" for number in (0, *range(4, KEPT + 3))]
    assert [path.name for path in all_runs(tmp_path)] == [*kept, new.name]


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(FailedPrecondition, match=r"^run_dir: .*file/run cannot be made \(Not a directory\)"):
        RunFolder(file / "run")
