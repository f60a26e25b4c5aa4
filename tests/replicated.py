"""Redis with replicas, watched by Sentinels: the servers are processes on free ports of this machine."""

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from redis import ConnectionError, Redis

from orca_local import embedded_pool

SERVICE = "orca"
QUORUM = 2
EVENT = re.compile(r"\d+:X (\d+ \w+ \d+ [\d:.]+) [#*] (\+[a-z-]+) (.*)")  # a line of a Sentinel's log
# Seconds. Sentinel asks as often, and each second at least. With less, a busy machine makes it replace a primary that
# is well, even by a server that was just started again with old data.
DOWN_AFTER = 2.0
MINUTE = 60.0  # seconds for what a busy machine may delay and no test bounds
# Of the chart's servers, too: by itself a primary waits 5 s for more replicas before it gives the first one its data.
AT_ONCE = ("--repl-diskless-sync-delay", "0")


def until(condition: Callable[[], bool], seen: Callable[[], object]) -> None:
    """Waits for a condition, a minute at most. seen: what the failure shows then."""
    end = time.monotonic() + MINUTE
    while not condition():
        assert time.monotonic() < end, f"after a minute: {seen()}"
        time.sleep(0.01)


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
        command = [*embedded_pool.command(self._folder, self.port), *AT_ONCE, *options]
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

    def wait_for_primary(self) -> None:
        """Returns when this replica follows its primary. Sentinels that begin then know it at once: they look at
        replicas every ten seconds."""
        until(lambda: self.replication()["master_link_status"] == "up", self.replication)

    def replication(self) -> dict[str, Any]:
        """Returns its role, and how far it has come."""
        with Redis(port=self.port, socket_timeout=5) as asked:
            return asked.info("replication")

    def seen(self) -> dict[str, Any] | str:
        """The same, or that it is away."""
        try:
            return self.replication()
        except ConnectionError as error:
            return str(error)


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
def sentinel(
    folder: Path, primary: int, quorum: int = 1, down_after: float = DOWN_AFTER, epoch: int = 0
) -> Iterator[int]:
    """A Sentinel that finds the primary down after `down_after` seconds, and knows of `epoch` failovers. Its port."""
    kept = embedded_pool.keep_port()
    port = kept.getsockname()[1]
    folder.mkdir()
    (folder / "sentinel.conf").write_text(
        f"port {port}\nbind 127.0.0.1 -::1\nsentinel monitor {SERVICE} 127.0.0.1 {primary} {quorum}\n"
        f"sentinel down-after-milliseconds {SERVICE} {down_after * 1000:.0f}\n"
        f"sentinel failover-timeout {SERVICE} 2000\nsentinel config-epoch {SERVICE} {epoch}\n"
    )
    command = [str(embedded_pool.binary()), str(folder / "sentinel.conf"), "--sentinel"]
    with kept:
        child = _listening(command, port, folder / "log")
    try:
        yield port
    finally:
        child.kill()
        child.wait()


def would_promote(sentinel: int, *replicas: Server) -> bool:
    """Whether the Sentinel at this port would make each of the replicas the primary."""
    with Redis(port=sentinel, socket_timeout=5, decode_responses=True) as asked:
        known = {one["port"]: one for one in asked.sentinel_slaves(SERVICE)}
    said = [known.get(replica.port, {"flags": ""}) for replica in replicas]
    return all(one["flags"] == "slave" and one["master-link-status"] == "ok" for one in said)


