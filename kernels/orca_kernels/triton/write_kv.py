"""After the QKV product: bias, split, rotary embedding, and the write of keys and values to their slots, in one launch.

A token's row of the product is [q of all heads | k of all key/value heads | v of all key/value heads].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .plan import Plan
from .rope import Rope, partner, turned

PROGRAM_HEADS = 8  # heads of a program; not tuned


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
    FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    H: tl.constexpr,
    BIAS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
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
        if HALF > 0:
            pair = partner(d, HALF, INTERLEAVED)[None, :]
            other = tl.load(row + pair, mask=real, other=0.0).to(tl.float32)
            if BIAS:
                other += tl.load(bias + head[:, None] * D + pair, mask=real, other=0.0).to(tl.float32)
            position = tl.load(positions + token)
            rotated = turned(x, other, d, position, cosines, sines, HALF, INTERLEAVED)
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
    qkv: Tensor, keys: Tensor, values: Tensor, plan: Plan, rope: Rope | None = None, bias: Tensor | None = None
) -> Tensor:
    """qkv [T, (heads + 2 kv_heads) * D], bias of a row of it, one layer's keys and values
    [n_blocks, kv_heads, block_size, D] -> q [T, heads, D].

    Without bias and rotary embedding q is a view of qkv. Tokens that pad the plan are neither written nor defined in q.
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
    as_is = bias is None and rope is None
    if as_is:
        q = qkv.view(tokens, -1, size)[:, :heads]
    else:
        q = torch.empty((tokens, heads, size), dtype=qkv.dtype, device=qkv.device)
    first = heads if as_is else 0
    launch(
        split_and_write, (tokens, -(-(heads + 2 * kv_heads - first) // PROGRAM_HEADS)),
        qkv, qkv if bias is None else bias, q, keys, values, plan.slots, plan.positions,
        qkv if rope is None else rope.cosines, qkv if rope is None else rope.sines,
        FIRST=first, HEADS=heads, KV_HEADS=kv_heads, BLOCK_SIZE=block_size, D=size,
        D_PADDED=triton.next_power_of_2(size), H=PROGRAM_HEADS, BIAS=bias is not None,
        HALF=0 if rope is None else rope.half, INTERLEAVED=rope is not None and rope.interleaved,
    )  # fmt: skip
    return q
