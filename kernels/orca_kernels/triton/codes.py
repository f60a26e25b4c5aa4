"""How weights in codes of eight or four bits lie in a GPU's memory. `linear.py` multiplies them.

A tile is some inputs of all outputs: the bytes of one output's inputs, then those of the next output. So what a program
reads at once lies together, whatever the number of inputs. A tile of eight bits has the 128 or 32 inputs that share a
scale. One of four bits has 128 or 64: byte j of an output has the code of input j in its lower half, and that of input
j of the tile's second half in its upper half. So a product is one of 32 inputs at least, all in one group. Inputs are
padded to whole blocks of BLOCK, with weights of zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

BLOCK = 128  # inputs that a program takes at a time
# Inputs of a product, at least: with codes of a byte Triton gives a thread four in a row, so that 32 make two mma.sync.
LEAST = 32


class Coded(NamedTuple):
    """Weights [outputs, inputs]: (code - point) * scale or, if they are `multiplied`, code * point * scale.

    tile: inputs of a tile; step, scaled: inputs that share a point, and a scale.
    """

    codes: Tensor  # [tiles, outputs, bytes] int8
    scales: Tensor  # [inputs / scaled, outputs]
    points: Tensor | None  # [inputs / step, outputs] int8
    inputs: int
    tile: int
    step: int
    scaled: int
    multiplied: bool

    @property
    def outputs(self) -> int:
        return self.codes.shape[1]

    def joined(self, other: Coded, join: Callable[[Tensor, Tensor], Tensor]) -> Coded:
        """Joins two matrices as one operation's: `join` puts the rows of two tensors [outputs, ..] together."""

        def both(mine: Tensor, theirs: Tensor) -> Tensor:
            return join(mine.transpose(0, 1), theirs.transpose(0, 1)).transpose(0, 1).contiguous()

        points = None
        if self.points is not None or other.points is not None:
            points = both(self._all_points, other._all_points)
        return Coded(
            both(self.codes, other.codes), both(self.scales, other.scales), points,
            self.inputs, self.tile, self.step, self.scaled, self.multiplied,
        )  # fmt: skip

    @property
    def _all_points(self) -> Tensor:
        assert self.points is not None or not self.multiplied
        groups = len(self.codes) * self.tile // self.step
        return self.codes.new_zeros(groups, self.outputs) if self.points is None else self.points


def coded(
    codes: Tensor,
    scales: Tensor,
    points: Tensor | None = None,
    *,
    bits: int,
    step: int,
    scaled: int | None = None,
    multiplied: bool = False,
) -> Coded:
    """codes [N, K] int8, of four bits from -8 to 7; scales [N, K / scaled rounded up], of any type of floats; points
    [N, K / step rounded up] int8, with which a weight's integer is from -128 to 127.

    step: inputs that share a point, 128, 64 or 32. scaled: inputs that share a scale, up to 128 and a multiple of step,
    which it is unless it is said.
    """
    (outputs, inputs), scaled = codes.shape, scaled or step
    assert bits in (4, 8), bits
    assert BLOCK % scaled == scaled % step == 0, (step, scaled)
    whole = -(-inputs // BLOCK) * BLOCK

    def padded(x: Tensor, each: int) -> Tensor:
        return functional.pad(x, (0, whole // each - x.shape[1]))

    tile = step if bits == 8 else max(step, 2 * LEAST)
    tiles = padded(codes, 1).view(outputs, -1, tile).transpose(0, 1)
    if bits == 4:
        low, high = tiles.chunk(2, 2)
        tiles = (low & 15) | (high << 4)
    return Coded(
        tiles.contiguous(), padded(scales, scaled).t().contiguous(),
        None if points is None else padded(points, step).t().contiguous(),
        inputs, tile, step, scaled, multiplied,
    )  # fmt: skip


def narrowed(scales: Tensor) -> Tensor:
    """scales float32 -> the same in float16 or bfloat16 if that holds them all, else as they are."""
    kinds = scales.half(), scales.bfloat16()
    return next((kind for kind in kinds if bool(((kind == scales) | scales.isnan()).all())), scales)
