"""Threads for large inputs, which would hold up the event loop: a fixed number of them, and a queue with a size."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from orca_common.errors import ErrorReason, Unavailable

from .turns import Turns

T = TypeVar("T")

# Bytes up to which an input is handled on the event loop; a larger one goes to a thread.
BODY_IN_LOOP = 1 << 14  # of a message that is parsed (1.5 ms: a chat of as many short messages as go in)
TEXT_IN_LOOP = 2048  # of a text that is tokenized (about 0.5 ms)


class Threads:
    """Runs functions off the event loop, each in its caller's turn.

    What waits is not in the executor: that would keep a function, and the input with it, after its caller has left.
    """

    def __init__(self, name: str, count: int, waiting: int, all_waiting: int) -> None:
        """count: functions that run at the same time; one caller's leave a thread free, where there are several.
        waiting, all_waiting: functions of one caller, and of all, that may wait beside them."""
        self._executor = ThreadPoolExecutor(count, name)
        self._turns = Turns("large inputs", count, max(count - 1, 1), waiting, all_waiting)
        self._closed = False

    async def run(self, work: Callable[[], T], caller: str = "") -> T:
        """Returns or raises what `work()` does. A cancelled call ends with its thread, which holds the input in memory.

        Raises ResourceExhausted when too many wait, Unavailable after `close`.
        """
        async with self._turns.turn(caller):
            if self._closed:
                raise Unavailable("this endpoint is leaving", reason=ErrorReason.ENDPOINT_LEAVING)
            return await finished(asyncio.get_running_loop().run_in_executor(self._executor, work))

    def close(self) -> None:
        """Ends the threads after the work that they do now; what waits is refused."""
        self._closed = True
        self._executor.shutdown(wait=False)


async def finished(running: asyncio.Future[T]) -> T:
    """Returns or raises what `running` does. A cancelled call ends with it."""
    try:
        return await asyncio.shield(running)
    finally:
        while not running.done():
            with suppress(asyncio.CancelledError):  # once more: it goes on to the caller in the end
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # a cancelled call reads no error, and asyncio would log one that was not read
        del running  # it holds its error, whose traceback holds this frame, and so the input
