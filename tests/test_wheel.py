"""A wheel of the checkout is made in seconds and without a compiler; a released one has the kernels."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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


@pytest.mark.long  # it fetches 1.7 GB, or 6 with a GPU
@pytest.mark.timeout(1800)
def test_the_wheel_alone_serves(on_disk: Path) -> None:
    """In a fresh environment, without the source tree: installed, served, called and ended."""
    made, _ = wheel(on_disk)
    environment, lock = on_disk / "venv", on_disk / "serve.txt"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [environment / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    light = [sys.executable, ROOT / "services/worker/light_torch.py"]
    on_gpu = shutil.which("nvidia-smi") is not None
    given = ROOT / "locks/serve.txt"
    lock.write_text(given.read_text() if on_gpu else subprocess.check_output([*light, "lock", given], text=True))
    subprocess.run([*pip, "--require-hashes", "-r", lock], check=True)
    if not on_gpu:
        (site,) = environment.glob("lib/python3*/site-packages")
        subprocess.run([*light, "link", site], check=True)
    subprocess.run([*pip, made], check=True)
    orca, alone = environment / "bin/orca", {"HOME": str(on_disk), "PATH": f"{environment}/bin:/usr/bin:/bin"}
    command = [orca, "serve", "--port", "0", "--http-port", "0", "--run-dir", on_disk / "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=on_disk, env=alone) as serving:
        try:
            assert serving.stdout is not None
            said = next(line for line in serving.stdout if "try: " in line)
            called = subprocess.check_output(shlex.split(said.partition("try: ")[2]), text=True, cwd=on_disk, env=alone)
        finally:
            serving.send_signal(signal.SIGINT)
            serving.communicate(timeout=60)  # its last words fail on a pipe that is closed
    assert called.strip()
    assert serving.returncode == 0
