"""Carries out requests of the rank that samples beyond the plain draw: penalties, biases, a form.

Nothing here depends on more than the request, its logits and its input tokens: its prompt and its committed tokens. So
a request that starts again after a recovery, as an initiation of both, gets the same draws. Rows without adjustments
have no entry anywhere here, and cost nothing.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from orca_kernels.transfer import to_device

from ..iteration.rows import Adjusted


def adjust(logits: Tensor, adjusted: Mapping[int, Adjusted], ends: np.ndarray) -> Tensor:
    """logits [B, V] -> float32 logits [B, V] with the adjustments of some rows; the same tensor when none has any.

    adjusted: by row of the batch. ends [B]: how many input tokens each request has. First the repetition penalty over
    prompt and output, or over the output alone where an encoder reads the prompt (Keskar et al., "CTRL", section 4.1),
    then OpenAI's presence and frequency penalties over the output, then the bias. At last the tokens are left out that
    would end the answer too early, and those that the form of the answer does not allow. A token that is forced needs
    none of it.
    """
    changed = {n: one for n, one in adjusted.items() if one.changes_logits}
    if not changed:
        return logits
    logits = logits.float().clone()
    for n, one in changed.items():
        values, asked, end = logits[n], one.asked, int(ends[n])  # a view of the row
        if one.forced is not None:
            values.fill_(-torch.inf)[one.forced] = 0
            continue
        if one.repetition != 1:
            seen = to_device(torch.from_numpy(one.repeated(end)), logits.device)
            old = values[seen]
            values[seen] = torch.where(old > 0, old / one.repetition, old * one.repetition)
        if (asked.presence_penalty or asked.frequency_penalty) and end > one.prompt:
            ids, counts = np.unique(one.tokens[one.prompt : end], return_counts=True)
            penalties = (asked.presence_penalty + asked.frequency_penalty * counts).astype(np.float32)
            values[to_device(torch.from_numpy(ids), logits.device)] -= to_device(
                torch.from_numpy(penalties), logits.device
            )
        if len(one.bias_ids):
            values[to_device(torch.from_numpy(one.bias_ids), logits.device)] += to_device(
                torch.from_numpy(one.biases), logits.device
            )
        if len(one.not_before) and end - one.prompt < asked.not_before.min_new_tokens:
            values[to_device(torch.from_numpy(one.not_before), logits.device)] = -torch.inf
        if one.answer is not None:
            _keep_allowed(values, one, one.answer.allowed(), int(one.tokens[end - 1]))
    return logits


def _keep_allowed(values: Tensor, one: Adjusted, allowed: np.ndarray | None, last: int) -> None:
    """Takes the tokens away that the form does not allow, of one row's logits [V]. Marks a row that has none left.

    allowed: as of `Constraint.allowed`. last: the row's last token, which it gets again where it waits.
    """
    one.waiting = allowed is None
    if allowed is None:
        values.fill_(-torch.inf)
        values[last] = 0
        return
    kept = to_device(torch.from_numpy(allowed), values.device)
    largest = values.where(kept, -torch.inf).max()
    if largest > -torch.inf or largest.isnan():  # NaN: of the model, which has a report of its own
        values.masked_fill_(~kept, -torch.inf)
    else:
        one.stuck = True  # its token means nothing


def stuck(adjusted: Mapping[int, Adjusted]) -> list[int]:
    """The rows for which `adjust` has found no token."""
    return [n for n, one in adjusted.items() if one.stuck]


def waiting(adjusted: Mapping[int, Adjusted]) -> list[int]:
    """The rows whose masks were not there when `adjust` asked for them."""
    return [n for n, one in adjusted.items() if one.waiting]
