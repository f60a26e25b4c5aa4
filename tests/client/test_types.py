"""What type checkers and tools see of the client: its types, its version."""

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import orca_client

ROOT = Path(__file__).parents[2]


def test_the_version() -> None:
    """The images hold no metadata of the package, so the version stands in the code too."""
    assert orca_client.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")
@pytest.mark.parametrize("example", ["one_stream", "several_streams", "many_prompts"])
def test_mypy_strict(example: str, tmp_path: Path) -> None:
    """An example passes as its reader would check it, and its values have types."""
    program = tmp_path / f"{example}.py"
    program.write_text((ROOT / f"examples/{example}.py").read_text())
    command = [sys.executable, "-m", "mypy", "--strict", "--disallow-any-expr", "--no-incremental", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout


def test_it_says_that_it_is_typed() -> None:
    assert orca_client.__file__ is not None
    assert Path(orca_client.__file__).with_name("py.typed").exists()
