"""The memory of keys and values."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from orca_worker.kv import KVManager, KVShape


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
