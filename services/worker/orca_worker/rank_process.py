"""A rank's process, as the supervisor sees it: started, told which rank it is, ended."""

import asyncio
import json
import logging
import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from orca_common.address import split_address

from .settings import RankSettings

log = logging.getLogger(__name__)


class RankProcess:
    """A process that is or will be a rank: one that has been begun, and is told its settings now."""

    def __init__(
        self, begun: subprocess.Popen[bytes], settings: RankSettings, on_listening: Callable[[], None]
    ) -> None:
        """settings: of all ranks of the pod. on_listening: called when it listens."""
        self._on_listening = on_listening
        self._loop = asyncio.get_running_loop()
        self._popen = begun
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._input, self._output = self._popen.stdin, self._popen.stdout
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._output.fileno(), self._read_lines)
        self._loop.add_reader(self._pidfd, self._reap)
        self.pid = self._popen.pid
        self.status: tuple[str, int] | None = None  # where its status port is, once it listens
        self.refusal = ""  # why it cannot work with its settings
        self.ended: asyncio.Future[int] = self._loop.create_future()  # its exit status, or minus a signal's number
        self._say(settings.model_dump(mode="json"))

    def tell(self, number: int, port: int) -> None:
        """Tells it, once, which rank it is."""
        if self.ended.done():
            return  # whoever waits for `ended` is about to hear of it
        self._say({"local_rank": number, "port": port})
        self._input.close()

    def _say(self, told: Mapping[str, Any]) -> None:
        """Writes a line. Never blocks: the pipe has room for both lines of a process's life even if it is frozen."""
        with suppress(BrokenPipeError):  # it has died, and `ended` will say so
            self._input.write(json.dumps(told).encode() + b"\n")

    def kill(self, number: signal.Signals) -> None:
        """Sends it a signal. By its descriptor, because its pid may belong to another process by now."""
        if not self.ended.done():
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                log.info("process has ended already", extra={"rank_pid": self.pid})

    def _read_lines(self) -> None:
        """Reads where it listens, or why it refuses: one line, written at once. All else goes to the log."""
        printed = os.read(self._output.fileno(), 65536)
        if not printed:
            self._loop.remove_reader(self._output.fileno())
        for line in printed.decode(errors="replace").splitlines():
            if line.startswith('{"address"'):
                self.status = split_address(json.loads(line)["status"])
                self._on_listening()
            elif line.startswith('{"refused"'):
                self.refusal = json.loads(line)["refused"]
            elif line.strip():
                log.info("rank printed", extra={"rank_pid": self.pid, "line": line})

    def _reap(self) -> None:
        left = select.poll()  # select() knows no descriptor above 1,023
        left.register(self._output)
        if left.poll(0):
            self._read_lines()  # its last words
        self._loop.remove_reader(self._output.fileno())
        self._loop.remove_reader(self._pidfd)
        code = self._popen.wait()
        self._input.close()
        self._output.close()
        os.close(self._pidfd)
        self.ended.set_result(code)
