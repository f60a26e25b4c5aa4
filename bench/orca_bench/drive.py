"""Sends a load to a server and notes when its answers come."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from .cases import Case
from .load import Planned
from .measures import Answer


class Door(Protocol):
    """A server's way in."""

    label: str  # its name in the lines of the bench

    async def ask(self, answer: Answer, clock: Callable[[], float]) -> None:
        """Sends the request of `answer` and fills in what comes back, until its end. `clock` gives the moments.

        Notes the end before it looks at what came. A request that fails has its reason in `answer.error`; nothing is
        raised, and nothing is tried again.
        """
        ...


Ended = Callable[[Answer], None]


async def open_loop(
    door: Door, load: Sequence[Planned], ended: Ended = lambda answer: None, patience: float | None = None
) -> list[Answer]:
    """Sends each request at its moment, whatever has become of those before it. Returns when all have ended.

    `ended` is called at each end. A request that has not ended after `patience` seconds counts as failed.
    """
    started = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started

    async def one(planned: Planned) -> Answer:
        answer = Answer(planned.request, planned.at)
        while (wait := planned.at - clock()) > 0:  # a timer may end a little early
            await asyncio.sleep(wait)
        await asked(door, answer, clock, patience)
        ended(answer)
        return answer

    return await asyncio.gather(*(one(planned) for planned in load))


async def closed_case(
    door: Door, case: Case, ended: Ended = lambda answer: None, patience: float | None = None
) -> list[Answer]:
    """Sends all requests of a case at once, and returns when all have ended."""
    return await open_loop(door, [Planned(0.0, request) for request in case], ended, patience)


async def asked(door: Door, answer: Answer, clock: Callable[[], float], patience: float | None) -> None:
    answer.sent = clock()
    try:
        async with asyncio.timeout(patience):
            await door.ask(answer, clock)
    except TimeoutError:
        answer.error = f"it had not ended after {patience:g} s"
        answer.ended = clock()
    if not answer.error and answer.tokens != answer.request.output:
        answer.error = f"{answer.tokens} tokens came instead of {answer.request.output}"
