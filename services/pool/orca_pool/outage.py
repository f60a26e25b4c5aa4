"""An outage of the request pool as two lines in the log, however often it is asked meanwhile."""

import logging
import time

log = logging.getLogger(__name__)


class Outage:
    """Says once that the pool is away and why, and once that it is back and how long it was away."""

    def __init__(self) -> None:
        self._since: float | None = None  # on the clock of `time.monotonic`

    def away(self, why: object) -> None:
        """A try has failed."""
        if self._since is None:
            self._since = time.monotonic()
            log.warning("the request pool is away", extra={"why": str(why)})

    def back(self) -> None:
        """A try went well."""
        if self._since is not None:
            log.info("the request pool is back", extra={"seconds": round(time.monotonic() - self._since, 2)})
            self._since = None
