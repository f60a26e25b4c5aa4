"""The flat batch of one iteration: the tokens of all requests one after the other, [T = sum of L] (paper section 3.2).

It is built once an iteration, from the control message. Attention splits it by request; all other operations of the
model run on the flat tokens.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from orca.v1 import worker_pb2
from orca.v1.sampling_pb2 import SamplingParams
from orca_common.errors import FailedPrecondition
from orca_common.protocol import NO_TOKEN

from .kv import KVManager
from .rows import NO_ADAPTER, Adjusted, Rows

NO_DRAFTS = np.empty(0, np.int64)
HERE = -1  # in place of a token that the host does not know: the device has it in its token table


class Part(NamedTuple):
    """Consecutive tokens of a batch, of b of its members."""

    tokens: slice  # flat indexes in the batch
    rows: np.ndarray  # [b]
    starts: np.ndarray  # [b + 1] index in the part of each member's first token, and the number of tokens
    inputs: np.ndarray | None  # [b] as the batch's


@dataclass(frozen=True, slots=True)
class Batch:
    """B members in the iteration's order with T tokens, which have O outputs: places where a token is made. Arrays are
    int64 unless stated."""

    rows: np.ndarray  # [B]
    query_lengths: list[int]  # [B] tokens of each member in this iteration
    contexts: list[int]  # [B] earlier tokens of each member, whose keys and values are in memory
    token_ids: np.ndarray  # [T]; HERE: the row's last token
    positions: np.ndarray  # [T] index of each token in its request
    slots: np.ndarray  # [T] where the token's key and value go
    starts: np.ndarray  # [B + 1] flat index of each member's first token, and T
    ends: np.ndarray  # [B] tokens of each member whose keys and values are in memory after this iteration
    out_at: np.ndarray  # [O] flat index of the token before each new one, in ascending order
    out_member: np.ndarray  # [O] whose it is
    out_ends: np.ndarray  # [O] its position in the request
    requests: np.ndarray  # [O] of rows.ROW: what the rank knows of the member
    drafts: bool = False  # some members have several outputs: for each of their drafts and one more
    adjusted: Mapping[int, Adjusted] = field(default_factory=dict)  # by output; empty for plain requests
    scored: Mapping[int, Adjusted] = field(default_factory=dict)  # by member: with parts of prompts to be scored
    inputs: np.ndarray | None = None  # [B] tokens of each prompt, where these see each other: in a prefix LM, and in a
    # part of a model with an encoder (models/parts.py)
    adapters: np.ndarray | None = None  # [B] int32: each member's, from 0; -1: it has none. None: no member has one

    def __len__(self) -> int:
        return len(self.rows)

    def token_adapters(self, start: int, end: int) -> np.ndarray | None:
        """[end - start] int32: `adapters` of flat tokens [start, end)."""
        if self.adapters is None:
            return None
        return self.adapters.repeat(self.query_lengths)[start:end]

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
    def out_rows(self) -> np.ndarray:
        """[O] the row of each output."""
        return self.rows[self.out_member]

    @property
    def draws(self) -> np.ndarray:
        """[O] index of each token that this iteration makes in the request's answer: the index of its random draw."""
        return self.out_ends - self.requests["prompt"]

    def right(self, tokens: Sequence[int], without: Collection[int] = ()) -> np.ndarray:
        """[O] bool: which outputs count, of those that were made. The first of a member, and each one behind a draft
        that equals the token made at its place.

        without: outputs that have no token.
        """
        kept = np.ones(len(self.out_at), bool)
        if self.drafts:
            drafts, of, lost = self.token_ids[self.out_at].tolist(), self.out_member.tolist(), set(without)
            for n in range(1, len(kept)):
                if of[n] == of[n - 1]:
                    follows = kept[n - 1] and tokens[n - 1] == drafts[n]
                    kept[n] = follows and lost.isdisjoint((n - 1, n))
        return kept

    def newest(self, kept: np.ndarray) -> np.ndarray:
        """[O] bool: of the outputs that are `kept`, which is the last one of its member."""
        of = self.out_member
        return kept & ~np.append(kept[1:] & (of[1:] == of[:-1]), False)


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
    reads_tokens: bool = True,
) -> Batch:
    """The flat batch of an iteration whose admissions and growths have been taken in.

    Members without tokens (the scheduler runs ahead) continue from the token that the row has made last. With
    `tokens_on_device` the host need not know it: HERE stands in its place. So it does where this rank `reads_tokens`
    not at all. prefix_lm: the tokens of a prompt see each other, so all of it must be there.
    Raises FailedPrecondition when the message does not fit what this rank holds.
    """
    rows_of, starts_of, counts, outputs, given = (
        part[:] for part in (iteration.rows, iteration.starts, iteration.counts, iteration.outputs, iteration.tokens)
    )
    b = len(rows_of)
    if not b:
        raise FailedPrecondition("an iteration without requests")
    if not len(starts_of) == len(counts) == len(outputs) == b or len(given) not in (0, b):
        raise FailedPrecondition(
            f"{b} rows have {len(starts_of)} starts, {len(counts)} counts, {len(outputs)} outputs and "
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
    if given:
        behind = before >= members["admitted"]  # whose token is not among those of its admission
        of, at, learnt = each, before, np.array(given)
        if np.count_nonzero(behind) < b:
            of, at, learnt = each[behind], before[behind], learnt[behind]
        if np.count_nonzero(learnt == NO_TOKEN):
            raise FailedPrecondition(
                f"rows {rows_of} at {starts_of}: neither their admissions nor {given} have a token"
            )
        rows.learn(of, at, learnt)
        members = rows.table.take(each)
    known, back = members["known"], before < members["length"]  # its last position runs again
    if rows.adjusted and not tokens_on_device:  # who waits has its last token again, and a run-ahead goes on from that
        known = np.where(members["adjusted"] & (before >= members["admitted"]), before + 1, known)
    new = before >= known  # whose token this rank has neither made nor been given
    lacking = bool(np.count_nonzero(new))
    if lacking and reads_tokens:
        if np.count_nonzero(new & back & ~members["adjusted"]):
            raise FailedPrecondition(f"rows {rows_of} have come farther than {starts_of}: their last tokens are others")
        if not tokens_on_device:
            raise FailedPrecondition(f"rows {rows_of}: no token is known at {starts_of}")
    tokens = np.where(new, HERE, members["last_token"]) if lacking else members["last_token"].copy()
    drafts = drafts_of(iteration, outputs, counts)
    if np.count_nonzero(before + 1 >= known) == b and counts.count(1) == b:
        token_ids, positions, starts, flat_rows, ends = tokens, before, np.arange(b + 1), each, before + 1
    else:
        last, latest = tokens.tolist(), (known - 1).tolist()
        parts = [
            np.append(last[n], drafts[n])
            if start >= latest[n] and count == 1 + len(drafts[n])
            else inputs_of(rows, row, start, count, drafts[n])
            for n, (row, start, count) in enumerate(zip(rows_of, starts_of, counts, strict=True))
        ]
        token_ids = np.concatenate(parts)
        starts = np.cumsum([0, *counts])
        flat_rows = each.repeat(counts)
        positions = np.arange(len(token_ids)) + (before - starts[:-1]).repeat(counts)
        ends = before + np.array(counts)
    if np.count_nonzero(token_ids >= vocab_size):
        raise FailedPrecondition(f"token id {int(token_ids.max())} of a vocabulary of {vocab_size}")
    if np.count_nonzero(ends > max_positions):
        raise FailedPrecondition(f"a token at {int(ends.max()) - 1} of a model with {max_positions} positions")
    inputs = members["prompt"] if prefix_lm else None
    if inputs is not None and np.count_nonzero(np.where(before == 0, ends, before + 1) < inputs):
        raise FailedPrecondition(f"rows {rows_of}: a part of a prompt, to a prefix LM")
    one_each = outputs.count(1) == b
    if one_each:
        early, out_member, out_at = ends < members["admitted"], np.arange(b), starts[1:] - 1
    else:
        made = np.array(outputs)
        early = (made > 0) & (ends - np.maximum(made - 1, 0) < members["admitted"])
        out_member, firsts = np.arange(b).repeat(made), made.cumsum() - made
        last = starts[1:][out_member]  # the last places of each member
        out_at = last - made[out_member] + np.arange(len(out_member)) - firsts[out_member]
    if np.count_nonzero(early):
        raise FailedPrecondition(f"rows {rows_of}: a part of a prompt makes no token")
    requests = members if one_each else members[out_member]
    adjusted, scored = {}, {}
    if rows.adjusted and members["adjusted"].any():
        adjusting = {n: rows.adjusted[rows_of[n]] for n in np.flatnonzero(members["adjusted"]).tolist()}
        for n, one in adjusting.items():
            if ends[n] > members["admitted"][n]:
                one.put(starts_of[n], token_ids[starts[n] : starts[n + 1]])
        adjusted = {i: adjusting[n] for i, n in enumerate(out_member.tolist()) if n in adjusting}
        for i in np.flatnonzero(out_member[1:] == out_member[:-1]).tolist():
            if i + 1 in adjusted:
                adjusted[i + 1] = adjusted[i + 1].behind_a_draft()
        scored = {
            n: one for n, one in adjusting.items() if one.scores_prompt and starts_of[n] < one.prompt and not back[n]
        }
    out_ends = ends if one_each else positions[out_at] + 1
    if np.count_nonzero(requests["forced_at"]):
        for n in np.flatnonzero(requests["forced_at"] == out_ends - requests["prompt"] + 1).tolist():
            requests["likeliest"][n] = False
            adjusted[n] = copy(adjusted.get(n) or Adjusted(SamplingParams(), (), 0))  # other outputs are not forced
            adjusted[n].force(int(requests["forced"][n]))
    return Batch(
        rows=each,
        query_lengths=counts,
        contexts=starts_of,
        token_ids=token_ids,
        positions=positions,
        slots=kv.slots(flat_rows, positions),
        starts=starts,
        ends=ends,
        out_at=out_at,
        out_member=out_member,
        out_ends=out_ends,
        requests=requests,
        drafts=bool(iteration.drafts),
        adjusted=adjusted,
        scored=scored,
        inputs=inputs,
        adapters=adapters_of(members) if rows.adapters else None,
    )


def adapters_of(members: np.ndarray) -> np.ndarray | None:
    """`Batch.adapters` of members [B] of ROW."""
    each = members["adapter"]
    return each if np.count_nonzero(each != NO_ADAPTER) else None


def drafts_of(iteration: worker_pb2.Iteration, outputs: Sequence[int], counts: Sequence[int]) -> list[np.ndarray]:
    """The drafts of each member."""
    if outputs.count(1) == len(outputs) and not iteration.drafts:
        return [NO_DRAFTS] * len(outputs)
    sizes = [max(made - 1, 0) for made in outputs]
    if len(iteration.drafts) != sum(sizes):
        raise FailedPrecondition(f"{len(iteration.drafts)} drafts for outputs of {list(outputs)}")
    if not len(iteration.drafts):
        return [NO_DRAFTS] * len(sizes)
    for row, size, count in zip(iteration.rows, sizes, counts, strict=True):
        if size and size >= count:
            raise FailedPrecondition(f"row {row}: {size} drafts in {count} positions")
    return np.split(np.array(iteration.drafts), np.cumsum(sizes)[:-1])


def inputs_of(rows: Rows, row: int, start: int, count: int, drafts: np.ndarray) -> np.ndarray:
    """The tokens at `count` positions from `start` on: those that came with the row's admission, and drafts."""
    inputs, known = rows.inputs.get(row, NO_DRAFTS), count - len(drafts)
    tokens = inputs[start : start + known]
    if not 0 < len(tokens) == known:
        raise FailedPrecondition(f"row {row} has not the tokens of {known} positions from {start} on")
    if len(drafts) and start + known < len(inputs):
        raise FailedPrecondition(f"row {row} has drafts within its input tokens")
    return np.append(tokens, drafts) if len(drafts) else tokens
