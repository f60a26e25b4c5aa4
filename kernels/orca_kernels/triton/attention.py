"""Split attention over keys and values in blocks (paper sections 3.2 and 5).

For query i of a request whose first query is at position `context`:

    out_i = softmax(scale * q_i . K[0 : context + i + 1]) V[0 : context + i + 1]

A window of w keys hides all but the last w of them. In a prefix LM the queries of a prompt see all of its keys.

Two launches, chosen by the batch:

- `increments`: a batch of increments alone. A program has one tile of rows, one key/value head and a share of the
  splits of the keys, so that few long requests still fill the device (split-K/V). If there is more than one split,
  partial results go to memory and `merge_splits` adds them up.
- `mixed`: a batch with initiations. One launch has the tiles of all requests, one after the other, as the paper's
  fused kernel has thread blocks. A program goes through all keys of its tile.

**Batch invariance.** A row's result is the same bits in both, whatever else is in the batch and in its tile:

1. Splits, and steps through them, begin at absolute positions. Each split starts its softmax anew. Splits are merged in
   order, by the same function, from registers or from memory (a float32 that is stored and loaded is the same).
2. Keys that a row does not see add zeros to it and rescale it by one.
3. All matrix products are instructions of the same kind (mma.sync m16n8k16), in which a row of the result depends on
   its own row of the left side alone, summed in order of k. Hopper's wgmma, with 64 rows, may add in another order. So
   tiles have 16 or 32 rows and two warps, which Triton never compiles to wgmma.
   (tests/kernels/test_triton_compiled.py looks at the machine code.)
4. The sum of a row's weights is a matrix product with ones, and its maximum does not depend on an order. So nothing is
   summed over threads, in an order that a layout would decide.
5. No atomics. No contraction of a product and a sum but where `tl.fma` asks for one (launch.py).

What this costs, estimated: keys and values are read from the L2 cache once for 32 rows, not for 64 or 128. For 512
tokens in GPT-3 13B's shape attention is 1 % of an initiation's FLOP; from some 10,000 tokens on it would matter. In an
increment 15 of 16 rows of a product are padding, which bandwidth hides.
"""

# pyright: reportGeneralTypeIssues=false
# (a kernel calls functions of Triton's language, which pyright takes for functions that never return)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .plan import INCREMENT_ROWS, INITIATION_ROWS, SPLIT, Plan
from .plan import TILE as NUMBERS_OF_A_TILE

LOG2_E = 1.4426950408889634
TILE = tl.constexpr(NUMBERS_OF_A_TILE)
# Programs of `increments` that fill a device some times over: an H100 runs 132 x 5 at once. A graph is captured for a
# model's longest request: with a program for each split, one of 131,072 positions would launch 512 of them a tile.
PROGRAMS = 2048


@dataclass(frozen=True)
class Tiling:
    """The keys that a program takes at a time, the stages of its loads, its warps. Not tuned on a GPU."""

    keys: int
    stages: int
    warps: int


