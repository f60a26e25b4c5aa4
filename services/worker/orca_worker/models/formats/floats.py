"""Weights as numbers of the model's type."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from orca_kernels.cpu.program import Operand, Packed, Program

from ..recording import Matrix
from ..weights import WeightSource


class Numbers(NamedTuple):
    """`Weight` [N, K]."""

    of: Tensor

    def joined(self, other: Numbers, join: Callable[[Tensor, Tensor], Tensor]) -> Numbers:
        return Numbers(join(self.of, other.of))

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, self.of, bias)

    def pack(self, program: Program, bias: Tensor | None) -> Packed:
        return program.pack(self.of, bias)

    def coded(self, device: torch.device) -> None:
        return None


def load(weights: WeightSource, matrix: Matrix) -> Numbers:
    return Numbers(weights.matrix(matrix).contiguous())


def operand(program: Program, width: int) -> Operand:
    return program.operand(width)
