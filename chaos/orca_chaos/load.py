"""Load: some requests of the raw client at all times, each of which must be right, while faults hit their servers."""

import asyncio
import itertools
import random
from collections.abc import Sequence

from orca.v1 import orca_pb2 as pb

from .client import Caller, Lost, Poisoned, Stream, Violation
from .oracle import Known
from .streams import Streams

LEAVES, CANCELS = 0.15, 0.1  # shares of the requests whose client breaks its call and resumes, or cancels
FATAL_LOSSES = 3  # losses of its ranks after which a request may end


class Load(Streams):
    """Requests with known tokens, some of whose clients leave and come back, or cancel.

    may_lose: requests may end DATA_LOSS; they are counted.
    """

    def __init__(
        self, caller: Caller, known: Sequence[Known], seed: int, streams: int, *, may_lose: bool = False
    ) -> None:
        super().__init__(streams)
        self.finished = self.cancelled = self.poisoned = self.lost = self.calls = 0
        self._may_lose = may_lose
        self.faults = 0  # that have begun: who does them counts here
        self._caller = caller
        self._asked = itertools.cycle(known)
        self._draws = [random.Random(f"stream {seed}/{n}") for n in range(streams)]

    async def _request(self, n: int) -> None:
        known, draw = next(self._asked), self._draws[n]
        does, at, again = draw.random(), draw.randrange(len(known.tokens)), draw.randint(0, 4)
        faults, cancelling = self.faults, list[asyncio.Task[None]]()

        def came(stream: Stream) -> None:
            nonlocal does
            self._came(n, stream.engine)
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
        except Lost:
            if not self._may_lose:
                raise
            self.lost += 1
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