def shares(tiles: int, kv_heads: int, splits: int) -> int:
    """The programs that share the splits of a tile's keys: as many as fill the device. They do not change bits."""
    return min(splits, -(-PROGRAMS // (tiles * kv_heads)))


def tiling(head_size: int, item_size: int) -> Tiling:
    """By the size of a head and of an element: a function of the model alone, because `keys` decides bits.

    More keys at a time do not fit in the registers of two warps, nor do rows of more than 256 bytes, nor a third
    stage, of which only the block table would make use (tests/kernels/test_triton_compiled.py counts them).
    """
    few = head_size * item_size <= 256
    return Tiling(keys=32 if item_size == 2 and head_size <= 128 else 16, stages=2 if few else 3, warps=2 if few else 4)


@triton.jit
def merge(m, total, acc, m_split, total_split, acc_split):
    """Adds a later split to a softmax: maxima m [M], sums of weights total [M], weighted sums of values acc [M, D]."""
    m_new = tl.maximum(m, m_split)
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet
    old = tl.exp2(m - safe)
    new = tl.exp2(m_split - safe)
    total = tl.fma(total_split, new, total * old)
    acc = tl.fma(acc_split, tl.broadcast_to(new[:, None], acc.shape), acc * old[:, None])
    return m_new, total, acc


@triton.jit
def softmax_of_split(
    q,
    visible,
    keys,
    values,
    blocks,
    first,
    end,
    kv_head,
    scale,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIKE: tl.constexpr,
):
    """Keys first..end for rows q [M, D_PADDED] that see `visible` [M] keys, or the last WINDOW of them.

    `blocks`: the request's block table. ALIKE: `visible` is one number, of all rows, and no row sees more than `end`.
    """
    M: tl.constexpr = q.shape[0]
    d = tl.arange(0, D_PADDED)
    m = tl.full([M], float("-inf"), tl.float32)
    sums = tl.zeros([M, 16], tl.float32)  # the same in each column
    acc = tl.zeros([M, D_PADDED], tl.float32)
    ones = tl.full([N, 16], 1.0, q.dtype)
    for start in range(first, end, N):
        n = start + tl.arange(0, N)
        real = n < end  # what is behind may be anything, such as NaN
        block = tl.load(blocks + n // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
        at = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + n % BLOCK_SIZE) * D
        k = tl.load(keys + at[None, :] + d[:, None], mask=real[None, :] & (d < D)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if ALIKE:
            seen = real
            if WINDOW > 0:
                seen &= n >= visible - WINDOW
            scores = tl.where(seen[None, :], scores, float("-inf"))
        else:
            seen = n[None, :] < visible[:, None]
            if WINDOW > 0:
                seen &= n[None, :] >= visible[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        old = tl.exp2(m - safe)
        p = tl.exp2(scores - safe[:, None]).to(q.dtype)
        v = tl.load(values + at[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
        acc = tl.dot(p, v, acc * old[:, None], input_precision="ieee")
        sums = tl.dot(p, ones, sums * old[:, None], input_precision="ieee")
        m = m_new
    return m, tl.max(sums, 1), acc


@triton.jit
def first_split(visible, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """The split of the first key that a row sees which sees the last WINDOW of `visible` keys."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(visible - WINDOW, 0) // SPLIT
    return first


@triton.jit
def rows_of_tile(tile, kv_head, M: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr):
    """-> rows [M], as token * HEADS + head of the flat batch; which are real; how many keys each sees; the most."""
    first, count, shift, least = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    r = tl.arange(0, M)
    real = r < count
    token = (first + r) // GROUP
    row = token.to(tl.int64) * HEADS + kv_head * GROUP + (first + r) % GROUP
    visible = tl.where(real, tl.maximum(token + shift + 1, least), 0)
    return row, real, visible, tl.maximum((first + count - 1) // GROUP + shift + 1, least)


@triton.jit
def load_queries(q, q_stride, row, real, HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr):
    d = tl.arange(0, D_PADDED)
    at = row // HEADS * q_stride + row % HEADS * D
    return tl.load(q + at[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_result(out, row, real, total, acc, D: tl.constexpr, D_PADDED: tl.constexpr):
    d = tl.arange(0, D_PADDED)
    total = tl.where(total == 0.0, 1.0, total)  # padding
    result = tl.div_rn(acc, tl.broadcast_to(total[:, None], acc.shape))
    tl.store(
        out + row[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=real[:, None] & (d < D)[None, :]
    )


@triton.jit
def attend_tile(
    q,
    q_stride,
    keys,
    values,
    out,
    tile,
    table,
    table_stride,
    scale,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """All keys of a tile of at most M rows."""
    kv_head = tl.program_id(1)
    row, real, visible, end = rows_of_tile(tile, kv_head, M, HEADS, HEADS // KV_HEADS)
    queries = load_queries(q, q_stride, row, real, HEADS, D, D_PADDED)
    blocks = table + tl.load(tile).to(tl.int64) * table_stride
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D_PADDED], tl.float32)
    begin = first_split(tl.min(tl.where(real, visible, end)), SPLIT, WINDOW) * SPLIT
    for first in range(begin, end, SPLIT):
        m_split, total_split, acc_split = softmax_of_split(
            queries, visible, keys, values, blocks, first, tl.minimum(first + SPLIT, end), kv_head, scale,
            KV_HEADS, BLOCK_SIZE, D, D_PADDED, N, WINDOW, False,
        )  # fmt: skip
        m, total, acc = merge(m, total, acc, m_split, total_split, acc_split)
    store_result(out, row, real, total, acc, D, D_PADDED)


@triton.jit(do_not_specialize=["table_stride"])
def mixed(
    q,
    q_stride,
    keys,
    values,
    out,
    tiles,
    table,
    table_stride,
    scale,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid: tiles, key/value heads. Tiles have at most MANY rows; those with at most FEW (increments) are less work."""
    tile = tiles + tl.program_id(0) * TILE
    count = tl.load(tile + 2)
    if count > FEW:
        attend_tile(
            q, q_stride, keys, values, out, tile, table, table_stride, scale,
            MANY, HEADS, KV_HEADS, BLOCK_SIZE, D, D_PADDED, N, SPLIT, WINDOW,
        )  # fmt: skip
    elif count > 0:
        attend_tile(
            q, q_stride, keys, values, out, tile, table, table_stride, scale,
            FEW, HEADS, KV_HEADS, BLOCK_SIZE, D, D_PADDED, N, SPLIT, WINDOW,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "splits"])
def increments(
    q,
    q_stride,
    keys,
    values,
    out,
    partial,
    statistics,
    tiles,
    table,
    table_stride,
    scale,
    splits,
    DIRECT: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid: tiles, key/value heads, shares of the splits. A program of n shares takes every n-th split of its tile.

    DIRECT: there is one split, which is the result. Otherwise `partial` [T * HEADS, splits, D] and `statistics`
    [T * HEADS, splits, 2] (maximum, sum of weights), float32, get what `merge_splits` reads.
    """
    tile = tiles + tl.program_id(0) * TILE
    if tl.load(tile + 2) > 0:
        kv_head = tl.program_id(1)
        row, real, _, end = rows_of_tile(tile, kv_head, M, HEADS, HEADS // KV_HEADS)
        queries = load_queries(q, q_stride, row, real, HEADS, D, D_PADDED)
        blocks = table + tl.load(tile).to(tl.int64) * table_stride
        d = tl.arange(0, D_PADDED)
        begin = first_split(end, SPLIT, WINDOW)
        for split in range(begin + tl.program_id(2), tl.cdiv(end, SPLIT), tl.num_programs(2)):
            first = split * SPLIT
            m, total, acc = softmax_of_split(
                queries, end, keys, values, blocks, first, tl.minimum(first + SPLIT, end), kv_head, scale,
                KV_HEADS, BLOCK_SIZE, D, D_PADDED, N, WINDOW, True,
            )  # fmt: skip
            if DIRECT:
                store_result(out, row, real, total, acc, D, D_PADDED)
            else:
                at = row * splits + split
                tl.store(partial + at[:, None] * D + d[None, :], acc, mask=real[:, None] & (d < D)[None, :])
                tl.store(statistics + at * 2, m, mask=real)
                tl.store(statistics + at * 2 + 1, total, mask=real)


@triton.jit(do_not_specialize=["splits"])
def merge_splits(
    partial,
    statistics,
    out,
    positions,
    splits,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid: tokens, query heads. Adds up a row's splits, in order."""
    token = tl.program_id(0)
    row = token.to(tl.int64) * HEADS + tl.program_id(1)
    d = tl.arange(0, D_PADDED)
    one = tl.arange(0, 1)
    position = tl.load(positions + token)
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, D_PADDED], tl.float32)
    for split in range(first_split(position + 1, SPLIT, WINDOW), position // SPLIT + 1):
        at = row * splits + split
        acc_split = tl.load(partial + at * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        m_split, total_split = tl.load(statistics + at * 2 + one), tl.load(statistics + at * 2 + 1 + one)
        m, total, acc = merge(m, total, acc, m_split, total_split, acc_split)
    store_result(out, row + one, one + position >= 0, total, acc, D, D_PADDED)


def split_attention(q: Tensor, keys: Tensor, values: Tensor, plan: Plan, scale: float, window: int = 0) -> Tensor:
    """q [T, heads, D] over one layer's keys and values [n_blocks, kv_heads, block_size, D] -> [T, heads, D].

    window: keys that a query sees at most, its own among them; 0: all.

    The batch's own keys and values must have been written. Tokens of q, T = plan.bounds.tokens, may lie apart in memory
    (as views of a larger tensor do). Rows of the result that pad the plan are not written.
    """
    tokens, heads, size = q.shape
    _, kv_heads, block_size, _ = keys.shape
    bounds = plan.bounds
    assert tokens == bounds.tokens, (tokens, bounds)
    assert heads % kv_heads == 0, (heads, kv_heads)
    assert q.dtype == keys.dtype == values.dtype, (q.dtype, keys.dtype, values.dtype)
    assert q.stride()[1:] == (size, 1), q.stride()
    assert keys.is_contiguous(), keys.stride()
    assert values.is_contiguous(), values.stride()
    out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
    how = tiling(size, q.itemsize)
    common = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": block_size,
        "D": size,
        "D_PADDED": max(16, triton.next_power_of_2(size)),
        "N": how.keys,
        "SPLIT": SPLIT,
        "WINDOW": window,
        "num_stages": how.stages,
        "num_warps": how.warps,
    }
    work = (plan.tiles, plan.table, plan.table.stride(0), scale * LOG2_E)
    if not bounds.increments_only:
        launch(
            mixed, (bounds.tiles, kv_heads), q, q.stride(0), keys, values, out, *work,
            FEW=INCREMENT_ROWS, MANY=INITIATION_ROWS, **common,
        )  # fmt: skip
        return out
    direct = bounds.splits == 1
    programs = shares(bounds.tiles, kv_heads, bounds.splits)
    partial = torch.empty((0 if direct else tokens * heads, bounds.splits, size), dtype=torch.float32, device=q.device)
    statistics = torch.empty((len(partial), bounds.splits, 2), dtype=torch.float32, device=q.device)
    launch(
        increments, (bounds.tiles, kv_heads, programs), q, q.stride(0), keys, values, out,
        partial, statistics, *work, bounds.splits, DIRECT=direct, M=INCREMENT_ROWS, **common,
    )  # fmt: skip
    if not direct:
        launch(
            merge_splits, (tokens, heads), partial, statistics, out, plan.positions, bounds.splits,
            HEADS=heads, D=size, D_PADDED=common["D_PADDED"], SPLIT=SPLIT, WINDOW=window, num_warps=1,
        )  # fmt: skip
    return out
