"""What a machine has for a rank, where it is told from files alone."""

import sys
from pathlib import Path

import pytest

from orca_worker import machine


@pytest.mark.parametrize(("cuda", "needed"), [("'13.0'", False), ("None", True)])
def test_a_gpu_serves_only_a_torch_that_was_built_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, needed: bool
) -> None:
    """Else the ranks compute on the CPU, and would compile its kernels each for itself."""
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('importing torch takes seconds')")
    (folder / "version.py").write_text(f"__version__ = '2'\ncuda: str | None = {cuda}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(machine, "gpus", lambda: 1)
    assert machine.kernels_needed("auto", "auto") is needed
    assert machine.on_gpu("auto") is not needed
    assert (machine.on_gpu("cuda"), machine.on_gpu("cpu")) == (True, False)
    assert not machine.kernels_needed("cuda", "auto")
    assert machine.kernels_needed("cpu", "auto")
