"""The pace at which an engine's requests get their tokens."""

import math

MEMORY = 2.0  # seconds of work that the mean goes back


class Pace:
    """The mean time from one token of a request to its next, over the last seconds of work.

    By Little's law it is the mean number of requests that run, divided by the tokens that come a second. So it counts
    what holds a request up as well: batches of other requests, and their initiations.
    """

    def __init__(self) -> None:
        self._since: float | None = None  # when the last batch returned; None: the engine was idle
        self._request_seconds = self._tokens = 0.0

    @property
    def seconds(self) -> float:
        """Seconds; 0 before the first token."""
        return self._request_seconds / self._tokens if self._tokens else 0.0

    def scheduled(self, now: float) -> None:
        """A batch was scheduled."""
        if self._since is None:
            self._since = now

    def returned(self, now: float, tokens: int, running: int, idle: bool) -> None:
        """A batch came back with `tokens` tokens.

        running: requests that the engine had until then. idle: no batch is in flight now.
        """
        if self._since is not None:
            seconds = max(now - self._since, 0.0)
            kept = math.exp(-seconds / MEMORY)
            self._request_seconds = self._request_seconds * kept + running * seconds
            self._tokens = self._tokens * kept + tokens
        self._since = None if idle else now

    def held(self, now: float) -> None:
        """Notes that the batch which returned last was held until now, as the pool was away: none followed it."""
        self._since = None if self._since is None else now

    def lost(self) -> None:
        """Forgets the iterations in flight, which will not return."""
        self._since = None
