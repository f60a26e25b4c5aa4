"""Bounds of an iteration's time, which separate a stuck device from a long initiation (docs/engines.md, "Verdicts")."""

from collections import deque
from collections.abc import Collection
from operator import add, mul
from typing import NamedTuple, Self

from .. import timers

PAIRS = 512  # attended positions that cost no more than the matrices of one position do, in a layer wider than 85


class Work(NamedTuple):
    """The size of an iteration."""

    positions: int  # at least one
    size: int  # positions x PAIRS, and the positions that they attend to

    @classmethod
    def of(cls, starts: Collection[int], counts: Collection[int]) -> Self:
        """starts, counts: of each member."""
        positions = sum(counts)
        attended = sum(map(mul, counts, map(add, starts, counts)))  # in C: a third of what a loop takes
        return cls(max(positions, 1), max(PAIRS * positions + attended, 1))


class Durations:
    """The times of iterations with these weights, from which follows how long a larger one may take.

    An iteration takes a + b x positions + c x attended positions, with unknown a, b and c that are not negative, and b
    at least PAIRS x c. So it takes at most as long as any other one times the larger of the ratios of their `Work`, or
    once where it has less of both. The layers are in a, b and c.
    """

    def __init__(self) -> None:
        self._weights = ""
        self._seen: dict[int, tuple[float, Work]] = {}  # by magnitude of the size: the longest, and the least work

    def keep(self, weights: str) -> None:
        """Forgets what was seen with other weights."""
        if weights != self._weights:
            self._weights, self._seen = weights, {}

    def took(self, work: Work, seconds: float) -> None:
        magnitude = work.size.bit_length()
        longest, least = self._seen.get(magnitude, (0.0, work))
        self._seen[magnitude] = max(longest, seconds), Work(*map(min, least, work))

    def at_most(self, work: Work) -> float:
        """Returns seconds."""
        if not self._seen:
            return timers.STUCK_POSITION * work.size / PAIRS
        return min(
            longest * max(1.0, work.positions / least.positions, work.size / least.size)
            for longest, least in self._seen.values()
        )


class Progress:
    """Watches the iterations of one life of an engine. All times are on the event loop's clock."""

    def __init__(self, durations: Durations, stages: int) -> None:
        """durations: of the lives before, to which this one adds."""
        self._durations, self._stages = durations, stages
        # In flight, oldest first: (number, when it was sent, ..). Without work one has no members, and takes no time.
        self._sent: deque[tuple[int, float, Work | None]] = deque()
        self.latest = 0  # the iteration that was sent last; 0: none
        self._returned = 0.0  # when the last one came back

    def sent(self, iteration: int, work: Work | None, now: float) -> None:
        self.latest = iteration
        self._sent.append((iteration, now, work))

    def returned(self, now: float) -> None:
        began, (_, _, work) = self._began, self._sent.popleft()
        if work is not None:
            self._durations.took(work, now - began)
        self._returned = now

    @property
    def oldest(self) -> int | None:
        """The oldest iteration in flight."""
        return self._sent[0][0] if self._sent else None

    @property
    def _began(self) -> float:
        """When the oldest iteration in flight could begin."""
        return max(self._sent[0][1], self._returned)

    @property
    def _bound(self) -> float:
        """Seconds for the oldest iteration in flight. A measured duration may be that of the last stage alone."""
        work = self._sent[0][2]
        expected = 0.0 if work is None else self._stages * self._durations.at_most(work)
        return min(max(timers.STUCK, timers.STUCK_TIMES * expected), timers.STUCK_MOST)

    def stuck(self, now: float, since: float) -> float | None:
        """Seconds without progress since `since`, if they are too many for a long iteration; else None."""
        if not self._sent:
            return None
        standing = now - max(self._began, since)
        return standing if standing > self._bound else None
