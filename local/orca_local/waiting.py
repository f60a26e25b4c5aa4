"""Waiting for the parts of a stack while it starts: what may heal is waited for, what can never work ends the start."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence

from orca_common.errors import FailedPrecondition

from .child import Child

LOOK = 0.1  # seconds between two looks
SURE = 1.0  # seconds after which a refusal counts: before, it may be taken back


class Waiting:
    """Waits for one condition after the other, and says once why it waits.

    `say` receives a line for each new state. `show` receives every progress, for a line that is written over.
    """

    def __init__(self, children: Sequence[Child], say: Callable[[str], None], show: Callable[[str], None]) -> None:
        """children: all processes that must run meanwhile, or may refuse."""
        self._children, self._say, self._show = children, say, show
        self.reason: str | None = None  # why the start still waits
        self._refused: tuple[str, float] | None = None  # a refusal, and since when it stands

    async def until(self, unready: Callable[[], str | None]) -> None:
        """Returns when there is no reason left. Raises FailedPrecondition when there will always be one."""
        while (reason := await asyncio.to_thread(unready)) is not None:
            self._check_running()
            await asyncio.to_thread(self._check_refusals)
            if reason != self.reason and self._refused is None:
                if _state(reason) != _state(self.reason or ""):
                    self._say(f"waiting: {reason}")
                self._show(reason)
                self.reason = reason
            await asyncio.sleep(LOOK)

    def _check_running(self) -> None:
        for child in self._children:
            if child.pid is None:
                raise FailedPrecondition(f"{child.name} ended: {child.last_words()}")

    def _check_refusals(self) -> None:
        refusal = next(filter(None, (child.refused() for child in self._children)), None)
        if refusal is None:
            self._refused = None
        elif self._refused is None or self._refused[0] != refusal:
            self._refused = refusal, time.monotonic()
        elif time.monotonic() - self._refused[1] > SURE:
            raise FailedPrecondition(refusal)


def _state(reason: str) -> str:
    """A reason without the numbers that count on in it."""
    return re.sub(r"\d[\d.]*", "", reason)
