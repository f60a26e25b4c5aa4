"""The GPU loop: one iteration on a CUDA device, without waiting for it. **Not run on a GPU yet.**

A batch with initiations is launched kernel by kernel; its work hides the launches. A batch of increments alone is
padded to the next bucket and replayed as a graph. Both run the same function, `_iterate`, on `Inputs`.

Tokens stay on the device: `_iterate` finds those of increments in the token table, and its sampling writes the next
ones there. So the next iteration can be launched before the host has read these.

`Inputs` are what the kernels read besides weights and memory. Everything is in two buffers, which two copies fill: the
plan of attention, and one of int64. Their sizes follow from the bounds alone. So a graph that was captured with them
can be replayed for any batch that fits: `load` writes the batch's numbers to where the graph reads them. Rows that pad
belong to no request: they have no tile and no slot, so they see and write no keys and values, and their tokens go to a
row of the token table that no request has.

All rows are drawn by the kernels, inside a graph where there is one. Rows whose logits are adjusted are drawn once more
from those, right after. The host waits for neither, unless a row is adjusted: has a parameter outside of `rows.DRAW`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from orca_common.errors import FailedPrecondition
from orca_kernels.transfer import Arriving, fill, to_device
from orca_kernels.triton.draws import Draws
from orca_kernels.triton.plan import INITIATION_ROWS, Bounds, HostPlan, Plan

from ..data_plane.plane import DataPlane, Loopback
from ..iteration.batch import Batch
from ..iteration.device_tokens import PADDING, DeviceTokens
from ..iteration.kv import KVManager
from ..iteration.model import Output
from ..iteration.rows import Adjusted
from ..partition import Place
from ..sampling.adjusting import adjust, stuck, waiting
from ..sampling.sampling import Layers, OfStage, not_finite, score_prompts
from ..sampling.scoring import log_totals, tops
from .graphs import BUCKETS, Recorder, bucket_of

log = logging.getLogger(__name__)

Head = Callable[[Tensor | None], Tensor]  # flat indexes [n] on the device, None: all -> logits [n, V of this rank]


# Tokens of an iteration that run through the layers at once. It bounds the memory of intermediate tensors, because
# after a failure all running requests initiate together. The tenth of a GPU's free memory that is left for them is
# enough for 13B on 40 GB and for Llama 8B on 24 GB (counted in tests/worker/test_fake_loop.py, not run on a GPU).
PIECE = 4096


def host_plan(batch: Batch, kv: KVManager, group: int) -> HostPlan:
    """`group`: query heads to a key/value head."""
    table = kv.block_table(batch.rows, int(batch.ends.max()))
    return HostPlan(table, batch.query_lengths, batch.contexts, batch.slots, group=group, prompts=batch.inputs)


def plans_of_pieces(batch: Batch, kv: KVManager, group: int) -> Iterator[tuple[slice, HostPlan]]:
    """The plans of PIECE tokens each, and which tokens of the batch these are."""
    for start, end in batch.pieces(PIECE, batch.inputs is not None):
        part = batch.between(start, end)
        lengths = np.diff(part.starts).tolist()
        contexts = batch.positions[part.tokens][part.starts[:-1]].tolist()  # the position of each member's first token
        table = kv.block_table(part.rows, max(map(int.__add__, contexts, lengths)))
        slots = batch.slots[part.tokens]
        yield part.tokens, HostPlan(table, lengths, contexts, slots, group=group, prompts=part.inputs)


class Inputs:
    """Room for a batch of B members with T tokens: `bounds`, and O outputs, B of them unless it is said; their numbers
    come first in what is [O]."""

    plan: Plan
    given: Tensor  # [T] token ids, or HERE
    rows_of_tokens: Tensor  # [T]
    rows: Tensor  # [O] to whose places in the token table the outputs go
    draws: Draws  # of the outputs
    last: Tensor | None  # [O] flat index of the token before each new one; None: each token of the batch is one

    def __init__(self, bounds: Bounds, device: torch.device, outputs: int | None = None) -> None:
        self.plan = Plan(bounds, device)
        tokens, requests = bounds.tokens, max(bounds.requests, outputs or 0)
        self._sizes = [tokens, tokens, *[requests] * 8]
        self._room = [-(-n // 2) * 2 for n in self._sizes]  # each begins at a multiple of 16 bytes, as in a plan
        self._numbers = torch.zeros(sum(self._room), dtype=torch.int64, device=device)
        parts = [part[:n] for part, n in zip(self._numbers.split(self._room), self._sizes, strict=True)]
        self.given, self.rows_of_tokens, self.rows, temperatures, top_k, top_p, min_p, seeds, indexes, last = parts
        temperatures, top_p, min_p = (each.view(torch.float64) for each in (temperatures, top_p, min_p))
        self.draws = Draws(temperatures, top_k, top_p, min_p, seeds, indexes)
        self.last = None if bounds.increments_only and outputs in (None, tokens) else last

    def clear(self) -> Inputs:
        """Fills the inputs with padding alone."""
        self.plan.clear()
        self._fill()
        return self

    def load(self, batch: Batch, plan: HostPlan) -> Inputs:
        """Copies a batch's numbers to the device without waiting for it."""
        self.plan.load(plan)
        asked = (batch.requests[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed"))
        self._fill(
            batch.token_ids,
            batch.rows.repeat(batch.query_lengths),
            rows_to_put(batch),
            *(each.copy().view(np.int64) for each in asked),
            batch.draws,
            batch.out_at,
        )
        return self

    def _fill(self, *values: np.ndarray) -> None:
        """Writes each part's first numbers; the rest is padding."""
        numbers = np.zeros(sum(self._room), np.int64)
        ends = list(accumulate(self._room))
        for rows in (1, 2):
            numbers[ends[rows] - self._room[rows] : ends[rows]] = PADDING
        for i, part in enumerate(values):
            start = ends[i] - self._room[i]
            numbers[start : start + len(part)] = part
        fill(self._numbers, torch.from_numpy(numbers))


def rows_to_put(batch: Batch) -> np.ndarray:
    """[O]: the row of each output. Which token of a member with drafts is its last is not known before: PADDING."""
    rows, of = batch.out_rows, batch.out_member
    return np.where(np.bincount(of)[of] > 1, PADDING, rows) if batch.drafts else rows


# Logits [B, V], and how each row is drawn -> tokens [B] int64 and their logprobs [B], NaN where the logits are not
# finite.
Sample = Callable[[Tensor, Draws], tuple[Tensor, Tensor]]


def choose_on_device(sample: Sample, logits: Tensor, draws: Draws) -> Tensor:
    """Arguments of `sample` -> [3, B] float64: tokens (exact to 2**53), logprobs, and a number for each row that is NaN
    where its logits are not finite: the logprobs again.
    """
    tokens, logprobs = sample(logits, draws)
    return torch.stack([tokens.double(), logprobs.double(), logprobs.double()])


def choose_again(
    sample: Sample, logits: Tensor, chosen: Tensor, draws: Draws, changed: Mapping[int, Adjusted], ends: np.ndarray
) -> None:
    """Draws for the rows whose logits [S or more, V] `adjust` changes, and fills `chosen` [3, S or more].

    ends [S]: how many input tokens each request has.
    """
    rows = list(changed)
    at = to_device(torch.tensor(rows), logits.device)
    own = logits.index_select(0, at)
    judged = adjust(own, dict(enumerate(changed.values())), ends[rows])
    tokens, _ = sample(judged, Draws(*(each.index_select(0, at) for each in draws)))
    values = own.float()
    logprobs = values.gather(1, tokens[:, None])[:, 0] - log_totals(values)
    chosen[:2].index_copy_(1, at, torch.stack([tokens.double(), logprobs.double()]))


class Tokens:
    """`Later`: what was chosen for a batch, on its way to the host.

    chosen [3, S]; wanted [S] bool: who asks for a log probability.
    """

    def __init__(self, chosen: Tensor, wanted: np.ndarray) -> None:
        self._chosen, self._wanted, self._copy = chosen, wanted.tolist(), Arriving(chosen)

    @property
    def tokens(self) -> Tensor:
        return self._chosen[0].long()

    def is_there(self) -> bool:
        return self._copy.is_there()

    def result(self) -> Output:
        ids, logprobs, finite = self._copy.wait().tolist()
        asked = [value if want else math.nan for value, want in zip(logprobs, self._wanted, strict=True)]
        return Output([int(token) for token in ids], asked, not_finite=not_finite(finite))


def _heads(heads: Sequence[tuple[slice, Head]], at: Tensor | None) -> Tensor:
    """The logits at flat indexes of a batch that was cut in pieces. Each head has the states of these tokens."""
    if at is None:
        return torch.cat([head(None) for _, head in heads])
    made = [head((at - part.start).clamp(0, part.stop - part.start - 1)) for part, head in heads]
    logits = made[-1]
    for (part, _), before in zip(heads[-2::-1], made[-2::-1], strict=True):
        logits = torch.where((at < part.stop)[:, None], before, logits)
    return logits


class DeviceLayers(Layers, Protocol):
    """The layers of a stage, which read nothing of the host."""

    device: torch.device
    max_positions: int
    group: int  # query heads to a key/value head

    def forward(self, plan: Plan, ids: Tensor, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Tensor | Head:
        """Token ids [T], hidden states x [T, H] of the stage before -> those of this stage, or what makes logits."""
        ...


class Made(NamedTuple):
    """The results that `_iterate` leaves on the device, padding included."""

    hidden: Tensor | None = None  # [T, H], at every stage but the last
    head: Head | None = None
    logits: Tensor | None = None  # [B, V], on the rank that samples
    chosen: Tensor | None = None  # [3, B], see `choose_on_device`


class Recorded(NamedTuple):
    """A recorded bucket: its input tensors, and the call that replays it."""

    inputs: Inputs
    x: Tensor | None  # [bucket, H], at every stage but the first
    replay: Callable[[], Made]


class Alone(Loopback):
    """`DataPlane` of a warm-up: logits of several tensor ranks are zeros. Sampling is compiled for the whole width."""

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        return super().gather(x, widths) if len(widths) == 1 else x.new_zeros(len(x), sum(widths))


class DeviceModel(OfStage[DeviceLayers]):
    """`Model` of a stage on a CUDA device. `recorder` None: no graphs.

    With several tensor ranks the recordings have their all-reduces, so they are of one epoch's data plane.
    """

    def __init__(self, model: DeviceLayers, place: Place, recorder: Recorder | None, sample: Sample) -> None:
        super().__init__(model)
        self._place, self._sample = place, sample
        self._recorder = recorder
        self._recorded: dict[int, Recorded] = {}
        self.tokens = DeviceTokens(model.device, sum(model.vocabulary_shares)) if place.is_first else None

    @torch.inference_mode()
    def prepare(self, kv: KVManager, plane: DataPlane) -> None:
        """Compiles the kernels of both kinds of batches, then records all buckets over this memory.

        If a recording fails there are no graphs in this epoch; the log says so. With several tensor ranks it raises
        FailedPrecondition instead: the others wait for this one in the operations of the same recording.
        """
        self.release()
        self.model.prepare(kv)
        self._warm_up(kv)
        recorder, started = self._recorder, time.monotonic()
        if recorder is None:
            return
        recorder.begin()
        try:
            for bucket in reversed(BUCKETS):  # the largest first: the others fit into its memory
                self._recorded[bucket] = self._record(recorder, bucket, kv, recorder.kept(plane))
        except RuntimeError as error:
            self.release()
            if self._place.tensor_parallel > 1:
                raise FailedPrecondition(f"no graphs with all-reduces (cuda_graphs_tp): {error}") from error
            log.warning("no CUDA graphs: kernels are launched one by one", exc_info=True)
            return
        seconds = round(time.monotonic() - started, 3)
        log.info("CUDA graphs", extra={"buckets": BUCKETS, "bytes": recorder.bytes, "seconds": seconds})

    def _warm_up(self, kv: KVManager) -> None:
        """Runs padding alone, of increments and of an initiation. Otherwise the first request would compile the
        kernels, for seconds, on all ranks at once."""
        model = self.model
        few = Bounds.of_increments(2, self._longest(kv), group=model.group, block_size=kv.block_size)
        tiles = -(-34 * model.group // INITIATION_ROWS) + 1
        mixed = Bounds(2, 35, tiles, few.blocks, few.keys, increments_only=False)
        for bounds in (few, mixed):
            inputs = Inputs(bounds, model.device).clear()
            self._iterate(inputs, kv, Alone(), self._room_for_states(bounds.tokens))

    def _room_for_states(self, tokens: int) -> Tensor | None:
        """Zeros in place of the hidden states of the stage before; None at the first stage."""
        incoming = None if self._place.is_first else self.model.incoming(tokens)
        if incoming is None:
            return None
        shape, dtype = incoming
        return torch.zeros(shape, dtype=dtype, device=self.model.device)

    def _longest(self, kv: KVManager) -> int:
        """Tokens of a request, at most."""
        return min(self.model.max_positions, kv.slots_in_all)

    def release(self) -> None:
        """Drops the recordings, and with the last of them the memory that they share."""
        self._recorded.clear()

    def _record(self, recorder: Recorder, bucket: int, kv: KVManager, plane: DataPlane) -> Recorded:
        model = self.model
        bounds = Bounds.of_increments(bucket, self._longest(kv), group=model.group, block_size=kv.block_size)
        inputs, x = Inputs(bounds, model.device).clear(), self._room_for_states(bucket)
        return Recorded(inputs, x, recorder.record(partial(self._iterate, inputs, kv, plane, x)))

    def _iterate(self, inputs: Inputs, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Made:
        """One iteration, of which the host does nothing but launch kernels, the same ones for the same bounds."""
        ids = inputs.given if self.tokens is None else self.tokens.find(inputs.rows_of_tokens, inputs.given)
        return self._ended(self.model.forward(inputs.plan, ids, kv, plane, x), inputs, plane)

    def _ended(self, end: Tensor | Head, inputs: Inputs, plane: DataPlane) -> Made:
        """Samples, at the last stage."""
        if isinstance(end, Tensor):
            return Made(hidden=end)
        logits = plane.gather(end(inputs.last), self.model.vocabulary_shares)
        if logits is None:
            return Made(head=end)
        chosen = choose_on_device(self._sample, logits, inputs.draws)
        if self.tokens is not None:
            self.tokens.put(inputs.rows, chosen[0].long())
        return Made(head=end, logits=logits, chosen=chosen)

    @torch.inference_mode()
    def run(self, batch: Batch, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Output:
        plan = host_plan(batch, kv, self.model.group)
        recorded = self._recorded_for(batch)
        if recorded is None:
            inputs = Inputs(plan.bounds, self.model.device, outputs=len(batch.out_at))
            inputs.load(batch, plan)
            if len(batch.token_ids) > PIECE:
                made = self._in_pieces(batch, inputs, kv, plane, x)
            else:
                made = self._iterate(inputs, kv, plane, x)
        else:
            inputs = recorded.inputs.load(batch, plan)
            if recorded.x is not None and x is not None:
                recorded.x[: len(batch)].copy_(x)
            made = recorded.replay()
        if made.hidden is not None:
            # The next replay writes the same memory, and the data plane sends from a stream of its own.
            return Output([], [], made.hidden if recorded is None else made.hidden[: len(batch)].clone())
        return self._sampled(batch, plane, made, inputs.draws)

    def _in_pieces(self, batch: Batch, inputs: Inputs, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Made:
        """Pieces of PIECE tokens run through the layers one after the other; then all are sampled at once."""
        device = self.model.device
        ids = inputs.given if self.tokens is None else self.tokens.find(inputs.rows_of_tokens, inputs.given)
        hidden, heads = list[Tensor](), list[tuple[slice, Head]]()
        for tokens, host in plans_of_pieces(batch, kv, self.model.group):
            plan = Plan(host.bounds, device).load(host)
            end = self.model.forward(plan, ids[tokens], kv, plane, None if x is None else x[tokens])
            if isinstance(end, Tensor):
                hidden.append(end)
            else:
                heads.append((tokens, end))
        if hidden:
            return Made(hidden=torch.cat(hidden))
        return self._ended(partial(_heads, heads), inputs, plane)

    def _recorded_for(self, batch: Batch) -> Recorded | None:
        """The bucket for a batch of one token each, in which each is followed by a new one."""
        bucket = bucket_of(len(batch)) if len(batch.token_ids) == len(batch) == len(batch.out_at) else None
        return self._recorded.get(bucket) if bucket is not None else None

    def _sampled(self, batch: Batch, plane: DataPlane, made: Made, draws: Draws) -> Output:
        n, prompts, head = len(batch.out_at), {}, made.head
        assert head is not None
        if batch.scored:
            at = lambda places: head(to_device(torch.from_numpy(places), self.model.device))  # noqa: E731
            prompts = score_prompts(at, batch, plane, self.model.vocabulary_shares)
        if made.logits is None or made.chosen is None or not n:
            return Output([], [], prompts=prompts)
        if changed := {i: one for i, one in batch.adjusted.items() if one.changes_logits}:
            choose_again(self._sample, made.logits, made.chosen, draws, changed, batch.out_ends)
            if self.tokens is not None and not batch.drafts:
                rows = to_device(torch.from_numpy(batch.out_rows), self.model.device)
                self.tokens.put(rows, made.chosen[0, :n].long())
        later = Tokens(made.chosen[:, :n], batch.requests["logprobs"])
        if not batch.adjusted and not prompts and not batch.drafts:
            return Output([], [], later=later)
        more = tops(made.logits[:n], batch.adjusted)
        without = {"stuck": stuck(batch.adjusted), "waiting": waiting(batch.adjusted)}
        output = later.result()._replace(tops=more, prompts=prompts, **without)
        if batch.drafts and self.tokens is not None:
            kept = batch.right(output.token_ids, output.without)
            self.tokens.learn(batch.out_rows, made.chosen[0, :n], batch.newest(kept))
        return output
