"""The flat batch of one iteration: the tokens of all requests one after the other, [T = sum of L] (paper section 3.2).

It is built once an iteration, from the control message. Attention splits it by request; all other operations of the
model run on the flat tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from orca.v1 import worker_pb2
from orca_common.errors import FailedPrecondition

from .kv import KVManager
from .rows import Adjusted, Rows

HERE = -1  # in place of a token that the device has in its token table


class Part(NamedTuple):
    """Consecutive tokens of a batch, of b of its members."""

    tokens: slice  # flat indexes in the batch
    rows: np.ndarray  # [b]
    starts: np.ndarray  # [b + 1] index in the part of each member's first token, and the number of tokens
    inputs: np.ndarray | None  # [b] as the batch's


@dataclass(frozen=True, slots=True)
class Batch:
    """B members in the iteration's order with T tokens; S of them make a token. Arrays are int64 unless stated."""

    rows: np.ndarray  # [B]
    query_lengths: list[int]  # [B] tokens of each member in this iteration
    contexts: list[int]  # [B] earlier tokens of each member, whose keys and values are in memory
    token_ids: np.ndarray  # [T]; HERE: the row's last token
    positions: np.ndarray  # [T] index of each token in its request
    slots: np.ndarray  # [T] where the token's key and value go
    starts: np.ndarray  # [B + 1] flat index of each member's first token, and T
    ends: np.ndarray  # [B] tokens of each member whose keys and values are in memory after this iteration
    sampled: np.ndarray  # [S] the members that make a token, in ascending order
    requests: np.ndarray  # [S] of rows.ROW: what the rank knows of those
    adjusted: Mapping[int, Adjusted] = field(default_factory=dict)  # of those, by index; empty for plain requests
    scored: Mapping[int, Adjusted] = field(default_factory=dict)  # by member: with parts of prompts to be scored
    inputs: np.ndarray | None = None  # [B] tokens of each prompt, where these see each other: in a prefix LM, and in a
    # part of a model with an encoder (models/parts.py)

    def __len__(self) -> int:
        return len(self.rows)

    def between(self, start: int, end: int) -> Part:
        """The members of which flat tokens [start, end) are a part, and that part."""
        first, after = self.starts.searchsorted(start, "right") - 1, self.starts.searchsorted(end)
        starts = self.starts[first : after + 1].clip(start, end) - start
        inputs = self.inputs[first:after] if self.inputs is not None else None
        return Part(slice(start, end), self.rows[first:after], starts, inputs)

    def pieces(self, tokens: int, whole_members: bool) -> Iterator[tuple[int, int]]:
        """Cuts the flat batch: [start, end) of pieces of at most this number of tokens, but for longer members if those
        are to be whole."""
        start, length = 0, len(self.token_ids)
        while start < length:
            end = min(start + tokens, length)
            if whole_members:
                first, last = self.starts.searchsorted((start, end), "right") - 1
                end = int(self.starts[max(first + 1, last)])
            yield start, end
            start = end

    @property
    def last(self) -> np.ndarray:
        """[S] flat index of the token before each new one."""
        return self.starts[1:][self.sampled] - 1

    @property
    def draws(self) -> np.ndarray:
        """[S] index of each output token that this iteration makes, which is the index of its random draw."""
        return self.ends[self.sampled] - self.requests["prompt"]


def token_count(iteration: worker_pb2.Iteration) -> int:
    """T, the tokens of the flat batch."""
    return sum(iteration.counts)


