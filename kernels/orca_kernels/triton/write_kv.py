"""After the QKV product, in one launch: bias, split, norms of heads, rotary embedding, keys and values to their slots.

A token's row of the product is [q of all heads | k of all key/value heads | v of all key/value heads].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .plan import Plan
from .rope import Rope, partner, turned

PROGRAM_HEADS = 8  # heads of a program; not tuned


class HeadNorms(NamedTuple):
    """RMSNorm of each head of the queries and of the keys, before the rotation: weights [D] each."""

    query: Tensor
    key: Tensor
    epsilon: float


@triton.jit
def normalized(x, factor, head, d, query_norm, key_norm, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr):
    """Elements d of heads x [H, ..] times their factors [H] and the weights of their norm; values stay as they are."""
    query = tl.load(query_norm + d, mask=d < D, other=0.0).to(tl.float32)
    key = tl.load(key_norm + d, mask=d < D, other=0.0).to(tl.float32)
    scaled = x * factor[:, None] * tl.where((head < HEADS)[:, None], query[None, :], key[None, :])
    return tl.where((head < HEADS + KV_HEADS)[:, None], scaled, x)


@triton.jit
def split_and_write(
    qkv,
    bias,
    q,
    keys,
    values,
    slots,
    positions,
    cosines,
    sines,
    query_norm,
    key_norm,
    epsilon,
    FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    H: tl.constexpr,
    BIAS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    """Grid: tokens, pieces of H heads of the row from head FIRST on. HALF 0: no rotary embedding."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        head, d = FIRST + tl.program_id(1) * H + tl.arange(0, H), tl.arange(0, D_PADDED)
        inside = (d < D)[None, :]
        real = (head < HEADS + 2 * KV_HEADS)[:, None] & inside
        row = qkv + token * ((HEADS + 2 * KV_HEADS) * D) + head[:, None] * D
        x = tl.load(row + d[None, :], mask=real, other=0.0).to(tl.float32)
        if BIAS:
            x += tl.load(bias + head[:, None] * D + d[None, :], mask=real, other=0.0).to(tl.float32)
        factor = tl.full([H], 1.0, tl.float32)
        if NORM:
            factor = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / D + epsilon)
            x = normalized(x, factor, head, d, query_norm, key_norm, HEADS, KV_HEADS, D)
        if HALF > 0:
            pair = partner(d, HALF)[None, :]
            other = tl.load(row + pair, mask=real, other=0.0).to(tl.float32)
            if BIAS:
                other += tl.load(bias + head[:, None] * D + pair, mask=real, other=0.0).to(tl.float32)
            if NORM:
                of_pair = partner(d, HALF)
                other = normalized(other, factor, head, of_pair, query_norm, key_norm, HEADS, KV_HEADS, D)
            position = tl.load(positions + token)
            rotated = turned(x, other, d, position, cosines, sines, HALF)
            x = tl.where((head < HEADS + KV_HEADS)[:, None], rotated, x)
        result = x.to(q.dtype.element_ty)
        if FIRST < HEADS:
            tl.store(
                q + (token * HEADS + head[:, None]) * D + d[None, :], result, mask=(head < HEADS)[:, None] & inside
            )
        is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
        is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
        kv_head = tl.where(is_key, head - HEADS, head - HEADS - KV_HEADS)
        at = ((slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * D
        tl.store(keys + at[:, None] + d[None, :], result, mask=is_key[:, None] & inside)
        tl.store(values + at[:, None] + d[None, :], result, mask=is_value[:, None] & inside)


def write_kv(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    rope: Rope | None = None,
    bias: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """qkv [T, (heads + 2 kv_heads) * D], bias of a row of it, one layer's keys and values
    [n_blocks, kv_heads, block_size, D] -> q [T, heads, D].

    Without bias, rotary embedding and norms q is a view of qkv. Tokens that pad the plan are not written, and not
    defined in q.
    """
    tokens, width = qkv.shape
    _, kv_heads, block_size, size = keys.shape
    heads = width // size - 2 * kv_heads
    assert tokens == plan.bounds.tokens, (tokens, plan.bounds)
    assert heads > 0, (width, keys.shape)
    assert width == (heads + 2 * kv_heads) * size, (width, keys.shape)
    assert qkv.is_contiguous(), qkv.stride()
    assert qkv.dtype == keys.dtype == values.dtype, (qkv.dtype, keys.dtype, values.dtype)
    assert keys.is_contiguous(), keys.stride()
    assert values.is_contiguous(), values.stride()
    assert rope is None or 2 * rope.half <= size, size
    as_is = bias is None and rope is None and norms is None
    if as_is:
        q = qkv.view(tokens, -1, size)[:, :heads]
    else:
        q = torch.empty((tokens, heads, size), dtype=qkv.dtype, device=qkv.device)
    first = heads if as_is else 0
    launch(
        split_and_write, (tokens, -(-(heads + 2 * kv_heads - first) // PROGRAM_HEADS)),
        qkv, qkv if bias is None else bias, q, keys, values, plan.slots, plan.positions,
        qkv if rope is None else rope.cosines, qkv if rope is None else rope.sines,
        *((qkv, qkv, 0.0) if norms is None else norms),
        FIRST=first, HEADS=heads, KV_HEADS=kv_heads, BLOCK_SIZE=block_size, D=size,
        D_PADDED=triton.next_power_of_2(size), H=PROGRAM_HEADS, BIAS=bias is not None,
        HALF=0 if rope is None else rope.half,
        NORM=norms is not None,
    )  # fmt: skip
    return q
