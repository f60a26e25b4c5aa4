"""Slots: the accounting of an engine's Attention K/V memory (paper section 4.2, `n_rsrv` of Algorithm 1).

A slot holds the key and value of one token; a block is `block_size` slots in a row. A request gets the blocks for its
`max_tokens` at its first iteration, so that no request is ever preempted. Ranks only follow these block ids.
"""

import heapq
from typing import Any


class Slots:
    """Blocks and rows of one engine. `n_slots` is rounded down to whole blocks."""

    def __init__(self, n_slots: int, block_size: int) -> None:
        self.block_size = block_size
        self.n_blocks = n_slots // block_size
        self._free_blocks = list(range(self.n_blocks - 1, -1, -1))
        self._held: dict[int, tuple[int, ...]] = {}  # row -> blocks
        self._free_rows: list[int] = []
        self._next_row = 0

    @property
    def n_slots(self) -> int:
        return self.n_blocks * self.block_size

    @property
    def reserved(self) -> int:
        """`n_rsrv`: slots in blocks that requests hold."""
        return self.n_slots - self.free

    @property
    def free(self) -> int:
        return len(self._free_blocks) * self.block_size

    def size(self, max_tokens: int) -> int:
        """Slots that a request of `max_tokens` reserves: whole blocks."""
        return -(-max_tokens // self.block_size) * self.block_size

    def reserve(self, max_tokens: int) -> tuple[int, tuple[int, ...]]:
        """A row and blocks for a request. The caller has seen that they are free."""
        count = self.size(max_tokens) // self.block_size
        assert count <= len(self._free_blocks), "selection reserved more than is free"
        blocks = tuple(self._free_blocks.pop() for _ in range(count))
        if self._free_rows:
            row = heapq.heappop(self._free_rows)
        else:
            row, self._next_row = self._next_row, self._next_row + 1
        self._held[row] = blocks
        return row, blocks

    def release(self, row: int) -> None:
        """Takes a row and its blocks back, exactly once."""
        self._free_blocks.extend(reversed(self._held.pop(row)))
        heapq.heappush(self._free_rows, row)

    def rows(self) -> dict[int, tuple[int, ...]]:
        """Rows in use and their blocks."""
        return dict(self._held)

    def state(self) -> list[Any]:
        """All of it as plain values; `restored` makes it again."""
        return [self.n_slots, self._free_blocks, list(self._held.items()), self._free_rows, self._next_row]

    @classmethod
    def restored(cls, state: list[Any], block_size: int) -> "Slots":
        n_slots, free_blocks, held, free_rows, next_row = state
        slots = cls(n_slots, block_size)
        slots._free_blocks, slots._free_rows, slots._next_row = list(free_blocks), list(free_rows), next_row
        slots._held = {row: tuple(blocks) for row, blocks in held}
        return slots
