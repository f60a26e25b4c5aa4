"""Processes that a test did not start itself: of containers, where this machine is their node and can see them, and
orphans."""

from collections.abc import Iterator
from pathlib import Path

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Also where the machine's first process, which orphans get, has not looked yet: that is not ours to wait for."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def named(name: str) -> list[int]:
    """The processes with this name."""
    return [pid for pid in _all() if _read(pid, "comm").strip() == name]


def inside(container: str, number: int) -> int | None:
    """A process of a container, by its number inside it. None: it cannot be seen here."""
    for pid in _all():
        if container in _read(pid, "cgroup"):
            numbers = next((x for x in _read(pid, "status").splitlines() if x.startswith("NSpid:")), "")
            if numbers.split()[-1:] == [str(number)]:
                return pid
    return None


def _all() -> Iterator[int]:
    return (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))


def _read(pid: int, name: str) -> str:
    """ "" when the process has ended."""
    try:
        return (Path("/proc") / str(pid) / name).read_text()
    except OSError:
        return ""
