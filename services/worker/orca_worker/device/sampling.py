"""Sampling on a CUDA device, with kernels, and the way of the tokens to the host. **Not run on a GPU yet.**

Greedy rows and those with a temperature alone are drawn by the kernels, inside a graph where there is one. Rows with
top-k, top-p or adjustments are drawn by plain torch from the same logits, right after. The host waits for neither,
unless a row is adjusted.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from orca_kernels.transfer import Arriving, to_device
from orca_kernels.triton.sampling import sample

from ..iteration.model import Output
from ..iteration.rows import Adjusted
from ..sampling.sampling import choose, not_finite


def is_cut(requests: np.ndarray, adjusted: Mapping[int, Adjusted], vocabulary: int) -> np.ndarray:
    """requests [S] of rows.ROW -> [S] bool: rows that plain torch draws."""
    top_k, top_p = requests["top_k"], requests["top_p"]
    cut = (requests["temperature"] > 0) & (((top_k > 0) & (top_k < vocabulary)) | ((top_p > 0) & (top_p < 1)))
    if adjusted:
        cut[list(adjusted)] = True
    return cut


def choose_on_device(logits: Tensor, temperatures: Tensor, seeds: Tensor, draws: Tensor) -> Tensor:
    """Arguments of `sample` -> what `sampling.choose` gives: [3, B] float64, of which the last is NaN where the logits
    are not finite.
    """
    tokens, logprobs = sample(logits, temperatures, seeds, draws)
    return torch.stack([tokens.double(), logprobs.double(), logprobs.double()])


def choose_cut(
    logits: Tensor, chosen: Tensor, cut: np.ndarray, requests: np.ndarray, draws: np.ndarray,
    adjusted: Mapping[int, Adjusted],
) -> None:  # fmt: skip
    """Puts into `chosen` [3, S or more] what the rows `cut` [S] get. logits [S or more, V]."""
    where = np.flatnonzero(cut)
    at = to_device(torch.from_numpy(where), logits.device)
    theirs = {n: adjusted[i] for n, i in enumerate(where.tolist()) if i in adjusted}
    rest = choose(logits.index_select(0, at), requests[where], draws[where], theirs)
    chosen[:2].index_copy_(1, at, rest[:2])


class Tokens:
    """`Later`: what was chosen for a batch, on its way to the host.

    chosen [3, S]; wanted [S] bool: who asks for a log probability.
    """

    def __init__(self, chosen: Tensor, wanted: np.ndarray) -> None:
        self._chosen, self._wanted, self._copy = chosen, wanted.tolist(), Arriving(chosen)

    @property
    def tokens(self) -> Tensor:
        return self._chosen[0].long()

    def is_there(self) -> bool:
        return self._copy.is_there()

    def result(self) -> Output:
        ids, logprobs, finite = self._copy.wait().tolist()
        asked = [value if want else math.nan for value, want in zip(logprobs, self._wanted, strict=True)]
        return Output([int(token) for token in ids], asked, not_finite=not_finite(finite))
