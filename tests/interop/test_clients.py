"""grpc-go, @grpc/grpc-js and grpc-java run the cases of gRPC's interop test descriptions that apply to orca.v1."""

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hostile.proxies import PROXIES, installed, proxy
from interop.conftest import Door
from interop.engine import played
from interop.programs import build, run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STATUSES = {
    "compressed": "UNIMPLEMENTED",  # of a request that is compressed with gzip: the door takes identity alone
    "beyond": "RESOURCE_EXHAUSTED",  # of a request that is larger than the limit of a message
}
CASES = {  # every program runs these
    "empty_unary",
    "large_unary",
    "large_unary_beyond_the_limit",
    "client_compressed_unary",
    "server_streaming",
    "ping_pong",
    "empty_stream",
    "custom_metadata",
    "status_code_and_message",
    "special_status_message",
    "unimplemented_method",
    "unimplemented_service",
    "cancel_after_begin",
    "cancel_after_first_response",
    "timeout_on_sleeping_server",
    "concurrent_streams",
}
PINGS = {"pings"}  # not in Java: grpc-java pings every 10 s at most

Program = Callable[[Sequence[str]], Sequence[str | Path]]  # its command, from the arguments

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # the first build on a machine takes minutes
needs_go = pytest.mark.skipif(shutil.which("go") is None, reason="go is not installed")


async def passes(program: Program, folder: Path, door: Door, cases: set[str], address: str = "") -> None:
    """Runs a program against a door, or another address before it: every case is ok, and no call is left open."""
    transport = ["-tls", str(door.certificates)] if door.certificates else []
    statuses = [word for name, status in STATUSES.items() for word in (f"-{name}", status)]
    async with played(door.orca):
        command = program([*transport, *statuses, address or door.address])
        status, printed = await run(command, folder, 150)
        assert status == 0, printed
        assert set(re.findall(r"^ok (\w+)$", printed, re.MULTILINE)) == cases
        await door.orca.serving.quiet()


async def go_program(folder: Path) -> Program:
    """Builds the program in Go into a folder."""
    await build(["go", "build", "-o", folder / "client", "."], HERE / "go")
    return lambda words: [folder / "client", *words]


@needs_go
async def test_go(door: Door, tmp_path: Path) -> None:
    await passes(await go_program(tmp_path), tmp_path, door, CASES | PINGS)


@needs_go
@pytest.mark.parametrize("kind", sorted(PROXIES))
@pytest.mark.parametrize("door", ["plaintext"], indirect=True)
async def test_go_through_a_proxy(door: Door, tmp_path: Path, kind: str) -> None:
    """Runs the program in Go through a proxy with its file of examples/proxy."""
    if not installed(kind):
        pytest.skip(f"{kind} is not installed")
    program = await go_program(tmp_path)
    async with proxy(kind, door.address) as address:
        await passes(program, tmp_path, door, CASES | PINGS, address)


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
async def test_node(door: Door, tmp_path: Path) -> None:
    """Runs a copy of the program, which has its packages beside it and reads the contract of this checkout: 22 s."""
    folder = tmp_path / "tests/interop/node"
    shutil.copytree(HERE / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    await build(["npm", "ci", "--no-audit", "--no-fund", "--prefer-offline"], folder)
    await passes(lambda words: ["node", "client.js", *words], folder, door, CASES | PINGS)


@pytest.mark.skipif(shutil.which("mvn") is None, reason="mvn is not installed")
async def test_java(door: Door, tmp_path: Path) -> None:
    """Maven generates the classes, compiles and runs them: some 10 s of CPU."""
    maven = ["mvn", "-q", "-B", f"-Dtarget={tmp_path / 'target'}"]
    await build([*maven, "compile"], HERE / "java")
    await passes(lambda words: [*maven, "exec:java", f"-Dexec.args={' '.join(words)}"], HERE / "java", door, CASES)
