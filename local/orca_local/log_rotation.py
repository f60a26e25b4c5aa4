"""Keeps the logs of a long run small: each has a limit, and one older file beside it."""

import asyncio
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from orca_common.service import in_thread

LIMIT = 64 << 20  # bytes
LOOK_SECONDS = 10.0  # a process that logs each request of 1,000 a second writes 5 MB meanwhile


async def keep_small(folder: Path) -> None:
    """Rotates the logs in a folder as they become too large. Never returns."""
    while True:
        for log in folder.glob("*.log"):
            with suppress(OSError):  # the disk is full, or the folder is gone: the run goes on
                await in_thread(partial(rotate, log))
        await asyncio.sleep(LOOK_SECONDS)


def rotate(log: Path, limit: int = LIMIT) -> None:
    """Moves the lines of a log that is larger than the limit to NAME.log.1, whose lines go.

    Its writers keep the log open to append, and go on in the same file. A line that comes between the end of the copy
    and the cut is lost. Raises OSError.
    """
    if log.stat().st_size <= limit:
        return
    older = log.with_suffix(".log.1")
    older.unlink(missing_ok=True)
    with open(log, "r+b", buffering=0) as source, open(older, "xb", opener=_for_its_owner, buffering=0) as copy:
        while os.sendfile(copy.fileno(), source.fileno(), None, limit):
            pass
        source.truncate(0)


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
