"""Bias and activation, and gates, against torch in float64."""

from collections.abc import Callable

import pytest
import torch
from kernels.triton_device import DEVICE, EPSILON, TYPES
from torch import Tensor
from torch.nn import functional

from orca_kernels.triton.activation import ACTIVATIONS, bias_act, gate_act

RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "tanh_gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


def test_all_are_here() -> None:
    assert set(RIGHT) == set(ACTIVATIONS)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter's sigmoid, which is 0 then
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("act", RIGHT)
def test_bias_act(act: str, dtype: torch.dtype) -> None:
    x, bias = torch.randn(3, 1500).mul(4).to(DEVICE, dtype), torch.randn(1500).to(DEVICE, dtype)
    for added in (bias, None):
        right = RIGHT[act](x.double() if added is None else x.double() + added.double())
        error = max(EPSILON[dtype], 1e-6)
        torch.testing.assert_close(bias_act(x, added, act).double(), right, rtol=error, atol=error)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("act", RIGHT)
@pytest.mark.parametrize("width", [5, 1024, 1100])
def test_gate_act(width: int, act: str) -> None:
    x = torch.randn(3, 2 * width).mul(4).to(DEVICE)
    gate, up = x.double().split(width, dim=1)
    torch.testing.assert_close(gate_act(x, act).double(), RIGHT[act](gate) * up, rtol=1e-6, atol=4e-6)
