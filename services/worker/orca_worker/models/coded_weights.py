"""Reads a rank's own slices of a checkpoint that another tool has quantized: as codes, or as numbers of a type."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .coded import CodedFiles, Part
from .weights import Weights

CHUNK = 1 << 22  # numbers that are made of codes at once
MIDDLE = 128  # zero point of codes of eight bits with a sign

log = logging.getLogger(__name__)


class CodedWeights(Weights):
    """`Weights` whose matrices are in codes, all or some. `parts`: a rank's, by name.

    `step`: of `codes`, where a rank keeps them. Raises FailedPrecondition as `Weights`, and for tensors of codes that
    are missing or wrong.
    """

    def __init__(self, files: CodedFiles, parts: Mapping[str, Part], step: int | None, *of: Any, **more: Any) -> None:
        super().__init__(*of, **more)
        self.step, self._files = step or 0, files
        self._parts = {name: part for name, part in parts.items() if files.has(part)}
        self._loading.whole += sum(map(files.bytes_of, self._parts.values()))
        how = "codes" if step is not None else "numbers"
        found = {"layout": files.layout.sentence, "kept": how, "matrices": len(self._parts), "of": len(parts)}
        log.info("weights that another tool quantized", extra=found)

    def find(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None:
        part = self._parts.get(name)
        if part is None:
            return super().find(name, dtype)
        codes, group, read = self._files.read(part)
        self._count(read)
        n, k = codes.codes.shape
        found = torch.empty(n, k, dtype=dtype or self._dtype)
        rows = max(1, CHUNK // max(1, k))
        for first in range(0, n, rows):
            some = slice(first, first + rows)
            found[some] = torch.from_numpy(codes.numbers(some, group))
        return (found.t() if part.is_transposed else found).to(self._device)

    def codes(self, name: str) -> tuple[Tensor, Tensor | None, Tensor]:
        """The codes [n, k] of a matrix, zero points [n, k / step rounded up] or None, and scales of the same shape in
        float32. Each `step` inputs are in one group. Codes with zero points are uint8, and int8 without."""
        codes, group, read = self._files.read(self._parts[name])
        self._count(read)
        of_steps = group[:: self.step]
        shape = len(codes.codes), len(of_steps)
        scales = torch.from_numpy(np.array(np.broadcast_to(codes.scales[:, of_steps], shape)))
        whole = np.ascontiguousarray(codes.codes)
        if codes.codes.dtype == np.int8:
            assert codes.zeros == 0
            return torch.from_numpy(whole), None, scales
        if isinstance(codes.zeros, int) and codes.zeros == MIDDLE:
            return torch.from_numpy((whole ^ MIDDLE).view(np.int8)), None, scales
        zeros = codes.zeros if isinstance(codes.zeros, int) else codes.zeros[:, of_steps]
        points = np.array(np.broadcast_to(np.asarray(zeros, np.uint8), shape))
        return torch.from_numpy(whole), torch.from_numpy(points), scales

    def _count(self, read: int) -> None:
        self.bytes_read += read
        self._loading.read = self.bytes_read
