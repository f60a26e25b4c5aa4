"""The examples in other languages. The Python ones are run as blocks of examples/README.md."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from docs.pages import ROOT
from docs.serving import serving

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # the first build on a machine takes minutes


def run(folder: Path, command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_node_by_reflection(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    shutil.copytree(ROOT / "examples/node", folder, ignore=shutil.ignore_patterns("node_modules"))
    installed = run(folder, ["npm", "ci", "--no-audit", "--no-fund", "--prefer-offline"], 120)
    if installed.returncode != 0:
        pytest.skip(f"npm cannot install here: {installed.stderr[-300:]}")
    with serving(".venv/bin/orca serve", tmp_path / "run") as served:
        done = run(folder, ["node", "client.js", served.grpc], 60)
    assert done.returncode == 0, done.stderr
    assert "16 tokens at once: " in done.stdout
    assert "16 tokens, FINISH_REASON_LENGTH" in done.stdout


@pytest.mark.skipif(shutil.which("mvn") is None, reason="mvn is not installed")
def test_java(tmp_path: Path) -> None:
    """Maven generates the classes, compiles and runs them, in a copy of the folder: some 10 s of CPU."""
    here = shutil.copytree(ROOT / "examples/java", tmp_path / "java", ignore=shutil.ignore_patterns("target"))
    maven = ["mvn", "-q", "-B", f"-Dprotos={ROOT / 'protos'}"]
    compiled = run(here, [*maven, "compile"], 280)
    if "Could not transfer" in compiled.stdout or "Unknown host" in compiled.stdout:
        pytest.skip(f"mvn cannot fetch packages here: {compiled.stdout[-300:]}")
    assert compiled.returncode == 0, compiled.stdout
    with serving(".venv/bin/orca serve", tmp_path / "run") as served:
        done = run(here, [*maven, "exec:java", f"-Dexec.args={served.grpc}"], 120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 tokens at once: " in done.stdout
    assert "16 tokens, FINISH_REASON_LENGTH" in done.stdout
    assert "an error: INVALID_FIELD: " in done.stdout


@pytest.fixture
def go_program(tmp_path: Path) -> Path:
    """The example in Go, built. Skips where its modules cannot be had."""
    if shutil.which("go") is None:
        pytest.skip("go is not installed")
    program = tmp_path / "client"
    built = run(ROOT / "examples/go", ["go", "build", "-o", str(program), "."], 280)
    if "dial tcp" in built.stderr or "no such host" in built.stderr or "toolchain not available" in built.stderr:
        pytest.skip(f"go cannot build here: {built.stderr[-300:]}")
    assert built.returncode == 0, built.stderr
    return program


def test_go(go_program: Path, tmp_path: Path) -> None:
    with serving(".venv/bin/orca serve", tmp_path / "run") as served:
        done = run(tmp_path, [str(go_program), served.grpc], 60)
    assert done.returncode == 0, done.stderr
    assert "16 tokens at once: " in done.stdout
    assert "16 tokens, FINISH_REASON_LENGTH" in done.stdout
    assert "an error: INVALID_FIELD: " in done.stdout


def test_generated_go_is_current(go_program: Path, tmp_path: Path) -> None:
    """The committed package is what generate.sh makes of the contract."""
    folder = ROOT / "examples/go"
    made = run(folder, ["./generate.sh", str(tmp_path)], 280)
    assert made.returncode == 0, made.stderr
    for file in sorted((folder / "orcav1").iterdir()):
        assert (tmp_path / "orcav1" / file.name).read_text() == file.read_text(), "run examples/go/generate.sh"
