"""What the faults cost, by kind, as a table."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .faults import Fault
from .load import Disturbance

AIM = 3.0  # seconds: the longest pause that one fault should make, beyond its own duration


@dataclass
class Report:
    """Faults by label, and the longest pause of the rounds in which a label's fault was alone."""

    rounds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)  # there was no such process at that moment
    alone: dict[str, list[tuple[float, Fault]]] = field(default_factory=dict)
    together: float = 0.0  # the longest pause of the rounds with several faults

    def add(self, faults: Sequence[Fault], done: Sequence[bool], seen: Disturbance) -> None:
        """A round has ended well."""
        self.rounds += 1
        for fault, hit in zip(faults, done, strict=True):
            (self.faults if hit else self.missed)[fault.label] += 1
        if len(faults) > 1:
            self.together = max(self.together, seen.pause)
        elif all(done):
            self.alone.setdefault(faults[0].label, []).append((seen.pause, faults[0]))

    def table(self) -> str:
        """Markdown: a row for each kind of fault."""
        rows = [
            "| fault | times | alone | longest pause | beyond the fault's own time |",
            "| --- | --- | --- | --- | --- |",
        ]
        for label, times in sorted(self.faults.items()):
            alone = self.alone.get(label, [])
            pause = f"{max(pause for pause, _ in alone):.1f} s" if alone else ""
            beyond = f"{max(max(0.0, pause - fault.seconds) for pause, fault in alone):.1f} s" if alone else ""
            rows.append(f"| {label} | {times} | {len(alone)} | {pause} | {beyond} |")
        return "\n".join(rows)

    def longest(self) -> float:
        """Seconds: the longest pause of a fault that was alone, beyond its own duration."""
        return max(
            (max(0.0, pause - fault.seconds) for alone in self.alone.values() for pause, fault in alone), default=0.0
        )

    def __str__(self) -> str:
        total, missed = self.faults.total(), self.missed.total()
        lines = [f"{self.rounds} rounds, {total} faults" + (f" ({missed} found nothing to hit)" if missed else "")]
        lines += ["", self.table(), ""]
        lines.append(f"longest pause of one fault beyond its own time: {self.longest():.1f} s (the aim is {AIM:g} s)")
        lines.append(f"longest pause of rounds with several faults: {self.together:.1f} s")
        return "\n".join(lines)
