"""Keeps the latest lines of all engines' journals in memory, for `orca explain` and the live page.

A master adds each line as the journal has encoded it. All else is done when somebody reads, in the reader's thread.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import NamedTuple

SECTIONS = 8  # of an engine, at most
OVERHEAD = 190  # bytes that a line takes beside its own
LASTING = 256  # lines about failures, of an engine: they come seldom and are worth more
STEPS = 2048  # lines of an engine in one look, at most: 20,000 a second for ten looks


class Kept(NamedTuple):
    """A line of a journal."""

    number: int  # of this process, ascending
    at: float  # seconds of the wall's clock
    engine: str
    term: int
    line: bytes


number_of = attrgetter("number")


@dataclass(slots=True)
class Section:
    """A journal's lines from one heading on."""

    begun: int  # ns of the wall's clock
    term: int
    heading: bytes
    lines: list[Kept] = field(default_factory=list[Kept])
    size: int = 0


class EngineRecent:
    """The latest lines of one engine, over its terms, in sections that begin with a heading each; the oldest goes."""

    def __init__(self, engine: str, share: Callable[[], int], numbers: "count[int]") -> None:
        """share: the bytes that all sections together may have now."""
        self._engine, self._share, self._numbers = engine, share, numbers
        self._sections: deque[Section] = deque()
        self._lasting: deque[Kept] = deque(maxlen=LASTING)

    @property
    def full(self) -> bool:
        """Whether the last section is to be followed by another."""
        last = self._sections[-1]
        return last.size > self._room(last.heading)

    def begin(self, heading: bytes, term: int) -> None:
        """Begins a section. The oldest ones go until the others leave room for it; the one before always stays."""
        self._sections.append(Section(time.time_ns(), term, heading, size=len(heading)))
        size = sum(section.size for section in self._sections) - len(heading) + self._room(heading)
        while len(self._sections) > 2 and size > self._share():
            size -= self._sections.popleft().size

    def _room(self, heading: bytes) -> int:
        """Returns the bytes of a section: its part of the share, and at least as many of lines as of heading.

        The heading of an engine with thousands of requests takes megabytes and some 60 ms.
        """
        return max(self._share() // SECTIONS, 2 * len(heading))

    def add(self, line: bytes, lasting: bool) -> None:
        """Adds a line to the last section. lasting: it is of a failure, and is kept beyond its section."""
        section = self._sections[-1]
        kept = Kept(next(self._numbers), time.time(), self._engine, section.term, line)
        section.lines.append(kept)
        section.size += len(line) + OVERHEAD
        if lasting:
            self._lasting.append(kept)

    def lines(self, since: int) -> list[bytes]:
        """Returns the lines of all sections but those that ended before `since`, in ns of the wall's clock."""
        sections = tuple(self._sections)
        begun = sum(section.begun <= since for section in sections)
        told = sections[max(begun - 1, 0) :]
        return [line for section in told for line in (section.heading, *(kept.line for kept in section.lines))]

    def after(self, number: int, failures_alone: bool) -> list[Kept]:
        """Returns the lines above a number, without headings."""
        found = [kept for kept in tuple(self._lasting) if kept.number > number]
        if not failures_alone:
            steps: list[Kept] = []
            for section in reversed(tuple(self._sections)):
                lines = section.lines[bisect_right(section.lines, number, key=number_of) :]
                steps[:0] = lines
                if len(lines) < len(section.lines) or len(steps) >= STEPS:
                    break
            steps = steps[-STEPS:]
            found = [kept for kept in found if not steps or kept.number < steps[0].number] + steps
        return found


class Recent:
    """The latest lines of all engines that this process masters, or has mastered. One thread adds, any thread reads."""

    def __init__(self, size: int) -> None:
        """size: bytes that all engines may have together, but for a line of each section. An engine whose headings take
        more than a quarter of its share has two sections all the same, each twice as large as its heading."""
        self._size, self._numbers = size, count(1)
        self._engines: dict[str, EngineRecent] = {}

    def of(self, engine: str) -> EngineRecent:
        """Returns the memory of one engine, over all its terms here."""
        if engine not in self._engines:
            self._engines[engine] = EngineRecent(engine, lambda: self._size // len(self._engines), self._numbers)
        return self._engines[engine]

    def lines(self, since: int) -> dict[str, list[bytes]]:
        """Returns each engine's lines, with headings, but those of sections that ended before `since`."""
        return {engine: recent.lines(since) for engine, recent in self._engines.copy().items()}

    def after(self, number: int, failures_alone: bool) -> list[Kept]:
        """Returns the lines above a number, in their order: STEPS of an engine at most, and those of failures."""
        found = [kept for recent in self._engines.copy().values() for kept in recent.after(number, failures_alone)]
        return sorted(found, key=number_of)
