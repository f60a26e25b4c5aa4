"""What `make` says while it installs: how far it is, and why it has failed. A program of ours stands in for pip."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = """#!/bin/sh
case "$*" in *--require-hashes*) ;; *) exit 0 ;; esac
echo "Collecting torch"
echo "Installing collected packages: torch"
n=0; while ! test -e {gate} && test $n -lt 3000; do sleep 0.01; n=$((n + 1)); done
exit {status}
"""


@pytest.fixture
def make() -> str:
    found = shutil.which("make")
    if found is None:
        pytest.skip("there is no make")
    return found


@pytest.mark.parametrize("status", [0, 1])
def test_an_installation_is_told(tmp_path: Path, make: str, status: int) -> None:
    gate, folder = tmp_path / "gate", tmp_path / "venv/bin"
    folder.mkdir(parents=True)
    for name, text in (("python", "#!/bin/sh\n"), ("pip", PIP.format(gate=gate, status=status))):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    command = [make, "setup", f"VENV={tmp_path / 'venv'}", "TELL=0.05"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith(" so far: Installing collected packages: torch\n"):
                break
        gate.touch()
        rest = process.stdout.read()
    assert (tmp_path / "venv/.installed").exists() == (process.returncode == 0) == (status == 0)
    assert (f"All that pip said: {tmp_path / 'venv/install.log'}" in rest) == (status == 1)


def test_another_checkouts_environment_is_left_alone(tmp_path: Path, make: str) -> None:
    """`make` installed a second checkout into the environment that its link led to."""
    (tmp_path / "first").mkdir()
    (tmp_path / "venv").symlink_to("first")
    done = subprocess.run(
        [make, "setup", f"VENV={tmp_path / 'venv'}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert f"{tmp_path / 'venv'} is a link: " in done.stdout
    assert list((tmp_path / "first").iterdir()) == []
