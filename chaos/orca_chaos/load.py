"""Load: some streams at all times, each of which must be right, while faults hit their servers."""

import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from orca.v1 import orca_pb2 as pb

from .client import Caller, Poisoned, Stream, Violation
from .late import watched
from .oracle import Known

LEAVES, CANCELS = 0.15, 0.1  # shares of the requests whose client breaks its call and resumes, or cancels
FATAL_LOSSES = 3  # so many faults may end a request


@dataclass
class Disturbance:
    """What the clients saw from a fault's beginning until every stream went on after it."""

    pause: float = 0.0  # seconds: the longest time that a stream waited for its next token, a request's first too
    seconds: float = 0.0  # until all was healed and every stream went on
    late: float = 0.0  # seconds: the longest time that this program itself did not run, so that its clock is worth less


class Load:
    """Keeps `streams` requests running. The first violation ends the block that it is used in."""

    def __init__(self, caller: Caller, known: Sequence[Known], seed: int, streams: int) -> None:
        self.finished = self.cancelled = self.poisoned = self.calls = 0
        self.faults = 0  # that have begun: who does them counts here
        self._caller, self._streams, self._seed = caller, streams, seed
        self._asked = itertools.cycle(known)
        self._ending = False
        self._last = [0.0] * streams  # when each stream got its last token, or began to wait for its first
        self._disturbance: Disturbance | None = None

    async def __aenter__(self) -> "Load":
        """Returns when every stream has a token."""
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._last = [time.monotonic()] * self._streams
        for n in range(self._streams):
            self._tasks.create_task(self._keep(n), name=f"stream {n}")
        try:
            await self.flows()
        except BaseException:  # a stream has failed: the group ends the others, and raises what was wrong
            await self.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        """Waits until the requests that run have ended."""
        self._ending = True
        await self._tasks.__aexit__(*error)  # type: ignore[arg-type]

    async def flows(self) -> None:
        """Waits until every stream has got a token from now on. A stream that never does is a Violation of its own."""
        now = time.monotonic()
        while any(last <= now for last in self._last):
            await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def disturbed(self) -> AsyncIterator[Disturbance]:
        """Records what the streams see while the block runs, and until every stream goes on after it."""
        seen = self._disturbance = Disturbance()
        begun = time.monotonic()
        async with watched() as late:
            yield seen
            await self.flows()
        seen.late = late.seconds
        seen.seconds = time.monotonic() - begun
        self._disturbance = None

    async def _keep(self, n: int) -> None:
        draw = random.Random(f"stream {self._seed}/{n}")
        while not self._ending:
            await self._request(n, next(self._asked), draw)

    async def _request(self, n: int, known: Known, draw: random.Random) -> None:
        does, at, again = draw.random(), draw.randrange(len(known.tokens)), draw.randint(0, 4)
        faults, cancelling = self.faults, list[asyncio.Task[None]]()

        def came(stream: Stream) -> None:
            nonlocal does
            self._came(n)
            if len(stream.tokens) > at:
                if does < LEAVES:
                    stream.leave(again)
                elif does < LEAVES + CANCELS:
                    cancelling.append(asyncio.create_task(stream.cancel()))
                does = 1.0

        stream = Stream(self._caller, known.request, known.tokens, came)
        try:
            end = await stream.run()
            for task in cancelling:
                await task
        except Poisoned as poisoned:
            if self.faults - faults < FATAL_LOSSES:
                raise Violation(f"{poisoned}, after {self.faults - faults} faults") from None
            self.poisoned += 1
            return
        finally:
            self.calls += stream.calls
        assert end is not None
        if cancelling and end.reason == pb.FINISH_REASON_CANCELLED:
            self.cancelled += 1
        elif end.reason == pb.FINISH_REASON_LENGTH:
            self.finished += 1
        else:
            raise Violation(f"request {stream.request_id} ended {pb.FinishReason.Name(end.reason)}")

    def _came(self, n: int) -> None:
        now = time.monotonic()
        if self._disturbance is not None:
            self._disturbance.pause = max(self._disturbance.pause, now - self._last[n])
        self._last[n] = now
