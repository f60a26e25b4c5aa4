"""Whether another scheduler of this machine still runs, by the kernel's word, without waiting for its lease to run out.

A process binds an abstract Unix socket with its name (see unix(7)). The kernel takes the name back when the process
ends, however it ends, and not while it is frozen: to connect to a name that no process has is refused. Such names are
those of a network namespace: all processes of `orca serve` share one, and so do a pod's container and the one that
replaces it. The name says which namespace it is of, so nothing is said of a process elsewhere: there its lease decides.
"""

import hashlib
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Self

BOOT = Path("/proc/sys/kernel/random/boot_id")  # of this kernel's run
NAMESPACE = Path("/proc/self/ns/net")  # its inode is that of one namespace of a kernel
PLACE = 8  # hex digits


class Presence:
    """This process among the schedulers, from now until `close` or its end. name: no other process has it."""

    def __init__(self) -> None:
        place = _place()
        self.name = f"{socket.gethostname()}-{place or secrets.token_hex(PLACE // 2)}{secrets.token_hex(4)}"
        self._place = place
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if place is not None:
            self._socket.bind(_address(self.name))

    def ended(self, name: str) -> bool:
        """Whether the scheduler of this name has ended for sure. False where this cannot be known from here."""
        if self._place is None or name.rpartition("-")[2][:PLACE] != self._place:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking, suppress(OSError):
            try:
                asking.connect(_address(name))
            except ConnectionRefusedError:
                return True
        return False

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _address(name: str) -> str:
    return f"\0orca-scheduler/{name}"


def _place() -> str | None:
    """Names this process's network namespace. None: the system does not show it."""
    try:
        told = f"{BOOT.read_text()}{os.stat(NAMESPACE).st_ino}"
    except OSError:
        return None
    return hashlib.sha256(told.encode()).hexdigest()[:PLACE]
