"""Applies each mutation of table.py to a copy of the services, and says whether the test that it names finds it.

    python tests/mutations/run.py [--only WORDS]

The named tests run first on the code as it is: they must pass. A mutation survives when its test passes with it. This
takes minutes, so it is no part of `make test`. A test that fails only because the machine is busy counts as a find: run
it on a quiet one.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from mutations.table import MUTATIONS, Mutation  # noqa: E402

ROOT = Path(__file__).parents[2]
PACKAGES = ("pool", "scheduler", "endpoint")  # of services/, those that mutations change
TEST_SECONDS = 30  # of one test: a mutation may let it wait for ever
RUN_SECONDS = 300  # of one mutation
PASSED, FAILED = 0, 1  # pytest's exit statuses; the others mean that no test has spoken


class NotMade(Exception):
    """The code has moved on, and the table must follow."""


def mutated(mutation: Mutation, folder: Path) -> None:
    """Copies the services to a folder, and applies the mutation there. Raises NotMade when its text is not there once."""
    for package in PACKAGES:
        shutil.copytree(ROOT / "services" / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        raise NotMade(f"{mutation.file} has {text.count(mutation.old)} times {mutation.old!r}")
    file.write_text(text.replace(mutation.old, mutation.new))


def run(tests: Sequence[str], seconds: float, folder: Path | None = None) -> tuple[int, str]:
    """Runs tests, with the services of a folder if one is given. pytest's exit status, and the last of what it says."""
    environment = dict(os.environ)
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join(str(folder / package) for package in PACKAGES)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "--tb=no"]
    command += [f"--timeout={TEST_SECONDS}", *tests]
    with tempfile.TemporaryFile("w+") as out:  # no pipe: a test's own processes may outlive it
        child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return FAILED, f"no end within {seconds:.0f} s"
        out.seek(0)
        lines = out.read().splitlines()
    said = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return status, (said or lines or [""])[-1]


def told(mutation: Mutation) -> str:
    """`found`, `SURVIVES` or `not made`, with the reason."""
    with tempfile.TemporaryDirectory(prefix="orca-mutation-") as made:
        try:
            mutated(mutation, Path(made))
        except NotMade as error:
            return f"not made: {error}"
        status, said = run([mutation.found_by], RUN_SECONDS, Path(made))
    if status == FAILED:
        return "found"
    return "SURVIVES" if status == PASSED else f"not made: exit status {status}: {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutations whose file or name has these words")
    given = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if given.only in f"{mutation.file}: {mutation.name}"]
    began = time.monotonic()
    status, said = run(sorted({mutation.found_by for mutation in chosen}), RUN_SECONDS * len(chosen))
    if status != PASSED:
        raise SystemExit(f"without a mutation: {said}")
    ends = Counter[str]()
    for number, mutation in enumerate(chosen, 1):
        before = time.monotonic()
        end = told(mutation)
        ends[end.split(":")[0]] += 1
        seconds = time.monotonic() - before
        print(f"{number}/{len(chosen)} {mutation.file}: {mutation.name}: {end} ({seconds:.0f} s)", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"{len(chosen)} mutations in {minutes:.0f} min: " + ", ".join(f"{n} {end}" for end, n in ends.items()))
    raise SystemExit(ends["found"] != len(chosen))


if __name__ == "__main__":
    main()
