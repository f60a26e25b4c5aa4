"""The memory of keys and values."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from orca_common.errors import FailedPrecondition
from orca_worker.iteration.kv import KVManager, KVShape


def mapping_of(address: int) -> tuple[str, list[str]]:
    """Permissions and flags of the mapping that an address lies in, as /proc/self/smaps has them."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line):
            found = head[3] if int(head[1], 16) <= address < int(head[2], 16) else None
        elif found and line.startswith("VmFlags:"):
            return found, line.split()[1:]
    raise AssertionError(f"{address:x} is not mapped")


def test_keys_and_values_can_have_huge_pages() -> None:
    """A mapping that is shared, as mmap makes it by itself, has small pages on most machines, whatever it asks for."""
    kv = KVManager(KVShape(2, 4, 64, torch.bfloat16, torch.device("cpu")))
    kv.allocate(1 << 16, 16)
    for memory in (kv.keys, kv.values):
        permissions, flags = mapping_of(memory.data_ptr())
        assert permissions == "rw-p"
        assert "hg" in flags  # MADV_HUGEPAGE


def test_a_kernel_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers that it does not know the advice. A rank there could not form."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    kv = KVManager(KVShape(2, 4, 64, torch.bfloat16, torch.device("cpu")))
    kv.allocate(64, 16)
    assert not kv.keys.any()


def kv_of(slots: int, block_size: int) -> KVManager:
    """Blocks without keys and values."""
    kv = KVManager(None)
    kv.allocate(slots, block_size)
    return kv


def slots_of(kv: KVManager, row: int, tokens: int) -> list[int]:
    return kv.slots(np.full(tokens, row), np.arange(tokens)).tolist()


def test_a_token_lies_in_the_block_of_its_row() -> None:
    """In the order in which the row got its blocks, whatever their numbers."""
    kv = kv_of(40, 4)
    kv.grow(3, [7, 2])
    kv.grow(0, [5])
    kv.grow(3, [0])
    assert slots_of(kv, 3, 12) == [28, 29, 30, 31, 8, 9, 10, 11, 0, 1, 2, 3]
    assert slots_of(kv, 0, 4) == [20, 21, 22, 23]
    assert kv.block_table(np.array([3]), 9).tolist() == [[7, 2, 0]]
    mixed = kv.slots(np.array([3, 0, 3]), np.array([4, 3, 0])).tolist()
    assert mixed == [8, 23, 28]


def test_the_table_grows_with_rows_and_blocks() -> None:
    kv = kv_of(400, 2)
    kv.grow(500, [9])
    kv.grow(1, list(range(10, 60)))
    assert slots_of(kv, 500, 2) == [18, 19]
    assert slots_of(kv, 1, 100) == list(range(20, 120))


@pytest.mark.parametrize("position", [4, 5, 100])
def test_a_token_beyond_the_blocks_of_its_row_is_refused(position: int) -> None:
    kv = kv_of(40, 4)
    kv.grow(2, [1])
    kv.grow(1, [0, 2])
    with pytest.raises(FailedPrecondition, match=f"row 2: its blocks hold 4 tokens, not one at {position}"):
        kv.slots(np.array([1, 2]), np.array([5, position]))


@pytest.mark.parametrize(
    ("blocks", "shared", "problem"),
    [
        ([10], 0, "block 10 of 10 blocks"),
        ([3, 99], 0, "block 99 of 10 blocks"),
        ([4, 4], 0, "a block twice"),
        ([6], 0, "a block twice"),
        ([1], 0, "block 1 belongs to another row"),
        ([4, 1], 0, "block 1 belongs to another row"),
        ([1, 2], 1, "block 2 belongs to another row"),
    ],
)
def test_blocks_that_a_row_cannot_have(blocks: list[int], shared: int, problem: str) -> None:
    """The scheduler would have made a mistake, and two requests would write over each other. Nothing is changed."""
    kv = kv_of(40, 4)
    kv.tags.begin(5, "0" * 32, range(13))
    kv.grow(0, [1, 2])
    kv.grow(5, [6])
    with pytest.raises(FailedPrecondition, match=f"row 5: .*{problem}"):
        kv.grow(5, blocks, shared)
    assert slots_of(kv, 5, 4) == [24, 25, 26, 27]
    kv.grow(7, [3, 4, 5, 7, 8, 9])


def test_blocks_come_back_when_their_last_row_is_gone() -> None:
    kv = kv_of(40, 4)
    kv.tags.begin(1, "0" * 32, range(5))
    kv.grow(0, [1, 2])
    kv.grow(1, [1, 3], shared=1)
    kv.free([0])
    with pytest.raises(FailedPrecondition, match="block 1 belongs to another row"):
        kv.grow(2, [1])
    assert slots_of(kv, 1, 8) == [4, 5, 6, 7, 12, 13, 14, 15]
    kv.grow(2, [2])
    kv.free([1, 63, 1_000])  # rows that it does not have are nothing
    kv.grow(0, [1, 3])
    assert slots_of(kv, 0, 8) == [4, 5, 6, 7, 12, 13, 14, 15]


def test_an_allocation_forgets_all_rows() -> None:
    """A new epoch begins with nothing, and may have other blocks."""
    kv = kv_of(40, 4)
    kv.grow(0, [1])
    kv.allocate(33, 8)
    assert (kv.n_blocks, kv.block_size) == (4, 8)
    with pytest.raises(FailedPrecondition, match="row 0: its blocks hold 0 tokens"):
        kv.slots(np.array([0]), np.array([0]))
    kv.grow(3, [1])


def test_blocks_of_an_earlier_epoch_are_in_no_table() -> None:
    """The engine has fewer slots now. A table of several rows is as wide as the longest, and is read as a whole."""
    kv = kv_of(400, 4)
    kv.grow(0, range(90, 98))
    kv.allocate(40, 4)
    for row, blocks in enumerate([[1], [2, 3, 4, 5]]):
        kv.tags.begin(row, "0" * 32, range(row))
        kv.grow(row, blocks)
    kv.check([0, 1])
    assert kv.block_table(np.array([0, 1]), 16).max() < kv.n_blocks
