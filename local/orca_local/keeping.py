"""Keeps a process running: starts it again whenever it has died, as a cluster would."""

import asyncio
import time
from collections.abc import Callable
from typing import Never

from orca_common.backoff import Backoff
from orca_common.errors import FailedPrecondition

from .child import Child

QUIET = 10.0  # seconds that a process must have lived for its death to be the first one
UNSTEADY = 3  # deaths in a row, from which on another one is no news


async def keep(
    child: Child, changed: Callable[[], None], say: Callable[[str], None], warn: Callable[[str], None]
) -> Never:
    """Starts a process again whenever it has ended. `changed` is called after each end and each start.

    `warn` receives once that it has ended, why it cannot be started, and that it does not stay up; `say` receives once
    that it stays up again.
    """
    backoff, deaths = Backoff(), 0
    while True:
        since = time.monotonic()
        if deaths >= UNSTEADY and await child.lives(QUIET):
            say(f"{child.name} stays up again (pid {child.pid})")
            deaths = 0
        how = await child.ended()
        changed()
        lived = time.monotonic() - since
        deaths = 1 if lived > QUIET else deaths + 1
        if deaths < UNSTEADY:
            warn(f"{how}, starting it again")
        elif deaths == UNSTEADY:
            warn(f"{how}, again ({child.last_words()}); it is started until it stays up")
        await asyncio.sleep(backoff.after(lived))
        await _start(child, backoff, warn)
        changed()
        if deaths < UNSTEADY:
            say(child.where)


async def _start(child: Child, backoff: Backoff, warn: Callable[[str], None]) -> None:
    told = ""
    while True:
        try:
            return await child.start()
        except FailedPrecondition as error:
            if str(error) != told:
                told = str(error)
                warn(f"{told}; it is tried again and again")
        await asyncio.sleep(backoff.after(0.0))
