"""Threads for large inputs, which would hold up the event loop: a fixed number of them, and a queue with a size."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from orca_common.errors import ErrorReason, Unavailable

from .limits import full

T = TypeVar("T")

# Bytes up to which an input is handled on the event loop; a larger one goes to a thread.
BODY_IN_LOOP = 1 << 16  # of a message that is parsed (5 ms at most)
TEXT_IN_LOOP = 2048  # of a text that is tokenized (about 0.5 ms)


class Threads:
    """Runs functions off the event loop, in the order in which they came.

    What waits is not in the executor: that would keep a function, and the input with it, after its caller has left.
    """

    def __init__(self, name: str, count: int, waiting: int) -> None:
        """count: functions that run at the same time. waiting: functions that may wait beside them."""
        self._executor = ThreadPoolExecutor(count, name)
        self._free = asyncio.Semaphore(count)
        self._room = self._most = count + waiting
        self._closed = False

    async def run(self, work: Callable[[], T]) -> T:
        """Returns or raises what `work()` does. A cancelled call ends with its thread, which holds the input in memory.

        Raises ResourceExhausted when too many wait, Unavailable after `close`.
        """
        if not self._room:
            raise full(f"{self._most} large inputs are being read here already")
        self._room -= 1
        try:
            async with self._free:
                if self._closed:
                    raise Unavailable("this endpoint is leaving", reason=ErrorReason.ENDPOINT_LEAVING)
                return await self._finished(work)
        finally:
            self._room += 1

    async def _finished(self, work: Callable[[], T]) -> T:
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            return await asyncio.shield(running)
        finally:
            while not running.done():
                with suppress(asyncio.CancelledError):  # once more: it goes on to the caller in the end
                    await asyncio.wait([running])
            del running  # it holds its error, whose traceback holds this frame, and so the input

    def close(self) -> None:
        """Ends the threads after the work that they do now; what waits is refused."""
        self._closed = True
        self._executor.shutdown(wait=False)
