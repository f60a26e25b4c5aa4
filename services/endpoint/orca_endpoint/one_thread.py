"""One thread for the work of large inputs, so that the event loop has to share Python's lock with one of them only."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class OneThread:
    """Runs functions one after the other, off the event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "large-inputs")

    async def run(self, work: Callable[[], T]) -> T:
        """What `work()` returns or raises."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Ends the thread after the work that it does now; what waits is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)
