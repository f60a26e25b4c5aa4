"""Which tokens a draw may give when logits differ in their last bits, computed in float64.

The criterion for two runs of one request in different batches, in plain torch or on a GPU: their tokens are equal, or
at the first difference the draw lies within `NEAR` of the border of the two tokens. Where kernels are batch-invariant,
the logits are the same bits, so the tokens are equal.
"""

import numpy as np

from orca_worker.sampling.sampling import uniform

NEAR = 1e-5  # of a probability


def tokens_near(
    logits: np.ndarray, *, seed: int, index: int, temperature: float, top_k: int = 0, top_p: float = 0, min_p: float = 0
) -> set[int]:
    """logits [V] -> the tokens that the draw gives, or would give if it or a sum of probabilities moved by `NEAR`."""
    u = uniform(np.array([seed], np.uint64), np.array([index]))[0]
    found: set[int] = set()
    for shares in distributions(logits, temperature, top_k, top_p, min_p):
        first, last = np.searchsorted(shares.cumsum(), [u - NEAR, u + NEAR], side="right")
        found |= {int(i) for i in range(first, min(last, len(shares) - 1) + 1) if shares[i] > 0}
    return found


def nearest_draws(logits: np.ndarray, count: int, of: int, *, seed: int, **sampling: float) -> np.ndarray:
    """The `count` indexes below `of` whose draws lie nearest to the border of two tokens."""
    sums = distributions(logits, **sampling)[0].cumsum()  # type: ignore[arg-type]
    u = uniform(np.full(of, seed), np.arange(of))
    above = np.searchsorted(sums, u).clip(1, len(sums) - 1)
    return np.argsort(np.minimum(np.abs(sums[above] - u), np.abs(sums[above - 1] - u)))[:count]


def distributions(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 0, min_p: float = 0
) -> list[np.ndarray]:
    """The distribution [V] that is drawn from, and those that are nearly it: a cut may take a token more or less."""
    values = logits.astype(np.float64) / temperature
    shares = np.exp(values - values.max())
    by_count = _cut_by_count(shares / shares.sum(), top_k)
    by_sum = [kept for some in by_count for kept in _cut_by_sum(some, top_p)]
    return [kept for some in by_sum for kept in _cut_by_share(some, min_p)]


def _cut_by_count(shares: np.ndarray, top_k: int) -> list[np.ndarray]:
    """What top-k may leave of the distribution. The k-th and the next token may change places."""
    if not 0 < top_k < len(shares):
        return [shares]
    order = np.argsort(-shares, kind="stable")
    last, following = order[top_k - 1], order[top_k]
    kept = np.where(shares >= shares[last], shares, 0)
    cuts = [kept]
    if shares[last] - shares[following] < NEAR:
        swapped, both = kept.copy(), kept.copy()
        swapped[last], swapped[following] = 0, shares[following]
        both[following] = shares[following]
        cuts += [swapped, both]
    return [cut / cut.sum() for cut in cuts]


def _cut_by_sum(shares: np.ndarray, top_p: float) -> list[np.ndarray]:
    """What top-p may leave of it. A sum that is nearly top-p may reach it or not."""
    if not 0 < top_p < 1:
        return [shares]
    falling = np.sort(shares)[::-1]
    sums = falling.cumsum()
    counts = [int((sums >= p).argmax()) for p in (top_p, top_p - NEAR, min(top_p + NEAR, sums[-1]))]
    cuts = [np.where(shares >= falling[count], shares, 0) for count in counts]
    return [cut / cut.sum() for cut in cuts]


def _cut_by_share(shares: np.ndarray, min_p: float) -> list[np.ndarray]:
    """The distributions that min-p may leave. A share that is nearly min-p of the largest may stay or not."""
    if not min_p:
        return [shares]
    of_largest = shares / shares.max()
    cuts = [np.where(of_largest >= least, shares, 0) for least in (min_p, min_p - NEAR, min(min_p + NEAR, 1))]
    return [cut / cut.sum() for cut in cuts]
