"""The iterations that this rank has accepted and has not reported yet."""

import asyncio
import logging
from collections import deque
from typing import NamedTuple

from orca_common.errors import FailedPrecondition, ResourceExhausted

from .lane import Lane

log = logging.getLogger(__name__)

MAX_WAITING = 64  # accepted iterations; a master has a few in flight


class Origin(NamedTuple):
    """Which lane and term brought an iteration; size and trace for its span."""

    lane: Lane | None  # that brought it; None: a relay
    term: int
    members: int  # requests in its batch
    trace: dict[str, str]


class Iterations:
    """Accepted iterations, oldest first. The GPU thread runs them in this order."""

    def __init__(self) -> None:
        self._waiting: deque[Origin] = deque()
        self._last = 0  # number of the last one that was accepted
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._waiting)

    def accept(self, number: int, origin: Origin) -> None:
        """Raises FailedPrecondition when the number is old, ResourceExhausted when too many wait."""
        if number <= self._last:
            raise FailedPrecondition(f"iteration {number} is old: this rank has taken {self._last}")
        if len(self._waiting) >= MAX_WAITING:
            raise ResourceExhausted(f"{MAX_WAITING} iterations wait here already", 0.1)
        self._last = number
        self._idle.clear()
        self._waiting.append(origin)

    def reported(self) -> Origin:
        """Removes the oldest one, which has run, and returns its origin."""
        origin = self._waiting.popleft()
        if not self._waiting:
            self._idle.set()
        return origin

    def abandon(self) -> None:
        """Drops all of them: none will run."""
        self._waiting.clear()
        self._idle.set()

    async def wait_idle(self, timeout: float) -> None:
        """Waits until all have been run, but no longer than `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            log.warning("iterations still run", extra={"waiting": len(self._waiting), "after": timeout})
