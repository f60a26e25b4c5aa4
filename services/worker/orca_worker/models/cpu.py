"""A recorded stage on a CPU, as a program of the compiled kernels.

Every kernel computes a row by the same operations in the same order, whatever else is in the batch. So a request's
logits are the same bits alone, in any batch, as increments or as an initiation after a recovery, in one piece or
several.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from orca_common.errors import FailedPrecondition
from orca_kernels.cpu import program as kernels
from orca_kernels.cpu.library import BatchPointers
from orca_kernels.cpu.program import PANEL, Delta, DeltaPart, Operand, Packed, Program, Rows, in_turn

from ..data_plane.plane import DataPlane
from ..iteration.batch import Batch
from ..iteration.kv import KVManager, KVShape
from ..iteration.model import Compute, Output
from ..partition import Slice, Types
from ..sampling.sampling import not_finite, sample
from ..sampling.scoring import PIECE as SCORED_PIECE
from ..sampling.scoring import PromptScores
from .adapters import AdapterFile
from .formats import floats
from .formats.table import Reader
from .low_rank import LowRanks
from .parts import parts
from .passes import Passes
from .positions import Sinusoids, Table
from .recording import (
    Attend,
    Attention,
    Buffer,
    Copy,
    Embed,
    Gated,
    Head,
    Linear,
    Matrix,
    Norm,
    Normalize,
    Operation,
    Recording,
    Residual,
    WriteKV,
)
from .rotary import Rotary
from .weights import WeightSource

# Tokens that run through the layers at once. It bounds the memory of activations, and keeps them in the level-2 cache
# while each weight is read once a piece.
PIECE = 512

NOTHING = np.zeros(0, np.int64)


class Section(NamedTuple):
    """Steps [first, last) of the program, and the rows to sum over the tensor ranks after them."""

    first: int
    last: int
    sums: Rows | None


class Changed(NamedTuple):
    """An operation that adapters change: its matrices, each with the column of its first output."""

    delta: Delta
    matrices: Sequence[tuple[Matrix, int]]
    columns: int  # of all outputs, in whole panels


class StageOnCPU:
    """`Model` of one stage. Raises FailedPrecondition when the machine does not run the kernels that are asked for."""

    tokens = None

    def __init__(
        self,
        recording: Recording,
        weights: WeightSource,
        types: Types,
        compute: Compute,
        reader: Reader = floats,
        adapters: LowRanks | None = None,
    ) -> None:
        self.recording, self.place, self.types = recording, recording.place, types
        self.vocabulary_shares = recording.vocabulary_shares
        if recording.group > kernels.MAX_GROUP:
            shared = f"{recording.group} query heads share a key/value head; {kernels.MAX_GROUP} can"
            raise FailedPrecondition(f"model: {shared} in the compiled kernels; kernels torch runs it")
        try:
            self.program = Program(getattr(torch, types.weights), compute.threads, compute.kernels)
        except ValueError as error:
            raise FailedPrecondition(str(error)) from None
        self._sections: list[Section] = []
        self._encoder: list[Section] = []
        self._crossing: list[Section] = []
        self._passes = Passes(self.place, recording.hidden, torch.float32)
        self._deltas: list[Changed] = []
        self._adapters = adapters
        self._whole_members = recording.prefix_lm  # no piece of a batch cuts a row
        self._translate(weights, reader, adapters)
        for number, file in enumerate(adapters.files if adapters is not None else ()):
            self.adapt(number, file)

    @property
    def kernels(self) -> str:
        threads = self.program.threads
        return f"{self.program.instruction_set}, {threads} thread{'s' * (threads > 1)}"

    @property
    def kv_shape(self) -> KVShape:
        of = self.recording
        return KVShape(of.layers, of.kv_heads, of.head_size, getattr(torch, self.types.kv), torch.device("cpu"))

    def incoming(self, tokens: int) -> tuple[tuple[int, ...], torch.dtype] | None:
        if self.place.is_first or self.recording.has_encoder:
            return None
        return (tokens, self.recording.hidden), torch.float32

    def prepare(self, kv: KVManager, plane: DataPlane) -> None:
        for table in self._by_position:
            table.reach(kv.slots_in_all)

    def release(self) -> None:
        pass

    def adapter_bytes(self, file: AdapterFile) -> int:
        """`Program.add_adapter` makes the ranks even, and has A in whole panels. A gated operation's B has as many
        numbers for each output of the gate as for each of what it gates."""
        assert self._adapters is not None
        numbers = 0
        for _, matrices, columns in self._deltas:
            each = [self._adapters.sizes(file, matrix) for matrix, _ in matrices]
            ranks = [sum(one.rank + one.rank % 2 for one in sizes) for sizes in each]
            if any(ranks):
                inputs = next(one.inputs for sizes in each for one in sizes)
                numbers += -(-sum(ranks) // PANEL) * PANEL * inputs
                outputs = (-(-one.outputs // PANEL) * PANEL * (one.rank + one.rank % 2) for one in each[0])
                numbers += columns * max(ranks) if len(each) > 1 else sum(outputs)
        return self.program.dtype.itemsize * numbers

    def adapt(self, number: int, file: AdapterFile | None) -> None:
        self.program.forget(number)
        if file is None:
            return
        assert self._adapters is not None
        try:
            with self.program.packing_for(number):
                for delta, matrices, columns in self._deltas:
                    found = [one for matrix, first in matrices for one in self._adapters.of(file, matrix, first)]
                    if found:
                        parts = [DeltaPart(one.a, one.b, one.column) for one in found]
                        self.program.add_adapter(delta, number, parts, columns, matrices[-1][1])
        except BaseException:
            self.program.forget(number)
            raise

    # Translation

    def _translate(self, weights: WeightSource, reader: Reader, adapters: LowRanks | None) -> None:
        program = self.program
        of_buffer: dict[Buffer, Any] = {  # Rows or Operand, as the recording says
            buffer: reader.operand(program, buffer.width) if buffer.is_operand else program.rows(buffer.width)
            for buffer in self.recording.buffers
        }
        self._of_head = program.operand(self.recording.hidden)  # a head's table is in the model's type
        self._x: Rows = of_buffer[self.recording.states]
        self._sum = program.rows(self.recording.hidden)
        self._unread = program.operand(self.recording.hidden)  # a normalized sum, which only its residual reads
        load = Load(program, weights, reader, self.types, self.recording.prefix_lm, adapters)
        if self.recording.has_encoder:
            self._encoder = self._record(self.recording.encoder, load, of_buffer)
            self._crossing = self._record(self.recording.crossing, load, of_buffer)
        self._record(self.recording.operations, load, of_buffer)
        self._by_position, self._deltas = load.by_position, load.deltas

    def _record(self, operations: Sequence[Operation], load: Load, of_buffer: Mapping[Buffer, Any]) -> list[Section]:
        program = self.program
        self._sections = []
        self._section_start = program.length
        for operation in operations:
            match operation:
                case Embed(table, first_token, scale, positions):
                    program.embed(self._x, load.table(table), first_token, load.positions(positions), scale)
                    self._all_reduce(self._x)
                case Normalize(out, norm, of_head, in_place):
                    to = self._of_head if of_head else of_buffer[out]
                    program.normalize(self._x, load.norm(norm), to, of_head, in_place)
                case Copy(out):
                    program.copy(self._x, self.recording.hidden, of_buffer[out])
                case Linear(x, matrix, out, None):
                    delta = load.delta(of_buffer[x], matrix)
                    program.linear(of_buffer[x], load.matrix(matrix), of_buffer[out], delta)
                case Linear(x, matrix, out, str(activation)):
                    delta = load.delta(of_buffer[x], matrix)
                    program.linear_act(of_buffer[x], load.matrix(matrix), of_buffer[out], activation, delta)
                case Gated(x, gate, up, out, activation):
                    delta = load.delta(of_buffer[x], gate, up)
                    program.linear_gated(of_buffer[x], load.gated(gate, up), of_buffer[out], activation, delta)
                case WriteKV(kv, attention):
                    program.write_kv(of_buffer[kv], load.attention(attention)._replace(group=0))
                case Attend(qkv, _, out):
                    self._attend(operation, of_buffer[qkv], of_buffer[out], load)
                case Residual(terms, norm):
                    self._residual([(of_buffer[x], matrix) for x, matrix in terms], norm, load)
                case Head():
                    program.head(self._of_head, load.head(operation))
        self._close_section(None)
        return self._sections

    def _attend(self, operation: Attend, qkv: Rows, out: Operand, load: Load) -> None:
        a = load.attention(operation.attention)
        if operation.writes:
            self.program.write_kv(qkv, a)
        self.program.attend(qkv, a, out)

    def _residual(self, terms: list[tuple[Operand, Matrix]], norm: Norm | None, load: Load) -> None:
        """The hidden states += norm(all x W, summed over the tensor ranks)."""
        if self.place.tensor_parallel == 1 and norm is None:
            for x, matrix in terms:
                delta = load.delta(x, matrix)
                self.program.linear_add(x, load.matrix(matrix), self._x, delta)
            return
        for i, (x, matrix) in enumerate(terms):
            delta = load.delta(x, matrix)
            (self.program.linear_add if i else self.program.linear)(x, load.matrix(matrix), self._sum, delta)
        self._all_reduce(self._sum)
        if norm is not None:
            self.program.normalize(self._sum, load.norm(norm), self._unread, in_place=True)
        self.program.add(self._x, self._sum)

    def _all_reduce(self, x: Rows) -> None:
        if self.place.tensor_parallel > 1:
            self._close_section(x)

    def _close_section(self, sums: Rows | None) -> None:
        self._sections.append(Section(self._section_start, self.program.length, sums))
        self._section_start = self.program.length

    # Running

    def run(self, batch: Batch, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Output:
        needs_logits = np.count_nonzero(batch.requests["likeliest"]) < len(batch.out_at)
        results = Results(len(batch.out_at), self.vocabulary_shares[self.place.tensor_rank] if needs_logits else 0)
        prompts = PromptScores(batch) if batch.scored and self.place.is_last else None
        length = SCORED_PIECE if prompts is not None and len(prompts.places) else PIECE
        flat, encoded = batch, None
        if self.recording.has_encoder:
            flat, encoded, x = self._encode(batch, kv, plane)
        states = None if self.place.is_last else torch.empty(len(flat.token_ids), self.recording.hidden)
        for start, end in flat.pieces(length, self._whole_members):
            if prompts is not None:
                self._run_scored(flat, kv, plane, x, start, end, results, prompts)
            else:
                self._run_piece(flat, kv, plane, x, start, end, results)
            if states is not None:
                states[start:end] = self._states(end - start)
        if states is not None:
            return Output([], [], states if encoded is None else torch.cat([encoded, states]))
        output = self._sample(batch, plane, results) if len(batch.out_at) else Output([], [])
        return output if prompts is None else output._replace(prompts=prompts.packed())

    def _states(self, tokens: int) -> Tensor:
        """The hidden states [tokens, hidden] of what has run last. The program's own memory."""
        return torch.from_numpy(self.program.view(self._x, tokens, self.recording.hidden))

    def _encode(self, batch: Batch, kv: KVManager, plane: DataPlane) -> tuple[Batch, Tensor | None, Tensor | None]:
        """Runs the encoder, and makes keys and values of its output.

        -> the decoder's batch; the encoder's output, where other stages need it; the decoder's states of the stage
        before, if there is one.
        """
        encoder, decoder = parts(batch, kv, self.recording.start_token)
        tokens, passes = len(encoder.token_ids), self._passes
        if self.place.pipeline_parallel == 1:
            self._run_encoder(encoder, kv, plane, None, [*self._encoder, *self._crossing])
            return decoder, None, None
        x = passes.first(plane, tokens) if tokens else None
        states = self._run_encoder(encoder, kv, plane, x, self._encoder)
        encoded, x = passes.second(plane, states, tokens, len(decoder.token_ids))
        self._run_encoder(encoder, kv, plane, encoded, self._crossing)
        return decoder, encoded, x

    def _run_encoder(
        self, batch: Batch, kv: KVManager, plane: DataPlane, x: Tensor | None, sections: Sequence[Section]
    ) -> Tensor | None:
        """Runs the encoder's batch, if it has tokens, in pieces of whole requests: all their tokens see each other.
        -> its hidden states."""
        if not len(batch):
            return None
        states = torch.empty(len(batch.token_ids), self.recording.hidden)
        for start, end in batch.pieces(PIECE, whole_members=True):
            self._run_tokens(batch, kv, plane, x, start, end, NOTHING, Results(0, 0), sections)
            states[start:end] = self._states(end - start)
        return states

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
        ends = batch.out_at[first:last]
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
        """Runs tokens [start, end) of the flat batch, with the logits of the outputs there."""
        first, last = ending(batch, start, end) if self.place.is_last else (0, 0)
        self._run_tokens(batch, kv, plane, x, start, end, batch.out_at[first:last] - start, results.after(first))

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
        sections: Sequence[Section] | None = None,
    ) -> None:
        """Runs tokens [start, end) of the flat batch; `selection` of them, from `start` on, go into the head."""
        tokens, hidden = end - start, self.recording.hidden
        part = batch.between(start, end)
        blocks = kv.block_table(part.rows, int(batch.ends.max()))
        given = (
            batch.token_ids[start:end],
            batch.positions[start:end],
            batch.slots[start:end],
            part.starts,
            blocks,
            selection,
            part.inputs if part.inputs is not None else NOTHING,
        )
        numbers = np.concatenate(given, axis=None)  # one array, for each one's address takes a microsecond
        at = list(accumulate((part.nbytes for part in given), initial=numbers.ctypes.data))
        keys, values = kv.keys, kv.values
        logits = results.logits
        adapters = batch.token_adapters(start, end)
        pointers = BatchPointers(
            tokens=tokens,
            requests=len(blocks),
            token_ids=at[0],
            positions=at[1],
            slots=at[2],
            starts=at[3],
            blocks=at[4],
            columns=blocks.shape[1],
            inputs=at[6] if part.inputs is not None else None,
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
            adapters=adapters.ctypes.data if adapters is not None else None,
        )
        if x is not None:
            self.program.view(self._x, tokens, hidden)[:] = x[start:end].numpy()
        for section in sections if sections is not None else self._sections:
            self.program.run(pointers, section.first, section.last)
            self._after(section, batch, kv, plane, start, end)

    def _after(self, section: Section, batch: Batch, kv: KVManager, plane: DataPlane, start: int, end: int) -> None:
        """Does what the program does not, between a section for tokens [start, end) of the batch and the next one."""
        if section.sums is not None:
            view = self.program.view(section.sums, end - start, self.recording.hidden)
            summed = plane.all_reduce(torch.from_numpy(np.ascontiguousarray(view)))
            view[:] = summed.numpy()

    def _sample(self, batch: Batch, plane: DataPlane, results: Results) -> Output:
        if results.logits is not None:
            logits = plane.gather(torch.from_numpy(results.logits), self.vocabulary_shares)
            return sample(logits, batch.requests, batch.draws, batch.adjusted) if logits is not None else Output([], [])
        place = self.place
        largest, index = results.best, results.index
        if place.tensor_parallel > 1:
            first = self.recording.tokens.start
            mine = np.stack([results.best.astype(np.float64), index + first], 1)  # exact in float64
            of_all = plane.gather(torch.from_numpy(mine), [2] * place.tensor_parallel)
            if of_all is None:
                return Output([], [])
            pairs = of_all.numpy().reshape(len(batch.out_at), place.tensor_parallel, 2)
            winner = pairs[:, :, 0].argmax(1)  # the first of equals, as on one rank; NaN before all
            largest, index = pairs[np.arange(len(pairs)), winner].T
            index = index.astype(np.int64)
        return Output(index.tolist(), [math.nan] * len(largest), not_finite=not_finite(largest.tolist()))


