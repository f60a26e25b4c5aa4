"""Carries out requests of the rank that samples beyond the plain draw: penalties, biases, a form.

Nothing here depends on more than the request, its logits and its input tokens: its prompt and its committed tokens. So
a request that starts again after a recovery, as an initiation of both, gets the same draws. Rows without adjustments
have no entry anywhere here, and cost nothing.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from orca_kernels.transfer import to_device

from ..iteration.rows import Adjusted

# [256, 8] float32: what eight logits may be at most, by a byte of a mask: infinity where it allows a token.
MOST = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
MOST = MOST.astype(np.float32)


def adjust(logits: Tensor, adjusted: Mapping[int, Adjusted], ends: np.ndarray) -> Tensor:
    """logits [B, V] -> float32 logits [B, V] with the adjustments of some rows; the same tensor when none has any.

    adjusted: by row of the batch. ends [B]: how many input tokens each request has.
    """
    changed = {n: one for n, one in adjusted.items() if one.changes_logits}
    if not changed:
        return logits
    logits = logits.float().clone()
    masks = {n: mask for n, one in changed.items() if (mask := _adjust(logits[n], one, int(ends[n]))) is not None}
    if masks:
        rows = to_device(torch.tensor(list(masks)), logits.device)
        bits = to_device(torch.from_numpy(np.stack(list(masks.values()))), logits.device)
        most = embedding(bits.int(), to_device(torch.from_numpy(MOST), logits.device))
        kept = torch.minimum(logits[rows], most.flatten(1)[:, : logits.shape[1]])
        logits[rows] = kept
        for n in rows[kept.amax(-1) == -torch.inf].tolist():  # NaN: of the model, which has a report of its own
            changed[n].stuck = True
            logits[n] = 0  # its token means nothing
    return logits


def adjusted_rows(
    logits: Tensor, rows: Iterable[int], adjusted: Mapping[int, Adjusted], ends: np.ndarray
) -> Iterator[np.ndarray]:
    """Does the work of `adjust` on a CPU, for some rows: yields each [V] float32. The next one overwrites it."""
    size, table = logits.shape[1], logits.numpy() if logits.dtype == torch.float32 else None
    values, most = np.empty(size, np.float32), np.empty((-(-size // 8), 8), np.float32)
    changing = torch.from_numpy(values)
    for n in rows:
        one, row = adjusted.get(n), logits[n].float().numpy() if table is None else table[n]
        if one is not None and one.changes_logits:
            values[:] = row
            row, mask = values, _adjust(changing, one, int(ends[n]))
            if mask is not None:
                np.take(MOST, mask, axis=0, out=most, mode="clip")  # without a mode it takes memory of its own
                np.minimum(row, most.reshape(-1)[:size], out=row)
                one.stuck = one.stuck or bool(row.max() == -np.inf)
        yield row


def _adjust(values: Tensor, one: Adjusted, end: int) -> np.ndarray | None:
    """Adjusts the logits [V] of a row whose request has `end` input tokens -> the mask that they still have to get.

    First the repetition penalty over prompt and output, or over the output alone where an encoder reads the prompt
    (Keskar et al., "CTRL", section 4.1), then OpenAI's presence and frequency penalties over the output, then the bias.
    At last the tokens are left out that would end the answer too early, and those that the form of the answer does not
    allow. A token that is forced needs none of it.
    """
    asked = one.asked
    if one.forced is not None:
        values.fill_(-torch.inf)[one.forced] = 0
        return None
    if one.repetition != 1:
        seen = to_device(torch.from_numpy(one.repeated(end)), values.device)
        old = values[seen]  # of a token that stands there twice the same, so it is penalized once
        values[seen] = torch.where(old > 0, old / one.repetition, old * one.repetition)
    if (asked.presence_penalty or asked.frequency_penalty) and end > one.prompt:
        ids, counts = np.unique(one.tokens[one.prompt : end], return_counts=True)
        penalties = (asked.presence_penalty + asked.frequency_penalty * counts).astype(np.float32)
        values[to_device(torch.from_numpy(ids), values.device)] -= to_device(torch.from_numpy(penalties), values.device)
    if len(one.bias_ids):
        values[to_device(torch.from_numpy(one.bias_ids), values.device)] += to_device(
            torch.from_numpy(one.biases), values.device
        )
    if len(one.not_before) and end - one.prompt < asked.not_before.min_new_tokens:
        values[to_device(torch.from_numpy(one.not_before), values.device)] = -torch.inf
    if one.answer is None:
        return None
    mask = one.answer.allowed()
    one.waiting = mask is None
    if mask is None:  # it gets its last token again
        values.fill_(-torch.inf)[int(one.tokens[end - 1])] = 0
    return mask


def stuck(adjusted: Mapping[int, Adjusted]) -> list[int]:
    """The rows for which no token was left, by `adjust` or `adjusted_rows`."""
    return [n for n, one in adjusted.items() if one.stuck]


def waiting(adjusted: Mapping[int, Adjusted]) -> list[int]:
    """The rows whose masks were not there when they were asked for."""
    return [n for n, one in adjusted.items() if one.waiting]
