"""Keeps a native library's output out of the log: Rust writes the message of a panic to descriptor 2 by itself.

The message may quote a prompt: that of a text cut inside a character has up to 256 bytes of the text. Nothing from
outside switches it off.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Descriptor:
    """A descriptor of the process that leads nowhere while somebody is inside `closed`, in whatever thread."""

    def __init__(self, number: int) -> None:
        """Takes two descriptors, so that later none is needed: a process may be at its limit."""
        self._number, self._lock, self._inside = number, threading.Lock(), 0
        self._nowhere, self._kept = os.open(os.devnull, os.O_WRONLY), os.dup(number)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Inside, what is written to the descriptor is lost. About 3 us."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                os.dup2(self._number, self._kept, inheritable=False)
                os.dup2(self._nowhere, self._number)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    os.dup2(self._kept, self._number)


STANDARD_ERROR = Descriptor(2)  # the process has one


def keep_python_writing() -> None:
    """Gives Python's standard error a descriptor of its own, so that logs are not lost. Before logging is set up."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
