"""The rounds of a seed in a file, a line each: a run that was stopped goes on where it ended."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from orca_common.errors import FailedPrecondition, InvalidArgument

from .faults import Fault
from .report import Round


class Line(msgspec.Struct, frozen=True):
    """A line of the file."""

    seed: int
    round: Round


class Record:
    """The rounds that were run, in memory, and in a file where there is one."""

    def __init__(self, path: Path | None, seed: int) -> None:
        """path: its rounds are read, and new ones written to it. Raises InvalidArgument, FailedPrecondition."""
        self._path, self._seed = path, seed
        self.rounds: dict[int, Round] = {}
        written = path.read_bytes() if path is not None and path.exists() else b""
        whole = written.rfind(b"\n") + 1
        if path is not None and whole < len(written):  # killed while it wrote a line: that round is run again
            os.truncate(path, whole)
        lines = written[:whole].splitlines()
        for number, raw in enumerate(lines, 1):
            try:
                line = msgspec.json.decode(raw, type=Line)
            except msgspec.DecodeError as error:
                raise InvalidArgument("record", f"{path}, line {number}: {error}") from None
            if line.seed != seed:
                raise FailedPrecondition(f"record: {path} has rounds of seed {line.seed}; give another file")
            self.rounds[line.round.number] = line.round

    def has(self, number: int, faults: Sequence[Fault]) -> bool:
        """Whether the round was run. Raises FailedPrecondition when it had other faults: another stack's."""
        known = self.rounds.get(number)
        if known is not None and list(known.faults) != list(faults):
            raise FailedPrecondition(
                f"record: round {number} of {self._path} had other faults; its stack was another one. "
                "Give another file, or the options of that run"
            )
        return known is not None

    def add(self, ended: Round) -> None:
        self.rounds[ended.number] = ended
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(Line(self._seed, ended)) + b"\n")
