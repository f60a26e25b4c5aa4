"""Attempt numbers. The server prefers the call with the highest attempt, so each new call gets a higher one."""

import threading
import time
from collections.abc import Callable


class Attempts:
    """Numbers that grow from call to call: the time in microseconds, made strictly monotonic. Safe for threads."""

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns, self._lock, self._last = clock_ns, threading.Lock(), 0

    def __call__(self) -> int:
        with self._lock:
            self._last = max(self._last + 1, self._clock_ns() // 1000)
            return self._last


# One for the whole process: two clients in it may call for the same request in the same microsecond.
next_attempt = Attempts()
