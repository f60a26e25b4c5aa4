"""The formats of weights, by the name that the setting `quantize` has for them. A new format is one file and one line.

A format says how much it keeps, how it reads a matrix's slices, and how each backend multiplies. Cutting is the
recording's: a rank reads its outputs or inputs, and a format begins its groups at the first input of the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, Self, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from orca_kernels.cpu.program import Operand, Packed, Program
    from orca_kernels.triton.codes import Coded

    from ..recording import Matrix
    from ..weights import WeightSource


class Weight(Protocol):
    """The weights [N, K] of a linear operation."""

    def joined(self, other: Self, join: Callable[[Tensor, Tensor], Tensor]) -> Self:
        """Joins two weights as one operation's: `join` puts the rows of two tensors [N, ..] together."""
        ...

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K], bias [N] -> x W^T + b [T, N], in plain torch."""
        ...

    def pack(self, program: Program, bias: Tensor | None) -> Packed:
        """For the compiled kernels of a CPU."""
        ...

    def coded(self, device: torch.device) -> Coded | None:
        """The codes for the Triton kernels of a GPU; None: they are numbers, which torch multiplies."""
        ...


class Reader(Protocol):
    """The functions that the file of a format has."""

    def load(self, weights: WeightSource, matrix: Matrix) -> Weight:
        """This rank's slice, on its device."""
        ...

    def operand(self, program: Program, width: int) -> Operand:
        """A buffer that the compiled kernels multiply with such weights."""
        ...


@dataclass(frozen=True)
class Format:
    """A format, without torch."""

    file: str
    bytes: Callable[[int, int, int], int]  # of weights [outputs, inputs], where one of the model's numbers has `item`

    @property
    def reader(self) -> Reader:
        """Imports torch."""
        return cast(Reader, import_module(f".{self.file}", __package__))


def _grouped(step: int, outputs: int, inputs: int, _: int) -> int:
    return outputs * (-(-inputs // 2) + 4 * -(-inputs // step))


FORMATS = {
    None: Format("floats", lambda outputs, inputs, item: outputs * inputs * item),
    # 128 inputs have a scale of four bytes, 32 a multiplier of one: CODES and PART of orca_kernels.cpu.program, which
    # imports torch.
    "int8": Format("int8", lambda outputs, inputs, _: outputs * (inputs + 4 * -(-inputs // 128))),
    "int4": Format(
        "int4", lambda outputs, inputs, _: outputs * (-(-inputs // 2) + -(-inputs // 32) + 4 * -(-inputs // 128))
    ),
}
# Those in which a rank keeps the codes that another tool has made (`grouped.py`), by their bits and by how many inputs
# share a scale of four bytes.
CODED = {("fours", step): Format("grouped", partial(_grouped, step)) for step in (128, 64, 32)} | {
    ("eights", 128): Format("grouped", FORMATS["int8"].bytes)
}
# Those in which a rank keeps the blocks of a GGUF file (`gguf.py`), by the name of their type.
KEPT = {
    "Q8_0": Format("gguf", lambda outputs, inputs, _: outputs * inputs // 32 * 34),
    "Q4_0": Format("gguf", lambda outputs, inputs, _: outputs * inputs // 32 * 18),
}
