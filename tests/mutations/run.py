"""Applies mutations of table.py to a copy of the repository, one at a time, and says whether the test finds it.

    python tests/mutations/run.py [--only EXPRESSION] [--sample N [--seed N]] [--by TESTS]

`--by` shows what other tests find: a file of tests, a folder, or a test, instead of the one that a mutation names.

The named tests run first on the code as it is: one that fails says nothing. A mutation survives when its test passes
with it. A test that fails only because the machine is busy counts as a find: run it on a quiet one.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context, parent_process
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1])]

from mutations.changes import Gone  # noqa: E402
from mutations.mutation import ROOT, Mutation  # noqa: E402
from mutations.table import MUTATIONS  # noqa: E402

TEST_SECONDS = 60  # of one test: a mutation may let it wait for ever
RUN_SECONDS = 300  # of one mutation
REWRITES = "ignore::pytest.PytestAssertRewriteWarning"  # they come too late, and a find's asserts are not read
PASSED, FAILED = 0, 1  # pytest's exit statuses; the others mean that no test has run

# Imports take longer than most of the tests. So each run is forked from a process that has done those that no mutation
# changes.
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("pytest", "hypothesis.strategies", "numpy", "tokenizers", "grpc.aio", "redis.asyncio", "redis.sentinel"),
        *("httpx2", "uvicorn", "msgspec", "hiredis", "torch", "opentelemetry.sdk.trace"),
    ]
)


class Copy:
    """A copy of the repository's files, one of which may be mutated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    @property
    def packages(self) -> list[str]:
        """The folders that hold packages."""
        folders = (*self.folder.iterdir(), *(self.folder / "services").iterdir())
        return [str(folder) for folder in folders if folder.name == "protos" or any(folder.glob("orca_*/__init__.py"))]

    def write(self, file: str, text: str) -> None:
        """Gives a file this text. Bytecode of another text of the same size and second would be taken for its own."""
        path = self.folder / file
        path.write_text(text)
        for old in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            old.unlink()


def run(tests: Sequence[str], copy: Copy, seconds: float) -> tuple[int, list[str]]:
    """Runs tests of a copy. Returns pytest's exit status, and its lines about those that fail, or its last line."""
    with tempfile.TemporaryDirectory(prefix="orca-mutation-") as made:
        out = Path(made) / "out"
        child = FORKS.Process(target=_run, args=(tests, copy.folder, copy.packages, out))
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


def _run(tests: Sequence[str], folder: Path, packages: list[str], out: Path) -> None:
    """The part of `run` that the forked process does."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with out.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    known = [name for name in sys.modules if name.startswith(("orca", "_orca"))]
    assert not known, f"a mutation could not change these, which are imported already: {known}"
    sys.path[:0] = packages
    os.environ["PYTHONPATH"] = os.pathsep.join(packages)  # of the processes that a test starts
    os.chdir(folder)
    options = ["-q", "-rfE", "-p", "no:cacheprovider", "--tb=no", "-W", REWRITES, f"--timeout={TEST_SECONDS}"]
    sys.exit(int(pytest.main([*options, *tests])))


def _end_with_parent() -> None:
    """Ends this process and the servers of its tests, and so the fork server, when what runs mutations ends."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def end_of(mutation: Mutation, copy: Copy) -> str:
    """`found`, `SURVIVES` or `not made`, with the reason."""
    source = (copy.folder / mutation.file).read_text()
    try:
        copy.write(mutation.file, mutation.made(source))
    except (Gone, SyntaxError) as error:
        return f"not made: {error}"
    try:
        status, said = run([mutation.found_by], copy, RUN_SECONDS)
    finally:
        copy.write(mutation.file, source)
    if status == FAILED:
        return "found"
    return "SURVIVES" if status == PASSED else f"not made: exit status {status}: {' '.join(said)}"


def run_all(chosen: Sequence[Mutation], copy: Copy) -> Counter[str]:
    """Runs mutations one after the other, and prints a line about each. Returns how many ended in each way."""
    tests = sorted({mutation.found_by for mutation in chosen})
    status, said = run(tests, copy, RUN_SECONDS + TEST_SECONDS * len(tests))
    if status not in (PASSED, FAILED):
        raise SystemExit(f"without a mutation: exit status {status}: {' '.join(said)}")
    broken = [line.split(" ")[1] for line in said] if status == FAILED else []  # names of tests, as pytest takes them
    ends = Counter[str]()
    for number, mutation in enumerate(chosen, 1):
        before = time.monotonic()
        fails = any(name.startswith(mutation.found_by) for name in broken)
        end = "not made: its test fails without it" if fails else end_of(mutation, copy)
        ends[end.split(":")[0]] += 1
        print(f"{number}/{len(chosen)} {mutation}: {end} ({time.monotonic() - before:.0f} s)", flush=True)
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutations whose `FILE: NAME` has this regular expression")
    parser.add_argument("--sample", type=int, default=0, help="this number of them, chosen by chance; 0: all")
    parser.add_argument("--seed", type=int, default=None, help="of the chance; a sample without one prints its own")
    parser.add_argument("--by", default="", help="tests that are run for every mutation, as pytest takes them")
    given = parser.parse_args()
    named = [replace(mutation, found_by=given.by or mutation.found_by) for mutation in MUTATIONS]
    chosen = [mutation for mutation in named if re.search(given.only, str(mutation))]
    if 0 < given.sample < len(chosen):
        seed = random.randrange(10**6) if given.seed is None else given.seed
        print(f"a sample of {given.sample} of {len(chosen)} mutations, seed {seed}", flush=True)
        chosen = random.Random(seed).sample(chosen, given.sample)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which removes the copy, too
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="orca-mutations-") as made:
        ends = run_all(chosen, Copy(Path(made)))
    minutes = (time.monotonic() - began) / 60
    print(f"{len(chosen)} mutations in {minutes:.1f} min: " + ", ".join(f"{n} {end}" for end, n in ends.items()))
    raise SystemExit(ends["found"] != len(chosen))


if __name__ == "__main__":
    main()
