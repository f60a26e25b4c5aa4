"""Waiting for a pool that is away: make a call again until Redis answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from orca_common.errors import Unavailable

RETRY_SECONDS = 0.2  # a call itself waits for a Redis that is away; this is for one that is busy, or away for longer

T = TypeVar("T")


async def reached(
    call: Callable[[], Awaitable[T]],
    *,
    retry_seconds: float = RETRY_SECONDS,
    give_up: float | None = None,
    leaving: Callable[[], bool] | None = None,
) -> T:
    """Returns what `call()` returns, as soon as the pool can be reached.

    After each Unavailable it waits `retry_seconds` and calls again. It raises that Unavailable instead when `leaving()`
    is true, and one that says how long it tried when the running loop's clock has passed `give_up`. Any other error of
    `call()` is raised at once. Every operation of the pool may be called again; one whose answer was lost is not done
    twice.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        try:
            return await call()
        except Unavailable as error:
            if leaving is not None and leaving():
                raise
            if give_up is not None and loop.time() > give_up:
                tried = f"{error}; it was tried for {loop.time() - began:.0f} s"
                raise Unavailable(tried, reason=error.reason) from None
        await asyncio.sleep(retry_seconds)
