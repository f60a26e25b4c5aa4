"""Which of several endpoints the next call goes to."""

from collections.abc import Sequence

SUSPECT = 5.0  # seconds for which an endpoint that failed is avoided while another one is left


class Addresses:
    """Goes round the addresses, past those that failed a moment ago.

    Any thread may use it without a lock: the worst that a race costs is one more try.
    """

    def __init__(self, targets: Sequence[str], start: int) -> None:
        """start: the position of the first address to pick; a random one spreads many clients over the list."""
        if not targets:
            raise ValueError("at least one address is needed")
        self.targets = tuple(targets)
        self._next = start
        self._suspect_until = [0.0] * len(self.targets)

    def pick(self, now: float) -> str:
        """The next address. When all failed a moment ago: the one whose failure is the oldest."""
        count = len(self.targets)
        order = [(self._next + step) % count for step in range(count)]
        chosen = next((n for n in order if self._suspect_until[n] <= now), None)
        if chosen is None:
            chosen = min(order, key=self._suspect_until.__getitem__)
        self._next = (chosen + 1) % count
        return self.targets[chosen]

    def failed(self, target: str, now: float) -> None:
        """Avoids an address for a while."""
        self._suspect_until[self.targets.index(target)] = now + SUSPECT
