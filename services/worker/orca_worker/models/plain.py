"""A recorded stage in torch: what machines without compiled kernels run, and what those kernels are tested against.

Linear operations are torch's own. The others are those of a `Kernels`: plain torch here, Triton's in `cuda.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from orca_kernels.cpu.program import Packed, Program
from orca_kernels.reference import PartAttention, SplitAttention, turned
from orca_kernels.transfer import to_device
from orca_kernels.triton.codes import Coded

from ..data_plane.plane import DataPlane
from ..iteration.batch import Batch
from ..iteration.kv import KVManager, KVShape
from ..iteration.rows import NO_ADAPTER
from ..partition import ITEM_BYTES, Slice, Types
from ..sampling.sampling import EndOfModel
from .adapters import AdapterFile
from .formats import floats
from .formats.table import Reader, Weight
from .low_rank import LowRank, LowRanks
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

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "tanh_gelu": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


class LoadedNorm(NamedTuple):
    """weight, bias [width]; without a bias it is an RMSNorm."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float


class LoadedAttention(NamedTuple):
    """An attention, and its tables and norms on the device."""

    of: Attention
    turns: tuple[Table, Table] | None
    query_norm: LoadedNorm | None
    key_norm: LoadedNorm | None
    bias: Tensor | None  # [heads, 2 * reach + 1] by key - query, from -reach on

    @property
    def rotary(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines [positions, half] float32, as far as they are made."""
        return None if self.turns is None else (self.turns[0].rows, self.turns[1].rows)


class Kernels(Protocol):
    """The operations of one batch that a device may have kernels for."""

    def add_norm(self, x: Tensor, update: Tensor | None, norm: LoadedNorm) -> tuple[Tensor, Tensor]:
        """x, update [T, H] -> (norm(x + update), x + update)"""
        ...

    def activated(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
        """x [T, K], weight [N, K] -> activation(x W + b) [T, N]"""
        ...

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up [T, 2 I], the gate first -> activation(gate) * up [T, I]"""
        ...

    def attend(self, qkv: Tensor, a: LoadedAttention) -> Tensor:
        """Writes keys and values of qkv [T, width] -> [T, heads * head_size]"""
        ...


@dataclass
class Pass:
    """A batch on its way through the stage. The hidden states are `x`, plus `update` until the next norm adds it."""

    kernels: Kernels
    all_reduce: Callable[[Tensor], Tensor]
    ids: Tensor  # [T]
    positions: Tensor  # [T]
    x: Tensor | None
    update: Tensor | None = None
    adapted: Sequence[tuple[int, Tensor]] = ()  # the flat indexes of the tokens with each adapter that some have
    at: dict[Buffer, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None

    @property
    def states(self) -> Tensor:
        """The hidden states [T, H]."""
        assert self.x is not None, "a first stage begins with an embedding, another with the states of the one before"
        return self.x if self.update is None else self.x + self.update

    def rows(self, at: Tensor | None) -> Pass:
        """The hidden states of tokens `at` [n] alone; None: of all."""
        if at is None:
            return replace(self, at={})
        assert self.x is not None
        return replace(self, x=self.x[at], update=None if self.update is None else self.update[at], at={})


class Adapted(NamedTuple):
    """`Weight` with what adapters add to its products, for the tokens of one batch."""

    of: Weight
    changes: Mapping[int, Sequence[LowRank]]  # by adapter
    adapted: Sequence[tuple[int, Tensor]]

    def joined(self, other: Adapted, join: Callable[[Tensor, Tensor], Tensor]) -> Adapted:
        raise NotImplementedError("weights are joined before adapters are added")

    def pack(self, program: Program, bias: Tensor | None) -> Packed:
        raise NotImplementedError("the compiled kernels have an operation for adapters")

    def coded(self, device: torch.device) -> Coded | None:
        raise NotImplementedError("plain torch runs a model with adapters")

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = self.of.linear(x, bias)
        for adapter, rows in self.adapted:
            for change in self.changes.get(adapter, ()):
                columns = slice(change.column, change.column + len(change.b))
                y[rows, columns] += x[rows] @ change.a.t() @ change.b.t()
        return y


class LoadedMatrix(NamedTuple):
    """The weights of a linear operation, and what adapters add to them."""

    weight: Weight
    bias: Tensor | None
    changes: Mapping[int, Sequence[LowRank]]  # by adapter

    def of(self, batch: Pass) -> Weight:
        return Adapted(self.weight, self.changes, batch.adapted) if self.changes and batch.adapted else self.weight


Step = Callable[[Pass], None]

# Rows of logits then begin at multiples of 128 bytes. GPT-2's 50,257 tokens are odd, and cuBLAS has slower kernels for
# those. (Not timed.)
HEAD_ROWS = 64


def padded_rows(vocabulary_shares: Sequence[int]) -> int:
    """Rows of the table of each tensor rank."""
    return -(-max(vocabulary_shares) // HEAD_ROWS) * HEAD_ROWS


class TorchStage:
    """The operations of a recording with their weights on a device. `StageModel` in plain torch."""

    kernels = "torch"

    def __init__(
        self,
        recording: Recording,
        weights: WeightSource,
        types: Types,
        device: torch.device,
        reader: Reader = floats,
        adapters: LowRanks | None = None,
    ) -> None:
        self.recording, self.types, self.device, self._reader = recording, types, device, reader
        self.dtype: torch.dtype = getattr(torch, types.activations)
        self.has_adapters, self._adapters = adapters is not None, adapters
        self.vocabulary_shares = recording.vocabulary_shares
        # Of each linear operation: its matrices with the columns of their first outputs, and what adapters add.
        self._changed: list[tuple[Sequence[tuple[Matrix, int]], dict[int, Sequence[LowRank]]]] = []
        self._weights, self._tables = weights, dict[str, Tensor]()
        self._rotary = dict[Rotary, tuple[Table, Table]]()
        self._by_position: list[Table] = []
        self._steps: list[Step] = []
        self._of_head: list[Step] = []
        self._encoder, self._crossing = (
            [self._load(operation) for operation in part] for part in (recording.encoder, recording.crossing)
        )
        for operation in recording.operations:
            is_head = self._of_head or (isinstance(operation, Normalize) and operation.of_head)
            (self._of_head if is_head else self._steps).append(self._load(operation))
        for number, file in enumerate(adapters.files if adapters is not None else ()):
            self.adapt(number, file)

    def adapter_bytes(self, file: AdapterFile) -> int:
        assert self._adapters is not None
        sizes = (one for matrices, _ in self._changed for at, _ in matrices for one in self._adapters.sizes(file, at))
        return ITEM_BYTES[self.types.weights] * sum(one.rank * (one.inputs + one.outputs) for one in sizes)

    def adapt(self, number: int, file: AdapterFile | None) -> None:
        assert self._adapters is not None
        for _, changes in self._changed:
            changes.pop(number, None)
        if file is None:
            return
        # All are read before any counts: an error leaves none.
        found = [[one for at in matrices for one in self._adapters.of(file, *at)] for matrices, _ in self._changed]
        for of, (_, changes) in zip(found, self._changed, strict=True):
            if of:
                changes[number] = of

    @property
    def kv_shape(self) -> KVShape:
        of = self.recording
        return KVShape(of.layers, of.kv_heads, of.head_size, getattr(torch, self.types.kv), self.device)

    def prepare(self, kv: KVManager) -> None:
        """Makes the tables by position, for requests that this memory may hold."""
        for table in self._by_position:
            table.reach(kv.slots_in_all)

    def incoming(self, tokens: int) -> tuple[tuple[int, ...], torch.dtype] | None:
        return None if self.recording.has_encoder else ((tokens, self.recording.hidden), self._dtype_between_stages)

    @property
    def _dtype_between_stages(self) -> torch.dtype:
        """On a CPU float32, as that of the compiled kernels: the stages of an engine need not run the same."""
        return torch.float32 if self.device.type == "cpu" else self.dtype

    def forward(self, batch: Batch, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Tensor | EndOfModel:
        """x: hidden states [T, H] of the stage before -> those of this stage.

        At the last stage: what makes logits of them, at the flat indexes that are wanted.
        """
        if self.recording.has_encoder:
            return self._forward_parts(batch, kv, plane)
        end = self.run(self._pass(batch, kv, plane, x))
        if isinstance(end, Tensor):
            return end.to(self._dtype_between_stages)
        return lambda at: end(to_device(torch.from_numpy(at), self.device))

    def _forward_parts(self, batch: Batch, kv: KVManager, plane: DataPlane) -> Tensor | EndOfModel:
        encoder, decoder = parts(batch, kv, self.recording.start_token)
        passes = Passes(self.recording.place, self.recording.hidden, self._dtype_between_stages)
        tokens, states = len(encoder.token_ids), None
        if tokens:
            of_encoder = self._pass(encoder, kv, plane, passes.first(plane, tokens))
            for step in self._encoder:
                step(of_encoder)
            states = of_encoder.states.to(passes.dtype)
        encoded, x = passes.second(plane, states, tokens, len(decoder.token_ids))
        if encoded is not None:
            crossing = self._pass(encoder, kv, plane, encoded)
            for step in self._crossing:
                step(crossing)
        end = self.run(self._pass(decoder, kv, plane, x))
        if isinstance(end, Tensor):
            end = end.to(passes.dtype)
            return end if encoded is None else torch.cat([encoded, end])
        # Only a member's last token has logits, and the decoder's batch has it elsewhere.
        return lambda _: end(to_device(torch.from_numpy(decoder.out_at), self.device))

    def _pass(self, batch: Batch, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Pass:
        ids, positions = (to_device(torch.from_numpy(each), self.device) for each in (batch.token_ids, batch.positions))
        blocks = to_device(torch.from_numpy(kv.block_table(batch.rows, int(batch.ends.max()))), self.device)
        of = batch.query_lengths, batch.contexts
        slots, heads = to_device(torch.from_numpy(batch.slots), self.device), self.recording.kv_heads
        inputs = None if batch.inputs is None else batch.inputs.tolist()
        prompts = inputs if self.recording.prefix_lm else None
        split = SplitAttention(blocks, *of, slots, heads=heads, block_size=kv.block_size, prompts=prompts)
        kernels = PlainKernels(split, kv, positions)
        if self.recording.has_encoder and inputs is not None:
            kernels = PartKernels(split, kv, positions, PartAttention(blocks, *of, inputs))
        adapted = self._adapted(batch)
        return Pass(kernels, plane.all_reduce, ids, positions, None if x is None else x.to(self.dtype), adapted=adapted)

    def _adapted(self, batch: Batch) -> list[tuple[int, Tensor]]:
        each = batch.token_adapters(0, len(batch.token_ids))
        if each is None:
            return []
        numbers = np.unique(each[each != NO_ADAPTER]).tolist()
        rows = (torch.from_numpy(np.flatnonzero(each == number)) for number in numbers)
        return [(number, to_device(of, self.device)) for number, of in zip(numbers, rows, strict=True)]

    def run(self, batch: Pass) -> Tensor | Callable[[Tensor | None], Tensor]:
        """-> the hidden states [T, H] or, at the last stage, what makes logits [n, V of this rank] of those at flat
        indexes [n]; None: of all."""
        for step in self._steps:
            step(batch)
        if not self._of_head:
            return batch.states
        return partial(self._logits, replace(batch, at={}))  # without the buffers, which a piece would keep otherwise

    def _logits(self, batch: Pass, at: Tensor | None) -> Tensor:
        rows = batch.rows(at)
        for step in self._of_head:
            step(rows)
        assert rows.logits is not None
        return rows.logits

    # Loading

    def _load(self, operation: Operation) -> Step:
        match operation:
            case Embed(table, first_token, scale, positions):
                added = self._positions(positions)
                mine = self._table(table.name)[: table.size[0]]
                return partial(_embed, mine, first_token, scale, added, self.recording.vocabulary)
            case Normalize(out, norm, _, in_place):
                return partial(_normalize, self._norm(norm), out, in_place)
            case Copy(out):
                return partial(_copy, out)
            case Linear(x, matrix, out, activation):
                return partial(_linear, x, self._matrix(matrix), out, activation)
            case Gated(x, gate, up, out, activation):
                halves = [self._reader.load(self._weights, matrix) for matrix in (gate, up)]
                weight = halves[0].joined(halves[1], lambda *both: torch.cat(both))
                biases = [bias for one in (gate, up) if (bias := self._weights.bias(one)) is not None]
                changes = self._changes((gate, 0), (up, gate.outputs))
                both = LoadedMatrix(weight, torch.cat(biases) if biases else None, changes)
                return partial(_gated, x, both, out, activation)
            case WriteKV(rows, attention):
                return partial(_write_kv, rows, self._attention(attention))
            case Attend(qkv, attention, out, writes):
                return partial(_attend if writes else _attend_written, qkv, self._attention(attention), out)
            case Residual(terms, norm):
                loaded = None if norm is None else self._norm(norm)
                return partial(_residual, [(x, self._matrix(matrix)) for x, matrix in terms], loaded)
            case Head(x, table):
                table, bias = self._table(table.name), self._weights.head_bias(operation)
                return partial(_head, x, table, bias if bias is None else self._padded(bias.to(table)))

    def _table(self, name: str) -> Tensor:
        """A table of this rank's tokens, and zeros behind them."""
        if name not in self._tables:
            self._tables[name] = self._padded(self._weights.get(name))
        return self._tables[name]

    def _padded(self, x: Tensor) -> Tensor:
        """x [V of this rank, ..] with as many rows on each tensor rank, a multiple of HEAD_ROWS."""
        padded = x.new_zeros(padded_rows(self.vocabulary_shares), *x.shape[1:])
        padded[: len(x)] = x
        return padded

    def _positions(self, of: Slice | Sinusoids | None) -> Tensor | Table | None:
        if isinstance(of, Sinusoids):
            table = of.table(self.dtype, self.device)
            self._by_position.append(table)
            return table
        return self._weights.get(of.name) if of is not None else None

    def _matrix(self, matrix: Matrix) -> LoadedMatrix:
        weight, bias = self._reader.load(self._weights, matrix), self._weights.bias(matrix)
        return LoadedMatrix(weight, bias, self._changes((matrix, 0)))

    def _changes(self, *matrices: tuple[Matrix, int]) -> Mapping[int, Sequence[LowRank]]:
        """Makes room for the summands of adapters of these matrices, each with its first column: `adapt` fills it."""
        changes = dict[int, Sequence[LowRank]]()
        if self._adapters is not None:
            self._changed.append((matrices, changes))
        return changes

    def _norm(self, norm: Norm) -> LoadedNorm:
        bias = self._weights.get(norm.bias.name) if norm.bias is not None else None
        return LoadedNorm(self._weights.norm(norm), bias, norm.epsilon)

    def _attention(self, a: Attention) -> LoadedAttention:
        if a.rotary is not None and a.rotary not in self._rotary:
            self._rotary[a.rotary] = a.rotary.tables(self.device)
            self._by_position += self._rotary[a.rotary]
        query, key = (None if norm is None else self._norm(norm) for norm in (a.query_norm, a.key_norm))
        bias = None if a.bias is None else a.bias.by_distance(self._weights.get(a.bias.table.name).float())
        return LoadedAttention(a, None if a.rotary is None else self._rotary[a.rotary], query, key, bias)


# The steps of a pass, each with its weights first.


def _embed(
    table: Tensor, first_token: int, scale: float, positions: Tensor | Table | None, vocabulary: int, batch: Pass
) -> None:
    if len(table) == vocabulary:
        x = functional.embedding(batch.ids, table)
    else:
        ids = batch.ids - first_token
        elsewhere = (ids < 0) | (ids >= len(table))
        x = functional.embedding(ids.masked_fill(elsewhere, 0), table)
        x.masked_fill_(elsewhere[:, None], 0)
    if scale != 1.0:
        x = x * scale
    if positions is not None:
        rows = positions.rows if isinstance(positions, Table) else positions
        x = x + functional.embedding(batch.positions, rows)
    batch.x = batch.all_reduce(x)


def _normalize(norm: LoadedNorm, out: Buffer, in_place: bool, batch: Pass) -> None:
    assert batch.x is not None
    batch.at[out], batch.x = batch.kernels.add_norm(batch.x, batch.update, norm)
    if in_place:
        batch.x = batch.at[out]
    batch.update = None


def _copy(out: Buffer, batch: Pass) -> None:
    batch.at[out] = batch.states


def _linear(x: Buffer, matrix: LoadedMatrix, out: Buffer, activation: str | None, batch: Pass) -> None:
    given, weight = batch.at[x], matrix.of(batch)
    if activation is None:
        batch.at[out] = weight.linear(given, matrix.bias)
    else:
        batch.at[out] = batch.kernels.activated(given, weight, matrix.bias, activation)


def _gated(x: Buffer, matrix: LoadedMatrix, out: Buffer, activation: str, batch: Pass) -> None:
    batch.at[out] = batch.kernels.gated(matrix.of(batch).linear(batch.at[x], matrix.bias), activation)


def _write_kv(kv: Buffer, attention: LoadedAttention, batch: Pass) -> None:
    assert isinstance(batch.kernels, PartKernels)
    batch.kernels.write_kv(batch.at[kv], attention)


def _attend(qkv: Buffer, attention: LoadedAttention, out: Buffer, batch: Pass) -> None:
    batch.at[out] = batch.kernels.attend(batch.at[qkv], attention)


def _attend_written(q: Buffer, attention: LoadedAttention, out: Buffer, batch: Pass) -> None:
    assert isinstance(batch.kernels, PartKernels)
    batch.at[out] = batch.kernels.attend_written(batch.at[q], attention)


def _residual(terms: Sequence[tuple[Buffer, LoadedMatrix]], norm: LoadedNorm | None, batch: Pass) -> None:
    products = [matrix.of(batch).linear(batch.at[x], matrix.bias) for x, matrix in terms]
    update = batch.all_reduce(sum(products[1:], products[0]))
    if norm is not None:
        update, _ = batch.kernels.add_norm(update, None, norm)
    batch.x, batch.update = batch.states, update


def _head(x: Buffer, weight: Tensor, bias: Tensor | None, batch: Pass) -> None:
    batch.logits = functional.linear(batch.at[x], weight, bias)


def rms_norm(x: Tensor, norm: LoadedNorm) -> Tensor:
    """Normalizes x in the weight's type, which may be wider than that of x."""
    return functional.rms_norm(x.to(norm.weight), norm.weight.shape, norm.weight, norm.epsilon).to(x)


class TokenKernels:
    """`Kernels` in plain torch, but for attention: each token's result is of that token alone."""

    def add_norm(self, x: Tensor, update: Tensor | None, norm: LoadedNorm) -> tuple[Tensor, Tensor]:
        if update is not None:
            x = x + update
        if norm.bias is None:
            return rms_norm(x, norm), x
        return functional.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.epsilon), x

    def activated(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
        return ACTIVATIONS[activation](weight.linear(x, bias))

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, 1)
        return ACTIVATIONS[activation](gate) * up


class PlainKernels(TokenKernels):
    """`Kernels` in plain torch."""

    def __init__(self, split: SplitAttention, kv: KVManager, positions: Tensor) -> None:
        """positions [T] of the tokens in their requests."""
        self._split, self._kv, self._positions = split, kv, positions

    def attend(self, qkv: Tensor, a: LoadedAttention) -> Tensor:
        of = a.of
        q, k, v = qkv.view(len(qkv), -1, of.head_size).split([of.heads, of.kv_heads, of.kv_heads], 1)
        q = q if a.query_norm is None else rms_norm(q, a.query_norm)
        k = k if a.key_norm is None else rms_norm(k, a.key_norm)
        if a.rotary is not None:
            q, k = (turned(each, self._positions, *a.rotary) for each in (q, k))
        keys, values = self._kv.of_layer(of.layer)
        self._split.write(k, v, keys, values)
        return self._split(q, keys, values, of.scale, of.window).flatten(1)


class PartKernels(PlainKernels):
    """Kernels for a batch of the encoder, or of the decoder, of a model that has both."""

    def __init__(self, split: SplitAttention, kv: KVManager, positions: Tensor, attention: PartAttention) -> None:
        super().__init__(split, kv, positions)
        self._attention = attention

    def attend(self, qkv: Tensor, a: LoadedAttention) -> Tensor:
        q, kv = qkv.split([a.of.heads * a.of.head_size, 2 * a.of.kv_heads * a.of.head_size], 1)
        self.write_kv(kv, a)
        return self.attend_written(q, a)

    def write_kv(self, kv: Tensor, a: LoadedAttention) -> None:
        """Writes keys and values [T, 2 * kv_heads * head_size]."""
        k, v = kv.unflatten(1, (2, -1, a.of.head_size)).unbind(1)
        self._split.write(k, v, *self._kv.of_layer(a.of.layer))

    def attend_written(self, q: Tensor, a: LoadedAttention) -> Tensor:
        """q [T, heads * head_size] -> the same shape, over keys and values that are there."""
        q = q.unflatten(1, (-1, a.of.head_size))
        return self._attention(q, *self._kv.of_layer(a.of.layer), a.of.scale, a.of.sees_input, a.bias).flatten(1)
