"""Weights as GGUF's Q8_0 and Q4_0 have them: codes of eight or four bits, 32 of which share a scale in float16.

Activations are those of `int8.py`. A sum of integers is over 32 inputs, and float32 rounds once for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from orca_kernels.cpu.program import CODES as GROUP
from orca_kernels.cpu.program import PART, Packed, Program
from orca_kernels.triton.codes import Coded, coded

from ..gguf_weights import GGUFWeights
from ..recording import Matrix
from ..weights import WeightSource
from .int8 import Codes, operand

__all__ = ["load", "operand"]


class Blocks(NamedTuple):
    """`Weight` [N, K]: code * scale."""

    codes: Tensor  # [N, K] int8, of 4 bits from -8 to 7
    scales: Tensor  # [N, K / 32] float16
    bits: int

    def joined(self, other: Blocks, join: Callable[[Tensor, Tensor], Tensor]) -> Blocks:
        return Blocks(join(self.codes, other.codes), join(self.scales, other.scales), self.bits)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        given = Codes.of(x.float())
        y = x.new_zeros((len(x), len(self.codes)), dtype=torch.float32)
        for part, first in enumerate(range(0, x.shape[1], PART)):
            inputs = slice(first, first + PART)
            integers = given.codes[:, inputs] @ self.codes[:, inputs].float().t()
            y += integers * (given.scales[:, first // GROUP, None] * self.scales[:, part].float())
        return (y if bias is None else y + bias.float()).to(x)

    def pack(self, program: Program, bias: Tensor | None) -> Packed:
        return program.pack_blocks(self.codes, self.scales, bias, bits=self.bits)

    def coded(self, device: torch.device) -> Coded:
        return coded(self.codes.to(device), self.scales.to(device), bits=self.bits, step=PART)


def load(weights: WeightSource, matrix: Matrix) -> Blocks:
    """The codes and scales of the file."""
    assert isinstance(weights, GGUFWeights)
    parts = [weights.codes(part) for part in matrix.weights]
    codes, scales, bits = zip(*parts, strict=True)
    return Blocks(torch.cat(codes), torch.cat(scales), bits[0])
