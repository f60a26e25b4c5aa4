"""The header of a safetensors file, without torch: it is read here and nowhere else, and believed only as a whole.

A file has three parts: the length of its header (8 bytes, little-endian), the header (JSON with the type, shape and
byte range of each tensor), and the tensors, row-major. The ranges follow one another from the first byte to the last.
"""

import os
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from orca_common.bounded_file import json_object, open_regular, shown
from orca_common.errors import FailedPrecondition

# Bounds of what a stranger's file may make a rank read. Headers of published models are below 2 MB.
HEADER_BYTES, MAX_AXES = 16 << 20, 8
METADATA = "__metadata__"
POINTER = b"version "  # how the text begins that git-lfs leaves in place of a file
KEYS = "dtype", "shape", "data_offsets"
# The types of the format and their bits, as of safetensors 0.8. Most of them hold no weights that are served.
BITS = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


class Stored(NamedTuple):
    """A tensor in a file."""

    kind: str  # a name of BITS
    shape: tuple[int, ...]
    start: int  # of its bytes in the file
    size: int  # bytes


class Header(NamedTuple):
    """The tensors of a file."""

    start: int  # of the tensors in the file
    tensors: dict[str, Stored]


def header_of(file: Path) -> Header:
    """Reads a file's header. Raises FileNotFoundError, and FailedPrecondition for one that is wrong, by the tensor's
    name."""
    try:
        with open(open_regular(file), "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            first = opened.read(8)
            if first == POINTER:
                raise broken(file, "it is a pointer of git-lfs: git lfs pull gets the file")
            length = int.from_bytes(first, "little")
            if not 0 < length <= min(size - 8, HEADER_BYTES):
                limit = f"at most {HEADER_BYTES} are read"
                raise broken(file, f"a header of {length} bytes in a file of {size}; {limit}")
            said = json_object(opened.read(length), f"the header of {file}")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise broken(file, error.strerror or str(error)) from None
    start = 8 + length
    tensors = {name: _stored(file, start, name, info) for name, info in said.items() if name != METADATA}
    _check_ranges(file, start, size, tensors)
    return Header(start, tensors)


def broken(file: Path, problem: str) -> FailedPrecondition:
    """The error of a file that cannot be read."""
    return FailedPrecondition(f"model: the weights in {file.parent} cannot be read ({file.name}: {problem})")


def _stored(file: Path, start: int, name: str, info: Any) -> Stored:
    kind, shape, offsets = ((info.get(key) if isinstance(info, dict) else None) for key in KEYS)
    if not (isinstance(kind, str) and _numbers(shape, 0, MAX_AXES) and _numbers(offsets, 2, 2)):
        raise broken(file, f"{shown(name)} needs a type, a shape and two offsets, all whole numbers from 0 on")
    bits, (begin, end) = BITS.get(kind), offsets
    if bits is None:
        raise broken(file, f"{shown(name)} has the type {shown(kind)}, which safetensors does not have")
    counts = [*accumulate(shape, mul, initial=1)]  # of the elements along the first axes
    if max(counts) >= 1 << 64:  # as the format's library counts, also where a later axis is 0
        raise broken(file, f"{shown(name)} of shape {shape} has more than 2^64 elements")
    if 8 * (end - begin) != counts[-1] * bits:
        raise broken(file, f"{shown(name)} of shape {shape} and type {kind} lies at bytes {begin} to {end}")
    return Stored(kind, tuple(shape), start + begin, end - begin)


def _check_ranges(file: Path, start: int, size: int, tensors: dict[str, Stored]) -> None:
    """Raises FailedPrecondition unless the tensors lie one behind the other, to the end of the file."""
    free = start
    for name, one in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if one.start != free:
            how = "overlaps the tensor before it" if one.start < free else "leaves a hole before it"
            raise broken(
                file, f"{shown(name)} begins at byte {one.start - start} and {how}, which ends at {free - start}"
            )
        free += one.size
    if free > size:
        raise broken(file, f"it ends after {size} of {free} bytes")
    if free < size:
        raise broken(file, f"it has {size - free} bytes behind its last tensor")


def _numbers(value: object, least: int, most: int) -> TypeGuard[list[int]]:
    """Whether it is a list of `least` to `most` whole numbers, none below 0."""
    return (
        isinstance(value, list)
        and least <= len(value) <= most
        and all(type(number) is int and 0 <= number < 1 << 62 for number in value)
    )
