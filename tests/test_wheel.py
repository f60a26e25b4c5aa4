"""A wheel of the checkout is made in seconds and without a compiler; a released one has the kernels."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def wheel(folder: Path, **environment: str) -> tuple[Path, str]:
    """Makes a wheel as pip does, where no compiler can be found. Returns it, and what was said."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PATH": str(folder)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    (found,) = folder.glob("*.whl")
    return found, done.stdout


def test_pip_install_asks_for_no_compiler(tmp_path: Path) -> None:
    """`pip install '.[cli]'` compiled kernels for four minutes."""
    made, said = wheel(tmp_path)
    assert made.name.endswith("-py3-none-any.whl")
    assert "kernels" not in said, "none was looked for"
    with zipfile.ZipFile(made) as files:
        assert "orca_kernels/cpu/src/program.cpp" in files.namelist(), "a worker compiles them on first use"


def test_a_release_asks_for_one(tmp_path: Path) -> None:
    name = "HATCH_BUILD_HOOK_ENABLE_CUSTOM"
    assert f"{name}=true" in (ROOT / "release/package.sh").read_text()
    _, said = wheel(tmp_path, **{name: "true"})
    assert "no compiled kernels in this wheel: no C++ compiler" in said
