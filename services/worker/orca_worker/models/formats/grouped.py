"""Weights in codes that another tool has made: (code - zero point) * scale, with a scale for 32, 64 or 128 inputs.

Codes of eight bits are those of `int8.py`. Those of four bits have zero points, and scales of 16 bits, in float16 or
bfloat16, so that a number of float32 holds both. Activations are those of `int8.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from orca_kernels.cpu.program import CODES as GROUP
from orca_kernels.cpu.program import Packed, Program
from orca_kernels.triton.codes import Coded, coded, narrowed

from ..coded_weights import CodedWeights
from ..recording import Matrix
from ..weights import WeightSource
from .int8 import Codes, operand

__all__ = ["load", "operand"]

MIDDLE = 8  # of codes of four bits


class Grouped(NamedTuple):
    """`Weight` [N, K]"""

    codes: Tensor  # [N, K] uint8, from 0 to 15
    zeros: Tensor  # [N, K / step rounded up] uint8, from 0 to 15
    scales: Tensor  # [N, K / step rounded up] float32
    step: int

    def joined(self, other: Grouped, join: Callable[[Tensor, Tensor], Tensor]) -> Grouped:
        codes, zeros, scales = (join(mine, theirs) for mine, theirs in zip(self[:3], other[:3], strict=True))
        return Grouped(codes, zeros, scales, self.step)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        given = Codes.of(x.float())
        y = x.new_zeros((len(x), len(self.codes)), dtype=torch.float32)
        for number, first in enumerate(range(0, x.shape[1], self.step)):
            inputs = slice(first, first + self.step)
            of_group = self.codes[:, inputs].float() - self.zeros[:, number, None]
            scales = given.scales[:, first // GROUP, None] * self.scales[:, number]
            y += (given.codes[:, inputs] @ of_group.t()) * scales
        return (y if bias is None else y + bias.float()).to(x)

    def pack(self, program: Program, bias: Tensor | None) -> Packed:
        return program.pack_grouped(*self, bias=bias)

    def coded(self, device: torch.device) -> Coded:
        codes, points = ((each.to(device) - MIDDLE).view(torch.int8) for each in self[:2])
        scales = narrowed(self.scales).to(device)
        return coded(codes, scales, points if bool(points.any()) else None, bits=4, step=self.step)


def load(weights: WeightSource, matrix: Matrix) -> Grouped | Codes:
    """The codes, zero points and scales of the files."""
    assert isinstance(weights, CodedWeights)
    codes, zeros, scales = zip(*(weights.codes(part.name) for part in matrix.weights), strict=True)
    points = [each for each in zeros if each is not None]
    if not points:
        return Codes(torch.cat(codes), torch.cat(scales))
    return Grouped(torch.cat(codes), torch.cat(points), torch.cat(scales), weights.step)
