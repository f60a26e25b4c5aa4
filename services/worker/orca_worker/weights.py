"""Reads a rank's own slices of a checkpoint's safetensors: one file, or several with an index.

Only the bytes of the slices are read: one range for a slice of rows, a range in each row for a slice of columns. A
safetensors file has three parts: the length of its header (8 bytes, little-endian), the header (JSON with the type,
shape and byte range of each tensor), and the tensors, row-major.
"""

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from orca_common.checkpoint import WEIGHT_NAMES
from orca_common.errors import FailedPrecondition

from .partition import Slice

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightSource(Protocol):
    """Where a model gets its rank's slices from."""

    def find(self, name: str) -> Tensor | None:
        """This rank's slice of a tensor, in the model's type and on its device; None if it holds nothing of it."""
        ...

    def get(self, name: str) -> Tensor:
        """A tensor of which this rank holds a slice."""
        tensor = self.find(name)
        assert tensor is not None, name
        return tensor


class Entry(NamedTuple):
    """A tensor in a file."""

    file: Path
    start: int  # of its bytes in the file
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a file, by name. Raises ValueError when the header does not fit the file."""
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= size - 8:
            raise ValueError(f"{file.name}: a header of {length} bytes in a file of {size}")
        header = json.loads(opened.read(length))
    entries = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        begin, end = info["data_offsets"]
        dtype, shape = DTYPES.get(info["dtype"]), tuple(info["shape"])
        if dtype is None:
            continue  # not a weight: published GPT-2 checkpoints also hold their causal masks
        if end - begin != prod(shape) * dtype.itemsize or not 0 <= begin <= end <= size - 8 - length:
            raise ValueError(f"{file.name}: {name} lies at {begin} to {end}")
        entries[name] = Entry(file, 8 + length + begin, dtype, shape)
    return entries


class Weights(WeightSource):
    """`WeightSource` over a checkpoint folder.

    `slices` are the parts that this rank holds. Names in the files may begin with `prefix`: some published checkpoints
    have it, others do not. Raises FailedPrecondition when the weights are missing or cannot be read.
    """

    def __init__(
        self, folder: Path, prefix: str, slices: Mapping[str, Slice], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._folder, self._prefix, self._slices = folder, prefix, slices
        self._dtype, self._device = dtype, device
        self.bytes_read = 0  # of tensors
        single, index = (folder / name for name in WEIGHT_NAMES)
        files = [single.name]
        self._entries: dict[str, Entry] = {}
        try:
            if index.exists() and not single.exists():
                files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            for file in files:
                self._entries |= read_header(folder / file)
        except FileNotFoundError:
            raise FailedPrecondition(f"model: {folder} lacks weights in safetensors ({', '.join(files)})") from None
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise FailedPrecondition(f"model: the weights in {folder} cannot be read ({error})") from None

    def find(self, name: str) -> Tensor | None:
        """Raises FailedPrecondition when the tensor is missing or has another shape."""
        part = self._slices.get(name)
        if part is None:
            return None
        entry = self._entries.get(name) or self._entries.get(self._prefix + name)
        if entry is None:
            raise FailedPrecondition(f"model: the weights in {self._folder} lack {name}")
        if entry.shape != part.shape:
            has, says = list(entry.shape), list(part.shape)
            raise FailedPrecondition(f"model: {name} in {self._folder} is {has}, config.json says {says}")
        return self._read(entry, part).to(self._device, self._dtype)

    def _read(self, entry: Entry, part: Slice) -> Tensor:
        tensor = torch.empty(part.size, dtype=entry.dtype)
        if not part.elements:
            return tensor
        item, filled = entry.dtype.itemsize, 0
        into = tensor.view(-1).view(torch.uint8).numpy().data
        file = os.open(entry.file, os.O_RDONLY)
        try:
            for first, count in part.runs():
                start, end = entry.start + first * item, filled + count * item
                while filled < end:  # one read returns at most 2 GiB on Linux
                    got = os.preadv(file, [into[filled:end]], start)
                    if not got:
                        raise FailedPrecondition(f"model: {entry.file} ends within {part.name}")
                    filled, start = filled + got, start + got
        finally:
            os.close(file)
        self.bytes_read += filled
        return tensor
