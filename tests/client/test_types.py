"""What type checkers and tools see of the client: its types, its version."""

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import orca_client

ROOT = Path(__file__).parents[2]
EXAMPLES = ["one_stream", "several_streams", "many_prompts"]


def test_the_version() -> None:
    """The images hold no metadata of the package, so the version stands in the code too."""
    assert orca_client.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_strict(tmp_path: Path) -> None:
    """Examples pass as their reader would check them, and their values have types."""
    programs = [tmp_path / f"{example}.py" for example in EXAMPLES]
    for program in programs:
        program.write_text((ROOT / "examples" / program.name).read_text())
    command = [sys.executable, "-m", "mypy", "--strict", "--disallow-any-expr", "--no-incremental", *programs]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{len(EXAMPLES)} source files" in done.stdout


def test_it_says_that_it_is_typed() -> None:
    assert orca_client.__file__ is not None
    assert Path(orca_client.__file__).with_name("py.typed").exists()
