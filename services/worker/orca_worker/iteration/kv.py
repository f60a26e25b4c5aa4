"""The Attention K/V manager (paper section 3.1) keeps keys and values of all tokens of the requests in progress.

It owns the memory and finds a token's slot by row and token index. The scheduler decides which blocks a request has,
and when they are free again.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from orca_common.errors import FailedPrecondition

from ..partition import head_bytes
from .rows import MAX_ROWS
from .tags import Tags

if TYPE_CHECKING:
    import torch

    from orca_kernels.reference import Cache


AT_ONCE = 4  # rows that run one token each: from there on it is cheaper to look at all of them at once


@dataclass(frozen=True)
class KVShape:
    """A token's share of this rank's memory: keys and values of its layers and heads; int8 are codes with scales."""

    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def is_coded(self) -> bool:
        return not self.dtype.is_floating_point

    @property
    def slot_bytes(self) -> int:
        return 2 * self.layers * self.heads * head_bytes(self.head_size, self.dtype.itemsize)


def untouched(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory that is taken page by page when it is first used. torch's own zeros are written (torch 2.13).

    The pages are huge ones where the kernel has them: with pages of 4 KiB, 512 tokens of GPT-2 124M in memory that was
    new took 35 ms more.
    """
    import torch

    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory, the default, gets small pages on most machines
    memory = mmap.mmap(-1, max(1, math.prod(size) * dtype.itemsize), flags=private)  # the tensor keeps it
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(size)).view(size)


