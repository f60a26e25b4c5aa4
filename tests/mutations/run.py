"""Applies each mutation of table.py to a copy of the services, and says whether the test that it names finds it.

    python tests/mutations/run.py [--only WORDS]

The named tests run first on the code as it is: one that fails tells nothing. A mutation survives when its test passes
with it. A test that fails only because the machine is busy counts as a find: run it on a quiet one.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1])]

from mutations.table import MUTATIONS, Mutation  # noqa: E402

ROOT = Path(__file__).parents[2]
PACKAGES = ("pool", "scheduler", "endpoint")  # of services/, those that mutations change
TEST_SECONDS = 20  # of one test: a mutation may let it wait for ever
RUN_SECONDS = 300  # of one mutation
REWRITES = "ignore::pytest.PytestAssertRewriteWarning"  # they come too late, and nobody reads what a find asserts
PASSED, FAILED = 0, 1  # pytest's exit statuses; the others mean that no test has spoken

# Imports take longer than most of the tests. So each run is forked from a process that has done those that no mutation
# changes.
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("pytest", "hypothesis.strategies", "numpy", "tokenizers", "grpc.aio", "redis.asyncio", "redis.sentinel"),
        *("httpx2", "uvicorn", "msgspec", "hiredis", "orca_common.telemetry", "orca_common.tls"),
        *(f"orca.v1.{name}" for name in ("orca_pb2_grpc", "worker_pb2_grpc", "pool_pb2")),
    ]
)


class NotMade(Exception):
    """The code has moved on, and the table must follow."""


def mutated(mutation: Mutation, folder: Path) -> None:
    """Copies the services to a folder, and applies the mutation there. Raises NotMade where its text is not found."""
    for package in PACKAGES:
        shutil.copytree(ROOT / "services" / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        raise NotMade(f"{mutation.file} has {text.count(mutation.old)} times {mutation.old!r}")
    file.write_text(text.replace(mutation.old, mutation.new))


def run(tests: Sequence[str], services: Path, seconds: float) -> tuple[int, list[str]]:
    """Runs tests with the services of this folder. Returns pytest's exit status, and what it says of those that fail,
    or else its last line."""
    with tempfile.TemporaryDirectory(prefix="orca-mutation-") as made:
        out = Path(made) / "out"
        child = FORKS.Process(target=_run, args=(tests, services, out))
        child.start()
        child.join(seconds)
        if child.is_alive():
            assert child.pid is not None
            os.killpg(child.pid, signal.SIGKILL)  # and the servers of its tests
            child.join()
            return FAILED, [f"no end within {seconds:.0f} s"]
        lines = out.read_text().splitlines()
    said = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    assert child.exitcode is not None
    return child.exitcode, said or lines[-1:]


def _run(tests: Sequence[str], services: Path, out: Path) -> None:
    """The part of `run` that the forked process does."""
    os.setsid()
    with out.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    known = [name for name in sys.modules if name.startswith(tuple(f"orca_{package}" for package in PACKAGES))]
    assert not known, "what a mutation may change was imported before it was made"
    folders = [str(services / package) for package in PACKAGES]
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)  # of the processes that a test starts
    os.chdir(ROOT)
    options = ["-q", "-rfE", "-p", "no:cacheprovider", "--tb=no", "-W", REWRITES, f"--timeout={TEST_SECONDS}"]
    sys.exit(int(pytest.main([*options, *tests])))


def told(mutation: Mutation) -> str:
    """`found`, `SURVIVES` or `not made`, with the reason."""
    with tempfile.TemporaryDirectory(prefix="orca-mutation-") as made:
        try:
            mutated(mutation, Path(made))
        except NotMade as error:
            return f"not made: {error}"
        status, said = run([mutation.found_by], Path(made), RUN_SECONDS)
    if status == FAILED:
        return "found"
    return "SURVIVES" if status == PASSED else f"not made: exit status {status}: {' '.join(said)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutations whose file or name has these words")
    given = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if given.only in f"{mutation.file}: {mutation.name}"]
    began = time.monotonic()
    tests = sorted({mutation.found_by for mutation in chosen})
    status, said = run(tests, ROOT / "services", RUN_SECONDS + TEST_SECONDS * len(tests))
    if status not in (PASSED, FAILED):
        raise SystemExit(f"without a mutation: exit status {status}: {' '.join(said)}")
    broken = [line.split(" ")[1] for line in said] if status == FAILED else []  # names of tests, as pytest takes them
    ends = Counter[str]()
    for number, mutation in enumerate(chosen, 1):
        before = time.monotonic()
        fails = any(name.startswith(mutation.found_by) for name in broken)
        end = "not made: its test fails without it" if fails else told(mutation)
        ends[end.split(":")[0]] += 1
        seconds = time.monotonic() - before
        print(f"{number}/{len(chosen)} {mutation.file}: {mutation.name}: {end} ({seconds:.0f} s)", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"{len(chosen)} mutations in {minutes:.1f} min: " + ", ".join(f"{n} {end}" for end, n in ends.items()))
    raise SystemExit(ends["found"] != len(chosen))


if __name__ == "__main__":
    main()
