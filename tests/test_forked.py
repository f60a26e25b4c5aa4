"""Tests in forked processes end as they do in one: `forked.py` runs this repository's."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
SHARED = """
import os, pathlib, pytest

@pytest.fixture(scope="session")
def process(tmp_path_factory):
    file = pathlib.Path({folder!r}) / str(os.getpid())
    file.touch()
    yield
    file.unlink()
"""
FILE = """
import os
pids = []

def test_one(process):
    print("said before it failed")
    pids.append(os.getpid())
    assert len(pids) == 2

def test_other(process, tmp_path):
    assert [*pids] == [os.getpid()]
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs a folder's tests in two processes."""
    command = [sys.executable, "-m", "pytest", "-p", "forked", "-p", "no:cacheprovider", "--processes", "2"]
    environment = os.environ | {"PYTHONPATH": str(HERE), "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        [*command, *options, str(folder)], env=environment, capture_output=True, text=True, check=False, cwd=folder
    )


@pytest.mark.parametrize("count", [1, 5])
def test_a_file_is_run_in_one_process(tmp_path: Path, count: int) -> None:
    """In its order, with one session's fixtures for all files of a process, which end with it."""
    made = tmp_path / "made"
    made.mkdir()
    (tmp_path / "conftest.py").write_text(SHARED.format(folder=str(made)))
    for number in range(count):
        (tmp_path / f"test_{number}.py").write_text(FILE)
    ended = run(tmp_path)
    assert ended.returncode == 1
    assert f"{count} failed, {count} passed" in ended.stdout, ended.stdout + ended.stderr
    assert ended.stdout.count("said before it failed\n") == count
    assert f"FAILED test_{count - 1}.py::test_one - assert 1 == 2" in ended.stdout
    assert not [*made.iterdir()]


def test_all_pass(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"test_{number}.py").write_text("def test_it(): pass\ndef test_too(): pass")
    ended = run(tmp_path)
    assert (ended.returncode, "8 passed" in ended.stdout) == (0, True), ended.stdout + ended.stderr


def test_a_process_that_crashes_fails_what_it_had_left(tmp_path: Path) -> None:
    (tmp_path / "test_crash.py").write_text(
        "import os\n\ndef test_it(): pass\ndef test_crash(): os.abort()\ndef test_after(): pass"
    )
    (tmp_path / "test_fine.py").write_text("def test_it(): pass\ndef test_too(): pass")
    ended = run(tmp_path)
    assert ended.returncode == 1
    assert "2 failed, 3 passed" in ended.stdout, ended.stdout + ended.stderr
    assert "FAILED test_crash.py::test_crash - its process has ended" in ended.stdout
    assert "FAILED test_crash.py::test_after - its process has ended" in ended.stdout


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    """As Ctrl-C does: fixtures are torn down."""
    made = tmp_path / "made"
    made.mkdir()
    (tmp_path / "conftest.py").write_text(SHARED.format(folder=str(made)))
    waits = f"import pathlib, time\n\ndef test_it(process):\n    pathlib.Path({str(tmp_path)!r}, 'began').touch()\n"
    (tmp_path / "test_long.py").write_text(waits + "    while True: time.sleep(1)")
    fails = f"import pathlib\n\ndef test_it():\n    while not pathlib.Path({str(tmp_path)!r}, 'began').exists(): pass\n"
    (tmp_path / "test_short.py").write_text(fails + "    assert False")
    ended = run(tmp_path, "-x")
    assert "1 failed" in ended.stdout, ended.stdout + ended.stderr
    assert not [*made.iterdir()]
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in (one.info["cmdline"] or [])]


def test_what_a_session_shares_fails_at_its_end(tmp_path: Path) -> None:
    shared = "@pytest.fixture(scope='session')\ndef shared():\n    yield\n    raise OSError('too late')"
    (tmp_path / "conftest.py").write_text(f"import pytest\n\n{shared}")
    for number in range(2):
        (tmp_path / f"test_{number}.py").write_text("def test_it(shared): pass")
    ended = run(tmp_path)
    assert ended.returncode == 2
    assert "2 passed" in ended.stdout
    assert "OSError: too late" in ended.stderr


def test_errors_of_collection_run_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_wrong.py").write_text("import nowhere")
    (tmp_path / "test_fine.py").write_text("def test_it(): pass")
    ended = run(tmp_path)
    assert ended.returncode == 2
    assert "1 error" in ended.stdout
    assert "passed" not in ended.stdout
