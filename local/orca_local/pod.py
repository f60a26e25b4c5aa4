"""Processes of the stack that are forked instead of started: services, and supervisors with their pods."""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orca_worker.processes.beginning import POD
from orca_worker.processes.forks import Forked, ForkedProcess, Forks

from .child import Child


class ServiceProcess(ForkedProcess):
    """A process of a fork server's which becomes a service, with what asyncio's processes have."""

    def __init__(self, forked: Forked, told: Mapping[str, Any]) -> None:
        super().__init__(forked, told)
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


class Program(NamedTuple):
    """The program of a service's process: a module's `main`, with these arguments."""

    app: str
    arguments: Sequence[str] = ()


class ForkedChild(Child):
    """A service of the stack, by a fork server that has imported what it needs."""

    def __init__(
        self,
        role: str,
        name: str,
        forks: Forks,
        environment: Mapping[str, str],
        log: Path,
        program: Program,
        batch: bool = False,
    ) -> None:
        super().__init__(role, name, (), environment, log, batch=batch)
        self._forks, self._program = forks, program

    @property
    def _first_line(self) -> Mapping[str, Any]:
        """The line of JSON that the process reads first."""
        return {"role": self.role, **self._program._asdict(), "environment": self._environment}

    async def _make(self, log: int) -> ServiceProcess:
        forked = await self._forks.fork(lambda why: None, log)  # the stack itself reports the fork server's ends
        return ServiceProcess(forked, self._first_line)


class Pod(ForkedChild):
    """A worker's pod: its supervisor, below which are its fork server and its ranks."""

    def __init__(self, name: str, address: str, forks: Forks, environment: Mapping[str, str], log: Path) -> None:
        """address: where it will listen. Schedulers know the address before."""
        super().__init__("supervisor", name, forks, environment, log, Program(POD))
        self.addresses = {"address": address}

    @property
    def _first_line(self) -> Mapping[str, Any]:
        return self._environment
