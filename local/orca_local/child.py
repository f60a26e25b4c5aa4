"""A process of the stack: how it is started, where it listens, how it ends."""

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orca_common.address import split_address
from orca_common.errors import FailedPrecondition
from orca_common.settings import child_environment, variable

from . import embedded_pool

LONGEST_SOCKET_PATH = 107  # bytes, on Linux
START_SECONDS = 120.0  # bound until a process listens; importing torch from a cold disk takes its time


class Child:
    """A service of the stack. When it has died it can be started again, and then listens where it did before."""

    def __init__(self, role: str, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.role, self.name = role, name
        self.addresses: dict[str, str] = {}  # by port's name, as the service printed them when it listened
        self._command, self._environment, self._log = command, dict(environment), log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    @property
    def address(self) -> str:
        """Where others reach it: its gRPC port, or its status port when it has no other."""
        return self.addresses.get("grpc") or self.addresses.get("address") or self.addresses["status"]

    async def start(self) -> None:
        """Starts the process and waits until it listens. Raises FailedPrecondition with the end of its log."""
        self._process = await self._spawn(asyncio.subprocess.PIPE)
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), START_SECONDS)
        except TimeoutError:
            line = b""
        if not line:
            raise FailedPrecondition(f"{self.name} did not start: {self.last_words()}")
        self.addresses = json.loads(line)
        for name, setting in (("grpc", "port"), ("http", "http_port"), ("address", "port")):
            if name in self.addresses:
                self._environment[variable(setting)] = str(split_address(self.addresses[name])[1])

    async def _spawn(self, stdout: int | None) -> asyncio.subprocess.Process:
        """Starts the process below a tether, with its log as standard error and, without `stdout`, as output too."""
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "orca_local.tether", str(os.getpid()), *self._command),
                env=child_environment(self._environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log if stdout is None else stdout,
                stderr=log,
                start_new_session=True,  # Ctrl-C at the terminal reaches only the parent, which ends all in order
            )

    async def ended(self) -> str:
        """Waits for the end of the process, which was started before. Returns what happened, for a reader."""
        assert self._process is not None
        return f"{self.name} (pid {self._process.pid}) ended with {await self._process.wait()}"

    async def end(self, seconds: float) -> bool:
        """Drains the process; after `seconds` it is killed. Returns whether it ended by itself."""
        if self._process is None or self._process.returncode is not None:
            return True
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            return False
        return True

    def last_words(self) -> str:
        """The end of the log: usually the reason why the process ended."""
        return " ".join(self._log.read_text(errors="replace").splitlines()[-3:]) or "its log is empty"

    def unready(self) -> str | None:
        """Asks the status port why the service is not ready. None: it is ready. Blocks for at most 5 s."""
        try:
            return self._status()["reason"]
        except OSError as error:
            return str(error)

    def engines(self) -> dict[str, str | None]:
        """Asks a scheduler for its engines: why each serves nothing, None: it runs. Blocks for at most 5 s."""
        try:
            return self._status()["engines"]
        except OSError:
            return {}

    def _status(self) -> dict[str, Any]:
        """What the status port tells. Raises OSError when it cannot be reached."""
        try:
            with urllib.request.urlopen(f"http://{self.addresses['status']}/readyz", timeout=5) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:  # it is not ready
            return json.load(error)


class RedisChild(Child):
    """The embedded Redis of the stack. `url` is where its clients find it."""

    def __init__(self, folder: Path, log: Path, closed: bool) -> None:
        """closed: it listens on a Unix socket in its folder, which only this user may open, and on no port: it has no
        TLS. Raises FailedPrecondition when the socket's path is too long for the system."""
        self._where: int | Path = folder.absolute() / "socket" if closed else embedded_pool.free_port()
        if closed and len(os.fsencode(str(self._where))) > LONGEST_SOCKET_PATH:
            raise FailedPrecondition(f"run_dir: {folder} is too long a path for a Unix socket; give a shorter one")
        super().__init__("redis", "redis", embedded_pool.command(folder, self._where), {}, log)
        address = f"unix://{self._where}" if closed else f"127.0.0.1:{self._where}"
        self.addresses = {"address": address}
        self.url = address if closed else f"redis://{address}/0"

    async def start(self) -> None:
        """Starts the server and waits until it has read its file and answers."""
        self._process = await self._spawn(None)
        try:
            async with asyncio.timeout(START_SECONDS):
                while self.pid is not None and not await asyncio.to_thread(embedded_pool.answers, self._where):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pass
        else:
            if self.pid is not None:
                return
        raise FailedPrecondition(f"redis did not start: {self.last_words()}")
