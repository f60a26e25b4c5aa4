"""Finds what this machine has for a rank, without torch: GPUs, compiled kernels for its CPU, memory and its limit."""

from __future__ import annotations

import ctypes
import runpy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from orca_common.errors import FailedPrecondition
from orca_kernels.cpu.build import built, flags_of

if TYPE_CHECKING:
    import torch


DRIVER = "libcuda.so.1"

CPU_SHARE = 1 << 30  # bytes, when no number of slots was asked for: other processes use a CPU's memory too
GPU_SHARE = 0.9  # of what is free after loading the weights; the rest is for intermediate tensors
SLOTS_OF_NOTHING = 1 << 20  # slots of a model that keeps nothing for a token
CGROUP = Path("/sys/fs/cgroup")  # of this container
CPUINFO = Path("/proc/cpuinfo")

# cgroup v2, then v1. Both files have a line "oom_kill NUMBER".
COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))


def gpus() -> int:
    """GPUs that this process may use, as CUDA's driver says; 0 where there is no driver, or where it cannot start."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return 0
    found = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(found)):
        return 0
    return found.value


def check_gpus(device: str, first: int, needed: int) -> None:
    """Raises FailedPrecondition when `device` asks for GPUs that are not there: `needed` of them, from `first` on."""
    if device == "cuda" and (there := gpus()) < first + needed:
        if not there:
            raise FailedPrecondition("device: no GPU is visible; --device cpu computes without one")
        which = f"GPU {first} is" if needed == 1 else f"GPUs {first} to {first + needed - 1} are"
        raise FailedPrecondition(f"device: {which} needed, counted from 0; there are {there}")


def torch_has_cuda() -> bool:
    """Whether the torch that is installed was built for CUDA; one for CPUs leaves a GPU alone. Does not import it."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return runpy.run_path(str(Path(torch.origin).with_name("version.py"))).get("cuda") is not None


def on_gpu(device: str) -> bool:
    """Whether a rank with this setting computes on a GPU."""
    return device == "cuda" or (device == "auto" and gpus() > 0 and torch_has_cuda())


def multiplies_bfloat16() -> bool:
    """Whether this CPU has an instruction for products of bfloat16."""
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(flags_of(CPUINFO.read_text()))


def kernels_needed(device: str, kernels: str) -> bool:
    """Whether a rank with these settings computes on a CPU with the compiled kernels, if they can be had."""
    return kernels not in ("torch", "device-loop") and not on_gpu(device)


def compile_kernels(kernels: str, tell: Callable[[str], None]) -> None:
    """Compiles the kernels of an instruction set, or of the best one ("auto"), where they are not.

    tell: is given the begin and the end. A failure is reported by a rank.
    """
    built(tell, kernels)


def free_bytes(device: torch.device | None, modest: bool, promised: int = 0) -> int:
    """Bytes that may be used on a device now. `modest`: on a CPU at most CPU_SHARE. `promised`: bytes that were
    allocated on a CPU, and that it does not count as used yet."""
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    half = max(0, available_bytes() - promised) // 2
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


def kills() -> int:
    """Counts the processes of this pod that the kernel has killed for want of memory; 0 where it does not say."""
    for path in COUNTERS:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0
