"""Runs `triton_kernels/` in Triton's interpreter, which must be chosen before a process imports Triton.

To see one of them: TRITON_INTERPRET=1 pytest tests/kernels/triton_kernels -k NAME

The interpreter shows what a kernel computes, not how fast, nor races. On a machine
with a GPU, `pytest tests/kernels/triton_kernels` runs the same tests there, in bfloat16 too.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from properties import PART

FOLDER = Path(__file__).parent / "triton_kernels"
# Families whose operations are those of Llama and Gemma 3, or of `test_write_kv.py`, and codes whose products
# `test_linear.py` has, and a bench. `make fuzz` runs them too, and all cases of a test: see `conftest.py` there.
ALIKE = ("qwen2", "qwen3", "neox", "gptj", "gptq", "test_every_kernel_is_timed")


@pytest.mark.timeout(900)  # a process with many tests, each with its own bound
def test_kernels_in_the_interpreter() -> None:
    without = ["-k", f"not ({' or '.join(ALIKE)})"] if PART > 1 else []
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *without, FOLDER],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
