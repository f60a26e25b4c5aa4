"""Operations that are asked for at the same time go to Redis together: a burst is submitted, and after an outage
thousands of calls attach."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from orca_common.errors import Unavailable

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Gathering(Generic[Item, Answer]):
    """Sends what has come while the exchange before was under way in one exchange.

    An error of an exchange is the answer of all who wait: who waits behind a pool that is away would wait in vain.
    """

    def __init__(self, send: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]], most: int) -> None:
        """send: returns an answer for each item, in their order. most: items of an exchange."""
        self._send, self._most = send, most
        self._waiting: deque[tuple[Item, asyncio.Future[Answer]]] = deque()
        self._together: list[tuple[Item, asyncio.Future[Answer]]] = []  # what the present exchange has
        self._sending: asyncio.Task[None] | None = None

    async def ask(self, item: Item) -> Answer:
        """Returns the answer. What is cancelled while it waits is not sent."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if self._sending is None:
            self._start()
        return await answer

    async def close(self) -> None:
        """Cancels those who wait, and ends the exchange that is under way."""
        for _, answer in (*self._together, *self._waiting):
            answer.cancel()
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])

    def _start(self) -> None:
        self._sending = asyncio.create_task(self._send_all())
        self._sending.add_done_callback(self._ended)  # it may be cancelled before it begins

    async def _send_all(self) -> None:
        while self._waiting:
            self._together = self._next()
            answers = await self._send([item for item, _ in self._together]) if self._together else ()
            for (_, waiting), answer in zip(self._together, answers, strict=True):
                if not waiting.done():
                    waiting.set_result(answer)

    def _ended(self, sending: asyncio.Task[None]) -> None:
        """Ends all waits, whatever ended the exchanges: no caller waits for an answer that never comes."""
        self._sending = None
        # A cancelled exchange is no cancellation of those who wait: they may ask again.
        error = Unavailable("the exchange was broken off") if sending.cancelled() else sending.exception()
        left, self._together = (*self._together, *self._waiting), []
        if error is not None:
            self._waiting.clear()
            for _, answer in left:
                if not answer.done():
                    answer.set_exception(error)
        elif self._waiting:
            self._start()  # they came as the last exchange ended

    def _next(self) -> list[tuple[Item, asyncio.Future[Answer]]]:
        count = min(self._most, len(self._waiting))
        taken = (self._waiting.popleft() for _ in range(count))
        return [(item, answer) for item, answer in taken if not answer.done()]
