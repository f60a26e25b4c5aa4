"""A draw from logits on a CPU, one row at a time, in the same two buffers.

The passes over a row are the cost of a draw: 128,256 logits are half a megabyte. So no row is sorted. Bounds that hold
for any row leave a few candidates for top-k and top-p, and the drawn token is looked for in one block of the row. A
row's token is a function of the row alone: no sum is cut into pieces for threads.
"""

import math
from collections.abc import Iterable

import numpy as np

BLOCK = 512  # shares that are added up before the block of the drawn token is known
ROWS = 64  # of the table in which top-k looks for a bound


def draw_rows(rows: Iterable[np.ndarray], vocabulary: int, settings: Iterable[np.ndarray], u: np.ndarray) -> list[int]:
    """rows: logits [V] float32 of each request -> tokens.

    settings: of each its temperature, top-k, top-p and min-p (0: none). u: of each a number in [0, 1). A row whose
    logits are not finite gets a token that means nothing.
    """
    temperature, top_k, top_p, min_p = settings
    divisors = np.where(temperature > 0, np.maximum(temperature.astype(np.float32), np.float32(1e-30)), 0)
    row = Row(vocabulary)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        floors = np.minimum(np.log(min_p.astype(np.float32)), 0)  # -inf: none. The likeliest token always stays
        asked = (each.tolist() for each in (divisors, top_k, top_p, floors, u))
        return [row.draw(logits, *own) for logits, *own in zip(rows, *asked, strict=True)]


class Row:
    """The memory of one row's draw."""

    def __init__(self, vocabulary: int) -> None:
        self._values = np.empty(vocabulary, np.float32)
        self._shares = np.empty(vocabulary, np.float32)

    def draw(self, logits: np.ndarray, divisor: float, top_k: int, top_p: float, floor: float, u: float) -> int:
        largest = logits.max()
        if not divisor or not math.isfinite(largest):
            return int(logits.argmax())
        values, tokens = np.subtract(logits, largest, out=self._values), None
        if divisor != 1:
            values /= divisor
        if 0 < top_k < len(values):
            tokens = np.flatnonzero(values >= kth_largest(values, top_k))  # ties with the k-th largest stay
            values = values[tokens]
        shares = np.exp(values, out=self._shares[: len(values)])  # of the likeliest token: 1
        if 0 < top_p < 1 or floor > -math.inf:
            least = least_share(shares, top_p) if 0 < top_p < 1 else 0  # ties with it stay
            kept = np.flatnonzero((shares >= least) & (values >= floor))
            tokens, shares = kept if tokens is None else tokens[kept], shares[kept]
        place = drawn(shares, u)
        return place if tokens is None else int(tokens[place])


def kth_largest(values: np.ndarray, k: int) -> np.float32:
    """values [n], k <= n -> the k-th largest of them."""
    columns = len(values) // ROWS
    if k <= columns:
        # k columns have a value of this bound or more, so the k-th largest is one, too.
        largest = values[: ROWS * columns].reshape(ROWS, columns).max(0)
        values = values[values >= np.partition(largest, -k)[-k]]
    return np.partition(values, -k)[-k]


def least_share(shares: np.ndarray, top_p: float) -> np.float32:
    """shares [n] -> the least one of the fewest largest that together have at least `top_p` of their sum."""
    total = float(shares.sum(dtype=np.float64))
    goal = top_p * total
    shares = shares[shares >= (total - goal) / len(shares)]  # those below have less than `total - goal` together
    # Bins by exponent and seven bits of the mantissa, largest first. Only the bin that reaches the goal is sorted.
    bins = shares.view(np.uint32) >> 16
    bins = bins.max() - bins
    sums = np.bincount(bins, shares).cumsum()
    reached = min(int(np.searchsorted(sums, goal)), len(sums) - 1)  # all of them may miss it by a rounding
    last = np.sort(shares[bins == reached])[::-1]
    before = sums[reached - 1] if reached else 0.0
    return last[min(int(np.searchsorted(before + last.cumsum(dtype=np.float64), goal)), len(last) - 1)]


def drawn(shares: np.ndarray, u: float) -> int:
    """shares [n] in the vocabulary's order, u in [0, 1) -> the first place up to which more than u of their sum lies.

    A share of 0 adds nothing, so it is never first.
    """
    sums = np.add.reduceat(shares, np.arange(0, len(shares), BLOCK), dtype=np.float64).cumsum()
    goal = u * sums[-1]
    block = int(np.searchsorted(sums, goal, side="right"))  # u is 1 - 2**-53 at most, so the goal is below the last sum
    start = block * BLOCK
    block_shares = shares[start : start + BLOCK]
    inner = (sums[block - 1] if block else 0.0) + block_shares.cumsum(dtype=np.float64)
    place = int(np.searchsorted(inner, goal, side="right"))
    if place == len(inner):  # the block's sum, added up in another order, is larger by a rounding
        place = int(np.flatnonzero(block_shares)[-1])
    return start + place
