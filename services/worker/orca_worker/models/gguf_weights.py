"""Reads a rank's own slices of the tensors of a GGUF file, for models of Llama's shape."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from orca_common.errors import FailedPrecondition
from orca_common.gguf.header import BY_NAME, broken, gguf_header
from orca_common.gguf.header import Tensor as Placed

from ..iteration.model import Loading
from ..partition import Slice
from .formats import blocks
from .gguf import LAYER, PARTS, name_in_file
from .weight_files import read_runs
from .weights import WeightSource

CHUNK = 1 << 22  # numbers that are made of blocks at once
PERMUTED = "llama"  # the architecture whose heads turn neighbours, not halves
HEADS = {"attn_q": "head_count", "attn_k": "head_count_kv"}

log = logging.getLogger(__name__)


class GGUFWeights(WeightSource):
    """`WeightSource` over a GGUF file; blocks become numbers. Raises FailedPrecondition when it cannot be read."""

    def __init__(
        self,
        file: Path,
        slices: Mapping[str, Slice],
        dtype: torch.dtype,
        device: torch.device,
        loading: Loading | None = None,
    ) -> None:
        self._file, self._slices, self._dtype, self._device = file, slices, dtype, device
        self._header = gguf_header(file)
        self.bytes_read = 0
        self._loading = loading or Loading()
        self._loading.read = 0
        of = [(self._placed(name), part) for name, part in slices.items()]
        self._loading.whole = sum(tensor.size * part.elements // _elements(part) for tensor, part in of)
        log.info("weights in GGUF", extra={"model": str(file), "types": dict(Counter(tensor.kind for tensor, _ in of))})

    def _placed(self, name: str) -> Placed:
        """The tensor of one of our names. Raises FailedPrecondition when it is missing or has another shape."""
        part, theirs = self._slices[name], name_in_file(name)
        if (tensor := self._header.tensors.get(theirs)) is None:
            raise broken(self._file, f"it lacks {theirs}")
        if tensor.shape != part.shape:
            raise broken(self._file, f"{theirs} is {list(tensor.shape)}, the configuration says {list(part.shape)}")
        return tensor

    def find(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None:
        part = self._slices.get(name)
        if part is None:
            return None
        tensor = self._placed(name)
        kind, inputs = BY_NAME[tensor.kind], part.shape[-1] if len(part.shape) > 1 else 1
        raw, columns = self._raw(tensor, part), _columns(part, kind.block)
        found = torch.empty(len(raw), len(columns) if columns is not None else inputs, dtype=dtype or self._dtype)
        rows = max(1, CHUNK // max(1, inputs))
        for first in range(0, len(raw), rows):
            chunk = blocks.numbers(raw[first : first + rows], tensor.kind)
            found[first : first + rows] = chunk if columns is None else chunk[:, columns]
        return self._in_halves(name, part, found).view(part.size).to(self._device)

    def codes(self, part: Slice) -> tuple[Tensor, Tensor, int]:
        """A matrix in Q8_0 or Q4_0 as it is: codes [rows, inputs] int8, scales [rows, blocks] float16, bits."""
        tensor = self._placed(part.name)
        raw = self._raw(tensor, part)
        codes = self._in_halves(part.name, part, blocks.CODES[tensor.kind](raw[..., 2:]).flatten(1))
        scales = self._in_halves(part.name, part, raw[..., :2].contiguous().view(torch.float16).flatten(1))
        return codes, scales, 8 if tensor.kind == "Q8_0" else 4

    def _raw(self, tensor: Placed, part: Slice) -> Tensor:
        """The blocks [rows, blocks, bytes] uint8 that have the numbers of a part."""
        kind = BY_NAME[tensor.kind]
        rows, inputs = (*part.shape, 1)[:2]
        ranges = part.ranges
        if part.axis == 1:
            ranges = tuple(
                range(one.start // kind.block * kind.bytes, -(-one.stop // kind.block) * kind.bytes) for one in ranges
            )
        in_bytes = Slice(part.name, (rows, inputs // kind.block * kind.bytes), part.axis, ranges)
        raw = torch.empty(in_bytes.size, dtype=torch.uint8)
        if raw.numel():
            read_runs(self._file, part.name, in_bytes.runs(), tensor.start, raw.view(-1).numpy().data)
        self.bytes_read += raw.numel()
        self._loading.read = self.bytes_read
        return raw.view(len(raw), -1, kind.bytes)

    def _in_halves(self, name: str, part: Slice, rows: Tensor) -> Tensor:
        """Queries' and keys' rows [heads * size, ..] in our order: the first halves of all turned pairs of a head,
        then the second ones."""
        found, arch = LAYER.fullmatch(name), self._header.fields.get("general.architecture")
        counted = HEADS.get(PARTS[found[2]]) if found is not None else None
        if arch != PERMUTED or counted is None:
            return rows
        fields = self._header.fields
        heads = fields.get(f"{arch}.attention.{counted}", fields.get(f"{arch}.attention.head_count"))
        if type(heads) is not int or heads < 1 or part.shape[0] % (2 * heads) or len(rows) % (part.shape[0] // heads):
            raise broken(self._file, f"{name_in_file(name)} has {part.shape[0]} rows for {heads} heads")
        return rows.unflatten(0, (-1, part.shape[0] // heads // 2, 2)).transpose(1, 2).reshape(rows.shape)


def _elements(part: Slice) -> int:
    """Counts the elements of the whole tensor."""
    count = 1
    for length in part.shape:
        count *= length
    return max(count, 1)


def _columns(part: Slice, block: int) -> Tensor | None:
    """The places of a part's columns among those of the blocks that have them; None: they are all."""
    if part.axis != 1:
        return None
    found, begin = list[Tensor](), 0
    for one in part.ranges:
        first = one.start // block * block
        found.append(torch.arange(begin + one.start - first, begin + one.stop - first))
        begin += -(-one.stop // block) * block - first
    return torch.cat(found)


def check_tensors(file: Path) -> None:
    """Reads the header alone. Raises FailedPrecondition for one that is missing or wrong."""
    try:
        gguf_header(file)
    except FileNotFoundError:
        raise FailedPrecondition(f"model: there is no {file}") from None
