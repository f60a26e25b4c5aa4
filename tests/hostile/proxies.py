"""Proxies in front of a gRPC door, with the files that `examples/proxy` has for operators."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from orca_local.embedded_pool import keep_port

EXAMPLES = Path(__file__).parents[2] / "examples" / "proxy"
DOOR, FRONT, MIDDLE = "127.0.0.1:50051", "127.0.0.1:50050", "/run/orca-proxy.sock"  # as the files have them
MODULE = Path("/usr/lib/nginx/modules/ngx_stream_module.so")


def command(kind: str, file: Path) -> list[str]:
    """How a proxy is started in the foreground."""
    if kind == "nginx":
        return ["nginx", "-p", str(file.parent), "-e", "stderr", "-c", str(file), "-g", "daemon off;"]
    return ["haproxy", "-db", "-q", "-f", str(file)]


PROXIES = {"nginx": EXAMPLES / "nginx.conf", "haproxy": EXAMPLES / "haproxy.cfg"}


def installed(kind: str) -> bool:
    """Whether the machine has this proxy."""
    return shutil.which(kind) is not None and (kind != "nginx" or MODULE.exists())


@asynccontextmanager
async def proxy(kind: str, door: str, changes: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """A proxy in front of a door's address. Gives its own address, on which it listens already.

    changes: texts of its file that are replaced by others.
    """
    with keep_port() as kept, TemporaryDirectory() as folder:
        front = f"127.0.0.1:{kept.getsockname()[1]}"
        Path(folder).chmod(0o755)  # nginx, when root starts it, works as another user
        file = Path(folder) / PROXIES[kind].name
        text = PROXIES[kind].read_text()
        for old, new in {DOOR: door, FRONT: front, MIDDLE: f"{folder}/middle.sock", **(changes or {})}.items():
            assert old in text or old == MIDDLE
            text = text.replace(old, new)
        file.write_text(text)
        child = await asyncio.create_subprocess_exec(*command(kind, file), stderr=asyncio.subprocess.DEVNULL)
        try:
            await reachable(front, child)
            yield front
        finally:
            with suppress(ProcessLookupError):
                child.terminate()
            await child.wait()


async def reachable(address: str, child: asyncio.subprocess.Process) -> None:
    """Waits until a process listens."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(60):
        while child.returncode is None:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                return
            await asyncio.sleep(0.02)
    raise RuntimeError(f"the proxy ended with {child.returncode}")
