"""These tests run where kernels can: on a GPU, or in Triton's interpreter for `test_triton_interpreted.py`."""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernels.triton_device import INTERPRETED
from triton.runtime import interpreter

if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]

if INTERPRETED:
    product = interpreter.InterpreterBuilder.create_dot

    def product_by_rows(
        self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> interpreter.TensorHandle:
        """A row of a product depends on that row alone, as on a GPU. BLAS orders its additions by the number of
        rows, on some processors more than on others."""
        rows = interpreter.TensorHandle(a.data[..., :, None, :], a.dtype)
        matrices = interpreter.TensorHandle(b.data[..., None, :, :], b.dtype)
        sums = interpreter.TensorHandle(d.data[..., :, None, :], d.dtype)
        done = product(self, rows, matrices, sums, input_precision, max_num_imprecise_acc)
        return interpreter.TensorHandle(done.data[..., 0, :], done.dtype)

    interpreter.InterpreterBuilder.create_dot = product_by_rows

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch wants for its deterministic mode


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that a result that nobody wrote is seen."""
    with warnings.catch_warnings():
        # torch draws cut rows by sums that have no deterministic form on CUDA. It warns there instead of refusing them.
        warnings.filterwarnings("ignore", message=".* does not have a deterministic implementation")
        torch.use_deterministic_algorithms(True, warn_only=not INTERPRETED)
        yield
        torch.use_deterministic_algorithms(False)
