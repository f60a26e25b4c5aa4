"""Predicts an iteration's time by its positions, from the latest ones: the budget of `positions=auto:MS`."""

from collections.abc import Sequence

from orca.v1 import worker_pb2 as pb

MEMORY = 256  # iterations that the means go back
LEAST = 32  # iterations before the first forecast, and between two
STEP = 1 / 8  # a budget that differs by less is not worth a change
MOST = 8192  # positions
FLYING = 256  # iterations whose times may be outstanding
OUTLIER = 8  # times the limit: a longer iteration counts as one of that length
SECOND = 1e9  # nanoseconds


class Forecast:
    """A line of time over positions, by least squares with weights that fall with age.

    Its time is what the slowest rank of each stage computed, added up: the gap that the iteration makes in a stream.
    The cost of attention by the lengths of contexts is in the line's means.
    """

    def __init__(self, seconds: float, positions: int) -> None:
        """seconds: that an iteration may take. positions: the budget at first."""
        self._seconds, self.positions = seconds, positions
        self._flying: dict[int, int] = {}  # iteration -> positions
        self._n = self._x = self._y = self._xx = self._xy = 0.0  # weights, and weighted sums
        self._since = 0

    def scheduled(self, iteration: int, positions: int) -> None:
        if len(self._flying) >= FLYING:
            del self._flying[min(self._flying)]  # some rank did not tell its times
        self._flying[iteration] = positions

    def lost(self) -> None:
        """Forgets the iterations in flight, which will not return."""
        self._flying.clear()

    def timed(self, iteration: int, times: Sequence[pb.StageTimes]) -> bool:
        """Takes an iteration's times. Returns whether `positions` has changed."""
        positions = self._flying.pop(iteration, None)
        if positions is None:
            return False
        stages = dict[int, float]()
        for rank in times:
            stages[rank.stage] = max(stages.get(rank.stage, 0.0), (rank.computed - rank.started) / SECOND)
        self.observe(positions, min(sum(stages.values()), OUTLIER * self._seconds))
        self._since += 1
        if self._since < LEAST:
            return False
        self._since, before = 0, self.positions
        wanted = max(min(self.most(), 2 * before), 1)  # a line is not believed far beyond what was seen
        if abs(wanted - before) > STEP * before:
            self.positions = wanted
        return self.positions != before

    def observe(self, positions: int, seconds: float) -> None:
        kept = 1 - 1 / MEMORY
        self._n, self._x, self._y = self._n * kept + 1, self._x * kept + positions, self._y * kept + seconds
        self._xx, self._xy = self._xx * kept + positions**2, self._xy * kept + positions * seconds

    def most(self) -> int:
        """Returns the most positions of an iteration that ends in time.

        Where iterations were too much alike for a line: as many as their mean time allows, or more where it leaves time
        and they used what they had.
        """
        x, y = self._x / self._n, self._y / self._n
        spread, together = self._xx / self._n - x * x, self._xy / self._n - x * y
        if spread > (x / 8) ** 2 and together > 0:
            slope = together / spread  # seconds a position
            return int(min(max((self._seconds - (y - slope * x)) / slope, 1), MOST))
        if y > self._seconds:
            return int(x * self._seconds / y)
        return min(2 * self.positions, MOST) if 2 * x > self.positions else self.positions
