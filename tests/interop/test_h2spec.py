"""h2spec in strict mode, with the fields of a gRPC call, against the gRPC door.

h2spec sends `GET /` with no further fields, and has no option for others. The function that makes its fields is
changed before it is compiled. Its calls go to reflection, whose method answers a call without a message.

What it judges is C-core, which changes with grpcio alone: `make examples` runs it.
"""

import asyncio
import shutil
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from endpoint.harness import world
from interop.programs import build, run

from orca_common.roles import Role
from orca_local.authority import Authority

MODULE = Path(__file__).parent / "h2spec"
PACKAGE = "github.com/summerwind/h2spec"
METHOD = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
GET, POST = 'HeaderField(":method", "GET"),', 'HeaderField(":method", "POST"),'
AUTHORITY = 'HeaderField(":authority", authority),'
MORE = 'HeaderField("te", "trailers"), HeaderField("content-type", "application/grpc"),'
PARTS = [  # of the suite, side by side: most of the time they wait for a server that says nothing
    ["generic", "hpack"],
    ["http2/3", "http2/4", "http2/5.3", "http2/5.4", "http2/5.5", "http2/7", "http2/8.2"],
    ["http2/5.1"],
    ["http2/6"],
    ["http2/8.1/1", "http2/8.1.2/1", "http2/8.1.2.1", "http2/8.1.2.2", "http2/8.1.2.6"],
    ["http2/8.1.2.3"],
]
CASES = 146

# What C-core does in the cases that fail. A client that keeps to the protocol notices none of it, but where it says so.
ANSWERED = "no fault: it answers with the status at once; the case waits for DATA, and without a message there is none"
DROPPED = "drops the frame and goes on"
TAKEN = "overlooks it and answers the call"
FAILED = {
    "generic/2/2": ANSWERED,  # WINDOW_UPDATE on a half-closed stream
    "generic/2/3": ANSWERED,  # PRIORITY on a half-closed stream
    "http2/4.1/2": "closes the connection on a PING with an unknown flag; a client that sent one would lose its calls",
    "http2/4.1/3": "the same: the case's PING has an unknown flag, too",
    "http2/5.1/1": DROPPED,  # DATA on an idle stream
    "http2/5.1/2": DROPPED,  # RST_STREAM on an idle stream
    "http2/5.1/3": DROPPED,  # WINDOW_UPDATE on an idle stream
    "http2/5.1/5": TAKEN,  # DATA after END_STREAM
    "http2/5.1/6": TAKEN,  # HEADERS after END_STREAM
    "http2/5.1/8": DROPPED,  # DATA after RST_STREAM
    "http2/5.1/9": DROPPED,  # HEADERS after RST_STREAM
    "http2/5.1/11": DROPPED,  # DATA on a closed stream
    "http2/5.1/12": DROPPED,  # HEADERS on a closed stream
    "http2/5.1.1/1": "drops the call of an even stream number, which then waits until its deadline",
    "http2/5.1.1/2": "drops the call of a stream number below the last one, which then waits until its deadline",
    "http2/5.3.1/1": TAKEN,  # HEADERS that depend on themselves: C-core has no priorities
    "http2/5.3.1/2": DROPPED,  # PRIORITY that depends on itself
    "http2/5.4.1/1": "answers a PING on stream 3 like one on the connection",
    "http2/5.4.1/2": "the same",
    "http2/6.1/1": DROPPED,  # DATA on stream 0
    "http2/6.1/2": TAKEN,  # DATA after END_STREAM
    "http2/6.1/3": "ends the call alone, by RST_STREAM, when the padding is longer than the frame",
    "http2/6.2/3": DROPPED,  # HEADERS on stream 0
    "http2/6.3/1": DROPPED,  # PRIORITY on stream 0
    "http2/6.3/2": TAKEN,  # PRIORITY of 4 bytes
    "http2/6.4/1": DROPPED,  # RST_STREAM on stream 0
    "http2/6.4/2": DROPPED,  # RST_STREAM on an idle stream
    "http2/6.7/3": "answers a PING on stream 1 like one on the connection",
    "http2/6.8/1": DROPPED,  # GOAWAY on stream 1
    "http2/6.9.1/2": "lets the connection's window grow above 2^31-1",
    "http2/6.9.1/3": "lets a stream's window grow above 2^31-1",
    "http2/8.1.2/1": "ends the call INTERNAL for a name in capitals; a client sees the status in place of RST_STREAM",
    "http2/8.1.2.1/1": "ends the call INTERNAL for an unknown pseudo-header; a client sees the status, too",
    "http2/8.1.2.1/2": TAKEN,  # :status in a request
    "http2/8.1.2.1/4": TAKEN,  # a pseudo-header after another field
    "http2/8.1.2.2/1": TAKEN,  # a field `connection`
    "http2/8.1.2.2/2": "ends the call INTERNAL for another `te` than trailers; a client sees the status, too",
    "http2/8.1.2.3/1": "ends the call UNIMPLEMENTED for an empty path; a client sees the status, too",
    "http2/8.1.2.3/2": "ends the call by RST_STREAM with INTERNAL_ERROR in place of PROTOCOL_ERROR: no :method",
    "http2/8.1.2.3/3": "the same: no :scheme",
    "http2/8.1.2.3/4": "the same: no :path",
    "http2/8.1.2.3/5": TAKEN,  # :method twice; the last one counts
    "http2/8.1.2.3/6": TAKEN,  # :scheme twice
    "http2/8.1.2.3/7": TAKEN,  # :path twice
    "http2/8.1.2.6/1": TAKEN,  # a content-length that is not the body's
    "http2/8.1.2.6/2": TAKEN,
    "http2/8.2/1": DROPPED,  # PUSH_PROMISE from a client
    "hpack/5.2/1": TAKEN,  # more padding of a Huffman code than 7 bits
}
EITHER = {"http2/5.1.2/1"}  # more calls at once than the limit: some may be over before the last one
SKIPPED = {  # h2spec leaves these out where the answer to its call has no DATA
    "http2/6.5.3/1",
    "http2/6.9.1/1",
    "http2/6.9.2/1",
    "http2/6.9.2/2",
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),  # the first build on a machine takes minutes
    pytest.mark.skipif(shutil.which("go") is None, reason="go is not installed"),
]


