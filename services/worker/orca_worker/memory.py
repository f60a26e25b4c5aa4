"""How much memory a rank may use for keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPU_SHARE = 1 << 30  # bytes, when no number of slots was asked for: other processes use a CPU's memory too
GPU_SHARE = 0.9  # of what is free after loading the weights; the rest is for intermediate tensors
SLOTS_OF_NOTHING = 1 << 20  # slots of a model that keeps nothing for a token
CGROUP = Path("/sys/fs/cgroup")  # of this container


def free_bytes(device: torch.device | None, modest: bool) -> int:
    """Bytes that keys and values may use on a device now. `modest`: on a CPU at most CPU_SHARE."""
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    half = available_bytes() // 2
    return min(CPU_SHARE, half) if modest else half


def available_bytes() -> int:
    """Bytes of the machine's memory, or of this container's, that are not in use.

    Files that are cached count as free, in the machine's own number too: the kernel drops them when memory is short. A
    rank that has just read its weights has about as many bytes in its container's cache.
    """
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    try:
        limit, used, stat = ((CGROUP / name).read_text() for name in ("memory.max", "memory.current", "memory.stat"))
    except FileNotFoundError:
        return available
    if limit.strip() == "max":
        return available
    counts = dict(line.split() for line in stat.splitlines())
    cached = int(counts["active_file"]) + int(counts["inactive_file"])
    return min(available, max(0, int(limit) - int(used) + cached))
