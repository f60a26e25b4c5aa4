"""Residual addition and normalization against float64."""

import pytest
import torch
from kernels.triton_device import DEVICE, EPSILON, TYPES

from orca_kernels.triton.norm import Norm, add_norm


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 1), (3, 20), (5, 768), (2, 1025)])
def test_add_norm(tokens: int, hidden: int, centered: bool, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, tokens, hidden).mul(3).add(1).to(DEVICE, dtype)
    weight, bias = torch.randn(2, hidden).to(DEVICE, dtype)
    norm = Norm(weight, bias if centered else None, 1e-5, centered)
    for added in (residual, None):
        y, total = add_norm(x, added, norm)
        assert torch.equal(total, x if added is None else x + added)
        wide = total.double()
        if centered:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        wide = wide + bias.double() if centered else wide
        error = max(EPSILON[dtype], 2e-6)
        torch.testing.assert_close(y.double(), wide, rtol=error, atol=5 * error)
        alone, _ = add_norm(x[-1:], None if added is None else added[-1:], norm)
        assert torch.equal(alone[0], y[-1])
