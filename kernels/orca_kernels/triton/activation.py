"""The part between the two products of a feed-forward network: bias and activation, or a gate. float32 inside.

tanh_gelu(x) = 0.5 x (1 + tanh(u)) = x sigmoid(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3)
gated(gate, up) = act(gate) up     (Shazeer, "GLU Variants Improve Transformer")
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

ACTIVATIONS = ("gelu", "tanh_gelu", "relu", "silu", "tanh")
ELEMENTS = 1024  # of a program; not tuned


@triton.jit
def activated(x, ACT: tl.constexpr):
    if ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "tanh_gelu":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "relu":
        x = tl.maximum(x, 0.0)
    elif ACT == "silu":
        x = x * tl.sigmoid(x)
    else:
        tl.static_assert(ACT == "tanh")
        x = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    return x


@triton.jit
def add_and_activate(x, bias, out, WIDTH: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr):
    """Grid: tokens, pieces of N elements of a row."""
    i = tl.program_id(1) * N + tl.arange(0, N)
    real = i < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + i
    value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + i, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at, activated(value, ACT).to(out.dtype.element_ty), mask=real)


@triton.jit
def gate_and_multiply(x, out, WIDTH: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr):
    """Grid: tokens, pieces of N elements of a row of the result."""
    i = tl.program_id(1) * N + tl.arange(0, N)
    real = i < WIDTH
    token = tl.program_id(0).to(tl.int64)
    gate = tl.load(x + token * 2 * WIDTH + i, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x + token * 2 * WIDTH + WIDTH + i, mask=real, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + i, (activated(gate, ACT) * up).to(out.dtype.element_ty), mask=real)


def bias_act(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """x [T, I], bias [I], act one of ACTIVATIONS -> act(x + bias) [T, I]."""
    assert act in ACTIVATIONS, act
    assert x.is_contiguous(), x.stride()
    tokens, width = x.shape
    out = torch.empty_like(x)
    launch(
        add_and_activate, (tokens, -(-width // ELEMENTS)), x, x if bias is None else bias, out,
        WIDTH=width, N=ELEMENTS, BIAS=bias is not None, ACT=act,
    )  # fmt: skip
    return out


def gate_act(gate_up: Tensor, act: str) -> Tensor:
    """gate_up [T, 2 I], the gate first, act one of ACTIVATIONS -> act(gate) * up [T, I]."""
    assert act in ACTIVATIONS, act
    assert gate_up.is_contiguous(), gate_up.stride()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    launch(gate_and_multiply, (tokens, -(-width // ELEMENTS)), gate_up, out, WIDTH=width, N=ELEMENTS, ACT=act)
    return out