@pytest.fixture
async def h2spec(tmp_path: Path) -> Path:
    """Compiles h2spec from its module, with the fields of a gRPC call."""
    folder = tmp_path / "h2spec"
    shutil.copytree(MODULE, folder)
    await build(["go", "mod", "vendor"], folder)
    file = folder / "vendor" / PACKAGE / "spec/util.go"
    code = file.read_text()
    assert (code.count(GET), code.count(AUTHORITY)) == (1, 1)
    file.write_text(code.replace(GET, POST).replace(AUTHORITY, AUTHORITY + MORE))
    # -trimpath, so that Go's cache knows the packages in another folder.
    await build(["go", "build", "-trimpath", "-o", folder / "program", f"{PACKAGE}/cmd/h2spec"], folder)
    return folder / "program"


async def report(program: Path, address: str, part: list[str], options: list[str]) -> dict[str, tuple[str, str]]:
    """Runs some sections. Returns each case's outcome (passed, skipped or failed) and what h2spec says about it."""
    host, _, port = address.rpartition(":")
    file = program.with_name(f"{part[0].replace('/', '_')}.xml")
    words = ["--strict", "-h", host, "-p", port, "-P", METHOD, "-j", file, *options]
    _, printed = await run([program, *part, *words], program.parent, 150)
    assert file.exists(), printed
    results: dict[str, tuple[str, str]] = {}
    numbers = Counter[str]()
    for case in ElementTree.parse(file).iter("testcase"):
        section, title = case.get("package", ""), case.get("classname", "")
        numbers[section] += 1
        problem = case.findtext("error")
        outcome = "skipped" if case.find("skipped") is not None else "passed" if problem is None else "failed"
        results[f"{section}/{numbers[section]}"] = (outcome, f"{title}: {problem}")
    return results


@pytest.mark.parametrize("transport", ["plaintext", "tls"])
async def test_h2spec(redis_url: str, model: Path, tmp_path: Path, h2spec: Path, transport: str) -> None:
    """Every case passes, but those that the tables above name."""
    settings, options = {}, []
    if transport == "tls":
        authority = Authority(tmp_path / "ca")
        settings = {"tls_dir": str(authority.issue(Role.ENDPOINT)), "client_certificates": False}  # h2spec has none
        options = ["--tls", "--insecure"]
    async with world(redis_url, model, **settings) as orca:
        address = orca.serving.addresses["grpc"]
        parts = await asyncio.gather(*(report(h2spec, address, part, options) for part in PARTS))
    results = {case: result for part in parts for case, result in part.items()}
    assert len(results) == CASES
    failed = {case: said for case, (outcome, said) in results.items() if outcome == "failed" and case not in EITHER}
    assert failed.keys() == FAILED.keys(), {case: failed.get(case, "passes") for case in failed.keys() ^ FAILED.keys()}
    assert {case for case, (outcome, _) in results.items() if outcome == "skipped"} == SKIPPED
