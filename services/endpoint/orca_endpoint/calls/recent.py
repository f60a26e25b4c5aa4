"""Answers of others, kept for a short time: however many callers ask, the source is asked now and then."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Keeps the answer of `ask`. Those who come while it is asked wait for the same answer."""

    def __init__(self, ask: Callable[[], Awaitable[T]], seconds: float) -> None:
        """seconds: for which an answer is told again. An error is told only to those who wait for it."""
        self._ask, self._seconds = ask, seconds
        self._asked: asyncio.Future[T] | None = None
        self._good_until = 0.0

    async def get(self) -> T:
        """The answer, `seconds` old at most. Raises what `ask()` raises."""
        asked, now = self._asked, asyncio.get_running_loop().time()
        stale = asked is None or (asked.done() and (now >= self._good_until or _failed(asked)))
        if asked is None or stale:
            self._asked = asked = asyncio.ensure_future(self._ask())
            self._good_until = now + self._seconds
        return await asyncio.shield(asked)


def _failed(asked: "asyncio.Future[T]") -> bool:
    return asked.cancelled() or asked.exception() is not None
