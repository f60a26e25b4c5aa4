"""grpcurl and ghz, as their users run them: they know the contract by reflection. Built from their Go modules."""

import asyncio
import json
import shutil
from collections.abc import Sequence

import pytest
from endpoint.harness import World

GRPCURL = "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.4"
GHZ = "github.com/bojand/ghz/cmd/ghz@v0.93.0"

pytestmark = [
    pytest.mark.long,  # compiling both took 87 s of CPU time
    pytest.mark.timeout(600),  # the first build on a machine takes minutes
    pytest.mark.skipif(shutil.which("go") is None, reason="go is not installed"),
]


async def go_run(package: str, *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command of a Go module. Skips when it cannot be built."""
    command = ["go", "run", package, *arguments]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    if b"dial tcp" in err or b"no such host" in err:
        pytest.skip(f"go cannot fetch {package} here")
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def grpcurl(orca: World, *arguments: str, options: Sequence[str] = ()) -> tuple[int, str, str]:
    return await go_run(GRPCURL, "-plaintext", *options, orca.serving.addresses["grpc"], *arguments)


async def test_grpcurl(orca: World) -> None:
    """It lists, describes a method, calls, and shows the details of an error."""
    status, out, err = await grpcurl(orca, "list")
    assert (status, "orca.v1.Orca" in out.splitlines()) == (0, True), err
    status, out, err = await grpcurl(orca, "describe", "orca.v1.Orca.Generate")
    assert status == 0, err
    assert "rpc Generate ( .orca.v1.GenerateRequest ) returns ( stream .orca.v1.GenerateResponse );" in out
    request = {"token_ids": {"ids": [5, 6]}, "max_new_tokens": 2}
    async with orca.background(lambda record: [10, 11]):
        status, out, err = await grpcurl(orca, "orca.v1.Orca/GenerateText", options=["-d", json.dumps(request)])
    assert status == 0, err
    answer = json.loads(out)
    assert (answer["token_ids"], answer["reason"]) == ([10, 11], "FINISH_REASON_LENGTH")
    status, out, err = await grpcurl(orca, "orca.v1.Orca/GenerateText", options=["-d", "{}"])
    assert status != 0
    assert '"reason": "INVALID_FIELD"' in err


async def test_ghz(orca: World) -> None:
    """A load of streams."""
    request = {"token_ids": {"ids": [5, 6]}, "max_new_tokens": 2}
    arguments = ["--insecure", "--call", "orca.v1.Orca.Generate", "-d", json.dumps(request), "-n", "20", "-c", "4"]
    async with orca.background(lambda record: [10, 11]):
        status, out, err = await go_run(GHZ, *arguments, "-O", "json", orca.serving.addresses["grpc"])
    assert status == 0, err
    assert json.loads(out)["statusCodeDistribution"] == {"OK": 20}
