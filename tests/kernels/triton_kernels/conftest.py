"""These tests run where kernels can: on a GPU, or in Triton's interpreter for `test_triton_interpreted.py`."""

import os
from collections.abc import Iterator

import pytest
import torch
from kernels.triton_device import INTERPRETED

if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch wants for its deterministic mode


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that a result that nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
