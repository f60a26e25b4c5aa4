"""Products with weights in codes of eight or four bits (`codes.py`), which become integers in registers.

    y[n] = sum over groups of (sum over the group of x[k] * integer[n, k]) * scale[n, group] + bias[n]

The integers, from -128 to 127, are exact in the type of x: float16, bfloat16 or float32. Sums are float32. No weight is
rounded, so the result is nearer to the numbers that the codes stand for than a product with these in the type of x.

A row's result is the same bits in any batch, as in `attention.py`:

1. Its sum has one order, which the matrix alone decides: groups in ascending order within a split of SPLIT inputs,
   splits in ascending order. Where tiles are too few to fill a device each split has a program, and their results are
   added by a second kernel; otherwise one program does all of it, in the same order (a float32 that is stored and
   loaded is the same).
2. Products are instructions of one kind (mma.sync m16n8k16), in which a row depends on its own row of x alone. Tiles
   have 16 or 32 rows: of 64, Triton would make Hopper's wgmma, which may add in another order.
3. No atomics, no sums over threads. A product with a scale and its sum are one rounding, because `tl.fma` asks for it.

What this costs, estimated: a long prompt reads weights from the L2 cache once for 32 rows, by instructions that reach
some 60 % of what wgmma does. Increments wait for memory.
"""

# pyright: reportGeneralTypeIssues=false
# (a kernel calls functions of Triton's language, which pyright takes for functions that never return)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import BLOCK, Coded
from .launch import launch

# Inputs whose products one program adds up where splits have programs of their own. It decides bits.
SPLIT = 1024
PROGRAMS = 256  # that keep a device busy: an H100 has 132 multiprocessors
ELEMENTS = 1024  # of a program that adds splits up; not tuned
AS_IT_IS, SUBTRACTED, MULTIPLIED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # a point, and a code


@dataclass(frozen=True)
class Tiling:
    """Rows and outputs of a program, the stages of its loads, its warps. It changes no bits. Not tuned on a GPU."""

    rows: int
    outputs: int
    stages: int
    warps: int


FEW = Tiling(rows=16, outputs=64, stages=4, warps=4)
MANY = Tiling(rows=32, outputs=128, stages=3, warps=8)


@triton.jit(do_not_specialize=["rows", "splits"])
def multiply(
    x,
    codes,
    scales,
    points,
    bias,
    out,
    partial,
    rows,
    inputs,
    outputs,
    splits,
    M: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    SCALED: tl.constexpr,
    POINTS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid: tiles of rows, tiles of outputs, and programs that share the splits: one, or one for each.

    One writes the result. Of several each writes its sums to `partial` [splits, rows, outputs] float32, which
    `add_splits` reads. TILE, STEP and SCALED are those of `Coded`. WIDTH: bytes of a tile and an output, and the inputs
    of a product.
    """
    r = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    n = (tl.program_id(1) * N + tl.arange(0, N)).to(tl.int64)
    real, is_output = r < rows, n < outputs
    both = real[:, None] & is_output[None, :]
    from_row = x + r * inputs
    w = tl.arange(0, WIDTH)
    total = tl.zeros([M, N], tl.float32)
    for split in range(tl.program_id(2), splits, tl.num_programs(2)):
        of_split = tl.zeros([M, N], tl.float32)
        for first in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, inputs), BLOCK):
            of_group = tl.zeros([M, N], tl.float32)
            for tile in tl.static_range(BLOCK // TILE):
                at = (first // TILE + tile) * outputs + n
                code = tl.load(codes + at[None, :] * WIDTH + w[:, None], mask=is_output[None, :], other=0)
                for part in tl.static_range(TILE // WIDTH):
                    begin = first + (tile * TILE + part * WIDTH)
                    k = begin + w
                    some = tl.load(
                        from_row[:, None] + k[None, :], mask=real[:, None] & (k < inputs)[None, :], other=0.0
                    )
                    integer = code
                    if TILE > WIDTH:
                        integer = code >> 4 if part == 1 else (code << 4) >> 4
                    if POINTS != AS_IT_IS:
                        at = begin // STEP * outputs + n
                        point = tl.load(points + at, mask=is_output, other=0)[None, :]
                        integer = integer * point if POINTS == MULTIPLIED else integer - point
                    of_group = tl.dot(some, integer.to(some.dtype), of_group, input_precision="ieee")
                    if (tile * TILE + part * WIDTH + WIDTH) % SCALED == 0:
                        at = begin // SCALED * outputs + n
                        scale = tl.load(scales + at, mask=is_output, other=0.0).to(tl.float32)[None, :]
                        of_split = tl.fma(of_group, tl.broadcast_to(scale, of_group.shape), of_split)
                        of_group = tl.zeros([M, N], tl.float32)
        if tl.num_programs(2) == 1:
            total += of_split
        else:
            at = (split * rows + r)[:, None] * outputs + n[None, :]
            tl.store(partial + at, of_split, mask=both)
    if tl.num_programs(2) == 1:
        if BIAS:
            total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
        at = r[:, None] * outputs + n[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["rows", "splits"])
def add_splits(partial, bias, out, rows, outputs, splits, N: tl.constexpr, BIAS: tl.constexpr):
    """Grid: rows, pieces of N outputs."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * N + tl.arange(0, N)
    is_output = n < outputs
    total = tl.zeros([N], tl.float32)
    for split in range(splits):
        total += tl.load(partial + (split * rows + row) * outputs + n, mask=is_output, other=0.0)
    if BIAS:
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + n, total.to(out.dtype.element_ty), mask=is_output)


def linear(x: Tensor, weight: Coded, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> x W^T + b [T, N]."""
    rows, inputs = x.shape
    outputs = weight.outputs
    assert x.is_contiguous(), x.stride()
    assert inputs == weight.inputs, (inputs, weight.inputs)
    how = FEW if rows <= FEW.rows else MANY
    tiles, splits = (-(-rows // how.rows), -(-outputs // how.outputs)), -(-inputs // SPLIT)
    programs = 1 if tiles[0] * tiles[1] >= PROGRAMS else splits
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    partial = torch.empty((0 if programs == 1 else splits, rows, outputs), dtype=torch.float32, device=x.device)
    points = MULTIPLIED if weight.multiplied else SUBTRACTED if weight.points is not None else AS_IT_IS
    added = out if bias is None else bias
    launch(
        multiply, (*tiles, programs), x, weight.codes, weight.scales,
        weight.codes if weight.points is None else weight.points, added, out, partial, rows, inputs, outputs, splits,
        M=how.rows, N=how.outputs, TILE=weight.tile, WIDTH=weight.codes.shape[2],
        STEP=weight.step, SCALED=weight.scaled, POINTS=points.value, BIAS=bias is not None, BLOCK=BLOCK, SPLIT=SPLIT,
        num_stages=how.stages, num_warps=how.warps,
    )  # fmt: skip
    if programs > 1:
        launch(
            add_splits, (rows, -(-outputs // ELEMENTS)), partial, added, out, rows, outputs, splits,
            N=ELEMENTS, BIAS=bias is not None,
        )  # fmt: skip
    return out
