"""What the kernels of one iteration read, besides weights and memory, on the device.

Everything is in two buffers, which two copies fill: the plan of attention, and one of int64. Their sizes follow from
the bounds alone. So a graph that was captured with them can be replayed for any batch that fits: `load` writes the
batch's numbers to where the graph reads them. Rows that pad are of nobody: they have no tile and no slot, so they see
and write no keys and values, and what is made of them goes to a row of the token table that no request has.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from orca_kernels.transfer import fill
from orca_kernels.triton.plan import Bounds, HostPlan, Plan

from ..iteration.batch import Batch
from ..iteration.device_tokens import NOBODY
from ..iteration.kv import KVManager


def host_plan(batch: Batch, kv: KVManager, group: int) -> HostPlan:
    """`group`: query heads to a key/value head."""
    table = kv.block_table(batch.rows, int(batch.ends.max()))
    return HostPlan(table, batch.query_lengths, batch.contexts, batch.slots, group=group)


class Inputs:
    """Room for a batch of B members with T tokens: `bounds`. Of the members at most B make a token; their numbers come
    first in what is [B]."""

    plan: Plan
    given: Tensor  # [T] token ids, or HERE
    rows_of_tokens: Tensor  # [T]
    rows: Tensor  # [B] of those that make a token
    seeds: Tensor  # [B] of random draws, as bits
    draws: Tensor  # [B] index of each draw
    last: Tensor | None  # [B] flat index of the token before each new one; None: each token of the batch is one

    def __init__(self, bounds: Bounds, device: torch.device, all_sample: bool = True) -> None:
        self.plan = Plan(bounds, device)
        tokens, requests = bounds.tokens, bounds.requests
        self._sizes = [tokens, tokens, *[requests] * 5]
        self._room = [-(-n // 2) * 2 for n in self._sizes]  # each begins at a multiple of 16 bytes, as in a plan
        self._numbers = torch.zeros(sum(self._room), dtype=torch.int64, device=device)
        parts = [part[:n] for part, n in zip(self._numbers.split(self._room), self._sizes, strict=True)]
        self.given, self.rows_of_tokens, self.rows, self.seeds, self.draws, self._temperatures, last = parts
        self.last = None if bounds.increments_only and all_sample else last

    @property
    def temperatures(self) -> Tensor:
        """[B] float32; 0: the likeliest token. (They travel as float64 among the numbers.)"""
        return self._temperatures.view(torch.float64).float()

    def clear(self) -> Inputs:
        """Nothing but padding."""
        self.plan.clear()
        self._fill()
        return self

    def load(self, batch: Batch, plan: HostPlan, temperatures: np.ndarray) -> Inputs:
        """temperatures [S] float64: of rows that this sampling draws for. The host does not wait."""
        self.plan.load(plan)
        self._fill(
            batch.token_ids,
            batch.rows.repeat(batch.query_lengths),
            batch.rows[batch.sampled],
            batch.requests["seed"].astype(np.uint64).view(np.int64),
            batch.draws,
            temperatures.view(np.int64),
            batch.last,
        )
        return self

    def _fill(self, *values: np.ndarray) -> None:
        """Writes each part's first numbers; what is behind them is padding."""
        numbers = np.zeros(sum(self._room), np.int64)
        ends = list(accumulate(self._room))
        for rows in (1, 2):
            numbers[ends[rows] - self._room[rows] : ends[rows]] = NOBODY
        for i, part in enumerate(values):
            start = ends[i] - self._room[i]
            numbers[start : start + len(part)] = part
        fill(self._numbers, torch.from_numpy(numbers))
