"""GPT-2 on a CPU: one stage as a program of the compiled kernels.

Every kernel computes a row by the same operations in the same order, whatever else is in the batch. So a request's
logits are the same bits alone, in any batch, as increments or as an initiation after a recovery, in one piece or
several.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from orca_common.errors import FailedPrecondition
from orca_kernels.cpu.library import BatchPointers
from orca_kernels.cpu.program import Attention, Operand, Packed, Program, Rows

from ...data_plane.plane import DataPlane
from ...iteration.batch import Batch
from ...iteration.kv import KVManager, KVShape
from ...iteration.model import Compute, Output
from ...partition import Place, share
from ...sampling.sampling import not_finite, sample
from ...sampling.scoring import PIECE as SCORED_PIECE
from ...sampling.scoring import PromptScores
from ..weights import WeightSource
from .configuration import GPT2Config

# Tokens that run through the layers at once. It bounds the memory of activations, and keeps them in the level-2 cache
# while each weight is read once a piece.
PIECE = 512


class Section(NamedTuple):
    """Steps [first, last) of the program, and the rows to sum over the tensor ranks after them."""

    first: int
    last: int
    sums: Rows | None


class GPT2OnCPU:
    """`Model` of one stage. Raises FailedPrecondition when the machine does not run the kernels that are asked for."""

    tokens = None

    def __init__(self, config: GPT2Config, place: Place, weights: WeightSource, dtype: torch.dtype, compute: Compute):
        self.config, self.place, self.dtype = config, place, dtype
        self.heads = config.heads // place.tensor_parallel
        self.vocabulary_shares = [
            len(share(config.vocab_size, place.tensor_parallel, rank)) for rank in range(place.tensor_parallel)
        ]
        try:
            self.program = Program(dtype, compute.threads, compute.kernels)
        except ValueError as error:
            raise FailedPrecondition(str(error)) from None
        self._sections: list[Section] = []
        self._record(weights)

    @property
    def kernels(self) -> str:
        threads = self.program.threads
        return f"{self.program.instruction_set}, {threads} thread{'s' * (threads > 1)}"

    @property
    def kv_shape(self) -> KVShape:
        layers = len(self.place.layers(self.config.layers))
        return KVShape(layers, self.heads, self.config.head_size, self.dtype, torch.device("cpu"))

    def incoming(self, tokens: int) -> tuple[tuple[int, ...], torch.dtype] | None:
        return ((tokens, self.config.hidden), torch.float32) if not self.place.is_first else None

    def prepare(self, kv: KVManager) -> None:
        pass

    def release(self) -> None:
        pass

    # Recording

    def _record(self, weights: WeightSource) -> None:
        program, config, place = self.program, self.config, self.place
        hidden, inner = config.hidden, len(place.tensor_share(config.inner))
        attention = self.heads * config.head_size
        self._x, self._sum = program.rows(hidden), program.rows(hidden)
        qkv = program.rows(3 * attention)
        normed, attended, middle = program.operand(hidden), program.operand(attention), program.operand(inner)

        embedding = None
        if place.is_first:
            embedding = program.pack(weights.get("wte.weight"))
            first_token = place.tensor_share(config.vocab_size).start
            program.embed(self._x, embedding, first_token, weights.find("wpe.weight"))
            self._all_reduce(self._x)
        for layer, index in enumerate(place.layers(config.layers)):
            name = f"h.{index}."
            scale = config.head_size**-0.5 if config.scale_attention else 1.0
            if config.scale_by_layer:
                scale /= index + 1
            a = Attention(layer, self.heads, 1, config.head_size, self.dtype, scale)
            self._norm(weights, name + "ln_1", normed)
            program.linear(normed, self._pack(weights, name + "attn.c_attn"), qkv)
            program.write_kv(qkv, a)
            program.attend(qkv, a, attended)
            self._residual(attended, self._pack(weights, name + "attn.c_proj"))
            self._norm(weights, name + "ln_2", normed)
            program.linear_act(normed, self._pack(weights, name + "mlp.c_fc"), middle, config.activation)
            self._residual(middle, self._pack(weights, name + "mlp.c_proj"))
        if place.is_last:
            self._norm(weights, "ln_f", normed, selected=True)
            if not config.tied:
                head = program.pack(weights.get("lm_head.weight"))
            else:
                head = embedding if embedding is not None else program.pack(weights.get("wte.weight"))
            program.head(normed, head)
        self._close_section(None)

    def _norm(self, weights: WeightSource, name: str, out: Operand, selected: bool = False) -> None:
        norm = self.program.norm(weights.get(name + ".weight"), weights.get(name + ".bias"), self.config.epsilon)
        self.program.normalize(self._x, norm, out, selected)

    def _pack(self, weights: WeightSource, name: str) -> Packed:
        return self.program.pack(weights.get(name + ".weight").t(), weights.find(name + ".bias"))

    def _residual(self, x: Operand, weights: Packed) -> None:
        """The hidden states += x W, summed over the tensor ranks."""
        if self.place.tensor_parallel == 1:
            self.program.linear_add(x, weights, self._x)
        else:
            self.program.linear(x, weights, self._sum)
            self._all_reduce(self._sum)
            self.program.add(self._x, self._sum)

    def _all_reduce(self, x: Rows) -> None:
        if self.place.tensor_parallel > 1:
            self._close_section(x)

    def _close_section(self, sums: Rows | None) -> None:
        first = self._sections[-1].last if self._sections else 0
        self._sections.append(Section(first, self.program.length, sums))

    # Running

    def run(self, batch: Batch, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Output:
        needs_logits = np.count_nonzero(batch.requests["likeliest"]) < len(batch.sampled)
        results = Results(len(batch.sampled), self.vocabulary_shares[self.place.tensor_rank] if needs_logits else 0)
        states = None if self.place.is_last else torch.empty(len(batch.token_ids), self.config.hidden)
        prompts = PromptScores(batch) if batch.scored and self.place.is_last else None
        length = SCORED_PIECE if prompts is not None and len(prompts.places) else PIECE
        for start in range(0, len(batch.token_ids), length):
            end = min(start + length, len(batch.token_ids))
            if prompts is not None:
                self._run_scored(batch, kv, plane, x, start, end, results, prompts)
            else:
                self._run_piece(batch, kv, plane, x, start, end, results)
            if states is not None:
                states[start:end] = torch.from_numpy(self.program.view(self._x, end - start, self.config.hidden))
        if states is not None:
            return Output([], [], states)
        output = self._sample(batch, plane, results) if len(batch.sampled) else Output([], [])
        return output if prompts is None else output._replace(prompts=prompts.packed())

    def _run_scored(
        self,
        batch: Batch,
        kv: KVManager,
        plane: DataPlane,
        x: Tensor | None,
        start: int,
        end: int,
        results: Results,
        prompts: PromptScores,
    ) -> None:
        """Runs tokens [start, end) with the logits of the prompts' places among them, and scores those."""
        part = prompts.between(start, end)
        first, last = ending(batch, start, end)
        ends = batch.last[first:last]
        at = np.union1d(prompts.places[part], ends)  # flat indexes
        of_piece = Results(len(at), self.vocabulary_shares[self.place.tensor_rank])
        self._run_tokens(batch, kv, plane, x, start, end, at - start, of_piece)
        results.take(slice(first, last), of_piece, np.searchsorted(at, ends))
        assert of_piece.logits is not None
        if part.stop > part.start:
            of_places = torch.from_numpy(of_piece.logits[np.searchsorted(at, prompts.places[part])])
            logits = plane.gather(of_places, self.vocabulary_shares)
            if logits is not None:
                prompts.add(part, logits)

    def _run_piece(
        self,
        batch: Batch,
        kv: KVManager,
        plane: DataPlane,
        x: Tensor | None,
        start: int,
        end: int,
        results: Results,
    ) -> None:
        """Runs tokens [start, end) of the flat batch, with the logits of the members that sample there."""
        first, last = ending(batch, start, end) if self.place.is_last else (0, 0)
        self._run_tokens(batch, kv, plane, x, start, end, batch.last[first:last] - start, results.after(first))

    def _run_tokens(
        self,
        batch: Batch,
        kv: KVManager,
        plane: DataPlane,
        x: Tensor | None,
        start: int,
        end: int,
        selection: np.ndarray,
        results: Results,
    ) -> None:
        """Runs tokens [start, end) of the flat batch; `selection` of them, from `start` on, go into the head."""
        tokens, hidden = end - start, self.config.hidden
        first, after = batch.starts.searchsorted(start, "right") - 1, batch.starts.searchsorted(end)
        starts = batch.starts[first : after + 1].clip(start, end) - start
        blocks = kv.block_table(batch.rows[first:after], int(batch.ends.max()))
        given = (
            batch.token_ids[start:end],
            batch.positions[start:end],
            batch.slots[start:end],
            starts,
            blocks,
            selection,
        )
        numbers = np.concatenate(given, axis=None)  # one array, for each one's address takes a microsecond
        at = list(accumulate((part.nbytes for part in given), initial=numbers.ctypes.data))
        keys, values = kv.keys, kv.values
        logits = results.logits
        pointers = BatchPointers(
            tokens=tokens,
            requests=len(blocks),
            token_ids=at[0],
            positions=at[1],
            slots=at[2],
            starts=at[3],
            blocks=at[4],
            columns=blocks.shape[1],
            selected=len(selection),
            selection=at[5],
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            layer_bytes=keys.stride(0) * keys.itemsize,
            block_size=kv.block_size,
            logits=logits.ctypes.data if logits is not None else None,
            logits_stride=logits.shape[1] if logits is not None else 0,
            best=results.best.ctypes.data,
            best_index=results.index.ctypes.data,
        )
        if x is not None:
            self.program.view(self._x, tokens, hidden)[:] = x[start:end].numpy()
        for section in self._sections:
            self.program.run(pointers, section.first, section.last)
            if section.sums is not None:
                view = self.program.view(section.sums, tokens, hidden)
                summed = plane.all_reduce(torch.from_numpy(np.ascontiguousarray(view)))
                view[:] = summed.numpy()

    def _sample(self, batch: Batch, plane: DataPlane, results: Results) -> Output:
        if results.logits is not None:
            logits = plane.gather(torch.from_numpy(results.logits), self.vocabulary_shares)
            return sample(logits, batch.requests, batch.draws, batch.adjusted) if logits is not None else Output([], [])
        place = self.place
        largest, index = results.best, results.index
        if place.tensor_parallel > 1:
            first = place.tensor_share(self.config.vocab_size).start
            mine = np.stack([results.best.astype(np.float64), index + first], 1)  # exact in float64
            of_all = plane.gather(torch.from_numpy(mine), [2] * place.tensor_parallel)
            if of_all is None:
                return Output([], [])
            pairs = of_all.numpy().reshape(len(batch.sampled), place.tensor_parallel, 2)
            winner = pairs[:, :, 0].argmax(1)  # the first of equals, as on one rank; NaN before all
            largest, index = pairs[np.arange(len(pairs)), winner].T
            index = index.astype(np.int64)
        return Output(index.tolist(), [math.nan] * len(largest), not_finite=not_finite(largest.tolist()))


def ending(batch: Batch, start: int, end: int) -> tuple[int, int]:
    """[first, last) of those that sample whose last tokens are among [start, end) of the flat batch."""
    first, last = batch.last.searchsorted((start, end)).tolist()
    return first, last


class Results:
    """What the head makes of n rows: the largest logit of each, and all V logits where they are asked for."""

    def __init__(self, rows: int, vocabulary: int) -> None:
        self.best = np.empty(rows, np.float32)
        self.index = np.empty(rows, np.int32)
        self.logits = np.empty((rows, vocabulary), np.float32) if vocabulary else None

    def after(self, first: int) -> Results:
        """The rows from `first` on: the same memory."""
        rest = Results(0, 0)
        rest.best, rest.index = self.best[first:], self.index[first:]
        rest.logits = self.logits[first:] if self.logits is not None else None
        return rest

    def take(self, rows: slice, other: Results, theirs: np.ndarray) -> None:
        """Copies the other's rows `theirs` to `rows`."""
        self.best[rows], self.index[rows] = other.best[theirs], other.index[theirs]
        if self.logits is not None and other.logits is not None:
            self.logits[rows] = other.logits[theirs]