def build_batch(
    iteration: worker_pb2.Iteration,
    rows: Rows,
    kv: KVManager,
    vocab_size: int,
    max_positions: int,
    tokens_on_device: bool = False,
    prefix_lm: bool = False,
) -> Batch:
    """The flat batch of an iteration whose admissions and growths have been taken in.

    Members without tokens (the scheduler runs ahead) continue from the token that the row has made last. With
    `tokens_on_device` the host need not know it: HERE stands in its place. prefix_lm: the tokens of a prompt see each
    other, so all of it must be there.
    Raises FailedPrecondition when the message does not fit what this rank holds.
    """
    rows_of, starts_of, counts, given = (
        list(part) for part in (iteration.rows, iteration.starts, iteration.counts, iteration.tokens)
    )
    b = len(rows_of)
    if not b:
        raise FailedPrecondition("an iteration without requests")
    if not len(starts_of) == len(counts) == len(iteration.samples) == b or len(given) not in (0, b):
        raise FailedPrecondition(
            f"{b} rows have {len(starts_of)} starts, {len(counts)} counts, {len(iteration.samples)} samples and "
            f"{len(given)} tokens"
        )
    if max(rows_of) >= len(rows.table):
        raise FailedPrecondition(f"row {max(rows_of)} is not held")
    if len(set(rows_of)) < b:
        raise FailedPrecondition(f"a row twice in one iteration: {rows_of}")
    each, before = np.array(rows_of), np.array(starts_of)
    members = rows.table.take(each)  # 1.3 us for 32 rows; indexing takes 5
    # count_nonzero takes 0.4 us; `any`, `all` and `max` of an array go through Python and take 2.
    if np.count_nonzero(members["held"]) < b:
        raise FailedPrecondition(f"row {rows_of[members['held'].argmin()]} is not held")
    if np.count_nonzero(before > members["length"]):
        raise FailedPrecondition(f"rows {rows_of} have not come as far as {starts_of}: a token would be missing")
    behind = before >= members["admitted"]  # whose token is not among those of its admission
    back = before < members["length"]  # its last position runs again, as no token came of it
    if not given and np.count_nonzero(behind & back & ~members["adjusted"]):
        raise FailedPrecondition(f"rows {rows_of} have come farther than {starts_of}: their last tokens are other ones")
    tokens = given or ([HERE] * b if tokens_on_device else members["last_token"].tolist())
    if np.count_nonzero(behind) == b and sum(counts) == b:  # each member is one token
        token_ids, positions, starts, flat_rows = np.array(tokens), before, np.arange(b + 1), each
        largest, ends = max(tokens), before + 1
    else:
        parts = [
            inputs_of(rows, row, start, count) if not late else one_token(row, token, count)
            for row, start, count, late, token in zip(rows_of, starts_of, counts, behind.tolist(), tokens, strict=True)
        ]
        token_ids = np.concatenate(parts)
        starts = np.cumsum([0, *counts])
        flat_rows = each.repeat(counts)
        positions = np.arange(len(token_ids)) + (before - starts[:-1]).repeat(counts)
        largest, ends = int(token_ids.max()), before + np.array(counts)
    if largest >= vocab_size:
        raise FailedPrecondition(f"token id {largest} of a vocabulary of {vocab_size}")
    end = int(ends.max())
    if end > max_positions:
        raise FailedPrecondition(f"a token at {end - 1} of a model with {max_positions} positions")
    inputs = members["prompt"] if prefix_lm else None
    if inputs is not None and np.count_nonzero(np.where(before == 0, ends, before + 1) < inputs):
        raise FailedPrecondition(f"rows {rows_of}: a part of a prompt, to a prefix LM")
    samples = np.array(iteration.samples)
    if np.count_nonzero(samples & (ends < members["admitted"])):
        raise FailedPrecondition(f"rows {rows_of}: a part of a prompt makes no token")
    all_sample = np.count_nonzero(samples) == b
    sampled = np.arange(b) if all_sample else np.flatnonzero(samples)
    requests = members if all_sample else members[sampled]
    adjusted, scored = {}, {}
    if rows.adjusted and members["adjusted"].any():
        adjusting = {n: rows.adjusted[rows_of[n]] for n in np.flatnonzero(members["adjusted"]).tolist()}
        for n, one in adjusting.items():
            if behind[n]:
                one.put(starts_of[n], int(token_ids[starts[n]]))
        index = {n: i for i, n in enumerate(sampled.tolist())}
        adjusted = {index[n]: one for n, one in adjusting.items() if n in index}
        scored = {
            n: one for n, one in adjusting.items() if one.scores_prompt and starts_of[n] < one.prompt and not back[n]
        }
    return Batch(
        rows=each,
        query_lengths=counts,
        contexts=starts_of,
        token_ids=token_ids,
        positions=positions,
        slots=kv.slots(flat_rows, positions),
        starts=starts,
        ends=ends,
        sampled=sampled,
        requests=requests,
        adjusted=adjusted,
        scored=scored,
        inputs=inputs,
    )


def inputs_of(rows: Rows, row: int, start: int, count: int) -> np.ndarray:
    """The tokens at `count` positions from `start` on, all of which came with the row's admission."""
    tokens = rows.inputs[row][start : start + count] if row in rows.inputs else np.empty(0)
    if not 0 < len(tokens) == count:
        raise FailedPrecondition(f"row {row} has not the tokens of {count} positions from {start} on")
    return tokens


def one_token(row: int, token: int, count: int) -> np.ndarray:
    """The token of a member that goes on behind its admission."""
    if count != 1:
        raise FailedPrecondition(f"row {row}: {count} positions of which one token is known")
    return np.array([token])
