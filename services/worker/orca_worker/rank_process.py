"""A rank's process, as the supervisor sees it: told which rank it is, ended."""

import asyncio
import json
import logging
import os
import select
import signal
from contextlib import suppress

from orca_common.address import split_address

from .forks import Forked
from .settings import RankSettings

log = logging.getLogger(__name__)


class RankProcess:
    """A process of the fork server's, which becomes a rank with these settings."""

    def __init__(self, forked: Forked, settings: RankSettings) -> None:
        self._loop = asyncio.get_running_loop()
        self.pid, input, self._output = forked
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._output, self._read_lines)
        self._loop.add_reader(self._pidfd, self._reap)
        self.status: tuple[str, int] | None = None  # where its status port is, once it listens
        self.refusal = ""  # why it cannot work with its settings
        self.ended: asyncio.Future[int] = self._loop.create_future()  # its exit status, or minus a signal's number
        with suppress(BrokenPipeError):  # it has died, and `ended` will say so
            os.write(input, settings.model_dump_json().encode() + b"\n")  # a pipe has room for this, always
        os.close(input)

    def kill(self, number: signal.Signals) -> None:
        """Sends it a signal. By its descriptor, because its pid may belong to another process by now."""
        if not self.ended.done():
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                log.info("process has ended already", extra={"rank_pid": self.pid})

    def _read_lines(self) -> None:
        """Reads where it listens, or why it refuses: one line, written at once. All else goes to the log."""
        printed = os.read(self._output, 65536)
        if not printed:
            self._loop.remove_reader(self._output)
        for line in printed.decode(errors="replace").splitlines():
            if line.startswith('{"address"'):
                self.status = split_address(json.loads(line)["status"])
            elif line.startswith('{"refused"'):
                self.refusal = json.loads(line)["refused"]
            elif line.strip():
                log.info("rank printed", extra={"rank_pid": self.pid, "line": line})

    def _reap(self) -> None:
        left = select.poll()  # select() knows no descriptor above 1,023
        left.register(self._output)
        if left.poll(0):
            self._read_lines()  # its last words
        self._loop.remove_reader(self._output)
        self._loop.remove_reader(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._output)
        os.close(self._pidfd)
        self.ended.set_result(os.waitstatus_to_exitcode(status))
