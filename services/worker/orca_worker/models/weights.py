"""Reads a rank's own slices of a checkpoint's safetensors.

Only the bytes of the slices are read: one range for a slice of rows, a range in each row for a slice of columns.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from orca_common.errors import FailedPrecondition

from ..iteration.model import Loading
from ..partition import Slice
from .header import header_of
from .recording import Head, Matrix, Norm
from .weight_files import missing, read_runs, weight_files

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightSource(Protocol):
    """The source of a rank's slices of a model."""

    def find(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None:
        """This rank's slice of a tensor, in a type, or in the model's, and on its device; None if it holds nothing of
        it."""
        ...

    def get(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of which this rank holds a slice."""
        tensor = self.find(name, dtype)
        assert tensor is not None, name
        return tensor

    def matrix(self, matrix: Matrix, dtype: torch.dtype | None = None) -> Tensor:
        """The weights [out, in] of a linear operation."""
        parts = [self.get(part.name, dtype) for part in matrix.weights]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1 if matrix.transposed else 0)
        return whole.t() if matrix.transposed else whole

    def bias(self, matrix: Matrix) -> Tensor | None:
        """Its bias [out]."""
        parts = [self.get(part.name) for part in matrix.biases]
        return torch.cat(parts) if parts else None

    def norm(self, norm: Norm) -> Tensor:
        """The factors [width] of a normalized row: float32 where they are not the checkpoint's own numbers."""
        weight = self.get(norm.weight.name)
        changed = norm.scale != 1 or norm.offset != 0
        return (weight.float() + norm.offset) * norm.scale if changed else weight

    def head_bias(self, head: Head) -> Tensor | None:
        """A head's [V of this rank]."""
        bias = self.get(head.bias.name).flatten() if head.bias is not None else None
        if head.never:
            bias = torch.zeros(head.table.size[0]) if bias is None else bias.clone()
            bias[list(head.never)] = -torch.inf
        return bias


def check_memory(wanted: int, device: torch.device) -> None:
    """Raises FailedPrecondition when a rank's weights are larger than the machine, before any of them is allocated."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cpu" and wanted > memory:
        raise FailedPrecondition(f"model: a rank's weights are {wanted} bytes, this machine has {memory}")


class Entry(NamedTuple):
    """A tensor in a file."""

    file: Path
    start: int  # of its bytes in the file
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a file that may be weights, by name. Raises as `header_of`."""
    return {
        name: Entry(file, one.start, DTYPES[one.kind], one.shape)
        for name, one in header_of(file).tensors.items()
        if one.kind in DTYPES  # published GPT-2 checkpoints also hold their causal masks
    }


class Weights(WeightSource):
    """`WeightSource` over a checkpoint folder.

    `slices` are the parts that this rank holds. Names in the files may begin with `prefix`: some published checkpoints
    have it, others do not. `others`: names under which a tensor may stand instead of its own. `zero`: one that is zeros
    where it is missing. Raises FailedPrecondition when the weights are missing or cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        prefix: str,
        slices: Mapping[str, Slice],
        dtype: torch.dtype,
        device: torch.device,
        loading: Loading | None = None,
        others: Mapping[str, Sequence[str]] = MappingProxyType({}),
        zero: str = "",
    ) -> None:
        self._folder, self._prefix, self._slices, self._others = folder, prefix, slices, others
        self._dtype, self._device, self._zero = dtype, device, zero
        self.bytes_read = 0  # of tensors
        self._loading = loading or Loading()
        self._entries: dict[str, Entry] = {}
        for file in weight_files(folder):
            try:
                self._entries |= read_header(file)
            except FileNotFoundError:
                raise missing(folder, file.name) from None

        found = ((self._entry(name), part) for name, part in slices.items())
        self._loading.read = 0
        self._loading.whole = sum(part.elements * entry.dtype.itemsize for entry, part in found if entry is not None)

    def _entry(self, name: str) -> Entry | None:
        names = (name, *self._others.get(name, ()))
        found = (self._entries.get(one) or self._entries.get(self._prefix + one) for one in names)
        return next((entry for entry in found if entry is not None), None)

    def find(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None:
        """Raises FailedPrecondition when the tensor is missing or has another shape."""
        part = self._slices.get(name)
        if part is None:
            return None
        entry = self._entry(name)
        if entry is None and name == self._zero:
            return torch.zeros(part.size, dtype=dtype or self._dtype, device=self._device)
        if entry is None:
            raise FailedPrecondition(f"model: the weights in {self._folder} lack {name}")
        if entry.shape != part.shape:
            has, says = list(entry.shape), list(part.shape)
            raise FailedPrecondition(f"model: {name} in {self._folder} is {has}, config.json says {says}")
        return self._read(entry, part).to(self._device, dtype or self._dtype)

    def _read(self, entry: Entry, part: Slice) -> Tensor:
        tensor = torch.empty(part.size, dtype=entry.dtype)
        if not part.elements:
            return tensor
        item = entry.dtype.itemsize
        into = tensor.view(-1).view(torch.uint8).numpy().data
        runs = ((first * item, count * item) for first, count in part.runs())
        read_runs(entry.file, part.name, runs, entry.start, into)
        self.bytes_read += len(into)
        self._loading.read = self.bytes_read
        return tensor
