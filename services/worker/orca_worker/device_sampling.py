"""`sample` on a CUDA device, with kernels. **Not run on a GPU yet.**"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from orca_kernels.transfer import to_device
from orca_kernels.triton import sampling as kernels

from .models.model import Output, Scored
from .rows import Adjusted
from .sampling import PLAIN, not_finite, sample


def sample_on_device(
    logits: Tensor, requests: np.ndarray, draws: np.ndarray, adjusted: Mapping[int, Adjusted] = PLAIN
) -> Output:
    """As `sample`: logits [B, V], requests [B] of rows.ROW, draws [B], what some rows ask for -> a token each.

    A request's token does not depend on the batch. Those with top-k, top-p or adjustments are left to `sample`, which
    waits for the device once more.
    """
    temperature = requests["temperature"]
    top_k, top_p = requests["top_k"], requests["top_p"]
    cut = (temperature > 0) & (((top_k > 0) & (top_k < logits.shape[1])) | ((top_p > 0) & (top_p < 1)))
    if adjusted:
        cut[list(adjusted)] = True
    drawn = (temperature > 0) & ~cut
    if drawn.any():
        tokens, logprobs = kernels.sample(
            logits,
            to_device(torch.from_numpy(np.where(drawn, temperature, 0).astype(np.float32)), logits.device),
            to_device(torch.from_numpy(requests["seed"].astype(np.uint64).view(np.int64)), logits.device),
            to_device(torch.from_numpy(draws.astype(np.int64)), logits.device),
        )
    else:
        tokens, logprobs = kernels.greedy(logits)
    together = torch.stack([tokens.double(), logprobs.double()]).tolist()  # one copy, exact to 2**53
    ids = [int(token) for token in together[0]]
    asked = [p if want else math.nan for p, want in zip(together[1], requests["logprobs"].tolist(), strict=True)]
    scores: list[Scored] = []
    if cut.any():
        at = np.flatnonzero(cut)
        theirs = {n: adjusted[i] for n, i in enumerate(at.tolist()) if i in adjusted}
        rest = sample(logits[to_device(torch.from_numpy(at), logits.device)], requests[at], draws[at], theirs)
        for i, token, logprob in zip(at.tolist(), rest.token_ids, rest.logprobs, strict=True):
            ids[i], asked[i] = token, logprob
        scores = [one._replace(member=int(at[one.member])) for one in rest.scores]
    return Output(ids, asked, not_finite=not_finite(together[1]), scores=scores)
