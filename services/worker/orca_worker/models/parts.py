"""The two flat batches of an iteration of a model with an encoder: the encoder's rows and the decoder's.

A request's blocks hold, in each layer of the decoder, first the keys and values that the encoder's output has for its n
input tokens, then those of the decoder's own tokens:

    slot 0 .. n - 1   input tokens, written once, in the initiation
    slot n + j        the decoder's token at position j

The decoder's token 0 is the start token, with which every decoder of this kind begins. A token at position p >= n of
the request is the decoder's token p - n + 1. So a request needs a slot for each input token and for each token that it
makes, as a request of any other model does. An initiation after a recovery follows the same rule.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from orca_common.errors import FailedPrecondition

from ..iteration.batch import Batch
from ..iteration.kv import KVManager


def parts(batch: Batch, kv: KVManager, start_token: int) -> tuple[Batch, Batch]:
    """-> the encoder's batch, of the members that begin (it may be empty), and the decoder's, of all members.

    Raises FailedPrecondition for a part of a prompt: an encoder needs all of it.
    """
    earlier, counts = np.array(batch.contexts), np.array(batch.query_lengths)
    begins, inputs = earlier == 0, batch.requests["prompt"]
    one_each = len(batch.out_at) == len(batch) and not batch.drafts
    if not one_each or np.count_nonzero(np.where(begins, counts, earlier + 1) < inputs):
        raise FailedPrecondition(
            f"rows {batch.rows.tolist()}: a part of a prompt or a draft, to a model with an encoder"
        )
    new = np.flatnonzero(begins)
    of_encoder = batch.positions < inputs.repeat(counts)
    read = of_encoder & begins.repeat(counts)
    encoder = _part(batch, kv, new, batch.token_ids[read], inputs[new], np.zeros_like(new), 0)

    starts = earlier < inputs  # with the start token: all that begin, and those that make their first token again
    own = np.where(begins, counts - inputs, counts - starts)  # tokens of each member that are the decoder's, and known
    tokens = np.insert(batch.token_ids[~of_encoder], (own.cumsum() - own)[starts], start_token)
    firsts = np.where(begins, 0, earlier - inputs + 1)
    return encoder, _part(batch, kv, np.arange(len(batch)), tokens, own + starts, firsts, inputs)


def _part(
    batch: Batch,
    kv: KVManager,
    members: np.ndarray,
    tokens: np.ndarray,
    lengths: np.ndarray,
    firsts: np.ndarray,
    behind: np.ndarray | int,
) -> Batch:
    """`lengths` of these flat tokens are each member's, from position `firsts` of its sequence on, which lies `behind`
    other slots of its request."""
    rows, starts = batch.rows[members], np.concatenate([[0], lengths.cumsum()])
    positions = np.arange(len(tokens)) + (firsts - starts[:-1]).repeat(lengths)
    return replace(
        batch,
        rows=rows,
        query_lengths=lengths.tolist(),
        contexts=firsts.tolist(),
        token_ids=tokens,
        positions=positions,
        slots=kv.slots(rows.repeat(lengths), positions + (lengths * 0 + behind).repeat(lengths)),
        starts=starts,
        ends=behind + firsts + lengths,
        out_at=starts[1:] - 1,
        out_member=np.arange(len(rows)),
        inputs=batch.requests["prompt"][members],
        adapters=batch.adapters[members] if batch.adapters is not None else None,
    )
