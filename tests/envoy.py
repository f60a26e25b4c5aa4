"""Envoy before several releases, by the file that `examples/proxy` has for operators."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from hostile.proxies import EXAMPLES, reachable

FILE = EXAMPLES / "models-envoy.yaml"


@asynccontextmanager
async def envoy(folder: Path, ports: Mapping[int, int]) -> AsyncIterator[str]:
    """Envoy on the loopback. Gives its address, on which it listens already. ports: of the file -> those to be used."""
    text = FILE.read_text()
    for old, new in ports.items():
        assert text.count(f"port_value: {old}}}") == 1
        text = text.replace(f"port_value: {old}}}", f"port_value: {new}}}")
    file = folder / FILE.name
    file.write_text(text)
    program = Path(sys.executable).with_name("envoy")
    with (folder / "envoy.log").open("wb") as log:
        options = ("--concurrency", "1", "--disable-hot-restart")
        child = await asyncio.create_subprocess_exec(program, "-c", file, *options, stderr=log)
    try:
        front = f"127.0.0.1:{ports[50050]}"
        await reachable(front, child)
        yield front
    finally:
        with suppress(ProcessLookupError):
            child.terminate()
        await child.wait()
