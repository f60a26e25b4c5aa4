"""Places with a network of their own on this machine: Linux network namespaces around a router, whose ways can be cut.

    redis ----+
    worker ---+-- router -- the place of the caller (the machine's own network)
    ...    ---+

A cut drops the packets of one direction in the router: nobody gets an error, connections just hear nothing. It takes
root and the program `ip`; `missing` says what is not there.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

HERE = "client"  # the place of the caller
LONGEST = 120.0  # seconds for one call of `ip`: a busy machine may stop it


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def missing() -> str | None:
    """Why there can be no places here, as a sentence; None: there can. Makes a namespace to see it."""
    if shutil.which("ip") is None:
        return "there is no program `ip` (iproute2)"
    name = f"orca-try-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "del", name)
    except OSError as error:
        return f"no network namespace can be made: {error}"
    return None


class Places:
    """Namespaces by name, each with one address."""

    def __init__(self, names: Sequence[str], number: int = 0) -> None:
        """Makes nothing yet. names: without HERE, which is always one. number: of these among this process's places."""
        self._prefix = f"oc{os.getpid() % 100000}{'abcdefghijklmnop'[number]}"  # a device's name has 15 characters
        self._net = f"10.{64 + (os.getpid() + number) % 128}"
        self._numbers = {name: n for n, name in enumerate((HERE, *names), 1)}
        self._router = f"{self._prefix}-router"
        self._made: list[str] = []

    def address(self, name: str) -> str:
        return f"{self._net}.{self._numbers[name]}.2"

    def inside(self, name: str) -> list[str]:
        """The beginning of a command that is to run in this place."""
        return ["ip", "netns", "exec", self._namespace(name)] if name != HERE else []

    def make(self) -> None:
        """Raises OSError with what `ip` says."""
        self._add(self._router)
        _run("ip", "netns", "exec", self._router, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        for name, number in self._numbers.items():
            own, routers = f"{self._prefix}p{number}", f"{self._prefix}r{number}"
            if name != HERE:
                self._add(self._namespace(name))
            where = ["netns", self._namespace(name)] if name != HERE else []
            _run("ip", "link", "add", routers, "netns", self._router, "type", "veth", "peer", "name", own, *where)
            self._up(self._router, routers, f"{self._net}.{number}.1/24")
            self._up(None if name == HERE else self._namespace(name), own, f"{self.address(name)}/24")
            way = f"{self._net}.0.0/16" if name == HERE else "default"
            ip = ["ip"] if name == HERE else ["ip", "-n", self._namespace(name)]
            _run(*ip, "route", "add", way, "via", f"{self._net}.{number}.1")

    def remove(self) -> None:
        """The links end with their namespaces."""
        for namespace in self._made:
            _run("ip", "netns", "del", namespace)
        self._made.clear()

    def cut(self, source: str, destination: str) -> None:
        """Drops what `source` sends to `destination`."""
        _run("ip", "-n", self._router, "rule", "add", *self._way(source, destination))

    def mend(self, source: str, destination: str) -> None:
        _run("ip", "-n", self._router, "rule", "del", *self._way(source, destination))

    def _way(self, source: str, destination: str) -> list[str]:
        return ["from", self.address(source), "to", self.address(destination), "blackhole"]

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _add(self, namespace: str) -> None:
        _run("ip", "netns", "add", namespace)
        self._made.append(namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")

    def _up(self, namespace: str | None, device: str, address: str) -> None:
        ip = ["ip"] if namespace is None else ["ip", "-n", namespace]
        _run(*ip, "address", "add", address, "dev", device)
        _run(*ip, "link", "set", device, "up")


@contextmanager
def places(names: Sequence[str], number: int = 0) -> Iterator[Places]:
    """The places, for as long as the block runs. number: as in Places."""
    made = Places(names, number)
    try:
        made.make()
        yield made
    finally:
        made.remove()
