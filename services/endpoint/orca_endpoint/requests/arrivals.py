"""Requests that arrive together are submitted together, so that an engine begins with all of them.

A burst of 32 requests takes an endpoint 10 ms or more. If each were submitted when it is ready, an idle engine would
run the first of them alone, and the others would wait for the end of this iteration.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds that a request waits at most for others that are being read or checked: what 32 of them take. One that takes
# longer is not waited for again.
PATIENCE = 0.015
ENOUGH = 32  # requests are submitted at once: as many as a batch often has
# Turns of the loop without a new request, after which those that are ready go on: 50 us. gRPC hands over a call that
# has arrived four turns after the one before it.
TURNS = 6


class Arrivals:
    """Requests between their arrival and their submission.

    A request that is alone goes on after some turns of the loop. While others are coming it waits for them.
    """

    def __init__(self) -> None:
        self._coming: set[object] = set()
        self._ready: list[asyncio.Future[None]] = []
        self._turns = 0  # for which nothing has come
        self._next_turn: asyncio.Handle | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @contextmanager
    def coming(self) -> Iterator[None]:
        """A request is being read or checked, until the block ends. Its `together` follows at once, if it is valid."""
        one = object()
        self._coming.add(one)
        try:
            yield
        finally:
            self._coming.discard(one)
            self._look_again()

    async def together(self) -> None:
        """Returns when the request may be submitted, for all who wait in the same turn of the loop."""
        ready: asyncio.Future[None] = self._loop.create_future()
        self._ready.append(ready)
        if len(self._ready) == ENOUGH:
            self._go()
        else:
            self._look_again()
        await ready

    def _look_again(self) -> None:
        self._turns = 0
        if self._next_turn is None and self._ready:
            self._next_turn = self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._next_turn = None
        self._turns += 1
        if not self._ready:
            return
        if self._coming:  # `coming` looks again when it ends
            if self._limit is None:
                self._limit = self._loop.call_later(PATIENCE, self._out_of_patience)
        elif self._turns < TURNS:
            self._next_turn = self._loop.call_soon(self._look)
        else:
            self._go()

    def _out_of_patience(self) -> None:
        self._coming.clear()
        self._go()

    def _go(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        for ready in self._ready:
            if not ready.done():  # its call was cancelled
                ready.set_result(None)
        self._ready.clear()
