"""The batch of one iteration, flat: every token of every request in one row, [T = sum of L] (paper section 3.2).

Built once an iteration from the control message and given to the model: attention splits it by request, all other
operations see the flat rows.
"""

from dataclasses import dataclass

import numpy as np

from orca.v1 import worker_pb2
from orca_common.errors import FailedPrecondition

from .kv import KVManager
from .rows import Rows


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests in the iteration's order, initiations first. B requests, T tokens; arrays are int64 unless stated."""

    rows: np.ndarray  # [B]
    query_lengths: list[int]  # [B] tokens of each request in this iteration
    contexts: list[int]  # [B] tokens before them, whose keys and values are in memory
    token_ids: np.ndarray  # [T]
    positions: np.ndarray  # [T] index of each token in its request
    slots: np.ndarray  # [T] where its key and value go
    block_table: np.ndarray  # [B, n]
    last: np.ndarray  # [B] flat index of each request's last token
    ends: np.ndarray  # [B] tokens of each request behind this iteration
    requests: np.ndarray  # [B] of rows.ROW
    draws: np.ndarray  # [B] index of the output token that this iteration makes: of its draw

    def __len__(self) -> int:
        return len(self.rows)


def build_batch(
    iteration: worker_pb2.Iteration, rows: Rows, kv: KVManager, vocab_size: int, max_positions: int
) -> Batch:
    """The flat batch of an iteration whose initiations were admitted.

    Increments without tokens (the scheduler ran ahead) go on from the token that this rank sampled last.
    Raises FailedPrecondition when the message does not fit what this rank holds.
    """
    order = [initiation.row for initiation in iteration.initiations]
    lengths = [len(initiation.token_ids) for initiation in iteration.initiations]
    token_ids: list[int] = []
    where: list[int] = []
    for initiation in iteration.initiations:
        token_ids += initiation.token_ids
        where += range(len(initiation.token_ids))
    contexts = [0] * len(order)

    increments, at = list(iteration.increment_rows), list(iteration.increment_positions)
    if increments:
        if max(increments) >= len(rows.table) or not rows.table["held"][increments].all():
            raise FailedPrecondition(f"increments of rows {increments}: not all are held")
        tokens = list(iteration.increment_tokens) or rows.table["last_token"][increments].tolist()
        if not len(increments) == len(at) == len(tokens):
            raise FailedPrecondition(f"{len(increments)} increments have {len(at)} positions, {len(tokens)} tokens")
        if (rows.table["length"][increments] < at).any():
            raise FailedPrecondition(f"increments of rows {increments} at {at}: one lies ahead of what is in memory")
        order += increments
        lengths += [1] * len(increments)
        contexts += at
        token_ids += tokens
        where += at
    if not order:
        raise FailedPrecondition("an iteration without requests")

    each, flat, at_flat = np.array(order), np.array(token_ids), np.array(where)
    if flat.max() >= vocab_size:
        raise FailedPrecondition(f"token id {flat.max()} of a vocabulary of {vocab_size}")
    if at_flat.max() >= max_positions:
        raise FailedPrecondition(f"a token at {at_flat.max()} of a model with {max_positions} positions")
    last = np.cumsum(lengths) - 1
    ends = at_flat[last] + 1
    members = rows.table[each]
    return Batch(
        rows=each,
        query_lengths=lengths,
        contexts=contexts,
        token_ids=flat,
        positions=at_flat,
        slots=kv.slots(each.repeat(lengths), at_flat),
        block_table=kv.block_table(each, int(ends.max())),
        last=last,
        ends=ends,
        requests=members,
        draws=ends - members["prompt"],
    )
