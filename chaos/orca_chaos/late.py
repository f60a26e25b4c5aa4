"""Measures how late this program itself is: while it does not run, its clock says little about others."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

LOOK = 0.05  # seconds between two looks
WORTH_TELLING = 0.5  # seconds that this program may be late without a word


@dataclass
class Late:
    """seconds: the longest time for which the event loop of this program did not run when it should have."""

    seconds: float = 0.0


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[Late]:
    """Notes how late the event loop is while the block runs."""
    late = Late()
    watching = asyncio.create_task(_watch(late))
    try:
        yield late
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(late: Late) -> None:
    before = time.monotonic()
    try:
        while True:
            await asyncio.sleep(LOOK)
            now = time.monotonic()
            late.seconds, before = max(late.seconds, now - before - LOOK), now
    finally:
        late.seconds = max(late.seconds, time.monotonic() - before - LOOK)  # the block may end in such a pause
