"""The check before an upgrade, as the program that the chart's hook runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_shape, make_timed

from orca_local.stack import DEMO_MODEL


def check(folder: Path, *flags: str) -> tuple[int, str]:
    """Its exit code, and its sentence."""
    command = [sys.executable, "-m", "orca_worker.models.check", str(folder), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert not (ended.stdout and ended.stderr)
    return ended.returncode, (ended.stdout + ended.stderr).strip()


@pytest.mark.parametrize(
    ("tp", "pp", "sentence"),
    [
        (4, 1, "tp 4: 6 heads cannot be shared evenly by 4 tensor ranks"),
        (2, 5, "pp 5: 4 layers are too few for 5 stages"),
    ],
)
def test_a_shape_that_cannot_form(tp: int, pp: int, sentence: str) -> None:
    assert check(DEMO_MODEL, f"--tp={tp}", f"--pp={pp}") == (1, f"{sentence}; nothing was changed")


def test_a_shape_that_can() -> None:
    assert check(DEMO_MODEL, "--tp=2", "--pp=2") == (0, f"{DEMO_MODEL} can be served by 2 x 2 ranks (tp x pp)")


def test_a_model_that_is_not_there_or_not_whole(tmp_path: Path) -> None:
    shape = ("--tp=1", "--pp=1")
    none, half = tmp_path / "none", tmp_path / "half"
    assert check(none, *shape) == (1, f"model: {none}: there is no such folder; nothing was changed")
    make_shape(half, "llama, 3 heads", shards=True)
    assert check(half, *shape)[0] == 0
    lost = sorted(half.glob("*.safetensors"))[-1]
    lost.unlink()
    assert check(half, *shape) == (1, f"model: {half} lacks weights in safetensors ({lost.name}); nothing was changed")
    assert check(half, *shape, "--config-only")[0] == 0
    (half / "config.json").write_text(json.dumps({"model_type": "other"}))
    code, said = check(half, *shape, "--config-only")
    assert (code, said.split(";")[0]) == (1, "model: half is of type other")


def test_a_configuration_alone(tmp_path: Path) -> None:
    """All that was fetched of a download."""
    shutil.copy(DEMO_MODEL / "config.json", tmp_path)
    assert check(tmp_path, "--tp=2", "--pp=2", "--config-only")[0] == 0
    assert check(tmp_path, "--tp=4", "--pp=2", "--config-only")[0] == 1


def test_a_model_without_weights(tmp_path: Path) -> None:
    assert check(make_timed(tmp_path / "timed"), "--tp=3", "--pp=2")[0] == 0
