"""What the GPU loop does with the logits of a batch, without the rest of it."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from orca_kernels.transfer import to_device
from orca_kernels.triton.sampling import sample
from orca_worker.device.model import Tokens, choose_cut, choose_on_device, is_cut
from orca_worker.iteration.model import Output
from orca_worker.iteration.rows import Adjusted
from orca_worker.sampling.sampling import PLAIN
from orca_worker.sampling.scoring import tops


def sampled_on_device(
    logits: Tensor, requests: np.ndarray, draws: np.ndarray, adjusted: Mapping[int, Adjusted] = PLAIN
) -> Output:
    """Arguments as those of `sampling.sample`; logits on the device."""
    cut = is_cut(requests, adjusted, logits.shape[1])
    temperatures = np.where(cut, 0, requests["temperature"]).astype(np.float32)
    numbers = (temperatures, requests["seed"].astype(np.int64), draws)
    chosen = choose_on_device(sample, logits, *(to_device(torch.from_numpy(each), logits.device) for each in numbers))
    if cut.any():
        choose_cut(logits, chosen, cut, requests, draws, adjusted)
    output = Tokens(chosen, requests["logprobs"]).result()
    return output._replace(tops=tops(logits, adjusted))
