"""Weights in eight bits, made of a checkpoint's numbers when they are loaded; docs/weights.md has the arithmetic.

A code is an integer from -127 to 127. The 128 inputs of a group share a scale, of each output for the weights and of
each row for the activations, which become codes before each product. The sum of a group's products is exact in integers
as in float32, so it depends on no order; float32 rounds once a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from orca_kernels.cpu.program import CODES as GROUP
from orca_kernels.cpu.program import Operand, Packed, Program
from orca_kernels.reference import eight_bits
from orca_kernels.triton.codes import Coded, coded

from ..recording import Matrix
from ..weights import WeightSource


class Codes(NamedTuple):
    """Numbers [N, K] as code * scale. As weights they are a `Weight`."""

    codes: Tensor  # [N, K]
    scales: Tensor  # [N, groups] float32

    @classmethod
    def of(cls, x: Tensor) -> Codes:
        """x [N, K] float32. The codes are float32, too."""
        n, k = x.shape
        groups = -(-k // GROUP)
        parts = torch.nn.functional.pad(x, (0, groups * GROUP - k)).view(n, groups, GROUP)
        codes, scales = eight_bits(parts)
        return cls(codes.view(n, -1)[:, :k], scales.view(n, groups))

    def joined(self, other: Codes, join: Callable[[Tensor, Tensor], Tensor]) -> Codes:
        return Codes(*map(join, self, other))

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        given = Codes.of(x.float())
        y = x.new_zeros((len(x), len(self.codes)), dtype=torch.float32)
        for group, first in enumerate(range(0, x.shape[1], GROUP)):
            part = slice(first, first + GROUP)
            integers = given.codes[:, part] @ self.codes[:, part].float().t()
            y += integers * (given.scales[:, group, None] * self.scales[:, group])
        return (y if bias is None else y + bias.float()).to(x)

    def pack(self, program: Program, bias: Tensor | None) -> Packed:
        return program.pack_codes(self.codes, self.scales, bias)

    def coded(self, device: torch.device) -> Coded:
        return coded(self.codes.to(device), self.scales.to(device), bits=8, step=GROUP)


def load(weights: WeightSource, matrix: Matrix) -> Codes:
    """Makes codes of the numbers as the checkpoint has them, whatever the model's type is."""
    codes, scales = Codes.of(weights.matrix(matrix, torch.float32))
    return Codes(codes.to(torch.int8), scales)


def operand(program: Program, width: int) -> Operand:
    return program.codes(width)
