"""The compiled kernels as Python calls them: a shared library for each instruction set, built by `build.py`.

Each has one table of kernels (src/isa.h).
"""

import ctypes
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache

from .build import CannotBuild, library_path, runnable


class BatchPointers(ctypes.Structure):
    """`orca_batch` of src/program.h."""

    _fields_ = (
        ("tokens", c_int64),
        ("requests", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("starts", c_void_p),
        ("blocks", c_void_p),
        ("columns", c_int64),
        ("inputs", c_void_p),
        ("selected", c_int64),
        ("selection", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("layer_bytes", c_int64),
        ("block_size", c_int32),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("best", c_void_p),
        ("best_index", c_void_p),
        ("adapters", c_void_p),
    )


def checked(number: int) -> int:
    """Returns what a function of the library returned. Raises MemoryError for -1."""
    if number < 0:
        raise MemoryError("no memory for an operation of the program")
    return number


SIGNATURES = {
    "orca_runs_here": (c_int, ()),
    "orca_model": (c_void_p, (c_int,)),
    "orca_free": (None, (c_void_p,)),
    "orca_multiplies_bf16": (c_int, (c_void_p,)),
    "orca_pack": (c_void_p, (c_void_p, c_void_p, c_int, c_int64, c_int64, c_int, c_int, c_int, c_void_p)),
    "orca_pack_codes": (c_void_p, (*[c_void_p] * 4, *[c_int] * 3, c_void_p)),
    "orca_with_bias": (c_void_p, (c_void_p, c_void_p, c_void_p)),
    "orca_packs_for": (checked, (c_void_p, c_int)),
    "orca_forget": (None, (c_void_p, c_int)),
    "orca_floats": (c_void_p, (c_void_p, c_void_p, c_int)),
    "orca_buffer": (checked, (c_void_p, c_int, c_int, c_int)),
    "orca_rows": (c_void_p, (c_void_p, c_int, c_int64, POINTER(c_int64))),
    "orca_steps": (c_int, (c_void_p,)),
    "orca_embed": (checked, (c_void_p, c_int, c_void_p, c_int64, c_float, c_void_p, c_int)),
    "orca_normalize": (checked, (c_void_p, c_int, c_int, c_void_p, c_void_p, c_float, c_int, c_int, c_int)),
    "orca_delta": (c_void_p, (c_void_p, c_int, c_int)),
    "orca_delta_adapter": (checked, (c_void_p, c_void_p, c_int, c_void_p)),
    "orca_delta_run": (checked, (c_void_p, c_void_p, *[c_int] * 6, c_void_p)),
    "orca_linear": (checked, (c_void_p, c_int, c_void_p, c_int, c_int, c_int, c_void_p)),
    "orca_write_kv": (checked, (c_void_p, *[c_int] * 6, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int)),
    "orca_attend": (checked, (c_void_p, *[c_int] * 8, c_float, c_int64, c_int, c_int, c_void_p, c_int)),
    "orca_add": (checked, (c_void_p, c_int, c_int)),
    "orca_run": (c_int, (c_void_p, c_int, c_int, POINTER(BatchPointers))),
}


def library(isa: str) -> ctypes.CDLL:
    """The kernels of an instruction set. Raises `CannotBuild` where they are not built and cannot be."""
    loaded = _load(isa)
    if isinstance(loaded, CannotBuild):
        raise loaded
    return loaded


@cache
def _load(isa: str) -> ctypes.CDLL | CannotBuild:
    """Tries once: a compiler that fails does so every time."""
    try:
        loaded = ctypes.CDLL(str(library_path(isa)))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except CannotBuild as error:
        return error
    except (OSError, RuntimeError, AttributeError) as error:  # no home, nowhere to write, a file of another machine
        return CannotBuild(str(error))
    return loaded


def best() -> str:
    """The best instruction set that this machine runs. Raises as `library` does."""
    try:
        return next(isa for isa in runnable() if library(isa).orca_runs_here())  # a kernel may refuse one to processes
    except (OSError, RuntimeError) as error:
        raise CannotBuild(str(error)) from None


@cache
def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that this machine runs, the best first. Raises as `library` does."""
    return tuple(runnable())
