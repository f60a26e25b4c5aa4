"""A table in Markdown of the kills that the kill matrix has recorded.

    python tests/e2e/kill_table.py FILE [FILE ...]

Each line of a file is a kill (`Kill`, as JSON), written by `kill_matrix.py --record FILE`.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from orca_chaos.late import WORTH_TELLING

ALIKE = ("endpoint", "scheduler", "redis")  # roles whose processes do the same, so that one row tells of all


class Moment(StrEnum):
    """Of a request's life, at which a process is killed."""

    QUEUED = "queued"
    INITIATION = "initiation"
    INCREMENT = "increment"
    LAST_TOKEN = "last token"
    AFTER_FINISH = "after finish"


class Kill(NamedTuple):
    """One process killed at one moment, after which no stream was harmed. Times in seconds."""

    seed: int
    round: int
    tp: int
    pp: int
    role: str
    name: str
    moment: Moment
    pause: float  # the longest time that the watched request waited
    late: float  # the longest time for which the program itself did not run meanwhile
    took: float  # until the next could be

    @property
    def row(self) -> str:
        """Of the table."""
        return self.role if self.role in ALIKE else f"{self.name} of tp {self.tp} x pp {self.pp}"


def read(paths: Iterable[Path]) -> list[Kill]:
    """All kills of some files."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [Kill(**line | {"moment": Moment(line["moment"])}) for line in lines]


def table(kills: Sequence[Kill]) -> str:
    """Markdown: a row for each process, a column for each moment. Cells: kills, median and longest pause."""
    cells: defaultdict[tuple[str, Moment], list[Kill]] = defaultdict(list)
    for kill in kills:
        cells[kill.row, kill.moment].append(kill)
    lines = ["| killed | " + " | ".join(Moment) + " |", "| --- |" + " --- |" * len(Moment)]
    for row in sorted({kill.row for kill in kills}):
        lines.append(f"| {row} | " + " | ".join(_cell(cells[row, moment]) for moment in Moment) + " |")
    late = sum(kill.late > WORTH_TELLING for kill in kills)
    lines += ["", f"{len(kills)} kills, no stream harmed. In {late} of them the program itself was late by more than"]
    lines.append(
        f"{WORTH_TELLING} s: the other processes of the machine had stopped it too. Their pauses are not in the table."
    )
    return "\n".join(lines)


def _cell(kills: Sequence[Kill]) -> str:
    pauses = [kill.pause for kill in kills if kill.late <= WORTH_TELLING]
    if not pauses:
        return f"{len(kills)} x"
    return f"{len(kills)} x, {statistics.median(pauses):.1f} s ({max(pauses):.1f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    print(table(read(parser.parse_args().files)))
