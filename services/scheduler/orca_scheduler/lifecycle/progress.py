"""How long iterations take: this tells a stuck device from a long initiation (docs/design.md, "Verdicts")."""

from collections import deque

from .. import timers


class Progress:
    """Watches the iterations of one life of an engine. All times are on the event loop's clock."""

    def __init__(self) -> None:
        self._sent: deque[tuple[int, float]] = deque()  # (iteration in flight, when it was sent), oldest first
        self.latest = 0  # the iteration that was sent last; 0: none
        self._returned = 0.0  # when the last one came back
        self._longest = 0.0

    def sent(self, iteration: int, now: float) -> None:
        self.latest = iteration
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
        """Seconds without progress since `since`, if they are too many for a long iteration; else None."""
        if not self._sent:
            return None
        standing = now - max(self._began, since)
        return standing if standing > max(timers.STUCK, timers.STUCK_TIMES * self._longest) else None
