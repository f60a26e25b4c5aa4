"""A process of a fork server's, as the parent of both sees it: told what it must know, listened to, ended."""

import asyncio
import json
import logging
import os
import select
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .forks import Forked
from .process import exit_status

log = logging.getLogger(__name__)


class ForkedProcess:
    """A child of this process, which begins its work when it is told."""

    def __init__(self, forked: Forked, told: Mapping[str, Any]) -> None:
        """told: becomes a line of JSON on its standard input. A pipe has room for 64 KiB."""
        self._loop = asyncio.get_running_loop()
        self.pid, input, self._output = forked
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._output, self._read_lines)
        self._loop.add_reader(self._pidfd, self._reap)
        self.ended: asyncio.Future[int] = self._loop.create_future()  # its exit status, or minus a signal's number
        with suppress(BrokenPipeError):  # it has died, and `ended` will say so
            os.write(input, json.dumps(told).encode() + b"\n")
        os.close(input)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it a signal. By its descriptor, because its pid may belong to another process by now."""
        if not self.ended.done():
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                log.info("process has ended already", extra={"forked_pid": self.pid})

    def _printed(self, line: str) -> None:
        """It has printed a line."""
        if line.strip():
            log.info("process printed", extra={"forked_pid": self.pid, "line": line})

    def _read_lines(self) -> None:
        """Reads what it has printed. A service prints one line, written at once: where it listens."""
        printed = os.read(self._output, 65536)
        if not printed:
            self._loop.remove_reader(self._output)
        for line in printed.decode(errors="replace").splitlines():
            self._printed(line)

    def _reap(self) -> None:
        left = select.poll()  # select() knows no descriptor above 1,023
        left.register(self._output)
        if left.poll(0):
            self._read_lines()  # its last words
        self._loop.remove_reader(self._output)
        self._loop.remove_reader(self._pidfd)
        status = exit_status(self.pid)
        os.close(self._output)
        os.close(self._pidfd)
        self.ended.set_result(status)
