"""A draw from logits on a CPU, one row at a time, in buffers that stay in the cache.

The rows' memory is the cost of a draw: 32 rows of 50,257 logits are 6 MB, and torch takes new memory for each of some
ten steps. Row by row it is a fifth of the time. It also makes a row's token a function of the row alone, as every step
is: no sum is cut into pieces for threads.
"""

import numpy as np
import torch
from torch import Tensor

FIRST_GUESS = 1024  # candidates that top-p looks at before it sorts a whole vocabulary
ALONE = 1 << 14  # elements that torch does not share out among threads


def draw_rows(
    logits: Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray, u: np.ndarray
) -> list[int]:
    """logits [b, V] on the CPU; of each row: its settings (0: none), and u in [0, 1) -> tokens.

    A row whose logits are not finite gets a token that means nothing.
    """
    divisors = np.maximum(temperature.astype(np.float32), np.float32(1e-30))
    floors = torch.from_numpy(min_p.astype(np.float32)).log().numpy()  # -inf: none
    row = Row(logits.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):
        return [
            row.draw(logits[i].float().numpy(), divisors[i], int(top_k[i]), float(top_p[i]), floors[i], float(u[i]))
            for i in range(len(logits))
        ]


class Row:
    """The memory of one row's draw."""

    def __init__(self, vocabulary: int) -> None:
        self._values = np.empty(vocabulary, np.float32)
        self._other = np.empty(vocabulary, np.float32)  # exponentials, then shares
        self._cumulative = np.empty(vocabulary, np.float64)

    def draw(
        self, logits: np.ndarray, divisor: np.float32, top_k: int, top_p: float, floor: np.float32, u: float
    ) -> int:
        values = self._values
        np.subtract(logits, logits.max(), out=values)
        values /= divisor
        candidates = values
        if 0 < top_k < len(values):
            self._keep(np.partition(values, -top_k)[-top_k])  # ties with the k-th largest stay
            candidates = values[np.flatnonzero(values > -np.inf)]
        if 0 < top_p < 1:
            self._keep_top_p(candidates, top_p)
        self._keep(floor)  # the largest value is 0, so e^value is the share of the most probable token
        torch.softmax(torch.from_numpy(values), -1, out=torch.from_numpy(self._other))
        cumulative = self._cumulative
        cumulative[:] = self._other
        torch.cumsum(torch.from_numpy(cumulative), -1, out=torch.from_numpy(cumulative))  # 42 us; numpy's takes 125
        # The first token whose cumulative share is above u. A token of probability 0 adds nothing, so it is never
        # first. As u < 1, the threshold is below the last sum, except when rounding lifts it: then the likeliest token
        # is taken.
        token = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
        return token if token < len(values) else int(values.argmax())

    def _keep(self, floor: np.float32) -> None:
        """Keeps the tokens from the floor on; the others get no share."""
        if floor > -np.inf:
            np.copyto(self._values, -np.inf, where=self._values < floor)

    def _keep_top_p(self, candidates: np.ndarray, top_p: float) -> None:
        """Keeps the fewest likeliest tokens that together reach top_p; ties with the last one stay."""
        shares = self._other[: len(candidates)]
        for start in range(0, len(candidates), ALONE):
            part = slice(start, start + ALONE)
            torch.exp(torch.from_numpy(candidates[part]), out=torch.from_numpy(shares[part]))
        least = top_p * shares.sum(dtype=np.float64)
        for n in (min(FIRST_GUESS, len(candidates)), len(candidates)):
            largest = np.sort(np.partition(candidates, -n)[-n:])[::-1].copy()
            reached = torch.from_numpy(largest).exp().numpy().cumsum(dtype=np.float64) >= least
            if reached.any():  # never: rounding, and nothing is cut
                self._keep(largest[int(reached.argmax())])
                return
