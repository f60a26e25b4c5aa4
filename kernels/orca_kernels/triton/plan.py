"""Tile planning: the host cuts a batch's queries into tiles, once an iteration; all layers use the plan.

A tile is some rows of one request. A row is a pair of a token and a query head, seen from one key/value head: with
`group` query heads to a key/value head, row r is token r // group, head r % group of the group. So any number of
grouped heads fills a tile, and an increment of a model without grouped heads is a tile of one row.

Everything that a kernel reads about the batch is in one int32 buffer on the device, written by one copy. The buffer's
size follows from `Bounds` alone, so a CUDA graph can be captured with a plan and replayed after `Plan.load`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ..transfer import fill

# Keys of one split. Softmax over a row's keys is computed split by split and merged in order of the splits, in whatever
# kernel; that is why a row's result is the same bits in all of them. Smaller splits give a small batch more programs,
# larger ones have fewer partial results. With 256 keys of 128 elements in 16 bits a partial result is 0.8 % of the
# bytes of its keys and values.
SPLIT = 256

INCREMENT_ROWS = 16  # rows of an increment's tile: what one matrix instruction takes at least
INITIATION_ROWS = 32  # rows of an initiation's tile, see attention.py

# Numbers of a tile: request, first row, rows, position of the flat batch's token 0 if it were the request's, keys that
# each row sees at least.
TILE = 5


@dataclass(frozen=True)
class Bounds:
    """The room of a plan, and the kernels that it runs. A CUDA graph is captured for one of these."""

    requests: int
    tokens: int
    tiles: int
    blocks: int  # of one request
    keys: int  # of one request
    increments_only: bool

    @property
    def splits(self) -> int:
        return -(-self.keys // SPLIT)

    @property
    def parts(self) -> list[int]:
        """Counts the numbers that the tiles, the block table, the slots and the positions take.

        Each begins at a multiple of 16 bytes: Triton would compile a kernel once more for a pointer that does not.
        """
        return [-(-n // 4) * 4 for n in (TILE * self.tiles, self.requests * self.blocks, self.tokens, self.tokens)]

    @classmethod
    def of_increments(cls, requests: int, keys: int, *, group: int, block_size: int) -> Bounds:
        """Bounds of a batch of increments, each of which sees at most `keys` keys, its own included."""
        tiles = requests * -(-group // INCREMENT_ROWS)
        return cls(requests, requests, tiles, -(-keys // block_size), keys, increments_only=True)


class HostPlan:
    """A batch's plan on the host. (numpy: 25 operations on small arrays cost a quarter of torch's.)

    block_table [B, n]: block ids of each request, in order (entries after its last token are not read);
    query_lengths [B], contexts [B]: how many tokens each request has in this batch, and how many before them;
    slots [T]: where each token's key and value go: block * block_size + offset;
    group: query heads to a key/value head;
    prompts [B]: tokens of each request's prompt, if these see each other; they are in one batch then.
    """

    def __init__(
        self,
        block_table: np.ndarray,
        query_lengths: Sequence[int],
        contexts: Sequence[int],
        slots: np.ndarray,
        *,
        group: int,
        prompts: np.ndarray | None = None,
    ) -> None:
        lengths, before = np.array(query_lengths), np.array(contexts)
        least = lengths * 0 if prompts is None else prompts
        first = lengths.cumsum() - lengths  # [B] flat index of each request's first token
        shift = before - first
        increments_only = len(slots) == len(lengths)
        rows, size = lengths * group, INCREMENT_ROWS if increments_only else INITIATION_ROWS
        each = -(-rows // size)  # [B] tiles of each request
        request = np.arange(len(lengths)).repeat(each)
        offset = (np.arange(len(request)) - (each.cumsum() - each)[request]) * size
        count = np.minimum(rows[request] - offset, size)
        keys = np.maximum((offset + count - 1) // group + before[request] + 1, least[request])
        order = (-keys).argsort(kind="stable")  # the longest first: none is left for the end
        numbers = request, first[request] * group + offset, count, shift[request], least[request]
        self.tiles = np.stack(numbers, 1)[order]
        self.table, self.slots = block_table, slots
        self.positions = np.arange(len(slots)) + shift.repeat(lengths)
        self.bounds = Bounds(
            requests=len(lengths),
            tokens=len(slots),
            tiles=len(request),
            blocks=block_table.shape[1],
            keys=int((lengths + before).max()),
            increments_only=increments_only,
        )

    def packed(self, bounds: Bounds) -> np.ndarray:
        """All numbers of the plan, int32, padded to the bounds. What pads computes nothing and writes nothing."""
        mine = self.bounds
        assert mine.increments_only == bounds.increments_only, "a plan of the other kind"
        assert mine.requests <= bounds.requests, (mine, bounds)
        assert mine.tokens <= bounds.tokens, (mine, bounds)
        assert mine.tiles <= bounds.tiles, (mine, bounds)
        assert mine.keys <= bounds.keys, (mine, bounds)
        blocks = min(mine.blocks, bounds.blocks)  # a table may be wider than its requests are long
        numbers = np.zeros(sum(bounds.parts), np.int32)  # a tile of zeros has no rows
        tiles, table, slots, positions = (
            numbers[end - size : end] for size, end in zip(bounds.parts, accumulate(bounds.parts), strict=True)
        )
        tiles[: self.tiles.size] = self.tiles.ravel()
        table[: bounds.requests * bounds.blocks].reshape(bounds.requests, -1)[: mine.requests, :blocks] = self.table[
            :, :blocks
        ]
        slots[: mine.tokens], slots[mine.tokens :] = self.slots, -1
        positions[: mine.tokens], positions[mine.tokens :] = self.positions, -1
        return numbers


class Plan:
    """A plan on a device, where kernels read it."""

    tiles: Tensor  # [n, TILE]
    table: Tensor  # [requests, blocks]
    slots: Tensor  # [tokens]; -1: no token
    positions: Tensor  # [tokens] index of each token in its request; -1: no token

    def __init__(self, bounds: Bounds, device: torch.device) -> None:
        self.bounds = bounds
        self._numbers = torch.zeros(sum(bounds.parts), dtype=torch.int32, device=device)
        tiles, table, slots, positions = self._numbers.split(bounds.parts)
        self.tiles = tiles[: TILE * bounds.tiles].view(-1, TILE)
        self.table = table[: bounds.requests * bounds.blocks].view(bounds.requests, bounds.blocks)
        self.slots, self.positions = slots[: bounds.tokens], positions[: bounds.tokens]

    def load(self, plan: HostPlan) -> Plan:
        """Copies a batch's plan to the device, in the order of its stream. The host does not wait."""
        fill(self._numbers, torch.from_numpy(plan.packed(self.bounds)))
        return self

    def clear(self) -> None:
        """A plan of nothing but padding."""
        self._numbers.zero_()  # tiles without rows
        self.slots.fill_(-1)
        self.positions.fill_(-1)


def plan_batch(
    block_table: np.ndarray,
    query_lengths: Sequence[int],
    contexts: Sequence[int],
    slots: np.ndarray,
    *,
    group: int,
    device: torch.device,
) -> Plan:
    """The plan of one batch, with no room to spare. The arguments are those of `HostPlan`, all on the host."""
    plan = HostPlan(block_table, query_lengths, contexts, slots, group=group)
    return Plan(plan.bounds, device).load(plan)
