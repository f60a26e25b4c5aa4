"""A worker's pod of the stack: a supervisor that is forked instead of started."""

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path

from orca_worker.processes.forks import Forked, ForkedProcess, Forks

from .child import Child


class PodProcess(ForkedProcess):
    """A process of the fork server's which becomes a supervisor, with what asyncio's processes have."""

    def __init__(self, forked: Forked, environment: Mapping[str, str]) -> None:
        """environment: of its settings, besides this process's own."""
        super().__init__(forked, environment)
        self.stdout = asyncio.StreamReader()
        self.ended.add_done_callback(lambda ended: self.stdout.feed_eof())

    @property
    def returncode(self) -> int | None:
        return self.ended.result() if self.ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _printed(self, line: str) -> None:
        self.stdout.feed_data(line.encode() + b"\n")


class Pod(Child):
    """A worker's pod: its supervisor, below which are its fork server and its ranks."""

    def __init__(self, name: str, address: str, forks: Forks, environment: Mapping[str, str], log: Path) -> None:
        """address: where it will listen. Schedulers know the address before."""
        super().__init__("supervisor", name, (), environment, log)
        self.addresses = {"address": address}
        self._forks = forks

    async def _make(self, log: int) -> PodProcess:
        forked = await self._forks.fork(lambda why: None, log)  # the stack itself reports the fork server's ends
        return PodProcess(forked, self._environment)
