"""The safetensors files of a checkpoint, without torch: one, or several with an index.

A file has three parts: the length of its header (8 bytes, little-endian), the header (JSON with the type, shape and
byte range of each tensor), and the tensors, row-major.
"""

import os
from pathlib import Path
from typing import Any

from orca_common.bounded_file import json_object, open_regular, read_bounded, shown
from orca_common.checkpoint import WEIGHT_NAMES
from orca_common.errors import FailedPrecondition

# Bounds of what a stranger's file may make a rank read. Headers of published models are below 2 MB.
HEADER_BYTES, MAX_SHARDS = 16 << 20, 1024


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that a checkpoint should have; they may be missing.

    Raises FailedPrecondition when its index is wrong.
    """
    single, index = (folder / name for name in WEIGHT_NAMES)
    if index.exists() and not single.exists():
        return [folder / name for name in shard_names(index)]
    return [single]


def shard_names(index: Path) -> list[str]:
    """The files that an index names. Raises FileNotFoundError, and FailedPrecondition when it is wrong."""
    names = json_object(read_bounded(index, HEADER_BYTES), index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise FailedPrecondition(f"model: {index} has no weight_map")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name or not name.isprintable():
            raise FailedPrecondition(f"model: {index} names {shown(name)}, which is no file of its folder")
    files = sorted(set(names.values()))
    if len(files) > MAX_SHARDS:
        raise FailedPrecondition(f"model: {index} names {len(files)} files; at most {MAX_SHARDS} are read")
    return files


def header_of(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors of a file begin, and its header. Raises FileNotFoundError, and FailedPrecondition for a header
    that is none."""
    try:
        with open(open_regular(file), "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= min(size - 8, HEADER_BYTES):
                limit = f"at most {HEADER_BYTES} are read"
                raise broken(file, f"a header of {length} bytes in a file of {size}; {limit}")
            return 8 + length, json_object(opened.read(length), f"the header of {file}")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise broken(file, error.strerror or str(error)) from None


def broken(file: Path, problem: str) -> FailedPrecondition:
    return FailedPrecondition(f"model: the weights in {file.parent} cannot be read ({file.name}: {problem})")
