"""The way from one process to another, with the faults of the network on it.

A proxy asks its link before it passes a message on (`carry`). A fault changes the link, and heals it again.
"""

import asyncio
from enum import StrEnum


class Direction(StrEnum):
    """The direction of a message, as the process sees it that has opened the connection."""

    TO = "to"
    FROM = "from"


class Broken(Exception):
    """The connection is broken: what was under way on it is lost."""


class Link:
    """Decides what happens to the messages between two processes.

    delay: seconds that each message takes longer. Messages of a direction that is held wait until it is released, as
    behind a network that drops packets: the connection stays, and carries nothing. `broken`: connections end at
    once and no new ones are made. `lose` and `double` hit the messages that come next.
    """

    def __init__(self, source: str, destination: str) -> None:
        self.source, self.destination = source, destination
        self.delay = 0.0
        self._open = {direction: asyncio.Event() for direction in Direction}
        for event in self._open.values():
            event.set()
        self._whole = asyncio.Event()
        self._whole.set()
        self._break = asyncio.Event()
        self._to_lose = self._to_double = 0
        self.lost = self.doubled = 0  # messages, ever

    @property
    def name(self) -> str:
        return f"{self.source} > {self.destination}"

    @property
    def broken(self) -> bool:
        return not self._whole.is_set()

    # -- faults

    def hold(self, *directions: Direction) -> None:
        for direction in directions:
            self._open[direction].clear()

    def release(self, *directions: Direction) -> None:
        for direction in directions:
            self._open[direction].set()

    def sever(self) -> None:
        """Ends all connections, and lets none be made until `mend`."""
        self._whole.clear()
        self._break.set()

    def mend(self) -> None:
        self._whole.set()
        self._break.clear()

    def lose(self, messages: int) -> None:
        self._to_lose += messages

    def double(self, messages: int) -> None:
        self._to_double += messages

    def heal(self) -> None:
        """Everything passes from now on. Messages that were to be lost or doubled and have not come are spared."""
        self.delay, self._to_lose, self._to_double = 0.0, 0, 0
        self.release(*Direction)
        self.mend()

    # -- for proxies

    async def carry(self, direction: Direction, *, may_double: bool = True) -> int:
        """Returns when a message arrives at the other side, and how often: once or twice. Raises Broken."""
        if self.delay:
            await asyncio.sleep(self.delay)
        await self._open[direction].wait()
        if self.broken:
            raise Broken
        if self._to_lose:
            self._to_lose -= 1
            self.lost += 1
            raise Broken  # a connection that loses a message does not outlive it: TCP keeps the order or gives up
        if self._to_double and may_double:
            self._to_double -= 1
            self.doubled += 1
            return 2
        return 1

    async def breaks(self) -> None:
        """Returns when the connections of now are to end."""
        await self._break.wait()
