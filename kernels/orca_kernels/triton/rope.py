"""Rotary position embedding (Su et al., "RoFormer").

The first `2 * half` elements of a head are pairs. The pair of number j at position p is turned by an angle of which
the tables hold cosine and sine at [p, j]:

    (a, b) -> (a cos - b sin, b cos + a sin)

A pair is (j, j + half). `write_kv` turns queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """cosines, sines [positions, half] float32."""

    cosines: Tensor
    sines: Tensor

    @property
    def half(self) -> int:
        return self.cosines.shape[1]


@triton.jit
def partner(d, HALF: tl.constexpr):
    """The element that element d of a head is paired with; itself, if it has no pair."""
    return tl.where(d < 2 * HALF, tl.where(d < HALF, d + HALF, d - HALF), d)


@triton.jit
def turned(x, other, d, position, cosines, sines, HALF: tl.constexpr):
    """Elements d [D] of heads x [..., D], whose partners are `other`, turned by the angles of a position. float32."""
    j = d % HALF
    rotary = d < 2 * HALF
    at = position.to(tl.int64) * HALF + j
    cosine = tl.load(cosines + at, mask=rotary, other=1.0)
    sine = tl.load(sines + at, mask=rotary, other=0.0)
    sine = tl.where(d < HALF, -sine, sine)
    return tl.fma(other, tl.broadcast_to(sine[None, :], x.shape), x * cosine[None, :])
