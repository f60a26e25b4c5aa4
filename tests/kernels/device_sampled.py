"""What the GPU loop does with the logits of a batch, without the rest of it."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from orca_kernels.transfer import to_device
from orca_kernels.triton.draws import Draws
from orca_kernels.triton.sampling import sample
from orca_worker.device.model import Tokens, choose_again, choose_on_device
from orca_worker.iteration.model import Output
from orca_worker.iteration.rows import Adjusted
from orca_worker.sampling.sampling import PLAIN
from orca_worker.sampling.scoring import tops


def draws_of(requests: np.ndarray, indexes: np.ndarray, device: torch.device) -> Draws:
    """requests [S] of rows.ROW, indexes [S] of their draws."""
    asked = [requests[name].copy() for name in ("temperature", "top_k", "top_p", "min_p")]
    numbers = [*asked, requests["seed"].copy().view(np.int64), indexes]
    return Draws(*(to_device(torch.from_numpy(each), device) for each in numbers))


def sampled_on_device(
    logits: Tensor, requests: np.ndarray, draws: np.ndarray, adjusted: Mapping[int, Adjusted] = PLAIN
) -> Output:
    """Arguments as those of `sampling.sample`; logits on the device."""
    on_device = draws_of(requests, draws, logits.device)
    chosen = choose_on_device(sample, logits, on_device)
    if changed := {i: one for i, one in adjusted.items() if one.changes_logits}:
        choose_again(sample, logits, chosen, on_device, changed, draws + requests["prompt"])
    output = Tokens(chosen, requests["logprobs"]).result()
    return output._replace(tops=tops(logits, adjusted))
