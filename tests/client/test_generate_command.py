"""`orca generate` as a process, against scripted endpoints."""

import asyncio
import json
import os
import pty
import signal
import socket
import sys
from pathlib import Path

import pytest
import typer
from client.conftest import Stage
from client.scripted import IDS, Act, Script
from listening import listening
from typer.testing import CliRunner

from orca.v1 import orca_pb2 as pb
from orca_cli import generating
from orca_cli.generate import generate
from orca_cli.generating import generate_all, told_once
from orca_common import errors
from orca_common.roles import Role
from orca_local.authority import Authority

COMMAND = [sys.executable, "-c", "import typer; from orca_cli.generate import generate; typer.run(generate)"]
TEXT = " w0 w1 w2 w3 w4 w5!"


async def start(*arguments: str | bytes, stdout: int = asyncio.subprocess.PIPE) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdin=pipe, stdout=stdout, stderr=pipe)


async def orca(*arguments: str, stdin: bytes = b"") -> tuple[int | None, str, str]:
    """Exit code, stdout, stderr."""
    process = await start(*arguments)
    out, err = await process.communicate(stdin)
    return process.returncode, out.decode(), err.decode()


async def test_one_prompt(stage: Stage) -> None:
    """It prints the text and a line break. Options become fields. It uses the second address when the first is gone."""
    script = Script()
    gone, endpoint = await stage.endpoint(script, "gone"), await stage.endpoint(script)
    await gone.server.stop(0)
    addresses = ["--address", gone.address, "--address", endpoint.address]
    options = ["--max-new-tokens", "6", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--seed", "7"]
    options += ["--stop", "a", "--stop", "b", "--ignore-eos", "--timeout", "60"]
    assert await orca("Hello", *addresses, *options) == (0, TEXT + "\n", "")
    request = script.calls[0].request
    assert request.text == "Hello"
    assert request.max_new_tokens == 6
    assert request.sampling == pb.Sampling(temperature=0.5, top_k=3, top_p=0.9, seed=7)
    assert (list(request.stop), request.ignore_eos) == (["a", "b"], True)
    assert 0 < (script.calls[0].remaining or 0) <= 61


async def test_adjustments_and_logprobs(stage: Stage) -> None:
    script = Script()
    address = (await stage.endpoint(script)).address
    options = [
        "--min-p",
        "0.1",
        "--repetition-penalty",
        "1.2",
        "--presence-penalty",
        "-1",
        "--frequency-penalty",
        "0.5",
    ]
    options += [
        "--logit-bias",
        "17=-100",
        "--logit-bias",
        "5=1.5",
        "--top-logprobs",
        "3",
        "--prompt-logprobs",
        "--json",
    ]
    code, _, _ = await orca("Hello", "--address", address, "--max-new-tokens", "6", *options)
    assert code == 0
    request = script.calls[0].request
    assert request.sampling == pb.Sampling(
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={17: -100, 5: 1.5},
    )
    assert (request.top_logprobs, request.prompt_logprobs) == (3, True)
    assert (await orca("Hello", "--top-logprobs", "3"))[0] == 2, "they are shown only with --json"
    assert (await orca("Hello", "--logit-bias", "17"))[0] == 2


async def test_stdin_and_token_ids(stage: Stage) -> None:
    """Standard input without its last line break is the prompt. Token ids are sent as ids."""
    script = Script()
    address = (await stage.endpoint(script)).address
    *fine, broken = await asyncio.gather(
        orca("--address", address, stdin="zwei\nZeilen ü\n".encode()),
        orca("-", "--address", address, stdin=b"x"),
        orca("--token-ids", "1, 2,3", "--address", address),
        orca("--address", address, stdin=b"\xff"),
    )
    assert [code for code, _, _ in fine] == [0, 0, 0]
    assert {call.request.text for call in script.calls} == {"zwei\nZeilen ü", "x", ""}
    [ids] = [call.request.token_ids.ids for call in script.calls if call.request.HasField("token_ids")]
    assert list(ids) == [1, 2, 3]
    code, _, err = broken
    assert (code, err.startswith("the prompt on stdin is not UTF-8")) == (1, True)


async def test_json(stage: Stage) -> None:
    """Each event is a line of JSON with the names of the protocol, and with default values."""
    script = Script()
    address = (await stage.endpoint(script)).address
    code, out, _ = await orca("Hello", "--address", address, "--json", "--logprobs")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    request = script.calls[0].request
    assert {line["request_id"] for line in lines} == {request.request_id}
    assert request.logprobs
    accepted = {"request_id": request.request_id, "input_tokens": 3, "queue_position": 1, "weights": ""}
    assert lines[0]["accepted"] == accepted
    token = {"index": 0, "token_id": 100, "text": " w0", "logprob": -0.5, "iteration": "10", "engine": "engine-0"}
    assert lines[1]["token"] == token | {"top": []}
    assert [line["token"]["token_id"] for line in lines[1:-1]] == IDS
    timings = {"claimed": "0.500s", "first_token": "1s", "finished": "2s"}
    finished = {"reason": "FINISH_REASON_LENGTH", "output_tokens": 6, "text": "!", "cached_tokens": 0}
    finished |= {"timings": timings}
    assert lines[-1]["finished"] == finished


async def test_several_prompts(stage: Stage) -> None:
    """Prompts run at the same time, and are printed in their order. One that fails does not stop the others."""
    refusal = errors.InvalidArgument("text", "the prompt has 9 tokens; the model has 8 positions")
    script = Script(Act(upto=2, end=refusal))
    address = (await stage.endpoint(script)).address
    code, out, err = await orca("one", "two", "three", "--address", address)
    [failed] = [call.request.text for call in script.calls[:1]]
    blocks = [f"==> {name} <==\n{' w0 w1' if name == failed else TEXT}\n" for name in ("one", "two", "three")]
    assert (code, out) == (1, "\n".join(blocks))
    number = ["one", "two", "three"].index(failed) + 1
    assert err == f"prompt {number}: text: the prompt has 9 tokens; the model has 8 positions\n"


async def test_panels_on_a_terminal(stage: Stage) -> None:
    script = Script()
    address = (await stage.endpoint(script)).address
    ours, theirs = pty.openpty()
    process = await start("one", "two", "--address", address, stdout=theirs)
    os.close(theirs)
    shown = bytearray()

    def read() -> None:
        try:
            while data := os.read(ours, 65536):
                shown.extend(data)
        except OSError:  # a terminal raises it when the other side has closed
            pass

    await asyncio.gather(asyncio.to_thread(read), process.wait())
    os.close(ours)
    picture = shown.decode()
    assert process.returncode == 0
    assert picture.count("6 tokens, LENGTH") >= 2
    assert "w5!" in picture


async def test_errors(stage: Stage) -> None:
    """An error is one sentence on stderr, and exit code 1."""
    script = Script(Act(accept=False, end=errors.ResourceExhausted("the queue is full", 1)))
    endpoint = await stage.endpoint(script)
    assert await orca("x", "--address", endpoint.address) == (1, "", "the queue is full\n")
    assert await orca("x", "--address", endpoint.address, "--timeout", "0") == (1, "", "the timeout of 0 s passed\n")
    script.cancelled.append("by somebody else")
    code, out, err = await orca("x", "--address", endpoint.address)
    assert (code, out) == (1, TEXT + "\n")
    assert err == f"request {script.calls[-1].request.request_id} was cancelled\n"
    wrong = "--address: '127.0.0.1' is no host:port, such as '127.0.0.1:50051'\n"
    assert await orca("x", "--address", "127.0.0.1") == (1, "", wrong)


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (errors.Unauthenticated("no API key"), "no API key (--api-key-file FILE)"),
        (errors.PermissionDenied("the certificate is for the role worker"), "the certificate is for the role worker"),
    ],
)
async def test_a_server_that_refuses_has_answered(stage: Stage, refusal: errors.OrcaError, said: str) -> None:
    """It said "no answer from", and not which option brings a key."""
    script = Script()
    script.refuses = refusal
    address = (await stage.endpoint(script)).address
    assert await generate_all([address], ["x"], {}, as_json=False) == [f"{address}: {said}"]


