"""Logprobs beyond those of the chosen tokens: the most probable tokens at a place, and a prompt's own tokens.

All of them are the model's own, before any adjustment and temperature.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from orca_common.scores import MAX_TOP
from orca_kernels.transfer import to_device

from ..iteration.batch import Batch
from ..iteration.rows import Adjusted

PIECE = 128  # places of a prompt whose logits are in memory at once: 26 MB for GPT-2's vocabulary

SCORE = np.dtype("<f4")
TOP = np.dtype([("id", "<u4"), ("logprob", "<f4")])  # orca_common.scores.TOP


def tops(logits: Tensor, adjusted: Mapping[int, Adjusted]) -> dict[int, bytes]:
    """logits [S, V] -> the most probable tokens of each row that asks for some."""
    asking = {n: one.asked.top_logprobs for n, one in adjusted.items() if one.asked.top_logprobs}
    if not asking:
        return {}
    rows = to_device(torch.tensor(list(asking)), logits.device)
    values = logits[rows].float()
    table = top_table(values, log_totals(values), max(asking.values()))
    return {n: table[i, :count].tobytes() for i, (n, count) in enumerate(asking.items())}


def log_totals(values: Tensor) -> Tensor:
    """values [n, V] float32 -> [n]: the logarithm of the sum of e^value. On a CPU it is a function of the row alone.

    torch cuts a sum into pieces for its threads where it is the only one, and leaves several whole.
    """
    largest = values.amax(-1, keepdim=True)
    shares = (values - largest).exp_()
    if len(shares) == 1:
        shares = torch.cat([shares, shares])
    return shares.sum(-1)[: len(values)].log_() + largest[:, 0]


def top_table(values: Tensor, total: Tensor, count: int) -> np.ndarray:
    """values [n, V] and the logarithms of their sums [n] -> [n, count] of TOP, the most probable first.

    So many as anybody may ask for are found: which of two equal ones comes first depends on how many are looked for.
    """
    largest = values.topk(min(MAX_TOP, values.shape[1]), dim=-1)
    table = np.empty((len(values), count), TOP)
    table["id"] = largest.indices[:, :count].cpu().numpy()
    table["logprob"] = (largest.values[:, :count] - total[:, None]).cpu().numpy()
    return table


class PromptScores:
    """The logprobs of the prompts in one batch whose requests ask for them, filled in piece by piece.

    `places` [P] are the flat indexes of all their tokens in ascending order, but the last of each prompt: each of them
    is followed by a token whose logprob is wanted.
    """

    def __init__(self, batch: Batch) -> None:
        starts = batch.starts
        self._counts = {n: one.asked.top_logprobs for n, one in batch.scored.items()}
        self._begun = {n: batch.contexts[n] > 0 for n in batch.scored}
        self._lengths = {
            n: min(int(batch.ends[n]), one.prompt - 1) - batch.contexts[n] for n, one in batch.scored.items()
        }
        parts = [np.arange(starts[n], starts[n] + length) for n, length in self._lengths.items()]
        self.places = np.concatenate(parts) if parts else np.empty(0, np.int64)
        targets = [
            one.tokens[batch.contexts[n] + 1 : batch.contexts[n] + 1 + self._lengths[n]]
            for n, one in batch.scored.items()
        ]
        self._targets = np.concatenate(targets) if targets else np.empty(0, np.int64)
        self._own = np.full(len(self.places), np.nan, SCORE)
        self._top = np.zeros((len(self.places), max(self._counts.values(), default=0)), TOP)

    def pieces(self) -> Iterator[slice]:
        """Yields all places, a bounded number at a time."""
        for start in range(0, len(self.places), PIECE):
            yield slice(start, min(start + PIECE, len(self.places)))

    def between(self, start: int, end: int) -> slice:
        """The places in tokens [start, end) of the flat batch."""
        first, last = np.searchsorted(self.places, [start, end])
        return slice(int(first), int(last))

    def add(self, part: slice, logits: Tensor) -> None:
        """logits [n, V] at the places of a part."""
        values = logits.float()
        total = log_totals(values)
        targets = to_device(torch.from_numpy(self._targets[part]), logits.device)
        self._own[part] = (values.gather(1, targets[:, None])[:, 0] - total).cpu().numpy()
        if self._top.shape[1]:
            self._top[part] = top_table(values, total, self._top.shape[1])

    def packed(self) -> dict[int, bytes]:
        """The scores of each part of a prompt in their binary form (orca_common.scores), by member of the batch.

        Those of the tokens behind `places`. Before them, where the part begins a prompt, its first token: nothing.
        """
        packed, at = {}, 0
        for n, count in self._counts.items():
            length, first = self._lengths[n], 0 if self._begun[n] else 1
            table = np.zeros(first + length, np.dtype([("own", SCORE), ("top", TOP, (count,))]))
            table["own"][:first], table["top"]["logprob"][:first] = np.nan, np.nan
            table["own"][first:] = self._own[at : at + length]
            table["top"][first:] = self._top[at : at + length, :count]
            packed[n] = table.tobytes()
            at += length
        return packed
