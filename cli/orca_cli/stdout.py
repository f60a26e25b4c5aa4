"""Standard output that cannot take what is written to it: a full disk, a reader that has left, a poor encoding."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from typing import IO, Any


def run(command: Callable[[], object]) -> None:
    """Runs a command. Raises SystemExit with a sentence when its output could not be written."""
    if sys.stdout is None:  # it was closed; without this, a file or a connection of ours would take its number
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model says what it likes
    try:
        try:
            command()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        drop()
        raise SystemExit(f"standard output cannot be written ({error.strerror})") from None


def drop() -> None:
    """Drops what is still to be written. Python would complain at its last flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Lossy:
    """A text file that loses what cannot be written: a server goes on when its reader has left, or its disk is full."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()