async def test_a_server_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process: its port takes connections, and nothing comes."""
    monkeypatch.setattr(generating, "HELLO_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "127.0.0.1:{1}".format(*server.getsockname())
        sentence = f"no answer from {address}: the timeout of 0.2 s passed"
        assert await generate_all([address], ["x"], {}, as_json=False) == [sentence]


async def test_the_port_of_the_openai_api() -> None:
    """gRPC told of a SETTINGS frame."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async with listening(answer) as port:
        address = f"127.0.0.1:{port}"
        sentence = f"{address}: it does not speak gRPC; is it the port of the OpenAI API?"
        assert await generate_all([address], ["x"], {}, as_json=False) == [sentence]


async def test_a_server_that_dies_for_good(stage: Stage) -> None:
    """Its address and the cause, once; each prompt had a line of gRPC's."""
    script = Script(Act(upto=2, end="die"), Act(upto=2))
    address = (await stage.endpoint(script)).address
    failures = await generate_all([address], ["one", "two"], {"max_new_tokens": 6, "timeout": 4}, as_json=True)
    passed = "the timeout of 4 s passed; the last try failed"
    assert failures == [f"all 2 prompts: {passed}: {address}: nobody listens there any more"]


async def test_certificates_for_a_server_without_tls(stage: Stage, tmp_path: Path) -> None:
    """One sentence: gRPC's C core told of each handshake around it."""
    address = (await stage.endpoint(Script())).address
    folder = Authority(tmp_path).issue(Role.CLIENT)
    command = [sys.executable, "-m", "orca_cli", "generate", "x", "--address", address, "--tls-dir", str(folder)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert err.decode() == f"{address}: it does not speak TLS: leave --tls-dir out, or credentials= in Python\n"


@pytest.mark.parametrize("content", [b"key:  orca-1\nline: me sha256:2", b"me sha256:2", b"a\xffb", b"\n"])
def test_a_file_that_holds_no_key_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    app = typer.Typer()
    app.command()(generate)
    result = CliRunner().invoke(app, ["x", "--api-key-file", str(file)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Invalid value for --api-key-file" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["x", "--max-new-tokens", "0"],
        ["x", "--temperature", "warm"],
        ["x", "--top-p", "7"],
        ["x", "--min-p", "-1"],
        ["x", "--logprobs"],
        ["x", "--token-ids", "1"],
        ["--token-ids", "1,b"],
        ["-", "-"],
    ],
)
def test_usage(arguments: list[str]) -> None:
    app = typer.Typer()
    app.command()(generate)
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Invalid value" in result.stderr


@pytest.mark.parametrize(("option", "file"), [("--tls-dir", "ca.crt"), ("--api-key-file", "")])
def test_a_file_that_is_not_there(tmp_path: Path, option: str, file: str) -> None:
    """The option was not named."""
    app = typer.Typer()
    app.command()(generate)
    absent = tmp_path / "absent"
    result = CliRunner().invoke(app, ["x", option, str(absent)])
    assert (result.exit_code, result.stderr) == (1, f"{option}: {absent / file}: No such file or directory\n")


def test_a_failure_of_all_is_told_once() -> None:
    """A server that died for good wrote a line for each of 200 prompts."""
    assert told_once({0: "gone"}, 1) == ["gone"]
    assert told_once({0: "gone", 1: "gone", 2: "gone"}, 3) == ["all 3 prompts: gone"]
    assert told_once({2: "gone", 0: "gone", 1: "full"}, 4) == ["prompts 1, 3: gone", "prompt 2: full"]


async def test_ctrl_c_cancels(stage: Stage) -> None:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a background job ignores SIGINT, and so would its children
    script = Script(Act(upto=2), Act(upto=2))
    process = await start("one", "two", "--address", (await stage.endpoint(script)).address)
    for _ in range(2):
        await script.said.get()
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert (process.returncode, err) == (130, b"")
    assert sorted(script.cancelled) == sorted(call.request.request_id for call in script.calls)


async def test_a_full_disk_cancels(stage: Stage) -> None:
    script = Script(Act(upto=6))
    full = os.open("/dev/full", os.O_WRONLY)
    process = await start("x", "--address", (await stage.endpoint(script)).address, stdout=full)
    os.close(full)
    _, err = await process.communicate()
    said = b"stdout cannot be written (No space left on device); the requests were cancelled\n"
    assert (process.returncode, err) == (1, said)
    assert len(script.cancelled) == 1


async def test_a_prompt_that_is_not_utf_8() -> None:
    process = await start(b"a\xff")
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"a prompt is not UTF-8" in err


async def test_a_closed_pipe_cancels(stage: Stage, tmp_path: Path) -> None:
    """A reader that closes the pipe, as in `orca generate .. | head -1`, cancels the requests."""
    script = Script(Act(upto=6))
    read, write = os.pipe()
    os.close(read)
    process = await start("x", "--json", "--address", (await stage.endpoint(script)).address, stdout=write)
    os.close(write)
    _, err = await process.communicate()
    assert process.returncode == 1
    assert err == b"stdout was closed by its reader; the requests were cancelled\n"
    assert len(script.cancelled) == 1
