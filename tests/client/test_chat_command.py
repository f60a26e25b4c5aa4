"""`orca chat` as a process, and `orca generate --chat`, against scripted endpoints."""

import asyncio
import os
import platform
import pty
import signal
import sys
from pathlib import Path

import pytest
from client.conftest import Stage
from client.scripted import FINISH, Act, Script
from client.test_generate_command import TEXT
from client.test_generate_command import orca as orca_generate

from orca.v1 import orca_pb2 as pb
from orca_common import errors

COMMAND = [sys.executable, "-c", "import typer; from orca_cli.chat import chat; typer.run(chat)"]


def chatting(*acts: Act) -> Script:
    """A server whose model has a chat template, and sampling of its own."""
    script = Script(*acts)
    script.has_chat_template = True
    script.sampling = pb.Sampling(temperature=0.6, top_k=20)
    return script


async def orca_chat(*arguments: str, stdin: bytes) -> tuple[int | None, str, str]:
    """Exit code, stdout, stderr of a conversation whose lines come from a pipe."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        out, err = await asyncio.wait_for(process.communicate(stdin), 60)
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, out.decode(), err.decode()


async def test_a_conversation(stage: Stage) -> None:
    """It remembers what was said, draws as the model says, and goes on after a message that the server refuses."""
    lines = Act(1, "finish", text="line\n")
    script = chatting(FINISH, Act(accept=False, end=errors.InvalidArgument("messages", "too long")), lines)
    address = (await stage.endpoint(script)).address
    drawn = ["--top-k", "5", "--top-p", "0.5", "--seed", "7"]
    options = ["--system", "Be brief.", *drawn, "--template-kwargs", '{"think": false}', "--address", address]
    code, out, err = await orca_chat(*options, stdin="Hi\n\nLong\nAgain é\n".encode())
    assert (code, out, err) == (0, f"{TEXT}\nline\nline\n", "messages: too long\n"), "each answer ends its line once"
    first, _, last = [seen.request for seen in script.calls]
    assert isinstance(last, pb.GenerateRequest)
    assert [(one.role, one.content) for one in last.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", TEXT),
        ("user", "Again é"),
    ]
    assert last.chat.template_kwargs == '{"think": false}'
    assert isinstance(first, pb.GenerateRequest)
    assert first.sampling == pb.Sampling(temperature=0.6, top_k=5, top_p=0.5, seed=7)
    assert first.max_new_tokens == 0


async def test_a_model_without_a_template(stage: Stage) -> None:
    address = (await stage.endpoint(Script())).address
    sentence = "demo has no chat template; `orca generate` completes prompts\n"
    assert await orca_chat("--address", address, stdin=b"Hi\n") == (1, "", sentence)


async def test_nobody_answers() -> None:
    code, out, err = await orca_chat("--address", "127.0.0.1:1", stdin=b"Hi\n")
    assert (code, out) == (1, "")
    assert "`orca serve` starts a server" in err


async def test_ctrl_c_cancels_an_answer_and_then_ends(stage: Stage) -> None:
    """The first one cancels the answer, whose part is remembered; at the prompt it ends the conversation."""
    script = chatting(Act(upto=3, end="hang", text="line\n"))
    address = (await stage.endpoint(script)).address
    terminal = Terminal()
    listens = "env", "--default-signal=INT"  # a shell's background job ignores Ctrl-C, and so do its children
    process = await asyncio.create_subprocess_exec(
        *listens, *COMMAND, "--address", address, stdin=terminal.theirs, stdout=terminal.theirs, start_new_session=True
    )
    os.close(terminal.theirs)
    try:
        await terminal.shows(f"demo, at {address}.", "/help shows", "> ")
        terminal.types("/help\n")
        await terminal.shows("/exit", "> ")
        terminal.types("Hi\n")
        await terminal.shows("line", "line", "line")
        process.send_signal(signal.SIGINT)
        await terminal.shows("(cancelled)\r\n", "> ")
        terminal.types("More\n")
        await terminal.shows("w5!", "> ")
        async with asyncio.timeout(30):
            while not waits_for_input(process.pid):
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)  # once: another one would end an interpreter that is leaving
            await process.wait()
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        terminal.close()
    first, last = [seen.request for seen in script.calls]
    assert isinstance(first, pb.GenerateRequest)
    assert script.cancelled[0] == first.request_id
    assert isinstance(last, pb.GenerateRequest)
    assert [one.content for one in last.chat.messages] == ["Hi", "line\n" * 3, "More"]


def waits_for_input(pid: int) -> bool:
    """Whether the main thread is in select(2). Readline misses a signal that comes between its prompt and that."""
    number = Path(f"/proc/{pid}/syscall").read_text().split()[0]
    return number in {"x86_64": ("23", "270"), "aarch64": ("72",)}[platform.machine()]


class Terminal:
    """Our side of a pseudo-terminal. Its reading side may block, so a thread reads."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self._shown = ""

    def types(self, text: str) -> None:
        os.write(self._ours, text.encode())

    async def shows(self, *parts: str) -> None:
        """Waits until these parts have come, one after the other, and forgets all up to them."""
        async with asyncio.timeout(30):
            for part in parts:
                while part not in self._shown:
                    self._shown += (await asyncio.to_thread(os.read, self._ours, 65536)).decode()
                self._shown = self._shown[self._shown.index(part) + len(part) :]

    def close(self) -> None:
        os.close(self._ours)


async def test_generate_with_chat(stage: Stage) -> None:
    """Each prompt is a conversation of its own."""
    script = Script()
    address = (await stage.endpoint(script)).address
    code, out, _ = await orca_generate("Hi", "Ho", "--chat", "--system", "Be brief.", "--address", address)
    assert (code, out) == (0, f"==> Hi <==\n{TEXT}\n\n==> Ho <==\n{TEXT}\n")
    for seen, content in zip(sorted(script.calls, key=lambda seen: str(seen.request)), ("Hi", "Ho"), strict=False):
        assert isinstance(seen.request, pb.GenerateRequest)
        said = {(one.role, one.content) for one in seen.request.chat.messages}
        assert ("system", "Be brief.") in said
        assert len(said) == 2, content


@pytest.mark.parametrize("options", [["--system", "x"], ["--chat", "--token-ids", "1"]])
async def test_options_that_do_not_go_together(options: list[str]) -> None:
    code, _, err = await orca_generate(*(["Hi"] if "--token-ids" not in options else []), *options)
    assert code == 2
    assert "--system" in err or "--token-ids" in err
