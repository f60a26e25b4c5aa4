"""Redis with a replica, watched by Sentinels: the servers are processes on free ports of this machine."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from redis import ConnectionError, Redis

from orca_local import embedded_pool

SERVICE = "orca"
SENTINELS, QUORUM = 3, 2
# Seconds. Sentinel asks as often, and each second at least. With less, a busy machine makes it replace a primary that
# is well, even by a server that was just started again with old data.
DOWN_AFTER = 2.0


class Server:
    """A server that can be killed, and started again at its port with its file."""

    def __init__(self, folder: Path) -> None:
        self._kept = embedded_pool.keep_port()  # while the server is away, too
        self.port: int = self._kept.getsockname()[1]
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def as_replica(self) -> tuple[str, str]:
        """The options of a replica of this one."""
        return "--replicaof", f"127.0.0.1 {self.port}"

    def start(self, *options: str) -> None:
        """options: besides those of the embedded server. Returns when it answers."""
        command = [*embedded_pool.command(self._folder, self.port), *options]
        self._child = _listening(command, self.port, self._folder / "log")

    def send_signal(self, number: int) -> None:
        if self._child is not None:
            self._child.send_signal(number)

    def kill(self) -> None:
        """Ends it by SIGKILL."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def close(self) -> None:
        """Ends it for good, and gives its port back."""
        self._kept.close()
        self.kill()

    def replication(self) -> dict[str, Any]:
        """What it says of its role, and of how far it has come."""
        with Redis(port=self.port, socket_timeout=5) as asked:
            return asked.info("replication")


@contextmanager
def server(folder: Path, *options: str) -> Iterator[Server]:
    """A server with more options than the embedded one has, until the block ends."""
    made = Server(folder)
    try:
        made.start(*options)
        yield made
    finally:
        made.close()


@contextmanager
def sentinel(folder: Path, primary: int, quorum: int = 1, down_after: float = DOWN_AFTER) -> Iterator[int]:
    """A Sentinel that finds the primary down after so many seconds. Its port."""
    kept = embedded_pool.keep_port()
    port = kept.getsockname()[1]
    folder.mkdir()
    (folder / "sentinel.conf").write_text(
        f"port {port}\nbind 127.0.0.1 -::1\nsentinel monitor {SERVICE} 127.0.0.1 {primary} {quorum}\n"
        f"sentinel down-after-milliseconds {SERVICE} {down_after * 1000:.0f}\n"
        f"sentinel failover-timeout {SERVICE} 2000\n"
    )
    command = [str(embedded_pool.binary()), str(folder / "sentinel.conf"), "--sentinel"]
    with kept:
        child = _listening(command, port, folder / "log")
    try:
        yield port
    finally:
        child.kill()
        child.wait()


class Replicated:
    """A primary, its replica, and the Sentinels that change their parts."""

    def __init__(self, folder: Path, servers: ExitStack) -> None:
        """servers: ends them all."""
        self.primary = servers.enter_context(server(folder / "redis-0"))
        self.replica = servers.enter_context(server(folder / "redis-1", *self.primary.as_replica))
        self._sentinels = [
            servers.enter_context(sentinel(folder / f"sentinel-{n}", self.primary.port, QUORUM))
            for n in range(SENTINELS)
        ]
        told = ",".join(f"127.0.0.1:{port}" for port in self._sentinels)
        self.url = f"redis+sentinel://{told}/{SERVICE}/0"

    def part_replica(self) -> None:
        """From now on the replica gets no writes: it stands still, and its connection is closed."""
        self.replica.send_signal(signal.SIGSTOP)
        with Redis(port=self.primary.port, socket_timeout=5) as asked:
            asked.client_kill_filter(_type="replica")

    def kill_primary(self) -> int:
        """Kills it, and lets the replica go on. Returns how many bytes of writes the replica lacks, at least."""
        written = self.primary.replication()["master_repl_offset"]
        self.primary.kill()
        self.replica.send_signal(signal.SIGCONT)
        return max(0, written - self.replica.replication()["slave_repl_offset"])

    def taken_over(self) -> bool:
        """Whether every Sentinel names the replica, and it takes writes."""
        return set(self._named()) == {self.replica.port} and self.replica.replication()["role"] == "master"

    def rejoin(self) -> None:
        """Starts the server that was killed, as the replica of the other one."""
        self.primary.start(*self.replica.as_replica)

    def whole(self) -> bool:
        """Whether one of the two follows the other, and every Sentinel would make it the primary. Notes which does."""
        named = set(self._named())
        if self.primary.port not in named:
            self.primary, self.replica = self.replica, self.primary
        try:
            link = self.replica.replication().get("master_link_status")
        except ConnectionError:
            return False
        return named == {self.primary.port} and link == "up" and all(self._would(port) for port in self._sentinels)

    def _would(self, sentinel: int) -> bool:
        with Redis(port=sentinel, socket_timeout=5, decode_responses=True) as asked:
            known = asked.sentinel_slaves(SERVICE)
            others = cast(list[Any], asked.sentinel_sentinels(SERVICE))
        well = [one for one in known if one["port"] == self.replica.port and one["flags"] == "slave"]
        return bool(well) and well[0]["master-link-status"] == "ok" and len(others) == SENTINELS - 1

    def _named(self) -> Iterator[int]:
        for port in self._sentinels:
            with Redis(port=port, socket_timeout=5) as asked:
                yield cast(Any, asked.sentinel_get_master_addr_by_name(SERVICE))[1]


def _listening(command: list[str], port: int, log: Path) -> "subprocess.Popen[bytes]":
    """Starts a server. Returns when it answers."""
    with log.open("ab") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    while not embedded_pool.answers(port):
        assert child.poll() is None, log.read_text()
    return child
