"""A real Redis for tests of the request pool, with its append-only file in a temporary folder in memory.

Each answer waits for that file, and a disk that others use stops at times: for longer than a test's pool waits.
"""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from orca_local import embedded_pool

# The servers that the pool must work with: the embedded Valkey, and Redis 7.0 where it is installed.
KINDS = ["valkey", *(["redis"] if shutil.which("redis-server") else [])]


class RedisServer:
    """A server that a test can freeze, kill, and start again on the same port with the same file."""

    def __init__(self, folder: Path, kind: str = "valkey") -> None:
        self._binary = Path(shutil.which("redis-server") or "redis-server") if kind == "redis" else None
        self._folder = folder
        self._kept = embedded_pool.keep_port()  # while the server is away, too
        self.port: int = self._kept.getsockname()[1]
        self._child, self.url = embedded_pool.start(folder, self.port, self._binary)

    @property
    def pid(self) -> int:
        return self._child.pid

    def freeze(self) -> None:
        self._child.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._child.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the server by SIGKILL. What it has acknowledged must be in the file."""
        self._child.kill()
        self._child.wait()

    def restart(self) -> None:
        self.kill()
        self._child, _ = embedded_pool.start(self._folder, self.port, self._binary)

    def stop(self) -> None:
        """Ends the server, and gives its port back."""
        self._kept.close()
        if self._child.poll() is None:
            self.thaw()
            self._child.terminate()
            try:
                self._child.wait(5)
            except subprocess.TimeoutExpired:
                self.kill()


@contextmanager
def redis_server(kind: str = "valkey") -> Iterator[RedisServer]:
    """A server of one of KINDS, for the time of a test."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(prefix="orca-redis-", dir=memory) as folder:
        server = RedisServer(Path(folder), kind)
        try:
            yield server
        finally:
            server.stop()
