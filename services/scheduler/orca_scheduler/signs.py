"""What tells a master that a rank may be lost, and how sure it is (DESIGN section 6, Verdicts)."""

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Never

from .discovery import Place

LINGER_SECONDS = 0.1  # so that ranks that were lost together are named together


class Kind(Enum):
    """`sure` signs fence the rank that they name. The others may come from a rank whose peer is the one that is lost.
    They count only when no rank is surely lost soon after."""

    GONE = "has ended"
    SILENT = "has been silent"
    STUCK = "makes no progress"
    FAILED = "failed"
    CLOSED = "left the control lane"
    REFUSED = "refused the control lane"  # of an old term (the master makes sure of its own first) or another epoch
    PEER_LOST = "lost a neighbour"

    @property
    def sure(self) -> bool:
        return self in (Kind.GONE, Kind.SILENT, Kind.STUCK)

    @property
    def fences(self) -> bool:
        """Whether the rank that it names is to be killed."""
        return self is not Kind.PEER_LOST


@dataclass(frozen=True, slots=True)
class Sign:
    place: Place
    kind: Kind
    detail: str  # what the rank did: goes on from its name to a sentence


class Signs:
    """The signs of one life of an engine, in the order in which they came. `doubt_seconds`: see `first`."""

    def __init__(self, doubt_seconds: float) -> None:
        self._doubt = doubt_seconds
        self._queue: asyncio.Queue[Sign] = asyncio.Queue()
        self._crash: asyncio.Future[Never] = asyncio.get_running_loop().create_future()

    def put(self, place: Place, kind: Kind, detail: str) -> None:
        self._queue.put_nowait(Sign(place, kind, detail))

    def guard(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """An error that ends this task is raised by `lost`: it is a bug of ours, not a rank's."""
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._crash.done():
            self._crash.set_exception(error)

    async def lost(self) -> list[Sign]:
        """What `_lost` says, unless a guarded task fails before."""
        judging = asyncio.ensure_future(self._lost())
        try:
            await asyncio.wait([judging, self._crash], return_when=asyncio.FIRST_COMPLETED)
            return self._crash.result() if self._crash.done() else judging.result()
        finally:
            judging.cancel()

    async def _lost(self) -> list[Sign]:
        """Waits until a rank is lost: one sign for each rank that is known to be.

        A doubtful sign waits `doubt_seconds` for a sure one; after that the most telling of the doubtful ones counts.
        """
        seen = [await self._queue.get()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._doubt):
                while not seen[-1].kind.sure:
                    seen.append(await self._queue.get())
        await asyncio.sleep(LINGER_SECONDS)
        while not self._queue.empty():
            seen.append(self._queue.get_nowait())
        return fenced(seen)


def fenced(seen: Iterable[Sign]) -> list[Sign]:
    """The signs that count, one a rank: all sure ones, else one. A rank that failed before it ended is told as that."""
    seen = list(seen)
    sure = {sign.place: sign for sign in reversed(seen) if sign.kind.sure}
    if not sure:
        return sorted(seen, key=lambda sign: list(Kind).index(sign.kind))[:1]
    failed = {sign.place: sign for sign in reversed(seen) if sign.kind is Kind.FAILED}
    return [failed.get(place, sign) for place, sign in reversed(sure.items())]
