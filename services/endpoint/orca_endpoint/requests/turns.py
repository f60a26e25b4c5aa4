"""Turns of callers, so that the work of one keeps no other waiting. A caller is a tenant, or a host without keys."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from .limits import full


class Turns:
    """Some turns at a time. Callers that wait have theirs in rotation, and their own work in order."""

    def __init__(self, work: str, count: int, each: int, waiting: int, all_waiting: int) -> None:
        """work: what is waited with, for errors. count: turns at a time. each: of one caller. waiting: those of one
        caller that may wait beside them. all_waiting: of all callers."""
        self._work, self._free, self._each = work, count, each
        self.waiting, self.all_waiting = waiting, all_waiting
        self.count = 0  # turns that are waited for
        self._having = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller, the next one first

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncGenerator[None]:
        """Raises ResourceExhausted when too many of the caller's wait, or of all."""
        if self._free and self._having[caller] < self._each:
            self._take(caller)
        else:
            await self._wait(caller)
        try:
            yield
        finally:
            self._give_back(caller)

    def _take(self, caller: str) -> None:
        self._free -= 1
        self._having[caller] += 1

    async def _wait(self, caller: str) -> None:
        if len(self._waiting.get(caller, ())) >= self.waiting:
            raise full(f"{self.waiting} {self._work} of this caller wait here already")
        if self.count >= self.all_waiting:
            raise full(f"{self.all_waiting} {self._work} wait here already")
        given = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(given)
        self.count += 1
        try:
            await given
        except asyncio.CancelledError:
            if given.cancelled():
                self._forget(caller, given)
            else:  # it was given at this moment
                self._give_back(caller)
            raise

    def _forget(self, caller: str, given: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(caller, deque())
        if given in waiting:  # it was not passed over meanwhile
            self.count -= 1
            waiting.remove(given)
            if not waiting:
                del self._waiting[caller]

    def _give_back(self, caller: str) -> None:
        self._free += 1
        self._having[caller] -= 1
        if not self._having[caller]:
            del self._having[caller]
        for following in list(self._waiting):
            if not self._free:
                break
            if self._having[following] < self._each:
                self._give_to(following)

    def _give_to(self, caller: str) -> None:
        """Gives a free turn to the first work of a caller that waits; its other work waits behind that of others."""
        waiting = self._waiting.pop(caller)
        while waiting:
            given = waiting.popleft()
            self.count -= 1
            if not given.done():
                self._take(caller)
                given.set_result(None)
                break
        if waiting:
            self._waiting[caller] = waiting
