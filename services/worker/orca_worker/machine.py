"""What this machine has for a rank, found before torch is imported: GPUs, and compiled kernels for its CPU."""

import ctypes
import runpy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from orca_common.errors import FailedPrecondition
from orca_kernels.cpu.build import built

DRIVER = "libcuda.so.1"


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


def kernels_needed(device: str, kernels: str) -> bool:
    """Whether a rank with these settings computes on a CPU with the compiled kernels, if they can be had."""
    return kernels != "torch" and device != "cuda" and not (device == "auto" and gpus() and torch_has_cuda())


def compile_kernels(tell: Callable[[str], None]) -> None:
    """Compiles the CPU's kernels where they are not, and tells the begin and the end. A failure is told by a rank."""
    built(tell)
