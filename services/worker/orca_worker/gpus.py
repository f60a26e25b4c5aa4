"""How many GPUs there are, as CUDA's driver says. It takes milliseconds, where the import of torch takes seconds."""

import ctypes

from orca_common.errors import FailedPrecondition

DRIVER = "libcuda.so.1"


def count() -> int:
    """GPUs that this process may use; 0 where there is no driver, or where it cannot start."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return 0
    found = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(found)):
        return 0
    return found.value


def check(device: str, first: int, needed: int) -> None:
    """Raises FailedPrecondition when `device` asks for GPUs that are not there: `needed` of them, from `first` on."""
    if device == "cuda" and (there := count()) < first + needed:
        which = f"GPU {first} is" if needed == 1 else f"GPUs {first} to {first + needed - 1} are"
        raise FailedPrecondition(f"device: {which} needed, counted from 0; there are {there}")
