"""How long a process that has died waits before it is started again."""

FIRST, LONGEST = 0.2, 5.0  # seconds; each wait is twice the one before
QUIET = 10.0  # seconds that a process must have lived for the waits to begin again


class Backoff:
    """Waits that grow while a process dies again and again."""

    def __init__(self) -> None:
        self._next = FIRST

    def after(self, lived: float) -> float:
        """Seconds to wait after the death of a process that `lived` so long."""
        wait = FIRST if lived > QUIET else self._next
        self._next = min(LONGEST, 2 * wait)
        return wait
