"""Threads for large inputs, which would hold up the event loop: so many at a time, and a queue with a size."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from orca_common.errors import ErrorReason, ResourceExhausted

from .refusals import RETRY_AFTER

T = TypeVar("T")


class Threads:
    """Runs functions off the event loop, in the order in which they came."""

    def __init__(self, name: str, count: int, waiting: int) -> None:
        """count: functions that run at the same time. waiting: functions that may wait beside them."""
        self._executor = ThreadPoolExecutor(count, name)
        self._room = self._most = count + waiting

    async def run(self, work: Callable[[], T]) -> T:
        """What `work()` returns or raises. Raises ResourceExhausted when too many wait."""
        if not self._room:
            sentence = f"{self._most} large inputs are being read here already"
            raise ResourceExhausted(sentence, RETRY_AFTER, reason=ErrorReason.ENDPOINT_FULL)
        self._room -= 1
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        running.add_done_callback(self._done)
        return await running

    def _done(self, _: object) -> None:
        self._room += 1

    def close(self) -> None:
        """Ends the threads after the work that they do now; what waits is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)
