"""How long `orca serve` takes from its first instruction to the line that says that it serves, and what it takes then.

    python -m orca_bench.start [--rounds 7] [--rest 25] [--against CHECKOUT] [SETTING OF orca serve ..]

Each round starts a stack, waits for that line, and ends the stack in order. With --against, rounds alternate with
those of another checkout, which has a .venv of its own. The first start of each is not counted: it brings what the
others read into the page cache. CPU seconds are those of all processes of the stack at that moment. Memory is that of
the pods (supervisors, fork servers, ranks): a page that n processes share counts as 1/n in each (PSS).

With --rest, each stack rests for that long, from 5 s after it served on: the CPU time of all its processes meanwhile,
and their memory. A file that other programs map, too, counts for less in it: rest one stack of a checkout at a time.
"""

import argparse
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from .stack import threads

HERE = Path(__file__).parents[2]
SERVES = "Orca serves"  # how the line begins
SETTLES = 5.0  # seconds from then on until a stack rests


class Rest(NamedTuple):
    """The cost of a stack that has nothing to do."""

    cores: float
    memory: float  # MB of all processes


class Start(NamedTuple):
    """What a start took, when the stack served."""

    seconds: float
    cpu: float  # seconds
    memory: float  # MB of the pods' processes
    processes: int  # of the pods
    rest: Rest | None  # None: not asked for


def memory_of(processes: list[psutil.Process]) -> float:
    """MB, with their shares of what they share."""
    return sum(process.memory_full_info().pss for process in processes) / 1e6


def rest(processes: list[psutil.Process], seconds: float) -> Rest:
    """Looks at the processes of a stack that has just begun to serve."""
    time.sleep(SETTLES)
    began, before = time.monotonic(), seconds_run(processes)
    time.sleep(seconds)
    cores = (seconds_run(processes) - before) / (time.monotonic() - began)
    return Rest(cores, memory_of(processes))


def seconds_run(processes: list[psutil.Process]) -> float:
    """CPU seconds of all their threads that live."""
    return sum(seconds for process in processes for _, seconds in threads(process.pid))


def start(checkout: Path, settings: list[str], resting: float = 0.0) -> Start:
    """Starts and ends a stack, after `resting` seconds of rest.

    Raises RuntimeError with what it printed when it does not serve.
    """
    with tempfile.TemporaryDirectory(prefix="orca-start-") as folder:
        command = [str(checkout / ".venv/bin/orca"), "serve", "--run-dir", folder, "--port", "0", "--http-port", "0"]
        began, printed = time.monotonic(), ""
        with subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, text=True) as stack:
            assert stack.stdout is not None
            try:
                for line in stack.stdout:
                    printed += line
                    if line.startswith(SERVES):
                        taken = time.monotonic() - began
                        top = psutil.Process(stack.pid)
                        below = top.children(recursive=True)
                        times = [process.cpu_times() for process in (top, *below)]
                        pods = [process for process in below if process.cmdline()[-1].startswith("orca_worker")]
                        cpu = sum(spent.user + spent.system for spent in times)
                        found = memory_of(pods), len(pods)
                        return Start(taken, cpu, *found, rest([top, *below], resting) if resting else None)
            finally:
                stack.send_signal(signal.SIGTERM)
                stack.communicate()
    raise RuntimeError(printed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rest", type=float, default=0.0, help="seconds for which each stack rests")
    parser.add_argument("--against", type=Path, help="another checkout")
    given, settings = parser.parse_known_args()
    checkouts = [HERE, *([given.against] if given.against else [])]
    found: dict[Path, list[Start]] = {checkout: [] for checkout in checkouts}
    for _ in range(given.rounds + 1):
        for checkout in checkouts:
            found[checkout].append(start(checkout, settings, given.rest))
    for checkout, starts in found.items():
        seconds, cpu, memory, processes, rests = zip(*starts[1:], strict=True)
        print(
            f"{checkout}: ready after {median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f} in "
            f"{given.rounds} starts), {median(cpu):.2f} s of CPU, {os.cpu_count()} cores; "
            f"{median(processes)} processes of pods hold {median(memory):.0f} MB"
        )
        if given.rest:
            cores, memory = zip(*rests, strict=True)
            print(f"    at rest {100 * median(cores):.2f} % of a core, all processes hold {median(memory):.0f} MB")


if __name__ == "__main__":
    main()
