"""Every code block of the pages is run, against one stack; what cannot run here says why, above the block.

`make test` runs those of README and of `docs/call.md`, `make examples` the others, too."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from docs.pages import PAGES, ROOT, RUNNABLE, SHOWN, Block, blocks
from docs.serving import Served, serving

ALL = [block for page in PAGES for block in blocks(page)]
PLAIN = [block for block in ALL if block.language in RUNNABLE and block.reason is None and not block.serves]
# Commands that would run these tests inside themselves, or never end: their blocks must be tagged.
NESTED = re.compile(r"\bmake (test|check|demo|setup)|pytest|orca serve")
RUN = [block for block in PLAIN if not NESTED.search(block.code)]
AT_ONCE = [ROOT / "README.md", ROOT / "docs/call.md"]
STACK = ".venv/bin/orca serve --endpoints 2"  # the one that all other blocks meet
COMMANDS = {line for block in ALL if block.serves for line in block.code.splitlines() if line}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    assert STACK in COMMANDS, "no page names this command any more"
    with serving(STACK, tmp_path_factory.mktemp("stack")) as served:
        yield served


@contextmanager
def session(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own. What it started and is left at the end is killed."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    "block", [pytest.param(one, id=str(one), marks=[pytest.mark.long] * (one.page not in AT_ONCE)) for one in RUN]
)
def test_block(block: Block, served: Served, tmp_path: Path) -> None:
    code = served.fill(block.code)
    if block.language == "python":
        script = tmp_path / "block.py"
        script.write_text(code)
        command = [sys.executable, str(script)]
    else:
        command = ["bash", "-euo", "pipefail", "-c", code]
    with session(command) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, f"{code}\n{output}\n{errors}"
    assert output, f"it printed nothing:\n{code}"


@pytest.mark.long  # a stack for each; tests/e2e has such stacks
@pytest.mark.parametrize("command", sorted(COMMANDS - {STACK}))
def test_serve(command: str, tmp_path: Path) -> None:
    with serving(command, tmp_path) as served:
        assert served.grpc


def test_every_block_is_run_or_says_why() -> None:
    nested = [str(block) for block in PLAIN if NESTED.search(block.code)]
    assert not nested, f"blocks that need a tag: {nested}"
    unknown = [str(block) for block in ALL if block.language not in RUNNABLE | SHOWN]
    assert not unknown, f"blocks of a language that is neither run nor only shown: {unknown}"
    shell = [str(block) for block in ALL if not block.language and ".venv/bin" in block.code]
    assert not shell, f"commands in a block without a language are not run: {shell}"
