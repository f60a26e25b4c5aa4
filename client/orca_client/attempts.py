"""Attempt numbers: the newest call of a request wins at the server, so each call's number is above all before it."""

import threading
import time
from collections.abc import Callable


class Attempts:
    """The clock in microseconds, strictly growing, from any thread."""

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns, self._lock, self._last = clock_ns, threading.Lock(), 0

    def __call__(self) -> int:
        with self._lock:
            self._last = max(self._last + 1, self._clock_ns() // 1000)
            return self._last


# One for the process, as its clock is: two clients here may call for one request in the same microsecond.
next_attempt = Attempts()
