"""An outage of the request pool as two lines in the log, however often it is asked meanwhile."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Outage:
    """Says once that the pool is away and why, and once that it is back and how long it was away."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds from any moment on."""
        self._clock = clock
        self._since: float | None = None

    def away(self, why: object) -> None:
        """A try has failed."""
        if self._since is None:
            self._since = self._clock()
            log.warning("the request pool is away", extra={"why": str(why)})

    def back(self) -> None:
        """A try went well."""
        if self._since is not None:
            log.info("the request pool is back", extra={"seconds": round(self._clock() - self._since, 2)})
            self._since = None
