"""The device token table: each row's last token, on the device that makes it and reads it again.

With run-ahead an increment is launched before the host knows its token. The device has it: the sampling of the
iteration before has written it here, or it has come from the last stage over the data plane.
"""

import numpy as np
import torch
from torch import Tensor

from orca_kernels.transfer import to_device

from .batch import HERE
from .rows import MAX_ROWS

PADDING = MAX_ROWS  # the row that padding reads and writes


class DeviceTokens:
    """One token a row, at a place that never moves, because a captured graph keeps its address. 8 MiB."""

    def __init__(self, device: torch.device, vocabulary: int) -> None:
        self._device, self._vocabulary = device, vocabulary
        self._table = torch.zeros(MAX_ROWS + 1, dtype=torch.int64, device=device)

    def put(self, rows: Tensor, tokens: Tensor) -> None:
        """rows, tokens [n] int64 on the device: the last tokens of these rows."""
        self._table.index_copy_(0, rows, tokens)

    def find(self, rows: Tensor, given: Tensor) -> Tensor:
        """rows, given [n] int64 on the device -> the tokens [n]: those that are given, and the last ones where HERE.

        All are in the vocabulary: a receive that was aborted leaves anything, and an index outside of a table would end
        the process's use of its device.
        """
        return torch.where(given == HERE, self._table.index_select(0, rows), given).clamp_(0, self._vocabulary - 1)

    def learn(self, rows: np.ndarray, tokens: Tensor, which: np.ndarray) -> None:
        """Tokens [B] of `rows` [B] that have come from another rank. `which` [B]: those that still count."""
        at = np.flatnonzero(which)
        where = to_device(torch.from_numpy(at), self._device)
        self.put(to_device(torch.from_numpy(rows[at]), self._device), tokens.index_select(0, where).long())
