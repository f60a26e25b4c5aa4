"""Launches all kernels."""

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launches a jitted kernel without contraction of a product and a sum into one rounding.

    Where the compiler may contract, it decides anew in each kernel, and the same formula gives other bits. Kernels ask
    for a contraction by `tl.fma`.
    """
    kernel[grid](*args, **options, enable_fp_fusion=False)
