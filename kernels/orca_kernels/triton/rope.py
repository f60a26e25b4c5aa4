"""Rotary position embedding (Su et al., "RoFormer").

The first `2 * half` elements of a head are pairs. The pair of number j at position p is turned by an angle of which
the tables hold cosine and sine at [p, j]:

    (a, b) -> (a cos - b sin, b cos + a sin)

A pair is (j, j + half), as in Llama and GPT-NeoX, or (2j, 2j + 1), `interleaved`, as in GPT-J.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch


@dataclass(frozen=True)
class Rope:
    """cosines, sines [positions, half] float32."""

    cosines: Tensor
    sines: Tensor
    interleaved: bool = False

    @property
    def half(self) -> int:
        return self.cosines.shape[1]


@triton.jit
def partner(d, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The element that element d of a head is paired with; itself, if none."""
    other = d ^ 1 if INTERLEAVED else tl.where(d < HALF, d + HALF, d - HALF)
    return tl.where(d < 2 * HALF, other, d)


@triton.jit
def turned(x, other, d, position, cosines, sines, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Elements d [D] of heads x [..., D], whose partners are `other`, turned by the angles of a position. float32."""
    if INTERLEAVED:
        j = d // 2
        is_first = d % 2 == 0
    else:
        j = d % HALF
        is_first = d < HALF
    rotary = d < 2 * HALF
    at = position.to(tl.int64) * HALF + j
    cosine = tl.load(cosines + at, mask=rotary, other=1.0)
    sine = tl.load(sines + at, mask=rotary, other=0.0)
    sine = tl.where(is_first, -sine, sine)
    return tl.fma(other, tl.broadcast_to(sine[None, :], x.shape), x * cosine[None, :])


@triton.jit
def rotate_heads(
    x,
    x_stride,
    out,
    positions,
    cosines,
    sines,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    if position >= 0:
        head, d = tl.arange(0, HEADS_PADDED), tl.arange(0, D_PADDED)
        real = (head < HEADS)[:, None] & (d < D)[None, :]
        at = x + token * x_stride + head[:, None] * D
        value = tl.load(at + d[None, :], mask=real, other=0.0).to(tl.float32)
        other = tl.load(at + partner(d, HALF, INTERLEAVED)[None, :], mask=real, other=0.0).to(tl.float32)
        value = turned(value, other, d, position, cosines, sines, HALF, INTERLEAVED)
        tl.store(out + (token * HEADS + head[:, None]) * D + d[None, :], value.to(out.dtype.element_ty), mask=real)


def rotary(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """x [T, heads, D], positions [T] int32 (-1: nothing is written) -> [T, heads, D]. (`write_kv` has it built in.)"""
    tokens, heads, size = x.shape
    assert x.stride()[1:] == (size, 1), x.stride()
    assert 2 * rope.half <= size, (rope.half, size)
    out = torch.empty((tokens, heads, size), dtype=x.dtype, device=x.device)
    launch(
        rotate_heads, (tokens,), x, x.stride(0), out, positions, rope.cosines, rope.sines,
        HEADS=heads, HEADS_PADDED=triton.next_power_of_2(heads), D=size, D_PADDED=triton.next_power_of_2(size),
        HALF=rope.half, INTERLEAVED=rope.interleaved,
    )  # fmt: skip
    return out