class Load:
    """Loads weights into a program. A table that is both embedding and head is packed once."""

    def __init__(
        self,
        program: Program,
        weights: WeightSource,
        reader: Reader,
        types: Types,
        prefix_lm: bool,
        adapters: LowRanks | None,
    ) -> None:
        self._program, self._weights, self._reader, self._adapters = program, weights, reader, adapters
        self._types, self._prefix_lm = types, prefix_lm
        self._tables: dict[Slice, Packed] = {}
        self._rotary: dict[Rotary, kernels.Rotary] = {}
        self.by_position: list[Table] = []  # not made yet
        self.deltas: list[Changed] = []

    def table(self, part: Slice) -> Packed:
        if part not in self._tables:
            self._tables[part] = self._program.pack(self._weights.get(part.name))
        return self._tables[part]

    def head(self, head: Head) -> Packed:
        table, bias = self.table(head.table), self._weights.head_bias(head)
        return table if bias is None else self._program.with_bias(table, bias)

    def matrix(self, matrix: Matrix) -> Packed:
        return self._reader.load(self._weights, matrix).pack(self._program, self._weights.bias(matrix))

    def gated(self, gate: Matrix, up: Matrix) -> Packed:
        """Interleaves two matrices as `Program.linear_gated` takes them: 8 rows of each in turn."""
        of_gate, of_up = (self._reader.load(self._weights, one) for one in (gate, up))
        biases = [bias for one in (gate, up) if (bias := self._weights.bias(one)) is not None]
        bias = in_turn(*biases) if len(biases) == 2 else None
        return of_gate.joined(of_up, in_turn).pack(self._program, bias)

    def delta(self, x: Operand, *matrices: Matrix) -> Delta | None:
        """Records the summands of adapters for the operation that is recorded next: of a matrix, or of a gate and what
        it gates."""
        if self._adapters is None or not self._adapters.may_change(matrices):
            return None
        column, whole, at = 0, PANEL // len(matrices), list[tuple[Matrix, int]]()  # a panel has columns of each matrix
        for matrix in matrices:
            at.append((matrix, column))
            column += -(-matrix.outputs // whole) * whole
        delta = self._program.delta(x)
        self.deltas.append(Changed(delta, at, column))
        return delta

    def norm(self, norm: Norm) -> kernels.Norm:
        bias = self._weights.get(norm.bias.name) if norm.bias is not None else None
        return self._program.norm(self._weights.norm(norm), bias, norm.epsilon)

    def positions(self, of: Slice | Sinusoids | None) -> Tensor | None:
        if isinstance(of, Sinusoids):
            self.by_position.append(of.table(torch.float32, torch.device("cpu")))
            return self.by_position[-1].rows
        return self._weights.get(of.name) if of is not None else None

    def attention(self, a: Attention) -> kernels.Attention:
        if a.rotary is not None and a.rotary not in self._rotary:
            tables = a.rotary.tables(torch.device("cpu"))
            self.by_position += tables
            self._rotary[a.rotary] = kernels.Rotary(*(table.rows for table in tables))
        return kernels.Attention(
            a.layer,
            a.kv_heads,
            a.heads // a.kv_heads,
            a.head_size,
            getattr(torch, self._types.kv),
            a.scale,
            a.window,
            None if a.rotary is None else self._rotary[a.rotary],
            None if a.query_norm is None else self.norm(a.query_norm),
            None if a.key_norm is None else self.norm(a.key_norm),
            a.sees_input,
            self._prefix_lm,
            None if a.bias is None else a.bias.by_distance(self._weights.get(a.bias.table.name)),
            narrows=self._types.activations == "bfloat16",
        )


def ending(batch: Batch, start: int, end: int) -> tuple[int, int]:
    """[first, last) of the outputs that are among [start, end) of the flat batch."""
    first, last = batch.out_at.searchsorted((start, end)).tolist()
    return first, last


class Results:
    """The head's results for n rows: the largest logit of each, and all V logits where they are asked for."""

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
