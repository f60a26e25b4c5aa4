"""`python -m orca_client.check` as a process, against scripted endpoints."""

import asyncio
import sys

import pytest
from client.conftest import Stage
from client.scripted import Act, Script

from orca_common import errors


async def check(address: str, *arguments: str) -> tuple[int | None, str, str]:
    """Runs the command. Returns its exit code, its output and its errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "orca_client.check", address, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, problems = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, output.decode(), problems.decode()


async def test_it_prints_the_text(stage: Stage) -> None:
    script = Script()
    address = (await stage.endpoint(script)).address
    arguments = ("--engines", "1", "--timeout", "30", "--prompt", "Hello", "--max-new-tokens", "6")
    assert await check(address, *arguments) == (0, " w0 w1 w2 w3 w4 w5!\n", "")
    (call,) = script.calls
    assert (call.request.text, call.request.max_new_tokens) == ("Hello", 6)


@pytest.mark.parametrize(
    ("act", "arguments", "sentence"),
    [
        (Act(), ("--engines", "2", "--timeout", "5"), "1 of 2 engines have formed"),
        (
            Act(accept=False, end=errors.FailedPrecondition("the request needs 9000 slots")),
            (),
            "the request needs 9000 slots",
        ),
    ],
    ids=["too few engines", "refused"],
)
async def test_it_says_what_is_wrong(stage: Stage, act: Act, arguments: tuple[str, ...], sentence: str) -> None:
    address = (await stage.endpoint(Script(act))).address
    assert await check(address, *arguments) == (1, "", f"{address}: {sentence}\n")


async def test_nobody_answers(stage: Stage) -> None:
    gone = await stage.endpoint(Script())
    await gone.server.stop(0)
    code, output, problems = await check(gone.address, "--timeout", "1")
    assert (code, output) == (1, "")
    assert problems.startswith(f"{gone.address}: no endpoint answers: ")
    assert len(problems.splitlines()) == 1


async def test_it_waits_for_an_endpoint(stage: Stage) -> None:
    """The first connections are closed at once. Then an endpoint starts at that port."""
    called = asyncio.Event()

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        called.set()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    waiting = asyncio.create_task(check(f"127.0.0.1:{port}", "--timeout", "30"))
    await called.wait()
    server.close()
    await server.wait_closed()
    script = Script()
    await stage.endpoint(script, port=port)
    assert (await waiting)[:2] == (0, " w0 w1 w2 w3 w4 w5!\n")
    (call,) = script.calls
    assert (call.request.text, call.request.max_new_tokens) == ("Once upon a time", 16), "where nothing is given"