class Replicated:
    """A primary, its replicas, and the Sentinels that change their parts."""

    def __init__(
        self, folder: Path, servers: ExitStack, replicas: int = 1, down_after: Sequence[float] = 3 * (DOWN_AFTER,)
    ) -> None:
        """servers: ends them all. down_after: seconds, of each Sentinel."""
        self.primary = servers.enter_context(server(folder / "redis-0"))
        self.replicas = [
            servers.enter_context(server(folder / f"redis-{n}", *self.primary.as_replica))
            for n in range(1, replicas + 1)
        ]
        for replica in self.replicas:
            replica.wait_for_primary()
        self._logs = [folder / f"sentinel-{n}" / "log" for n in range(len(down_after))]
        self.sentinels = [
            servers.enter_context(sentinel(log.parent, self.primary.port, QUORUM, seconds))
            for log, seconds in zip(self._logs, down_after, strict=True)
        ]
        told = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        self.url = f"redis+sentinel://{told}/{SERVICE}/0"

    def part_replica(self) -> None:
        """From now on a replica gets no writes: it stands still, and its connection is closed."""
        self.replicas[0].send_signal(signal.SIGSTOP)
        with Redis(port=self.primary.port, socket_timeout=5) as asked:
            asked.client_kill_filter(_type="replica")

    def kill_primary(self) -> int:
        """Kills it, and lets the replicas go on. Returns how many bytes of writes each of them lacks, at least."""
        written = self.primary.replication()["master_repl_offset"]
        self.primary.kill()
        self.replicas[0].send_signal(signal.SIGCONT)
        return max(0, written - max(replica.replication()["slave_repl_offset"] for replica in self.replicas))

    def taken_over(self) -> bool:
        """Whether every Sentinel names the same replica, and it takes writes."""
        named = set(self._named())
        return any(named == {r.port} and r.replication()["role"] == "master" for r in self.replicas)

    def seen(self) -> dict[str, Any]:
        """Returns the parts that servers say they have, and the port that each Sentinel names."""
        servers = {one.port: one.seen() for one in (self.primary, *self.replicas)}
        return {"servers": servers, "named": list(self._named())}

    def rejoin(self) -> None:
        """Starts the server that was killed, as a replica of the one that took over."""
        killed = self.primary
        assert self._follow()
        killed.start(*self.primary.as_replica)

    def whole(self) -> bool:
        """Whether the replicas follow the primary, and every Sentinel would make each of them the primary.

        On a busy machine Sentinels may replace a primary by themselves.
        """
        if not self._follow():
            return False
        try:
            links = {replica.replication().get("master_link_status") for replica in self.replicas}
        except ConnectionError:
            return False
        return links == {"up"} and all(self._would(port) for port in self.sentinels)

    def _follow(self) -> bool:
        """Notes which server is the primary, the one before as the first replica. False where Sentinels differ."""
        named = set(self._named())
        if len(named) == 1:
            servers = [self.primary, *self.replicas]
            self.primary = next(one for one in servers if one.port in named)
            self.replicas = [one for one in servers if one is not self.primary]
        return len(named) == 1

    def _would(self, sentinel: int) -> bool:
        with Redis(port=sentinel, socket_timeout=5, decode_responses=True) as asked:
            others = cast(list[Any], asked.sentinel_sentinels(SERVICE))
        return len(others) == len(self.sentinels) - 1 and would_promote(sentinel, *self.replicas)

    def events(self, since: float) -> dict[str, list[float]]:
        """When Sentinels logged each kind of event after a moment, in seconds after it, the earliest first.

        since: as time.time() gives it. An event of a server that is no primary is left out.
        """
        seen: dict[str, list[float]] = {}
        for found in (match for log in self._logs for match in EVENT.finditer(log.read_text())):
            moment = datetime.strptime(found[1], "%d %b %Y %H:%M:%S.%f").astimezone(UTC).timestamp() - since
            if moment >= 0 and (found[2] != "+sdown" or found[3].startswith("master ")):
                seen.setdefault(found[2], []).append(moment)
        return {kind: sorted(moments) for kind, moments in seen.items()}

    def _named(self) -> Iterator[int]:
        for port in self.sentinels:
            with Redis(port=port, socket_timeout=5) as asked:
                yield cast(Any, asked.sentinel_get_master_addr_by_name(SERVICE))[1]


def _listening(command: list[str], port: int, log: Path) -> "subprocess.Popen[bytes]":
    """Starts a server. Returns when it answers."""
    with log.open("ab") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    while not embedded_pool.answers(port):
        assert child.poll() is None, log.read_text()
    return child
