"""The blocks of GGUF's tensors as numbers: what ggml's `dequantize_row_*` make of them, to the bit.

A block has a float16 scale, or two, for its 32 or 256 numbers; those of 256 have smaller ones inside, in integers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def numbers(raw: Tensor, kind: str) -> Tensor:
    """raw [rows, blocks, bytes of a block] uint8 -> [rows, numbers] float32"""
    return OF[kind](raw).flatten(1)


def _floats(raw: Tensor, dtype: torch.dtype) -> Tensor:
    return raw.contiguous().view(dtype).float()


def _scale(raw: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block [rows, blocks, 1]."""
    return _floats(raw[..., at : at + 2], torch.float16)


def _halves(raw: Tensor) -> Tensor:
    """[.., n] -> [.., 2, n]: the lower four bits of bytes, then the upper ones."""
    return torch.stack([raw & 15, raw >> 4], -2)


# The codes, int8, of what is behind a block's scale.
CODES: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": lambda raw: raw.contiguous().view(torch.int8),
    "Q4_0": lambda raw: _halves(raw).flatten(-2).to(torch.int8) - 8,
}


def _coded(raw: Tensor, kind: str) -> Tensor:
    return CODES[kind](raw[..., 2:]).float() * _scale(raw, 0)


def _q4_k(raw: Tensor) -> Tensor:
    first, second, third = (raw[..., at : at + 4] for at in (4, 8, 12))
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], -1)
    least = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], -1)
    codes = _halves(raw[..., 16:].unflatten(-1, (4, 32))).flatten(-3, -2)  # [.., 8, 32]
    steps, lowest = _scale(raw, 0) * scales.float(), _scale(raw, 2) * least.float()
    return steps[..., None] * codes.float() - lowest[..., None]


def _q6_k(raw: Tensor) -> Tensor:
    low, high = raw[..., :128].unflatten(-1, (2, 2, 32)), raw[..., 128:192].unflatten(-1, (2, 32))
    four = _halves(low.flatten(-2)).unflatten(-1, (2, 32)).flatten(-3, -2)  # [.., half, 4, 32]
    two = torch.stack([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], -2)
    codes = (four | two).to(torch.int8) - 32
    scales = _scale(raw, 208) * raw[..., 192:208].contiguous().view(torch.int8).float()
    return scales[..., None] * codes.flatten(-3).unflatten(-1, (16, 16)).float()


OF: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda raw: _floats(raw, torch.float32),
    "F16": lambda raw: _floats(raw, torch.float16),
    "BF16": lambda raw: _floats(raw, torch.bfloat16),
    "Q8_0": partial(_coded, kind="Q8_0"),
    "Q4_0": partial(_coded, kind="Q4_0"),
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
