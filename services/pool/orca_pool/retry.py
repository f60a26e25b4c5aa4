"""Calling the pool while Redis may be away."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from orca_common.errors import Unavailable

T = TypeVar("T")


async def reached(
    call: Callable[[], Awaitable[T]],
    *,
    retry_seconds: float = 0.2,
    give_up: float | None = None,
    leaving: Callable[[], bool] | None = None,
) -> T:
    """Repeats a call of the pool until the pool answers, and returns the answer.

    call: makes one attempt; only Unavailable is tried again, after `retry_seconds`.
    give_up: a moment of the running loop's clock. An attempt that fails later raises its Unavailable.
    leaving: while it returns true, a failed attempt raises its Unavailable at once.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await call()
        except Unavailable:
            if give_up is not None and loop.time() > give_up:
                raise
            if leaving is not None and leaving():
                raise
        await asyncio.sleep(retry_seconds)
