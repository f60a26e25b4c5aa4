"""Positions as tables: sinusoids, added to the embedding, and a bias by distance, added to the scores of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..partition import Slice

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sinusoids:
    """Positions as the original Transformer has them (Vaswani et al., "Attention Is All You Need", section 3.5), the
    sines of a row before its cosines, as Marian keeps them."""

    positions: int
    width: int

    def table(self) -> Tensor:
        """[positions, width] float32"""
        import torch

        pairs = torch.arange((self.width + 1) // 2, dtype=torch.float64)
        angles = torch.arange(self.positions, dtype=torch.float64)[:, None] / 10000 ** (2 * pairs / self.width)
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
