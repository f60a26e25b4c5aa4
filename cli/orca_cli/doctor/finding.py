"""The findings of the checks, and how they are shown."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum


class Level(StrEnum):
    """A finding's weight. Only a fault makes the command fail."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"
    UNCHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    level: Level
    found: str
    advice: str = ""  # what to do; empty when there is nothing to do


def ok(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def warning(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Level.WARNING, found, advice)


def fault(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Level.FAULT, found, advice)


def unchecked(check: str, why: str, advice: str = "") -> Finding:
    return Finding(check, Level.UNCHECKED, why, advice)


def listing(names: Sequence[str], most: int = 4) -> str:
    """Names in a sentence: `a, b, c, d and 3 more`."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 pod`, `2 pods`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def report(findings: Sequence[Finding], width: int) -> str:
    """The findings as text of at most `width` columns, and a last line that counts them."""
    name = max((len(finding.check) for finding in findings), default=0)
    margin = " " * (len(Level.UNCHECKED) + name + 4)
    lines = []
    for finding in findings:
        said = f"{finding.found}; {finding.advice}" if finding.advice else finding.found
        start = f"{finding.level:<{len(Level.UNCHECKED)}}  {finding.check:<{name}}  "
        lines += textwrap.wrap(said, width, initial_indent=start, subsequent_indent=margin, break_on_hyphens=False) or [
            start.rstrip()
        ]
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    lines.append(", ".join(f"{count} {level}" for level, count in counts.items() if count))
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as a JSON list of objects with check, level, found and advice."""
    return json.dumps([asdict(finding) for finding in findings], indent=2)
