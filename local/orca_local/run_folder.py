"""Run folders: where a run of `orca serve` leaves its logs, journals, `processes.json` and the pool's file.

Prompts are in the pool's file, so only their owner may read what is in a run folder.
"""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from orca_common.errors import FailedPrecondition

KEPT = 10  # runs, the present one included
LOCK = "lock"


class RunFolder:
    """A folder that one run holds, until `close`. Its Redis holds it too: see `descriptor`."""

    def __init__(self, path: Path) -> None:
        """Makes the folder, unless it is there. Raises FailedPrecondition when another run has it, or it cannot be."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            (path / "logs").mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FailedPrecondition(f"run_dir: {path} cannot be made ({error.strerror})") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise FailedPrecondition(f"run_dir: {path} belongs to another `orca serve`, which still runs") from None

    @property
    def descriptor(self) -> int:
        """The descriptor of the lock, for a child that writes here: it holds the folder until it has ended, too."""
        return self._lock

    def log(self, name: str) -> Path:
        """The log of a process."""
        return self.path / "logs" / f"{name}.log"

    def close(self) -> None:
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_log(path: Path) -> int:
    """A descriptor that appends to a log, which is its owner's alone. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def new_run(runs: Path) -> Path:
    """A folder for a new run among the others, which is named after the time. Removes all but the last runs."""
    moment = time.strftime("%Y-%m-%dT%H-%M-%S")
    for number in range(1, 1000):
        path = runs / (moment if number == 1 else f"{moment}.{number}")
        try:
            path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise FailedPrecondition(
                f"run_dir: {path} cannot be made ({error.strerror}); --run-dir names another"
            ) from None
        for old in all_runs(runs)[:-KEPT]:
            _remove(old)
        return path
    raise FailedPrecondition(f"run_dir: {runs} holds 1000 runs of this second")


def unwritable(path: Path) -> str | None:
    """Returns why a folder cannot be written to, such as a full disk; None when it can."""
    try:
        with tempfile.TemporaryFile(dir=path, buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        return error.strerror
    return None


def runs_now(path: Path) -> bool:
    """Whether a run holds the folder."""
    try:
        with open(path / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it holds no lock: no run got so far
        return False
    return False


def all_runs(runs: Path) -> list[Path]:
    """The runs in a folder, the oldest first."""
    return sorted((path for path in runs.glob("*") if path.is_dir()), key=lambda path: path.stat().st_mtime_ns)


def _remove(path: Path) -> None:
    """Removes a run that has ended."""
    with suppress(FailedPrecondition), RunFolder(path):
        shutil.rmtree(path, ignore_errors=True)
