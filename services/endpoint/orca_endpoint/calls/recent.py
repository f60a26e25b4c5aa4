"""A cache of an answer for a short time, so that many callers cost its source one question."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Caches the answer of `ask`. Callers that come meanwhile wait for the same answer."""

    def __init__(self, ask: Callable[[], Awaitable[T]], seconds: float) -> None:
        """seconds: for which an answer is given again. An error reaches only the callers that wait for it."""
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
