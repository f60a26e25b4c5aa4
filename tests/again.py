"""Runs the failed tests of the last run once more, one after the other: `make again`.

CI does it, because the whole suite keeps both cores busy, and its verdict should be on the code. A test that passes
only here is a race, of the test or of Orca: its name stands in CI's output, and whoever finds it there mends it.
More than three failures are no chance, and fail at once.
"""

import subprocess
import sys

MOST = 3  # tests
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "--last-failed",
    "--last-failed-no-failures=none",
    "-m",
    "not kubernetes",
]


def main() -> int:
    collected = subprocess.run([*PYTEST, "--collect-only", "--quiet"], check=False, stdout=subprocess.PIPE, text=True)
    failed = [line for line in collected.stdout.splitlines() if "::" in line]
    if not 0 < len(failed) <= MOST:
        print(f"not run again: {len(failed)} tests failed, and only one to {MOST} are run again")
        return 1
    alone = subprocess.run(PYTEST, check=False).returncode
    if alone == 0:
        print(f"FLAKY, failed once and passed alone, to be mended: {' '.join(failed)}")
    return alone


if __name__ == "__main__":
    sys.exit(main())
