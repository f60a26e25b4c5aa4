"""The scripts for machines with GPUs are rehearsed without one: no import, flag or path fails first on a GPU."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu.run import BUDGET, Run, Step, interprets, node, one_gpu, run

ROOT = Path(__file__).parents[2]
# As on the machine that is lent (November 2026): its image has these, and no network.
IMAGE = ["torch==2.11.0", "transformers==5.17.0", "tokenizers==0.23.2", "numpy==2.5.2", "pip"]
IMAGE += ["psutil", "rich", "jinja2", "pyyaml", "regex", "uvloop", "typer", "hypothesis", "pytest-xdist", "msgpack"]
PYTHON = next(Path.home().glob(".pyenv/versions/3.12.*/bin/python3.12"), None) or shutil.which("python3.12")
BARE = """
ip link set lo up && cd "$1" && exec env -i HOME="$3" PATH="$2:/usr/bin:/bin" OUT="$4" tests/gpu/run.sh --rehearse
"""


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def check(out: Path, steps: list[Step]) -> None:
    """Each step has ended well, in its order, and what has results has said them."""
    files = sorted(path.name for path in out.iterdir())
    assert files == ["log", "results.jsonl"]
    first, *rows = rows_of(out)
    assert first["machine"].keys() >= {"torch", "triton", "driver", "gpus", "numpy"}
    interpreter = interprets(first["machine"])
    ends = [(row["step"], row.get("status")) for row in rows if "status" in row or "dropped" in row]
    right = [(step.name, None if step.interpreted and not interpreter else 0) for step in steps]
    assert ends == right, (out / "log").read_text()[-5000:]
    told = {row["step"] for row in rows if "status" not in row}
    assert told >= {"first", "decode", "peer", "serve"} or "groups-2" in told


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("of", [one_gpu(), node(4)], ids=["one", "node"])
def test_every_step_runs_without_a_gpu(tmp_path: Path, of: list[Step]) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)}
    options = ["--rehearse"] if of[0].name == "first" else ["--rehearse", "--node"]
    ran = subprocess.run([ROOT / "tests/gpu/run.sh", *options], env=environment, check=False)
    check(tmp_path, of)
    assert ran.returncode == 0


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.skipif(os.getuid() != 0, reason="only root may make a network without a way out")
@pytest.mark.skipif(PYTHON is None, reason="no Python 3.12, on PATH or of pyenv")
def test_every_step_runs_on_a_bare_machine(on_disk: Path) -> None:
    """The versions of the machine that is lent, wheels instead of `make setup`, an empty environment and no network."""
    uv = [sys.executable, "-m", "uv"]
    python, out = on_disk / "image/bin/python", on_disk / "out"
    subprocess.run([*uv, "venv", "--quiet", "--python", str(PYTHON), on_disk / "image"], check=True)
    subprocess.run([*uv, "pip", "install", "--quiet", "--python", python, *IMAGE], check=True)
    copy, home = on_disk / "tree", on_disk / "home"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]  # the files that travel
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    home.mkdir()
    subprocess.run([copy / "tests/gpu/fetch.sh"], check=True, env={**os.environ, "PYTHON": str(python)})
    bare = ["unshare", "--net", "sh", "-ec", BARE, "sh", copy, python.parent, home, out]
    ran = subprocess.run(bare, check=False)
    check(out, one_gpu())
    assert ran.returncode == 0


def test_the_steps_of_one_gpu_fit_its_budget() -> None:
    assert sum(step.expected for step in one_gpu()) <= BUDGET
    assert max(step.bound for step in one_gpu()) + BUDGET < 600, "longer than one command may run there"
    assert len({step.name for step in one_gpu()}) == len(one_gpu())


def test_a_step_says_what_became_of_it() -> None:
    lines = """print('{"a": 1}'); print('{"event": "of a log"}'); print('{no JSON'); """
    for code, bound, status, told in (
        (lines, 60.0, 0, [{"a": 1}]),
        (lines + "exit(3)", 60.0, 3, [{"a": 1}]),
        ("import time; time.sleep(600)", 0.1, 124, []),
    ):
        rows = list[dict[str, Any]]()
        ended, _ = run([sys.executable, "-c", code], bound, io.StringIO(), rows.append, {})
        assert (ended, rows) == (status, told)


def test_a_step_that_would_begin_too_late_is_dropped(tmp_path: Path) -> None:
    """The first of them runs, and those behind it, if they are short enough."""
    quick = '-c \'print("{\\"ran\\": true}")\''
    steps = [Step(name, expected, 200, quick, quick) for name, expected in (("a", 1), ("b", 100), ("c", 1))]
    with Run(tmp_path, budget=50, rehearse=False) as runs:
        for step in steps:
            runs.step(step)
    assert not runs.failed
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows if row.get("ran")] == ["a", "c"]
    assert [row["step"] for row in rows if "dropped" in row] == ["b"]


@pytest.mark.long
def test_groups_are_timed() -> None:
    options = ["--ranks", "2", "--device", "cpu", "--bytes", "4096", "--epochs", "2"]
    ran = subprocess.run(
        [sys.executable, "-m", "orca_lab.groups", *options], capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [row["kind"] for row in rows] == ["all_reduce", "formation", "formation", "killed"]
    assert all(row["ranks"] == 2 for row in rows)
    assert all(row["formed_seconds"] > 0 for row in rows[1:])
