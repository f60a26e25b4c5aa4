"""Our engine and its peers on the same cases, in turn, in one sitting: a table of medians and ratios.

A peer is any command that prints the lines of `orca bench engine`: one JSON object a case, with `engine`, `case` and
`seconds`. In each round every command runs once, so that whatever else the machine does meets all of them.
"""

import json
import shlex
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orca_common.errors import FailedPrecondition
from orca_kernels.cpu.cores import cores
from orca_lab.roofline import Accelerator
from orca_worker.rank.app import open_device

from .ceilings import at_best, of_device
from .engine import EngineOptions, chosen_cases
from .floors import case_floor
from .machine import isa, processor

Line = Mapping[str, Any]


def lines_of(command: Sequence[str] | str) -> Iterator[Line]:
    """The JSON lines that a command prints, as it prints them. A string is run by the shell.

    Raises FailedPrecondition when the command fails.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, shell=isinstance(command, str)) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        shown = command if isinstance(command, str) else shlex.join(command)
        raise FailedPrecondition(f"`{shown}` ended with {process.returncode}")


def rounds(commands: Sequence[Sequence[str] | str], number: int, about_to: Callable[[str], None]) -> Iterator[Line]:
    """The lines of all commands, `number` times in turn, with the round. `about_to`: called before each command."""
    for one in range(1, number + 1):
        for command in commands:
            shown = command if isinstance(command, str) else shlex.join(command)
            about_to(f"round {one} of {number}: {shown}")
            for line in lines_of(command):
                if "case" in line and "seconds" in line:
                    yield {**line, "round": one}


def medians(lines: Sequence[Line]) -> dict[str, dict[str, float]]:
    """case -> engine -> the median of its seconds. Both in the order in which they first came."""
    times: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        times.setdefault(line["case"], {}).setdefault(line["engine"], []).append(line["seconds"])
    return {case: {name: statistics.median(values) for name, values in each.items()} for case, each in times.items()}


def table(lines: Sequence[Line], floors: Mapping[str, float | None], engine: str = "orca") -> str:
    """A table in Markdown: seconds of each engine, how many times ours the others take, and ours over the floor."""
    found = medians(lines)
    names = list(dict.fromkeys(line["engine"] for line in lines))
    peers = [name for name in names if name != engine]
    head = ["case", *(f"{name}, s" for name in names), *(f"{peer} / {engine}" for peer in peers)]
    rows = [[*head, "floor, s", f"{engine} / floor"], ["---"] * (len(head) + 2)]
    for case, each in found.items():
        own, floor = each.get(engine), floors.get(case)
        row = [case, *(seconds(each.get(name)) for name in names)]
        row += [ratio(each.get(peer), own) for peer in peers]
        rows.append([*row, seconds(floor), ratio(own, floor)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}" if above and below else "-"


class Sitting:
    """Rounds of one sitting, and what a reader needs to judge them. The floors' ceilings are the better of two
    measurements, before the first round and after the last one."""

    def __init__(self, options: EngineOptions, cases: Path | None, names: Sequence[str]) -> None:
        """The cases are chosen as by `chosen_cases`. Raises FailedPrecondition."""
        self.options, self.lines = options, list[Line]()
        self.checkpoint, self.cases = chosen_cases(options, cases, names)
        self.threads = options.compute.threads

    def rounds(
        self, commands: Sequence[Sequence[str] | str], number: int, about_to: Callable[[str], None]
    ) -> Iterator[Line]:
        """Runs the commands as `rounds` does; lines of other cases are left out."""
        about_to("measuring this machine's ceilings")
        before = self._ceilings()
        for line in rounds(commands, number, about_to):
            if line["case"] in self.cases:
                self.lines.append(line)
                yield line
        about_to("measuring this machine's ceilings")
        after = self._ceilings()
        self.ceilings = better(before, after) if before is not None and after is not None else None

    def _ceilings(self) -> Accelerator | None:
        return at_best(of_device(open_device(self.options.device, 0), self.threads))

    def report(self, command: str) -> str:
        """The table in Markdown, below the command and the circumstances."""
        options, on = self.options, self.ceilings
        floors = {
            name: case_floor(self.checkpoint, options.dtype, case, options.max_batch_size, on)
            for name, case in self.cases.items()
        }
        machine = f"{processor()}, {cores()} cores, instruction set {isa()}"
        ours = f"{self.checkpoint.name}, orca in {options.dtype} with {self.threads} thread{'s' * (self.threads > 1)}"
        number = max((line["round"] for line in self.lines), default=0)
        about = f"{machine}; {ours}. Medians of {number} rounds in one sitting."
        if on is not None:
            rate = on.peak[options.dtype] / 1e12
            about += f" The floor: {on.bandwidth / 1e9:.1f} GB/s read, {rate:.2f} TFLOP/s in {options.dtype}."
        return f"`{command}`\n\n{about}\n\n{table(self.lines, floors)}"


def better(one: Accelerator, other: Accelerator) -> Accelerator:
    """The higher ceilings of two measurements of a machine."""
    peak = {dtype: max(rate, other.peak[dtype]) for dtype, rate in one.peak.items()}
    return Accelerator(one.name, max(one.bandwidth, other.bandwidth), peak)
