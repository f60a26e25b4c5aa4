"""Whose message is read now. gRPC tells of a message when it is whole, but takes memory for it as it comes.

A stream whose message nobody reads gets its first window of 64 KB and no more. So what comes unseen is bounded by how
many messages are read at a time, not by how many calls there are.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from orca_common.errors import DeadlineExceeded, ErrorReason, ResourceExhausted

from .refusals import RETRY_AFTER

SHARE = 4  # a peer has a quarter of all turns at most, so that no host alone keeps others out
UNHURRIED = 1.0  # seconds for which a turn is sure; after that a message that is not whole gives way to one that waits


class Queue:
    """Some turns, and who waits for one. The newest goes first: those that a flood has left behind keep nobody out."""

    def __init__(self, turns: int) -> None:
        self._free, self._giving_way = turns, 0
        self._waiting: list[asyncio.Future[None]] = []
        self.users = 0

    async def take(self) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given at this moment
                self.give_back()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def give_back(self) -> None:
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1

    @property
    def short(self) -> bool:
        """Whether more messages wait for a turn than give way."""
        return len(self._waiting) > self._giving_way

    def give_way(self, change: int) -> None:
        self._giving_way += change


class Turns:
    """`turns` messages are read at a time, SHARE of a peer's."""

    def __init__(self, turns: int) -> None:
        self._all = Queue(max(turns, SHARE))
        self._of_peer = max(turns // SHARE, 1)
        self._peers: dict[str, Queue] = {}

    @asynccontextmanager
    async def turn(self, peer: str, seconds: float) -> AsyncGenerator[None]:
        """A turn to read a message in, which comes and is used within `seconds`.

        Raises DeadlineExceeded when that is over, and ResourceExhausted when a message is slow and others wait.
        """
        own = self._peers.setdefault(peer, Queue(self._of_peer))
        own.users += 1
        slow = Slow(own, self._all)
        try:
            async with asyncio.timeout(seconds) as slow.bound:
                await own.take()
                try:
                    await self._all.take()
                    try:
                        slow.look_later()
                        yield
                    finally:
                        self._all.give_back()
                finally:
                    own.give_back()
        except TimeoutError:
            if slow.short is not None:
                why = f"the request did not come within {UNHURRIED:g} s, and others wait to be read"
                raise ResourceExhausted(why, RETRY_AFTER, reason=ErrorReason.ENDPOINT_FULL) from None
            raise DeadlineExceeded(f"the request did not come within {seconds:g} s") from None
        finally:
            slow.close()
            own.users -= 1
            if not own.users:
                del self._peers[peer]


class Slow:
    """Ends a turn that has lasted for UNHURRIED, when one of the queues is short of turns."""

    bound: asyncio.Timeout

    def __init__(self, *queues: Queue) -> None:
        self._queues = queues
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.short: Queue | None = None  # for which the turn was ended

    def look_later(self) -> None:
        self._timer = self._loop.call_later(UNHURRIED, self._look)

    def _look(self) -> None:
        self.short = next((queue for queue in self._queues if queue.short), None)
        if self.short is None:
            self.look_later()
        else:
            self.short.give_way(1)
            self.bound.reschedule(self._loop.time())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.short is not None:
            self.short.give_way(-1)
