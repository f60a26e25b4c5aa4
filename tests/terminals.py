"""A program in a pseudo-terminal, for tests that press keys and read the screen."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

SECONDS = 60.0  # for what a test waits for
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


class Terminal:
    """Runs a program in a terminal of its own, as a context. Its output is read as text, without colours."""

    def __init__(self, command: Sequence[str], columns: int = 140, rows: int = 40) -> None:
        self._keys, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = os.environ | {"TERM": "xterm-256color"}
        environment.pop("COLUMNS", None)
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self._printed = ""  # that no `until` has looked at

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._keys)

    def send(self, keys: str) -> None:
        """Presses keys, and forgets all earlier output."""
        self._printed = ""
        os.write(self._keys, keys.encode())

    def until(self, pattern: str) -> None:
        """Waits until the program has printed this."""
        due = time.monotonic() + SECONDS
        while not re.search(pattern, CONTROLS.sub("", self._printed)):
            assert time.monotonic() < due, f"{pattern!r} was not printed, but:\n{self._printed[-4000:]}"
            assert self._read(), f"it ended before it printed {pattern!r}:\n{self._printed[-4000:]}"

    def ended(self) -> int:
        """Waits for its end, and returns its status."""
        while self._read():
            pass
        return self._process.wait(SECONDS)

    def _read(self) -> bool:
        """Takes what there is, or waits a moment. False: there will be no more."""
        ready, _, _ = select.select([self._keys], [], [], 0.5)
        if ready:
            try:
                self._printed += os.read(self._keys, 65536).decode(errors="replace")
            except OSError:  # EIO: the program has closed its side
                return False
        return True
