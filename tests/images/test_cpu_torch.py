"""torch's own CPU wheel in the worker's image: by its hash, from an index that the builder is given."""

import hashlib
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "services/worker/cpu_torch.py"
LOCK = ROOT / "locks/worker.txt"


def torch_version() -> str:
    return next(
        line.split()[0].removeprefix("torch==") for line in LOCK.read_text().splitlines() if line[:6] == "torch="
    )


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """An index of one wheel, which is torch by name."""
    version = f"{torch_version()}+cpu"
    wheel = tmp_path / f"simple/torch/torch-{version}-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        info = f"torch-{version}.dist-info"
        archive.writestr("torch/__init__.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return wheel


def split(folder: Path, sha256: str) -> tuple[Path, Path]:
    torch, others = folder / "torch.txt", folder / "others.txt"
    subprocess.run([sys.executable, SCRIPT, LOCK, sha256, torch, others], check=True)
    return torch, others


def pip(index: Path, requirements: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """As the Dockerfile calls it."""
    where = ["--index-url", (index.parent.parent).as_uri(), "--target", target]
    command = [sys.executable, "-m", "pip", "install", "--require-hashes", "--no-deps", *where, "-r", requirements]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_torch_comes_from_its_index_by_its_hash(index: Path, tmp_path: Path) -> None:
    torch, _ = split(tmp_path, hashlib.sha256(index.read_bytes()).hexdigest())
    done = pip(index, torch, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"site/torch-{torch_version()}+cpu.dist-info").is_dir()
    torch, _ = split(tmp_path, "0" * 64)
    refused = pip(index, torch, tmp_path / "other")
    assert refused.returncode == 1
    assert "DO NOT MATCH THE HASHES" in refused.stderr


def test_all_others_keep_their_hashes(tmp_path: Path) -> None:
    """None is missing but torch and those that are for GPUs, which nothing but torch needs."""
    _, others = split(tmp_path, "0" * 64)
    lines = others.read_text().splitlines()
    left_out = [line for line in LOCK.read_text().splitlines() if line not in lines]
    names = {line.split("==")[0] for line in left_out if not line.startswith(" ")}
    assert names
    assert {name for name in names if not name.startswith(("nvidia-", "cuda-"))} == {"torch", "triton"}
    assert sum("--hash=" in line for line in lines) > 100
    assert not [line for line in lines if line.startswith("torch")]


@pytest.mark.parametrize("sha256", ["", "abc", "0" * 63 + "g"])
def test_a_hash_that_is_none(tmp_path: Path, sha256: str) -> None:
    with pytest.raises(SystemExit, match="64 hexadecimal digits"):
        runpy.run_path(str(SCRIPT))["split"](LOCK.read_text(), sha256)
