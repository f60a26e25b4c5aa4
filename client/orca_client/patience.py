"""Decides when to try again after a failure, and when to give up. Pure: `now` is in seconds of any monotonic clock."""

import random

from .errors import DeadlineExceeded, OrcaError, Unavailable, Unreachable

# Seconds to wait before a try. The wait doubles from try to try; its upper half is random.
# An endpoint that dies is back in less than a second, so long waits were most of a stream's pause; a server that is too
# busy names its own delay.
FIRST_WAIT, LONGEST_WAIT = 0.05, 0.4
# Seconds until a client that fails fast gives up where no address can be reached. One may be restarting, which takes an
# endpoint 1 to 2.
SURE = 3.0


class Patience:
    """Exponential backoff with jitter, and its two limits: one on outages, one on everything."""

    def __init__(
        self,
        bound: float,
        now: float,
        timeout: float | None,
        rng: random.Random,
        *,
        connect: float | None = None,
        fail_fast: bool = False,
    ) -> None:
        """bound: seconds without a working call since the last progress. timeout: seconds from now for everything.

        connect: the bound until something has answered at all; None: something has. fail_fast: SURE is that bound while
        no address can be reached and the cause is sure, as for a person who mistyped one. Time in which a call works
        but has nothing to tell yet (a long queue) does not count towards the bounds.
        """
        self._bound, self._timeout, self._connect, self._rng = bound, timeout, connect, rng
        self._deadline = None if timeout is None else now + timeout
        self._fail_fast, self._failures = fail_fast, 0
        self._spent = 0.0  # seconds without a working call since the last progress, before the present outage
        self._down_since: float | None = now
        self._last: OrcaError | None = None

    def remaining(self, now: float) -> float | None:
        """Seconds to the deadline. Raises DeadlineExceeded when it has passed."""
        if self._deadline is None:
            return None
        if now >= self._deadline:
            raise self.expired()
        return self._deadline - now

    def expired(self) -> DeadlineExceeded:
        """The error of the caller's own timeout, which gRPC would call "Deadline Exceeded"."""
        why = f"; the last try failed: {self._last}" if self._last else ""
        return DeadlineExceeded(f"the timeout of {self._timeout:g} s passed{why}")

    def working(self, now: float) -> None:
        """Notes that a call was answered: the outage, if there was one, is over."""
        self._connect = None
        if self._down_since is not None:
            self._spent += now - self._down_since
            self._down_since = None

    def progress(self) -> None:
        """Notes that something new came: counting starts again."""
        self._connect = None
        if self._spent or self._failures or self._down_since is not None:
            self._failures, self._spent, self._down_since, self._last = 0, 0.0, None, None

    def failed(self, error: OrcaError, now: float) -> float:
        """Seconds to wait before the next try. Raises the error when the bound would be reached first."""
        self._last = error
        if self._down_since is None:
            self._down_since = now
        if error.answered:
            self._connect = None
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2**self._failures) * self._rng.uniform(0.5, 1)
        self._failures = min(self._failures + 1, 30)
        without = self._spent + now - self._down_since + wait
        if self._connect is not None:
            if self._fail_fast and isinstance(error, Unreachable) and error.sure and without >= SURE:
                raise error
            if without >= self._connect:
                if isinstance(error, Unreachable):
                    raise error
                raise Unavailable(f"nothing answered within {self._connect:g} s: {error}") from error
        if without >= self._bound:
            raise error
        return self._at_most(wait, now)

    def refused(self, error: OrcaError, retry_after: float, now: float) -> float:
        """Seconds to wait when the server named a delay. It is alive, so only the deadline bounds such tries."""
        self._last = error
        self.working(now)
        return self._at_most(retry_after * self._rng.uniform(1, 1.5), now)

    def _at_most(self, wait: float, now: float) -> float:
        return wait if self._deadline is None else max(0.0, min(wait, self._deadline - now))
