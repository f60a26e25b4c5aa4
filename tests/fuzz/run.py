"""Fuzzes the parsers at length: `python tests/fuzz/run.py --seconds 600 --count 1000000`, or `make fuzz`.

Each target runs in a process of its own, with bounds on memory and on the CPU time of an input. The process keeps the
present input in memory that the parent shares, so an input that kills it or never ends is found too. Inputs that fail
are written to --out, and the program ends with status 1. --input runs one such file again. At the end a table tells how
many inputs each parser had.
"""

import argparse
import asyncio
import hashlib
import mmap
import multiprocessing
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.mutations import LARGEST, mutated
from fuzz.targets import CORPUS, Target, corpus, targets

SECONDS = 5.0  # of CPU time for an input
HANG = 60.0  # seconds without a new input until a process is ended: it hangs outside of Python
MEMORY = 4 << 30  # bytes of address space beyond what the process begins with
SHM = Path("/dev/shm")
KEPT = 300  # inputs that others are made of
HEAD = struct.Struct("<QQ")  # inputs so far, length of the present one


class Present:
    """The input that a process has now, and how many it had, in memory that the parent sees."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, HEAD.size + LARGEST)

    def write(self, number: int, raw: bytes) -> None:
        self._memory[: HEAD.size + len(raw)] = HEAD.pack(number, len(raw)) + raw

    def read(self) -> tuple[int, bytes]:
        number, length = HEAD.unpack(self._memory[: HEAD.size])
        return number, self._memory[HEAD.size : HEAD.size + length]


class TooLong(BaseException):
    """An input took more CPU time than it may. No `except Exception` of a parser catches it."""


def bound_process() -> None:
    def late(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"more than {SECONDS} s of CPU time")

    signal.signal(signal.SIGVTALRM, late)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))


def trouble_of(target: Target, raw: bytes) -> str | None:
    """What an input did that it may not do; None: nothing."""
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        target(raw)
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return None


def fuzz(name: str, seed: int, seconds: float, count: int, present: Present, out: Path, folder: Path) -> None:
    """A process: runs inputs until the time or the count is over. Writes those that fail, and ends with 1 then."""
    bound_process()
    with asyncio.Runner() as runner, targets(folder, runner) as made:
        failures = _inputs(made[name], name, seed, seconds, count, present, out)
    sys.exit(1 if failures else 0)


def _inputs(target: Target, name: str, seed: int, seconds: float, count: int, present: Present, out: Path) -> int:
    """Runs inputs. Returns how many of them failed."""
    chance = random.Random(f"{name} {seed}")
    inputs, failures, number = corpus(name), 0, 0
    first, ends = len(inputs), time.monotonic() + seconds
    for raw in list(inputs):
        number += 1
        present.write(number, raw)
        if (trouble := trouble_of(target, raw)) is not None:
            report(out, name, raw, trouble)
            failures += 1
    while number < count and time.monotonic() < ends and failures < 5:
        raw = mutated(chance.choice(inputs), inputs, chance)
        number += 1
        present.write(number, raw)
        if (trouble := trouble_of(target, raw)) is not None:
            report(out, name, raw, trouble)
            failures += 1
        elif chance.random() < 0.02:  # a generation of inputs that are further from the corpus
            if len(inputs) >= KEPT:
                inputs[chance.randrange(first, KEPT)] = raw
            else:
                inputs.append(raw)
    return failures


def report(out: Path, name: str, raw: bytes, trouble: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}-{hashlib.sha1(raw).hexdigest()[:12]}"
    path.write_bytes(raw)
    print(f"{name}: {path}: {trouble.splitlines()[-1]}", flush=True)
    path.with_suffix(".txt").write_text(trouble)


@dataclass(frozen=True)
class Outcome:
    """What came of one target."""

    name: str
    inputs: int
    seconds: float
    cpu: float  # seconds of them on a core: the rest belonged to this machine's other load
    well: bool

    def __str__(self) -> str:
        rate, said = self.inputs / self.seconds, "nothing found" if self.well else "FAILED"
        return f"| {self.name} | {self.inputs:,} | {self.seconds:.0f} s | {self.cpu:.0f} s | {rate:,.0f} | {said} |"


HEADER = ["| parser | inputs | time | on a core | inputs a second | |", "| --- | ---: | ---: | ---: | ---: | --- |"]


def supervise(name: str, seed: int, seconds: float, count: int, out: Path, folder: Path) -> Outcome:
    """Runs one target."""
    present = Present()
    given = (name, seed, seconds, count, present, out, folder)
    process = multiprocessing.get_context("fork").Process(target=fuzz, args=given)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process.start()
    started = moved = time.monotonic()
    last, hung = 0, False
    while process.is_alive():
        process.join(1.0)
        number, _ = present.read()
        if number != last:
            last, moved = number, time.monotonic()
        elif time.monotonic() - moved > HANG:
            hung = True
            process.kill()
    number, raw = present.read()
    if hung or process.exitcode not in (0, 1):
        report(out, name, raw, "it hangs" if hung else f"the process ended with {process.exitcode}")
    well = process.exitcode == 0 and not hung
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return Outcome(name, number, time.monotonic() - started, cpu, well)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--target", action="append", help="one of them, may be repeated; all if not given")
    arguments.add_argument("--seconds", type=float, default=600.0, help="for each target, at most")
    arguments.add_argument("--count", type=int, default=1_000_000, help="inputs for each target at most")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--out", type=Path, default=Path("fuzz-failures"))
    arguments.add_argument("--input", type=Path, help="run this file instead, in this process, on the one --target")
    given = arguments.parse_args()
    names = given.target or sorted(path.name for path in CORPUS.iterdir())
    results = list[Outcome]()
    for name in names:  # in memory where there is some: every input is a file for many of them
        with tempfile.TemporaryDirectory(prefix="orca-fuzz-", dir=SHM if SHM.is_dir() else None) as folder:
            if given.input is not None:
                with asyncio.Runner() as runner, targets(Path(folder), runner) as made:
                    made[name](given.input.read_bytes())
                return
            results.append(supervise(name, given.seed, given.seconds, given.count, given.out, Path(folder)))
            print(f"{name}: {results[-1].inputs:,} inputs in {results[-1].seconds:.0f} s", flush=True)
    print("\n".join([f"\nseed {given.seed}", "", *HEADER, *map(str, results)]))
    sys.exit(0 if all(result.well for result in results) else 1)


if __name__ == "__main__":
    main()
