"""A run of mutations that is killed leaves nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
from processes import has_ended

TESTS = Path(__file__).parents[1]
# It runs a test that never ends. Nothing is imported before: the test needs none of it.
SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from mutations import run

class Copy:
    folder, packages = Path({folder!r}), []

if __name__ == "__main__":
    run.FORKS.set_forkserver_preload(["pytest"])
    run.run(["test_it.py"], Copy(), 600)
"""
TEST = """
import subprocess, sys

def test_it():
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("began", "w").write(str(server.pid))
    server.wait()
"""


def test_what_runs_ends_with_it(tmp_path: Path) -> None:
    """The test, its servers, and the process from which it was forked."""
    (tmp_path / "script.py").write_text(SCRIPT.format(tests=str(TESTS), folder=str(tmp_path)))
    (tmp_path / "test_it.py").write_text(TEST)
    os.mkfifo(tmp_path / "began")
    environment = os.environ | {"PYTEST_ADDOPTS": "", "PYTHONPATH": str(TESTS)}
    with subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, env=environment) as process:
        server = int((tmp_path / "began").read_text())  # waits for it
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert server in [one.pid for one in started]
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not [one for one in alive if not has_ended(one)]
