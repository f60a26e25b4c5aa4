"""Runs streams that never stop, and measures how a disturbance delays them."""

import asyncio
import contextlib
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Self

from .late import watched


@dataclass
class Disturbance:
    """The pauses that the clients saw, from a fault's beginning until every stream went on after it."""

    name: str = ""
    pause: float = 0.0  # seconds: the longest time that a stream waited for its next token, a request's first too
    seconds: float = 0.0  # until all was healed and every stream went on
    late: float = 0.0  # seconds: the longest time that this program itself did not run, so that its clock is worth less
    tokens: Counter[str] = field(default_factory=Counter)  # by the engine that made them


class Streams(ABC):
    """Keeps `streams` requests running: when one ends, its stream begins the next.

    The first error ends the block that it is used in:

    async with Load(..) as load:
        async with load.disturbed() as seen:
            ...  # do harm, and wait until all is well again
    """

    def __init__(self, streams: int) -> None:
        self._streams, self._ending = streams, False
        self._last = [0.0] * streams  # when each stream got its last token, or began to wait for its first
        self._disturbance: Disturbance | None = None

    @abstractmethod
    async def _request(self, n: int) -> None:
        """Runs a request of stream n to its end, and calls `_came` with each token. Raises what is wrong."""

    async def __aenter__(self) -> Self:
        """Returns when every stream has a token."""
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._last = [time.monotonic()] * self._streams
        for n in range(self._streams):
            self._tasks.create_task(self._keep(n), name=f"stream {n}")
        try:
            await self.flows()
        except BaseException:  # a stream has failed: the group ends the others, and raises what was wrong
            await self.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        """Waits until the requests that run have ended."""
        self._ending = True
        await self._tasks.__aexit__(*error)  # type: ignore[arg-type]

    async def flows(self) -> None:
        """Waits until every stream has got a token from now on. A stream that never does has to fail by itself."""
        now = time.monotonic()
        while any(last <= now for last in self._last):
            await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def disturbed(self, name: str = "") -> AsyncIterator[Disturbance]:
        """Records what the streams see while the block runs, and until every stream goes on after it."""
        seen = self._disturbance = Disturbance(name)
        begun = time.monotonic()
        self._last = [max(last, begun) for last in self._last]  # what came before is not its doing
        async with watched() as late:
            yield seen
            await self.flows()
            await self.flows()  # a stream that waits long just now must not hand its wait to the next disturbance
        seen.late = late.seconds
        seen.seconds = time.monotonic() - begun
        self._disturbance = None

    async def _keep(self, n: int) -> None:
        while not self._ending:
            await self._request(n)

    def _came(self, n: int, engine: str) -> None:
        """Stream n has got a token that it did not have."""
        now = time.monotonic()
        if self._disturbance is not None:
            self._disturbance.pause = max(self._disturbance.pause, now - self._last[n])
            self._disturbance.tokens[engine] += 1
        self._last[n] = now
