"""Reports the cost of the faults, by kind, as a table."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .faults import Fault
from .late import WORTH_TELLING

AIM = 3.0  # seconds: the longest pause that one fault should make, beyond its own duration


@dataclass(frozen=True)
class Round:
    """A round that ended well."""

    number: int
    faults: tuple[Fault, ...]
    hit: tuple[bool, ...]  # of each fault: whether there was such a process at that moment
    pause: float  # seconds: the longest time that a stream waited for its next token
    seconds: float  # until all was well again
    late: float  # seconds: the longest time that this program itself did not run

    @property
    def timed(self) -> bool:
        """Whether its pause is that of the faults, and not of this machine's other load."""
        return self.late <= WORTH_TELLING

    def __str__(self) -> str:
        late = "" if self.timed else f" (not counted: this program itself was late by {self.late:.1f} s)"
        return f"longest pause {self.pause:.1f} s, all well after {self.seconds:.1f} s{late}"


class Report:
    """Rounds, counted by the labels of their faults. A label's pauses are those of its rounds with no other fault."""

    def __init__(self, rounds: Iterable[Round] = ()) -> None:
        self.rounds: list[Round] = list(rounds)

    def table(self) -> str:
        """Markdown: a row for each kind of fault."""
        alone = self._alone()
        rows = [
            "| fault | times | alone | longest pause | beyond the fault's own time |",
            "| --- | --- | --- | --- | --- |",
        ]
        for label, times in sorted(self._counted(True).items()):
            found = alone.get(label, [])
            pause = f"{max(pause for pause, _ in found):.1f} s" if found else ""
            beyond = f"{max(_beyond(*one) for one in found):.1f} s" if found else ""
            rows.append(f"| {label} | {times} | {len(found)} | {pause} | {beyond} |")
        return "\n".join(rows)

    def longest(self) -> float | None:
        """Seconds: the longest pause of a fault that was alone, beyond its own duration. None: no fault was."""
        return max((_beyond(*one) for found in self._alone().values() for one in found), default=None)

    def _counted(self, hit: bool) -> Counter[str]:
        """Faults by label: those that hit something, or those that did not."""
        pairs = ((fault, done) for one in self.rounds for fault, done in zip(one.faults, one.hit, strict=True))
        return Counter(fault.label for fault, done in pairs if done is hit)

    def _alone(self) -> dict[str, list[tuple[float, Fault]]]:
        """The pauses of single faults, by label."""
        alone: dict[str, list[tuple[float, Fault]]] = {}
        for one in self.rounds:
            if len(one.faults) == 1 and all(one.hit) and one.timed:
                alone.setdefault(one.faults[0].label, []).append((one.pause, one.faults[0]))
        return alone

    def __str__(self) -> str:
        total, missed = self._counted(True).total(), self._counted(False).total()
        together = max((one.pause for one in self.rounds if len(one.faults) > 1 and one.timed), default=0.0)
        lines = [
            f"{counted(len(self.rounds), 'round')}, {counted(total, 'fault')}"
            + (f" ({missed} found nothing to hit)" if missed else "")
        ]
        lines += ["", self.table(), ""]
        longest = self.longest()
        measured = "not measured, because no fault was alone" if longest is None else f"{longest:.1f} s"
        lines.append(f"longest pause of one fault beyond its own time: {measured} (the aim is {AIM:g} s)")
        lines.append(f"longest pause of rounds with several faults: {together:.1f} s")
        if late := sum(not one.timed for one in self.rounds):
            late_by = f"this program itself was late by more than {WORTH_TELLING:g} s"
            lines.append(f"without a pause: {counted(late, 'round')}, as {late_by}")
        return "\n".join(lines)


def _beyond(pause: float, fault: Fault) -> float:
    return max(0.0, pause - fault.seconds)


def counted(count: int, of: str) -> str:
    """Returns "1 round" or "2 rounds"."""
    return f"{count} {of}" if count == 1 else f"{count} {of}s"
