"""Positions as tables: sinusoids, added to the embedding, and a bias by distance, added to the scores of attention.

A config.json may say that a model has millions of positions. No request reaches more of them than an engine has slots,
so tables by position are made that far (`Table`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..partition import Slice

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PIECE = 1 << 14  # positions that are made at once


class Table:
    """Numbers for each position, of which only the first rows are made. `make`: the rows of a range of positions.

    On a CPU its rows never move, because compiled kernels keep their address, and those that are not made take no
    memory. On another device it is made anew where it grows.
    """

    def __init__(
        self,
        make: Callable[[range], Tensor],
        positions: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        import torch

        from ..iteration.kv import untouched

        self._make, self._positions, self._made = make, positions, 0
        if device.type == "cpu":
            self.rows = untouched((positions, width), dtype)
        else:
            self.rows = torch.empty((0, width), dtype=dtype, device=device)

    def reach(self, positions: int) -> None:
        """Makes the rows of the first `positions` positions, unless they are there."""
        import torch

        end = min(positions, self._positions)
        if end <= self._made:
            return
        if self.rows.device.type != "cpu":
            missing = self._make(range(self._made, end)).to(self.rows)
            self.rows = torch.cat([self.rows, missing])
        else:
            for start in range(self._made, end, PIECE):
                piece = range(start, min(start + PIECE, end))
                self.rows[piece.start : piece.stop] = self._make(piece)
        self._made = end


@dataclass(frozen=True)
class Sinusoids:
    """Positions as the original Transformer has them (Vaswani et al., "Attention Is All You Need", section 3.5), the
    sines of a row before its cosines, as Marian keeps them."""

    positions: int
    width: int

    def table(self, dtype: torch.dtype, device: torch.device) -> Table:
        return Table(self.rows, self.positions, self.width, dtype, device)

    def rows(self, positions: range) -> Tensor:
        """[len(positions), width] float32"""
        import torch

        pairs = torch.arange((self.width + 1) // 2, dtype=torch.float64)
        at = torch.arange(positions.start, positions.stop, dtype=torch.float64)
        angles = at[:, None] / 10000 ** (2 * pairs / self.width)
        return torch.cat([angles.sin(), angles.cos()[:, : self.width // 2]], 1).float()


@dataclass(frozen=True)
class RelativeBias:
    """A learned number for each head and bucket of distances (Raffel et al., "Exploring the Limits of Transfer Learning
    with a Unified Text-to-Text Transformer", section 2.1): half of the buckets have one distance each, the others grow
    up to `reach`, and the last one has all beyond."""

    table: Slice  # [buckets, heads of this rank]
    buckets: int
    reach: int
    both_ways: bool  # keys behind the query have buckets of their own

    def by_distance(self, table: Tensor) -> Tensor:
        """The table of the weights -> [heads, 2 * reach + 1] by key - query, from -reach on."""
        import torch

        distance = torch.arange(-self.reach, self.reach + 1)
        each = self.buckets // 2 if self.both_ways else self.buckets
        exact = each // 2
        away = distance.abs() if self.both_ways else (-distance).clamp(min=0)
        growth = torch.log(away.float() / exact) / math.log(self.reach / exact) * (each - exact)
        grown = (exact + growth.clamp(min=0).long()).clamp(max=each - 1)
        bucket = torch.where(away < exact, away, grown)
        if self.both_ways:
            bucket = bucket + (distance > 0) * each
        return table[bucket.to(table.device)].t().contiguous()
