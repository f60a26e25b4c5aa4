"""The pause before a process that has died is started again."""

FIRST, LONGEST = 0.2, 5.0  # seconds; each wait is twice the one before
# Seconds that a process must have worked to be started again at once, and for the waits to begin again. A start costs
# about a second of a core: a process that dies after so long each time takes a quarter of one.
WORKED = 3.0


class Backoff:
    """Waits that grow while a process dies again and again."""

    def __init__(self) -> None:
        self._next = FIRST

    def after(self, lived: float) -> float:
        """Seconds to wait after the death of a process that `lived` so long."""
        if lived > WORKED:
            self._next = FIRST
            return 0.0
        wait, self._next = self._next, min(LONGEST, 2 * self._next)
        return wait
