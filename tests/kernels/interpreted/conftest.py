"""Tests that run kernels: in Triton's interpreter, which `tests/kernels/test_triton_interpreted.py` starts."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty gives NaN, so that a result that nobody wrote is seen."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
