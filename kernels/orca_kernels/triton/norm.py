"""Residual addition and normalization of whole hidden states, in one pass.

    sum = x + residual
    LayerNorm: y = (sum - mean) / sqrt(variance + epsilon) * weight + bias     (Ba et al., "Layer Normalization")
    RMSNorm:   y = sum / sqrt(mean of squares + epsilon) * weight              (Zhang, Sennrich)

The sum is rounded to the type of the data before it is normalized, as two operations of torch would do. Everything else
is float32. A program has one token, so nothing depends on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch


@dataclass(frozen=True)
class Norm:
    """weight, bias [H]. `centered`: LayerNorm; otherwise RMSNorm."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float
    centered: bool = True


@triton.jit
def add_and_normalize(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    epsilon,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    ADD: tl.constexpr,
    CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Grid: tokens."""
    h = tl.arange(0, H_PADDED)
    real = h < H
    at = tl.program_id(0).to(tl.int64) * H + h
    value = tl.load(x + at, mask=real, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(residual + at, mask=real, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(total + at, value, mask=real)
    value = value.to(tl.float32)
    if CENTERED:
        value = tl.where(real, value - tl.sum(value, 0) / H, 0.0)
    variance = tl.sum(value * value, 0) / H
    value = value * (1.0 / tl.sqrt_rn(variance + epsilon)) * tl.load(weight + h, mask=real, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + h, mask=real, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=real)


def add_norm(x: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """x, residual [T, H] -> (normalized sum, sum), each [T, H]. Without a residual the sum is x."""
    tokens, hidden = x.shape
    assert x.is_contiguous(), x.stride()
    y = torch.empty_like(x)
    total = x
    if residual is not None:
        assert residual.is_contiguous(), residual.stride()
        assert residual.shape == x.shape, (residual.shape, x.shape)
        assert residual.dtype == x.dtype, (residual.dtype, x.dtype)
        total = torch.empty_like(x)
    padded = triton.next_power_of_2(hidden)
    launch(
        add_and_normalize, (tokens,), x, x if residual is None else residual,
        norm.weight, x if norm.bias is None else norm.bias, y, total, norm.epsilon,
        H=hidden, H_PADDED=padded, ADD=residual is not None, CENTERED=norm.centered, BIAS=norm.bias is not None,
        num_warps=min(8, max(1, padded // 512)),
    )  # fmt: skip
    return y, total
