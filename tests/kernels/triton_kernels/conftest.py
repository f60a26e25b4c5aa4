"""These tests run where kernels can: on a GPU, or in Triton's interpreter for `test_triton_interpreted.py`."""

import os
import warnings
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
import torch
from kernels.triton_device import INTERPRETED
from properties import PART
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

    patch_language, patched = interpreter._patch_lang, set[str]()

    def patch_once(function: Any) -> Any:
        """Triton (3.7) patches its language at each call within a kernel, and takes it back: a third of all time. This
        process does nothing but interpret, so the language may stay as it is then."""
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch wants for its deterministic mode


def values_of(item: pytest.Item) -> set[Any]:
    """The names and values of a case; the test itself where it has no parameters."""
    assert isinstance(item, pytest.Function)
    return {*item.callspec.params.items()} if hasattr(item, "callspec") else {item}


@pytest.hookimpl(trylast=True)  # after `-k`, which could drop the only case of a value
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The interpreter is slow: of a test's cases `make test` takes some in which each value comes once at least, and
    `make fuzz` all."""
    if not INTERPRETED or PART == 1:
        return
    kept = set[pytest.Item]()
    for _, cases in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        values = {one: values_of(one) for one in cases}
        missing = set[Any]().union(*values.values())
        while missing:
            most = max(values, key=lambda one: len(values[one] & missing))
            missing -= values.pop(most)
            kept.add(most)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that a result that nobody wrote is seen."""
    with warnings.catch_warnings():
        # torch draws cut rows by sums that have no deterministic form on CUDA. It warns there instead of refusing them.
        warnings.filterwarnings("ignore", message=".* does not have a deterministic implementation")
        torch.use_deterministic_algorithms(True, warn_only=not INTERPRETED)
        yield
        torch.use_deterministic_algorithms(False)
