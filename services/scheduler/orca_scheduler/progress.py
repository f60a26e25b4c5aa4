"""How long iterations take, so that a stuck device is told from a long initiation (DESIGN section 6, Verdicts)."""

from collections import deque

from . import timers


class Progress:
    """Of the iterations of one life of an engine. All times are the loop's."""

    def __init__(self) -> None:
        self._sent: deque[tuple[int, float]] = deque()  # each iteration in flight and when it was sent, oldest first
        self._returned = 0.0  # when the last one came back
        self._longest = 0.0

    def sent(self, iteration: int, now: float) -> None:
        self._sent.append((iteration, now))

    def returned(self, now: float) -> None:
        self._longest = max(self._longest, now - self._began)
        self._sent.popleft()
        self._returned = now

    @property
    def oldest(self) -> int | None:
        """The oldest iteration in flight."""
        return self._sent[0][0] if self._sent else None

    @property
    def _began(self) -> float:
        """When the oldest iteration in flight could begin."""
        return max(self._sent[0][1], self._returned)

    def stuck(self, now: float, since: float) -> float | None:
        """Seconds without progress, when they are too many; only those after `since` count."""
        if not self._sent:
            return None
        standing = now - max(self._began, since)
        return standing if standing > max(timers.STUCK, timers.STUCK_TIMES * self._longest) else None
