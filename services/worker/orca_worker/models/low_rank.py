"""A rank's slices of the adapters' matrices, cut as the model's matrix is: B along its outputs, A along its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..partition import Slice
from .adapters import AdapterFile, is_cut_along_outputs
from .header import Stored
from .recording import Matrix
from .weights import DTYPES, read_runs


class LowRank(NamedTuple):
    """The summand x A^T B^T of some outputs."""

    column: int  # of the first output
    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank], multiplied with the scale


class Size(NamedTuple):
    """The sizes of one summand's matrices."""

    rank: int
    inputs: int
    outputs: int


class LowRanks:
    """Reads what adapters change.

    files: those that a stage begins with. others: whether more may come while it runs. `dtype` is the model's.
    """

    def __init__(
        self, files: Sequence[AdapterFile], dtype: torch.dtype, device: torch.device, others: bool = False
    ) -> None:
        self.files, self._dtype, self._device, self._others = files, dtype, device, others

    def may_change(self, matrices: Sequence[Matrix]) -> bool:
        """Whether some adapter changes one of these, or may come and do so."""
        return self._others or any(
            part.name in file.changes for matrix in matrices for part in matrix.weights for file in self.files
        )

    def of(self, file: AdapterFile, matrix: Matrix, first: int = 0) -> list[LowRank]:
        """Reads an adapter's summands for a matrix, by column. first: the column of the matrix's first output.

        Raises FailedPrecondition where a file ends too early.
        """
        found = list[LowRank]()
        for part in matrix.weights:
            if part.name in file.changes:
                found.append(LowRank(first, *self._read(file, part, matrix)))
            first += part.size[1] if matrix.transposed else part.size[0]
        return found

    def sizes(self, file: AdapterFile, matrix: Matrix) -> list[Size]:
        """The sizes of the summands that `of` reads."""
        parts = [part for part in matrix.weights if part.name in file.changes]
        axes = (0, 1) if matrix.transposed else (1, 0)
        return [Size(file.changes[part.name].a.shape[0], *(part.size[axis] for axis in axes)) for part in parts]

    def _read(self, file: AdapterFile, part: Slice, matrix: Matrix) -> tuple[Tensor, Tensor]:
        scale, *stored = file.changes[part.name]
        a, b = (self._tensor(file, part.name, one) for one in stored)
        if is_cut_along_outputs(part, matrix):
            b = torch.cat([b[one.start : one.stop] for one in part.ranges])
        else:
            a = torch.cat([a[:, one.start : one.stop] for one in part.ranges], 1)
        return a.to(self._device, self._dtype), (b * scale).to(self._device, self._dtype)

    def _tensor(self, file: AdapterFile, name: str, stored: Stored) -> Tensor:
        tensor = torch.empty(stored.shape, dtype=DTYPES[stored.kind])
        into = tensor.view(-1).view(torch.uint8).numpy().data
        read_runs(file.path, name, [(0, stored.size)], stored.start, into)
        return tensor.float()
