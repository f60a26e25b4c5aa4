"""Chooses the message that is read next. gRPC reports a message when it is whole, but takes memory as it comes.

A stream whose message is not read gets its first window of 64 KB and no more. So what comes unseen is bounded by how
many messages are read at a time, not by how many calls there are.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from orca_common.errors import DeadlineExceeded

from ..requests.limits import Refusals, full

SHARE = 4  # a host has a quarter of all turns at most, so that no host alone keeps others out
UNHURRIED = 1.0  # seconds for which a turn is sure; after that a message that is not whole gives way to one that waits
LIMIT = "messages that are slow while others wait"


class Turn:
    """The reading of one message."""

    def __init__(self, host: str, bound: asyncio.Timeout, since: float) -> None:
        self.host, self.bound, self.since, self.slow = host, bound, since, False


class Turns:
    """Reads `turns` messages at a time, a quarter of them of one host. Hosts that wait are served in rotation, and the
    calls of one host in their order."""

    def __init__(self, turns: int, refusals: Refusals) -> None:
        self._free = max(turns, SHARE)
        self._most, self._of_host = self._free, max(turns // SHARE, 1)
        self._used: Counter[str] = Counter()  # turns of each host
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the next host first
        self._reading: dict[Turn, None] = {}  # the oldest first
        self._refusals, self._looking = refusals, False

    @asynccontextmanager
    async def turn(self, host: str, seconds: float) -> AsyncGenerator[None]:
        """A turn to read a message in, which comes and is used within `seconds`.

        Raises DeadlineExceeded when that is over, and ResourceExhausted when a message is slow and others wait.
        """
        turn: Turn | None = None
        try:
            async with asyncio.timeout(seconds) as bound:
                await self._take(host)
                turn = Turn(host, bound, asyncio.get_running_loop().time())
                self._reading[turn] = None
                try:
                    yield
                finally:
                    del self._reading[turn]
                    self._give_back(host)
        except TimeoutError:
            if turn is not None and turn.slow:
                self._refusals.refused(LIMIT, self._most)
                raise full(f"the request did not come within {UNHURRIED:g} s, and others wait to be read") from None
            raise DeadlineExceeded(f"the request did not come within {seconds:g} s") from None

    async def _take(self, host: str) -> None:
        if self._free and self._used[host] < self._of_host:
            self._free -= 1
            self._used[host] += 1
            return
        given = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(host, deque()).append(given)
        self._look()
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # it was given at this moment
                self._give_back(host)
            elif given in (waiting := self._waiting.get(host, deque())):
                waiting.remove(given)
                if not waiting:
                    del self._waiting[host]
            raise

    def _give_back(self, host: str) -> None:
        self._free += 1
        self._used[host] -= 1
        if not self._used[host]:
            del self._used[host]
        for other in list(self._waiting):
            if self._used[other] < self._of_host and self._give_to(other):
                break
        if not self._waiting:
            self._refusals.used(LIMIT, self._most, self._most - self._free)

    def _give_to(self, host: str) -> bool:
        """Gives a free turn to the first call of a host that waits, and lets other hosts go before its next one.

        Returns False when none of them waits any more.
        """
        waiting = self._waiting.pop(host)
        while waiting:
            given = waiting.popleft()
            if not given.cancelled():
                self._free -= 1
                self._used[host] += 1
                given.set_result(None)
                if waiting:
                    self._waiting[host] = waiting
                return True
        return False

    def _look(self) -> None:
        """Ends slow turns while calls wait that could have them."""
        if self._looking or not self._waiting:
            return
        loop, wanted = asyncio.get_running_loop(), sum(map(len, self._waiting.values()))
        for turn in self._reading:
            if not wanted or loop.time() - turn.since < UNHURRIED:
                break
            if not turn.slow and (turn.host in self._waiting or not self._free):
                turn.slow = True
                turn.bound.reschedule(loop.time())
                wanted -= 1
        self._looking = True
        loop.call_later(UNHURRIED / 4, self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        self._look()
