"""The example in another language. The Python ones are run as blocks of examples/README.md."""

import shutil
import subprocess
from pathlib import Path

import pytest
from docs.pages import ROOT
from docs.serving import serving


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_node_by_reflection(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    shutil.copytree(ROOT / "examples/node", folder, ignore=shutil.ignore_patterns("node_modules"))
    install = ["npm", "ci", "--no-audit", "--no-fund", "--prefer-offline"]
    installed = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    if installed.returncode != 0:
        pytest.skip(f"npm cannot install here: {installed.stderr[-300:]}")
    with serving(".venv/bin/orca serve", tmp_path / "run") as served:
        command = ["node", "client.js", served.grpc]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "16 tokens, FINISH_REASON_LENGTH" in done.stdout
