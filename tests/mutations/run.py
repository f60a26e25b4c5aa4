"""Applies each mutation of table.py to a copy of the services, and says which of them the tests find.

    python tests/mutations/run.py [--only WORDS] [--seeds 12]

The simulator runs first, then the tests of the mutated file. A mutation survives when all of them pass. Each survivor
takes a minute, so this is no part of `make test`. Tests that fail on a busy machine count as finds: run it on a quiet
one.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from mutations.table import MUTATIONS, TESTS, Mutation  # noqa: E402

ROOT = Path(__file__).parents[2]
PACKAGES = ("pool", "scheduler", "endpoint")  # of services/, those that mutations change
SIMULATOR = "the simulator"
TEST_SECONDS = 90  # of one test: a mutation may let it wait for ever
RUN_SECONDS = 900  # of all tests of a file


class Moved(Exception):
    """The code has moved on, and the table must follow."""


def mutated(mutation: Mutation, folder: Path) -> None:
    """Copies the services to a folder, and applies the mutation there. Raises Moved when its text is not there once."""
    for package in PACKAGES:
        shutil.copytree(ROOT / "services" / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        raise Moved(f"{mutation.file} has {text.count(mutation.old)} times {mutation.old!r}")
    file.write_text(text.replace(mutation.old, mutation.new))


def found_by(mutation: Mutation, seeds: int, tests: Sequence[str]) -> str | None:
    """What fails with the mutation; None: it survives. seeds: of the simulator, 0: none."""
    with tempfile.TemporaryDirectory(prefix="orca-mutation-") as made:
        folder = Path(made)
        mutated(mutation, folder)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder / package) for package in PACKAGES)}

        def fails(command: Sequence[str], says: str) -> str | None:
            """The line of the command's output that begins so, if it fails."""
            out = folder / "out"
            with out.open("w") as file:
                child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
                try:
                    code = child.wait(RUN_SECONDS)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
                    return f"no end within {RUN_SECONDS} s"
            lines = [line for line in out.read_text().splitlines() if line.startswith(says)]
            return (lines[0] if lines else f"exit status {code}") if code else None

        simulator = [sys.executable, "tests/simulator/simulate.py", "--seeds", str(seeds), "--stop"]
        if seeds and (why := fails(simulator, "seed ")) is not None:
            return f"{SIMULATOR}: {why}"
        if not tests:
            return None
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "--tb=no"]
        return fails([*pytest, f"--timeout={TEST_SECONDS}", *tests], "FAILED")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutations whose file or name has these words")
    parser.add_argument("--seeds", type=int, default=12, help="of the simulator; 0: only the tests")
    given = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if given.only in f"{mutation.file}: {mutation.name}"]
    survivors = moved = 0
    for number, mutation in enumerate(chosen, 1):
        began = time.monotonic()
        try:
            why = found_by(mutation, given.seeds, TESTS[mutation.file])
        except Moved as error:
            moved += 1
            told = f"not made: {error}"
        else:
            survivors += why is None
            told = why or "SURVIVES"
        seconds = time.monotonic() - began
        print(f"{number}/{len(chosen)} {mutation.file}: {mutation.name}: {told} ({seconds:.0f} s)", flush=True)
    print(f"{len(chosen)} mutations, {survivors} survive, {moved} were not made")


if __name__ == "__main__":
    main()
