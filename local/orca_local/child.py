"""A process of the stack: how it is started, where it listens, how it ends."""

import asyncio
import hashlib
import json
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from orca_common.environment import child_environment
from orca_common.errors import FailedPrecondition

from . import embedded_pool, status_port
from .redis_log import copy_lines
from .run_folder import open_log

MODULE = (sys.executable, "-P", "-m")  # -P: a redis.py in the current folder is not imported
# Without the paths of packages Python starts sooner. All streams wait for a Redis that is started again.
TETHER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("tether.py")))
LONGEST_SOCKET_PATH = 107  # bytes, on Linux
START_SECONDS = 120.0  # bound until a process listens; importing from a cold disk takes its time


class Process(Protocol):
    """The process that a parent holds, with the names of asyncio's."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def stdout(self) -> asyncio.StreamReader | None: ...
    async def wait(self) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Child:
    """A service of the stack. When it has died it can be started again, as it was."""

    def __init__(
        self,
        role: str,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        inherits: Sequence[int] = (),
        batch: bool = False,
    ) -> None:
        """command: without Python's own, if it is a module. inherits: descriptors that the process keeps open. batch:
        it takes no core from a process that computes."""
        self.role, self.name = role, name
        self.addresses: dict[str, str] = {}  # by port's name, as the service printed them when it listened
        self._command, self._environment, self._log = command, dict(environment), log
        self._inherits, self._batch = inherits, batch
        self._starts = 0
        self._began = 0  # where in the log the present process began
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """The process's id; None while it does not run."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    @property
    def restarts(self) -> int:
        return max(self._starts - 1, 0)

    @property
    def address(self) -> str:
        """Where others reach it: its gRPC port, or its status port when it has no other."""
        return self.addresses.get("grpc") or self.addresses.get("address") or self.addresses["status"]

    @property
    def status(self) -> str | None:
        """The address of its status port."""
        return self.addresses.get("status")

    @property
    def where(self) -> str:
        """Where it listens, for a reader."""
        also = f", status {self.status}" if self.status not in (None, self.address) else ""
        return f"{self.name} at {self.address}{also} (pid {self.pid})"

    async def start(self) -> None:
        """Starts the process and waits until it listens. Raises FailedPrecondition with the end of its log."""
        self._process = await self._spawn()
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await self._process.stdout.readline()
        except TimeoutError:
            self.kill()
            raise FailedPrecondition(f"{self.name} did not listen within {START_SECONDS:g} s") from None
        if not line:
            await self._process.wait()
            raise FailedPrecondition(f"{self.name} did not start: {self.last_words()}")
        self.addresses = json.loads(line)

    async def _spawn(self) -> Process:
        """Starts the process with its log as standard error."""
        try:
            log = open_log(self._log)
        except OSError as error:
            raise FailedPrecondition(f"{self.name} did not start: {self._log}: {error.strerror}") from None
        try:
            self._began = os.fstat(log).st_size
            process = await self._make(log)
        finally:
            os.close(log)
        if self._batch and hasattr(os, "SCHED_BATCH"):
            with suppress(OSError):  # it has ended, or this is not allowed here
                os.sched_setscheduler(process.pid, os.SCHED_BATCH, os.sched_param(0))
        self._starts += 1
        return process

    async def _make(self, log: int) -> Process:
        """Makes the process, below a tether. log: a descriptor, for its standard error."""
        return await asyncio.create_subprocess_exec(
            *(*TETHER, str(os.getpid()), *self._command),
            pass_fds=self._inherits,
            env=child_environment(self._environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C at the terminal reaches only the parent, which ends all in order
        )

    async def ended(self) -> str:
        """Waits for the end of the process, which was started before. Returns what happened, for a reader."""
        assert self._process is not None
        return f"{self.name} (pid {self._process.pid}) {how_ended(await self._process.wait())}"

    async def lives(self, seconds: float) -> bool:
        """Whether the process, which was started before, is still there after some seconds."""
        assert self._process is not None
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            return True
        return False

    async def end(self, seconds: float) -> bool:
        """Drains the process; after `seconds` it is killed. Returns whether it ended by itself."""
        if self._process is None or self._process.returncode is not None:
            return True
        with suppress(ProcessLookupError):  # it ends at this moment
            self._process.terminate()
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            return False
        return True

    def kill(self) -> None:
        """Ends the process at once."""
        if self.pid is not None:
            with suppress(ProcessLookupError):  # it ends at this moment
                os.kill(self.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The last line in the log of the process that was started last: usually the reason why it ended."""
        try:
            lines = self._log_lines()
        except OSError as error:
            return f"{self._log}: {error.strerror}"
        line = next((line for line in reversed(lines) if line.strip()), "its log says nothing, or the disk is full")
        return said(line).removeprefix(f"orca-{self.role}: ")

    def logged(self, event: str) -> dict[str, Any] | None:
        """Returns the last line with an event in the log of the last process; None without such a line."""
        with suppress(OSError):
            for line in reversed(self._log_lines()):
                if f'"event": "{event}"' in line:
                    return json.loads(line)
        return None

    def _log_lines(self) -> list[str]:
        """The log of the process that was started last. Raises OSError."""
        with self._log.open("rb") as log:
            log.seek(self._began if os.fstat(log.fileno()).st_size >= self._began else 0)  # it was rotated since
            return log.read().decode(errors="replace").split("\n")

    # -- asking its status port. Each question blocks for at most 5 s

    def unready(self) -> str | None:
        """Asks the status port why the service is not ready. None: it is ready."""
        try:
            return self._status()["reason"]
        except OSError as error:
            return f"{self.name}: {error}"

    def engines(self) -> dict[str, str | None]:
        """Asks a scheduler for its engines: why each serves nothing, None: it runs."""
        return self._field("engines") or {}

    def calls(self) -> int:
        """Asks an endpoint how many calls are open; 0 without an answer."""
        return int(self._field("calls") or 0)

    def starting(self) -> str | None:
        """Asks a supervisor what its ranks still do before they can form an engine."""
        return self._field("starting")

    def fork_server(self) -> int | None:
        """Asks a supervisor for the process that forks its ranks; None where none runs."""
        return self._field("fork_server")

    def refused(self) -> str | None:
        """Asks why this process or its part of the engines cannot work, ever."""
        refused = self._field("refused") if self.status is not None else None
        if isinstance(refused, dict):
            return next((f"{engine} cannot form: {why}" for engine, why in refused.items()), None)
        return refused

    def _field(self, name: str) -> Any:
        """A field of the status port's answer; None without it, or without an answer."""
        try:
            return self._status().get(name)
        except OSError:
            return None

    def _status(self) -> dict[str, Any]:
        """Returns the answer of the status port. Raises OSError when it cannot be reached."""
        return status_port.ask(self.addresses["status"])


def how_ended(code: int) -> str:
    """Describes an end by its exit status, or by minus the number of a signal."""
    return f"ended with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def said(line: str) -> str:
    """A line of a log as a reader wants it: of a line of JSON, what happened and why."""
    try:
        event = json.loads(line)
        return f"{event['event']}: {event['why']}" if event.get("why") else str(event["event"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return line.strip()


def place_of_socket(folder: Path) -> Path:
    """The path of a Unix socket in a folder or, where that is too long for the system, in one of this user's own in the
    folder for temporary files. Raises FailedPrecondition where another user has that, or it is too long itself."""
    if _fits(folder / "socket"):
        return folder / "socket"
    name = hashlib.sha256(os.fsencode(str(folder))).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"orca-{os.getuid()}-{name}"
    if not _fits(short / "socket"):
        raise FailedPrecondition(f"run_dir: {folder} is too long for a Unix socket, and so is {short}, by TMPDIR")
    short.mkdir(mode=0o700, exist_ok=True)
    found = short.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        raise FailedPrecondition(f"run_dir: {folder} is too long for a Unix socket, and {short} is another user's")
    return short / "socket"


def _fits(path: Path) -> bool:
    """Whether the system takes the path of a Unix socket."""
    return len(os.fsencode(str(path))) <= LONGEST_SOCKET_PATH


class RedisChild(Child):
    """The embedded Redis of the stack. `url` is where its clients find it.

    It has neither TLS nor a password, so it listens on a Unix socket in its folder alone, which only this user may
    open.
    """

    def __init__(self, folder: Path, log: Path, lock: int, batch: bool) -> None:
        """folder: of its append-only file. lock: the descriptor that says that the folder is in use. batch: as for
        every child. Raises FailedPrecondition where there is no place for the socket."""
        self._where = place_of_socket(folder.absolute())
        super().__init__("redis", "redis", embedded_pool.command(folder, self._where), {}, log, [lock], batch)
        self.addresses = {"address": f"unix://{self._where}"}
        self.url = f"unix://{quote(str(self._where))}"

    async def start(self) -> None:
        """Starts the server and waits until it has read its file and answers."""
        self._process = await self._spawn()
        assert self._process.stdout is not None
        self._lines = asyncio.create_task(copy_lines(self._process.stdout, self._log))
        try:
            async with asyncio.timeout(START_SECONDS):
                while self.pid is not None and not await asyncio.to_thread(embedded_pool.answers, self._where):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pass
        else:
            if self.pid is not None:
                return
        self.kill()
        await self._lines
        raise FailedPrecondition(f"redis did not start: {self.last_words()}")