class KVManager:
    """The memory and the blocks of each row; rows may share a block. `tags` hold the key of the tokens in each block.

    `shape` None: a model without keys and values. It has blocks, too.
    """

    keys: torch.Tensor  # [layers, n_blocks, heads, block_size, D]; of codes as `of_layer` takes them apart
    values: torch.Tensor

    def __init__(self, shape: KVShape | None) -> None:
        self._shape = shape
        self.n_blocks, self.block_size = 0, 1
        self._table = np.zeros((64, 8), np.int64)  # [row, i]: the row's block i
        self._capacity = np.zeros(64, np.int64)  # [row]: tokens that its blocks hold
        self._owners: dict[int, int] = {}  # block -> how many rows have it
        self._begun: set[int] = set()  # blocks that a row has had
        self.tags = Tags(0, 1)

    @property
    def slots_in_all(self) -> int:
        return self.n_blocks * self.block_size

    @property
    def heads(self) -> int:
        """Heads of keys and values on this rank."""
        return self._shape.heads if self._shape is not None else 0

    @property
    def untouched_bytes(self) -> int:
        """Bytes of memory that was allocated, and that the machine counts as free until it is written."""
        if self._shape is None or self._shape.device.type != "cpu":
            return 0
        return (self.n_blocks - len(self._begun)) * self.block_size * self._shape.slot_bytes

    def release(self) -> None:
        """Frees the memory and forgets all rows."""
        self.n_blocks = 0
        self._table[:] = self._capacity[:] = 0  # blocks of a larger memory would stay in the table
        self._owners.clear()
        self._begun.clear()
        if self._shape is not None and hasattr(self, "keys"):
            del self.keys, self.values

    def allocate(self, slots: int, block_size: int) -> None:
        """Allocates memory for `slots` tokens, in whole blocks. Forgets all rows."""
        self.release()
        self.n_blocks, self.block_size = slots // block_size, block_size
        self.tags = Tags(self.n_blocks, block_size)
        shape = self._shape
        if shape is not None:
            import torch

            size_of_codes = block_size * head_bytes(shape.head_size, 1)
            of_head = (size_of_codes,) if shape.is_coded else (block_size, shape.head_size)
            size = (shape.layers, self.n_blocks, shape.heads, *of_head)
            if shape.device.type == "cpu":
                self.keys, self.values = (untouched(size, shape.dtype) for _ in range(2))
            else:
                self.keys = torch.zeros(size, dtype=shape.dtype, device=shape.device)
                self.values = torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def of_layer(self, layer: int) -> tuple[Cache, Cache]:
        """The keys and the values of a layer, as `SplitAttention` takes them."""
        keys, values = self.keys[layer], self.values[layer]
        if self._shape is None or not self._shape.is_coded:
            return keys, values
        from orca_kernels.reference import Codes

        return Codes.within(keys, self.block_size), Codes.within(values, self.block_size)

    def grow(self, row: int, blocks: Sequence[int], shared: int = 0) -> None:
        """Gives a row blocks behind those that it has. The first `shared` of them have keys and values already, and may
        be other rows' too: `check` says whether those are the row's.

        Raises FailedPrecondition when one does not exist, or is another row's and not shared.
        """
        if row >= MAX_ROWS:
            raise FailedPrecondition(f"row {row} is larger than any engine's rows")
        held = int(self._capacity[row]) // self.block_size if row < len(self._capacity) else 0
        rows, columns = self._table.shape
        if row >= rows or held + len(blocks) > columns:
            grown = np.zeros((max(rows, 2 * row), max(columns, 2 * (held + len(blocks)))), np.int64)
            grown[:rows, :columns] = self._table
            self._table = grown
            self._capacity = np.concatenate([self._capacity, np.zeros(len(grown) - rows, np.int64)])
        if blocks and max(blocks) >= self.n_blocks:
            raise FailedPrecondition(f"row {row}: block {max(blocks)} of {self.n_blocks} blocks")
        owners = self._owners
        if len(set(blocks)) < len(blocks) or not owners.keys().isdisjoint(blocks):
            mine = self._table[row, :held].tolist()
            if len({*blocks, *mine}) < held + len(blocks):
                raise FailedPrecondition(f"row {row}: a block twice in {[*mine, *blocks]}")
            if not owners.keys().isdisjoint(blocks[shared:]):
                block = next(block for block in blocks[shared:] if block in owners)
                raise FailedPrecondition(f"row {row}: block {block} belongs to another row")
        for block in blocks:
            owners[block] = owners.get(block, 0) + 1
        self._begun.update(blocks)
        self._table[row, held : held + len(blocks)] = blocks
        self.tags.grown(row, held, blocks, shared)
        self._capacity[row] = (held + len(blocks)) * self.block_size

    def free(self, rows: Sequence[int]) -> None:
        """Forgets the blocks of rows. The scheduler may give those to other rows that no row has now."""
        for row in rows:
            if row < len(self._capacity):
                for block in self._table[row, : self._capacity[row] // self.block_size].tolist():
                    owners = self._owners.pop(block) - 1
                    if owners:
                        self._owners[block] = owners
                self._capacity[row] = 0
                self.tags.free(row)

    def check_start(self, row: int, position: int) -> None:
        """Raises FailedPrecondition unless a new row, which begins at this position, does so behind its last block with
        keys and values: others would have nothing in them, or be written over."""
        filled = self.tags.texts[row].filled if row in self.tags.texts else 0
        if position != filled * self.block_size:
            raise FailedPrecondition(
                f"row {row} begins at position {position}, behind {filled} blocks of {self.block_size} with keys and "
                "values"
            )

    def check(self, rows: Sequence[int]) -> None:
        """Raises FailedPrecondition where a block of one of these rows holds the keys and values of other tokens."""
        if rows and self.tags.texts:
            self.tags.check(rows, self._table)

    def ran(
        self,
        rows: np.ndarray,
        starts: Sequence[int],
        counts: Sequence[int],
        outputs: Sequence[int],
        token_ids: np.ndarray,
    ) -> None:
        """Gives keys to the blocks that an iteration has filled.

        rows [B], starts [B], counts [B], outputs [B]: of its members. token_ids [T]: those that it ran.
        """
        tags = self.tags
        if not tags.texts:
            return
        at_once = counts.count(1) >= AT_ONCE
        if at_once:
            of = np.array(starts)
            if len(token_ids) == len(rows):
                tags.ran_one(rows, of, token_ids, self._table)
                return
            lengths = np.array(counts)
            one = lengths == 1
            tags.ran_one(rows[one], of[one], token_ids[lengths.cumsum()[one] - 1], self._table)
        at, tokens = 0, token_ids.tolist()
        for row, start, count, made in zip(rows.tolist(), starts, counts, outputs, strict=True):
            if row in tags.texts and not (at_once and count == 1):
                tags.ran(row, start, tokens[at : at + count], max(made - 1, 0), self._table[row])
            at += count

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's keys and values on this rank."""
        return self._shape.slot_bytes * self.block_size if self._shape is not None else 0

    @property
    def layout(self) -> str:
        """Names the layout of a block's bytes: a rank of another layout cannot use them."""
        shape = self._shape
        of = f"{shape.layers} layers, {shape.heads} heads of {shape.head_size}, {shape.dtype}" if shape else "nothing"
        return f"{of}, blocks of {self.block_size}"

    def block_of(self, row: int, n: int) -> int:
        """The row's block n. Any thread may ask. Raises FailedPrecondition where it has none."""
        table, capacity = self._table, self._capacity
        if row >= len(capacity) or (n + 1) * self.block_size > capacity[row]:
            raise FailedPrecondition(f"row {row} has no block {n}")
        return int(table[row, n])

    def read(self, block: int) -> bytes:
        """The keys, then the values of a block, in all layers. Any thread may ask."""
        if self._shape is None:
            return b""
        import torch

        of = torch.stack((self.keys[:, block], self.values[:, block])).cpu()
        return of.view(torch.uint8).numpy().tobytes()

    def write(self, block: int, payload: bytes | bytearray) -> None:
        """Puts what `read` has read into a block that no iteration uses. Any thread may, one at a time."""
        if self._shape is None:
            return
        import torch

        of = torch.frombuffer(bytearray(payload), dtype=self._shape.dtype)
        keys, values = of.view(2, *self.keys[:, block].shape)
        self.keys[:, block].copy_(keys)
        self.values[:, block].copy_(values)

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """rows, positions [T] -> slots [T]: block * block_size + offset of each token.

        Raises FailedPrecondition when a position lies beyond its row's blocks.
        """
        beyond = positions >= self._capacity[rows]
        if np.count_nonzero(beyond):  # a fifth of what `any` takes
            row, position = int(rows[beyond][0]), int(positions[beyond][0])
            raise FailedPrecondition(f"row {row}: its blocks hold {self._capacity[row]} tokens, not one at {position}")
        blocks, offsets = np.divmod(positions, self.block_size)
        return self._table[rows, blocks] * self.block_size + offsets

    def block_table(self, rows: np.ndarray, tokens: int) -> np.ndarray:
        """rows [B] -> block ids [B, n]: n blocks hold `tokens`. Entries after a row's own blocks are any blocks."""
        return self._table[rows, : -(-tokens // self.block_size)]
