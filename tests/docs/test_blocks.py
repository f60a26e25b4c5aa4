"""Every code block of the pages is run, against one stack; what cannot run here says why, above the block."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs.pages import PAGES, ROOT, RUNNABLE, SHOWN, Block, blocks
from docs.serving import Served, serving

ALL = [block for page in PAGES for block in blocks(page)]
RUN = [block for block in ALL if block.language in RUNNABLE and block.reason is None and not block.serves]
SERVE = [(block, command) for block in ALL if block.serves for command in block.code.splitlines() if command]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(".venv/bin/orca serve --endpoints 2", tmp_path_factory.mktemp("stack")) as served:
        yield served


@pytest.mark.parametrize("block", RUN, ids=str)
def test_block(block: Block, served: Served, tmp_path: Path) -> None:
    code = served.fill(block.code)
    if block.language == "python":
        script = tmp_path / "block.py"
        script.write_text(code)
        command = [sys.executable, str(script)]
    else:
        command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    assert done.stdout, f"it printed nothing:\n{code}"


@pytest.mark.parametrize(("block", "command"), SERVE, ids=lambda part: str(part).rpartition("/")[2])
def test_serve(block: Block, command: str, tmp_path: Path) -> None:
    with serving(command, tmp_path) as served:
        assert served.grpc


def test_every_block_is_run_or_says_why() -> None:
    unknown = [str(block) for block in ALL if block.language not in RUNNABLE | SHOWN]
    assert not unknown, f"blocks of a language that is neither run nor only shown: {unknown}"
    shell = [str(block) for block in ALL if not block.language and ".venv/bin" in block.code]
    assert not shell, f"commands in a block without a language are not run: {shell}"
