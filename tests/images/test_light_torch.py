"""torch without most of CUDA, for a machine that has no GPU: what the lock leaves out, and what stands in for it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT, LOCK = ROOT / "services/worker/light_torch.py", ROOT / "locks/serve.txt"
RPATH = "$ORIGIN/../../nvidia/nccl/lib:$ORIGIN/../../nvidia/cu13/lib"
LOADS = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1], mode=2).answer())"  # RTLD_NOW, as Python loads extensions


def names(lock: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))


def test_a_light_lock_lacks_what_only_a_gpu_needs() -> None:
    light = subprocess.run([sys.executable, SCRIPT, "lock", LOCK], capture_output=True, text=True, check=True).stdout
    left_out = names(LOCK.read_text()) - names(light)
    assert {"nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "triton"} <= left_out
    assert all(name.startswith(("cuda-", "nvidia-", "triton")) for name in left_out)
    assert {"torch", "nvidia-cuda-runtime"} <= names(light)
    assert light.count("--hash=") > 1000, "each package that is left has its hashes"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_library_that_is_not_there_has_a_stand_in_until_its_package_comes(tmp_path: Path) -> None:
    """One with version names and one without, as cuBLAS and NCCL are."""
    torch, toolkit, nccl = (tmp_path / f for f in ("torch/lib", "nvidia/cu13/lib", "nvidia/nccl/lib"))
    for folder in (torch, toolkit, nccl):
        folder.mkdir(parents=True)
    (tmp_path / "versions").write_text("libcublas.so.13 { *; };\n")
    cublas = shared(toolkit / "libcublas.so.13", "int cublasCreate(void) { return 1; }", f"{tmp_path}/versions")
    shared(nccl / "libnccl.so.2", "int ncclInit(void) { return 2; }")
    code = "int cublasCreate(void), ncclInit(void); int (*used[])(void) = {cublasCreate, ncclInit}; "
    user = shared(torch / "libtorch_cuda.so", code + "int answer(void) { return 42; }", links=[toolkit, nccl])
    package = cublas.read_bytes()
    shutil.rmtree(tmp_path / "nvidia")
    assert subprocess.run([sys.executable, "-c", LOADS, user], capture_output=True, check=False).returncode == 1
    subprocess.run([sys.executable, SCRIPT, "link", tmp_path], check=True)
    assert loaded(user) == "42"
    assert {path.name for path in (tmp_path / "nvidia").rglob("*.so*")} == {"libcublas.so.13", "libnccl.so.2"}
    assert cublas.exists(), "where its package puts it"
    cublas.write_bytes(package)
    subprocess.run([sys.executable, SCRIPT, "link", tmp_path], check=True)
    assert (loaded(user), cublas.read_bytes()) == ("42", package), "a library that is there stays"


def shared(path: Path, code: str, script: str | None = None, links: list[Path] | None = None) -> Path:
    """Compiles a shared library. links: folders, all of whose libraries it links."""
    libraries = [library for folder in links or [] for library in folder.iterdir()]
    options = [f"-Wl,--version-script={script}"] if script else []
    options += [f"-Wl,-rpath,{RPATH}", "-Wl,--disable-new-dtags", "-Wl,--no-as-needed"]
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-x",
        "c",
        "-",
        "-x",
        "none",
        "-o",
        path,
        f"-Wl,-soname,{path.name}",
        *options,
    ]
    subprocess.run([*command, *libraries], input=code, text=True, check=True)
    return path


def loaded(library: Path) -> str:
    """Returns the answer of a process that loads the library and calls it."""
    run = subprocess.run([sys.executable, "-c", LOADS, library], capture_output=True, text=True, check=True)
    return run.stdout.strip()
