"""Weights in four bits, made of a checkpoint's numbers when they are loaded; docs/weights.md has the arithmetic.

They are weights in eight bits (`int8.py`) of which each code is a product: a code of four bits for the input, and a
multiplier for its 32 inputs. So 32 inputs have a scale of their own, and a product is still one of integers over 128
(Lin et al., "QServe", MLSys'25, section 4.1, has the same two levels).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from orca_kernels.cpu.program import CODES as GROUP
from orca_kernels.cpu.program import PART, Packed, Program
from orca_kernels.reference import ZERO
from orca_kernels.triton.codes import Coded, coded

from ..recording import Matrix
from ..weights import WeightSource
from .int8 import Codes, operand

__all__ = ["load", "operand"]

LARGEST = 120  # of the products: -8 * -15


class Fours(NamedTuple):
    """`Weight` [N, K]: code * multiplier * scale."""

    codes: Tensor  # [N, K] int8, from -8 to 7
    multipliers: Tensor  # [N, K / 32 rounded up] int8, from -15 to 15 and not 0
    scales: Tensor  # [N, K / 128 rounded up] float32

    @classmethod
    def of(cls, x: Tensor) -> Fours:
        """x [N, K] float32"""
        n, k = x.shape
        groups = functional.pad(x, (0, -k % GROUP)).view(n, -1, GROUP)
        largest = groups.abs().amax(2, keepdim=True)
        is_zero = largest < ZERO
        parts = (groups * (LARGEST / largest).masked_fill_(is_zero, 0)).view(n, -1, PART)
        least, most = parts.amin(2, keepdim=True), parts.amax(2, keepdim=True)
        multipliers = torch.where(-least >= most, least, most).mul_(-0.125).round_()
        multipliers.masked_fill_(multipliers == 0, 1)
        codes = (parts / multipliers).round_().clamp_(-8, 7).view(n, -1)[:, :k]
        return cls(
            codes.to(torch.int8),
            multipliers.view(n, -1)[:, : -(-k // PART)].to(torch.int8),
            (largest / torch.full_like(largest, LARGEST)).masked_fill_(is_zero, 0).view(n, -1),
        )

    def joined(self, other: Fours, join: Callable[[Tensor, Tensor], Tensor]) -> Fours:
        return Fours(*map(join, self, other))

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        multipliers = self.multipliers.repeat_interleave(PART, 1)[:, : self.codes.shape[1]]
        return Codes(self.codes * multipliers, self.scales).linear(x, bias)

    def pack(self, program: Program, bias: Tensor | None) -> Packed:
        return program.pack_fours(self.codes, self.multipliers, self.scales, bias)

    def coded(self, device: torch.device) -> Coded:
        codes, multipliers, scales = (each.to(device) for each in self)
        return coded(codes, scales, multipliers, bits=4, step=PART, scaled=GROUP, multiplied=True)


def load(weights: WeightSource, matrix: Matrix) -> Fours:
    """Makes codes of the numbers as the checkpoint has them, whatever the model's type is."""
    return Fours.of(weights.matrix(matrix, torch.float32))
