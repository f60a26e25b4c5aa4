"""A stage of a model as a program for the CPU's kernels: recorded once when the model is loaded, run for each batch.

What a CUDA graph is to a GPU. Hidden states are float32 whatever the type of the weights; only what a linear operation
multiplies is narrowed, where the instruction set multiplies bfloat16.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NewType

import numpy as np
import torch
from torch import Tensor

from .cores import cores
from .library import BatchPointers, best, instruction_sets, library

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
# Type of src/formats.h
IN_CODES = {"i8": 2, "i4": 3, "blocks8": 4, "blocks4": 5, "grouped128": 6, "grouped64": 7, "grouped32": 8}
CODES = 128  # GROUP_OF_CODES of src/formats.h: inputs that have one scale
PART = 32  # of src/formats.h: inputs that have one multiplier
ZERO_BITS = 31  # of src/formats.h: a zero point, in the lowest bits of a scale
STORE, ADD, OPERAND, GATED, GREEDY = range(5)  # Epilogue of src/isa.h
MAX_GROUP = 64  # QUERIES of src/isa.h
PANEL = 16  # of src/formats.h: outputs that are packed together
GATED_COLUMNS = PANEL // 2
ACTIVATIONS = {"none": 0, "gelu": 1, "tanh_gelu": 2, "relu": 3, "silu": 4, "tanh": 5}

Rows = NewType("Rows", int)  # a buffer of float32 rows [T, width]
Operand = NewType("Operand", int)  # a buffer that a linear operation multiplies
Packed = NewType("Packed", int)  # weights and bias of a linear operation
Delta = NewType("Delta", int)  # what adapters add to a linear operation's products


class Norm(NamedTuple):
    """A normalization's weights; without bias it is an RMSNorm."""

    weight: int
    bias: int | None
    epsilon: float
    width: int


class Rotary(NamedTuple):
    """Rotary positions: element j of a head and element j + half are turned by an angle, for j < half."""

    cosines: Tensor  # [positions, half] float32, contiguous
    sines: Tensor


class Attention(NamedTuple):
    """The attention of one layer. `group` query heads share a key/value head; 0: there are no queries."""

    layer: int
    kv_heads: int
    group: int
    head_size: int
    dtype: torch.dtype  # of keys and values; int8: codes
    scale: float
    window: int = 0  # keys that a query sees at most, its own among them; 0: all before it
    rotary: Rotary | None = None
    query_norm: Norm | None = None  # RMSNorm of each head, before the rotation
    key_norm: Norm | None = None
    sees_input: bool = False  # each query sees all keys of its encoder's tokens, and no others
    sees_prompt: bool = False  # each query sees all keys of its request's prompt, and those up to its own
    bias: Tensor | None = None  # [kv_heads * group, 2 reach + 1] float32: added to a score by key - query, clamped
    narrows: bool = False  # of codes: queries and weights become bfloat16, where the instruction set multiplies it


class DeltaPart(NamedTuple):
    """The summand x A^T B^T of some outputs, by one adapter."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank]
    column: int  # of the first output


class Program:
    """`dtype` of the weights. `threads` 0: one for each core that this process may use.

    Raises ValueError when the machine does not run the instruction set, `build.CannotBuild` when nothing is built.
    Whatever takes weights raises MemoryError when they do not fit.
    """

    def __init__(self, dtype: torch.dtype, threads: int = 0, instruction_set: str = "auto") -> None:
        if instruction_set == "auto":
            instruction_set = best()
        elif instruction_set not in (have := instruction_sets()):
            raise ValueError(f"kernels {instruction_set}: this machine runs {', '.join(have)}")
        self.instruction_set, self._library = instruction_set, library(instruction_set)
        self.dtype = dtype
        self.threads = threads or cores()
        self._model = self._library.orca_model(self.threads)
        if not self._model:
            raise MemoryError(f"{self.threads} threads cannot be started")
        self._kept: list[Tensor] = []  # what the program points to
        narrows = dtype is torch.bfloat16 and self._library.orca_multiplies_bf16(self._model)
        self._operands = TYPES[torch.bfloat16 if narrows else torch.float32]

    def __del__(self) -> None:
        if model := getattr(self, "_model", None):
            self._library.orca_free(model)

    # Weights

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        """weight [N, K] of any strides, bias [N]."""
        n, k = weight.shape
        weight = weight if weight.dtype in TYPES else weight.float()
        bias = bias.float().contiguous() if bias is not None else None
        packed = self._library.orca_pack(
            self._model,
            weight.data_ptr(),
            TYPES[weight.dtype],
            *weight.stride(),
            n,
            k,
            TYPES[self.dtype],
            bias.data_ptr() if bias is not None else None,
        )
        if not packed:
            raise MemoryError(f"no memory for packed weights of {n} x {k}")
        return Packed(packed)

    def pack_codes(self, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Packed:
        """codes [N, K] int8 and scales [N, K / 128 rounded up] float32: weights code * scale, one scale for each 128
        inputs. bias [N]."""
        return self._pack_codes("i8", codes, None, scales.float(), bias, CODES)

    def pack_fours(self, codes: Tensor, multipliers: Tensor, scales: Tensor, bias: Tensor | None = None) -> Packed:
        """codes [N, K] from -8 to 7 and multipliers [N, K / 32 rounded up] from -15 to 15, both int8: what
        `pack_codes` takes is code * multiplier, one multiplier for each 32 inputs."""
        assert multipliers.dtype is torch.int8
        assert multipliers.shape == (len(codes), -(-codes.shape[1] // PART))
        return self._pack_codes("i4", codes, multipliers.contiguous(), scales.float(), bias, CODES)

    def pack_blocks(self, codes: Tensor, scales: Tensor, bias: Tensor | None = None, *, bits: int) -> Packed:
        """codes [N, K] int8, of 4 bits from -8 to 7, and scales [N, K / 32 rounded up] float16, one for each 32
        inputs: what GGUF's Q8_0 and Q4_0 hold."""
        assert scales.dtype is torch.float16
        return self._pack_codes(f"blocks{bits}", codes, None, scales, bias, PART)

    def pack_grouped(
        self, codes: Tensor, zeros: Tensor, scales: Tensor, step: int, bias: Tensor | None = None
    ) -> Packed:
        """codes [N, K] uint8 from 0 to 15; of each `step` inputs (128, 64 or 32) zeros [N, K / step rounded up] uint8
        from 0 to 15, and scales of the same shape in float32 with numbers of float16 or bfloat16: weights
        (code - zero) * scale."""
        words = scales.contiguous().view(torch.int32)
        assert codes.dtype is zeros.dtype is torch.uint8
        assert not bool((words & ZERO_BITS).any()), "scales of more than 16 bits"
        return self._pack_codes(
            f"grouped{step}", (codes - 8).view(torch.int8), None, words | zeros.to(torch.int32), bias, step
        )

    def _pack_codes(
        self, kind: str, codes: Tensor, multipliers: Tensor | None, scales: Tensor, bias: Tensor | None, group: int
    ) -> Packed:
        n, k = codes.shape
        assert codes.dtype is torch.int8
        assert scales.shape == (n, -(-k // group))
        codes, scales = codes.contiguous(), scales.contiguous()
        bias = bias.float().contiguous() if bias is not None else None
        pointers = [None if part is None else part.data_ptr() for part in (codes, multipliers, scales, bias)]
        packed = self._library.orca_pack_codes(self._model, *pointers[:3], n, k, IN_CODES[kind], pointers[3])
        if not packed:
            raise MemoryError(f"no memory for packed weights of {n} x {k}")
        return Packed(packed)

    def with_bias(self, packed: Packed, bias: Tensor) -> Packed:
        """The same weights with another bias [N]: they are in memory once."""
        bias = bias.float().contiguous()
        if not (made := self._library.orca_with_bias(self._model, packed, bias.data_ptr())):
            raise MemoryError(f"no memory for a bias of {len(bias)}")
        return Packed(made)

    def norm(self, weight: Tensor, bias: Tensor | None, epsilon: float) -> Norm:
        return Norm(self._floats(weight), self._floats(bias) if bias is not None else None, epsilon, len(weight))

    def _floats(self, x: Tensor) -> int:
        x = x.float().contiguous()
        if not (copy := self._library.orca_floats(self._model, x.data_ptr(), len(x))):
            raise MemoryError(f"no memory for {len(x)} weights")
        return copy

    # Recording

    def rows(self, width: int) -> Rows:
        return Rows(self._library.orca_buffer(self._model, width, 0, TYPES[torch.float32]))

    def operand(self, width: int) -> Operand:
        return Operand(self._library.orca_buffer(self._model, width, 1, self._operands))

    def codes(self, width: int) -> Operand:
        """An operand in codes of eight bits, which weights in codes multiply, and no others."""
        return Operand(self._library.orca_buffer(self._model, width, 1, TYPES[torch.int8]))

    @property
    def length(self) -> int:
        """Steps recorded so far."""
        return self._library.orca_steps(self._model)

    def embed(
        self, x: Rows, tokens: Packed, first_token: int, positions: Tensor | None = None, scale: float = 1.0
    ) -> None:
        """x = scale * tokens' rows (nothing for a token that this rank does not hold) + positions' rows [n, width]."""
        if positions is not None:
            positions = positions.contiguous()
            self._kept.append(positions)
        pointer = positions.data_ptr() if positions is not None else None
        kind = TYPES[positions.dtype] if positions is not None else 0
        self._library.orca_embed(self._model, x, tokens, first_token, scale, pointer, kind)

    def normalize(self, x: Rows, norm: Norm, out: Operand, selected: bool = False, in_place: bool = False) -> None:
        """`selected`: only of the rows that go into the head. `in_place`: x becomes the same as out."""
        self._library.orca_normalize(self._model, x, out, *norm, in_place, selected)

    def copy(self, x: Rows, width: int, out: Operand) -> None:
        self._library.orca_normalize(self._model, x, out, None, None, 0.0, width, False, False)

    def delta(self, x: Operand) -> Delta:
        """Records that adapters may add to the operation on x that is recorded next, with the result, by `add_adapter`.
        Raises MemoryError."""
        if not (made := self._library.orca_delta(self._model, x, TYPES[self.dtype])):
            raise MemoryError("no memory for an operation of the program")
        return Delta(made)

    def add_adapter(self, delta: Delta, adapter: int, parts: Sequence[DeltaPart], columns: int, up: int = 0) -> None:
        """Adds the summands of an adapter, from 0 on, to an operation, by column; between two runs. `columns`: of all
        outputs, and what is missing to whole panels. `up`: of a gated one, the column behind the gate's, where those of
        `up` begin: half of all. Raises MemoryError."""
        assert columns % PANEL == 0
        assert up in (0, columns // 2)
        a, runs = low_rank(parts, columns, up)
        self._library.orca_delta_adapter(self._model, delta, adapter, self.pack(a))
        side_by_side = 2 if self.dtype is torch.bfloat16 else 1  # k
        for begin, end, first, second, of_panels in runs:
            count = of_panels.shape[2]
            b = of_panels.to(self.dtype).unflatten(2, (-1, side_by_side)).transpose(1, 2).contiguous()
            self._library.orca_delta_run(self._model, delta, adapter, begin, end, first, second, count, b.data_ptr())

    @contextmanager
    def packing_for(self, adapter: int) -> Iterator[None]:
        """Inside this context packed matrices belong to the adapter, and `forget` frees them. Raises MemoryError."""
        self._library.orca_packs_for(self._model, adapter)
        try:
            yield
        finally:
            self._library.orca_packs_for(self._model, -1)

    def forget(self, adapter: int) -> None:
        """Frees an adapter's matrices, between two runs."""
        self._library.orca_forget(self._model, adapter)

    def linear(self, x: Operand, weights: Packed, out: Rows, delta: Delta | None = None) -> None:
        self._library.orca_linear(self._model, x, weights, out, STORE, 0, delta)

    def linear_add(self, x: Operand, weights: Packed, out: Rows, delta: Delta | None = None) -> None:
        """out += the product: the residual."""
        self._library.orca_linear(self._model, x, weights, out, ADD, 0, delta)

    def linear_act(
        self, x: Operand, weights: Packed, out: Operand, activation: str, delta: Delta | None = None
    ) -> None:
        self._library.orca_linear(self._model, x, weights, out, OPERAND, ACTIVATIONS[activation], delta)

    def linear_gated(
        self, x: Operand, weights: Packed, out: Operand, activation: str, delta: Delta | None = None
    ) -> None:
        """activation(x gate) * (x up), of weights and a bias that stand `in_turn`."""
        self._library.orca_linear(self._model, x, weights, out, GATED, ACTIVATIONS[activation], delta)

    def head(self, x: Operand, weights: Packed) -> None:
        """The largest logit of each selected row, and all logits where the run asks for them."""
        self._library.orca_linear(self._model, x, weights, 0, GREEDY, 0, None)

    def write_kv(self, qkv: Rows, a: Attention) -> None:
        """Writes keys and values of qkv [T, (group + 2) * kv_heads * head_size] to their slots, and leaves the queries
        there as `attend` takes them: both with their norms and their positions."""
        norms = [None if norm is None else norm.weight for norm in (a.query_norm, a.key_norm)]
        epsilon = next((norm.epsilon for norm in (a.query_norm, a.key_norm) if norm is not None), 0.0)
        tables, half = (None, None), 0
        if a.rotary is not None:
            self._kept += a.rotary
            tables, half = tuple(table.data_ptr() for table in a.rotary), a.rotary.cosines.shape[1]
        self._library.orca_write_kv(
            self._model, qkv, a.layer, a.kv_heads, a.group, a.head_size, TYPES[a.dtype], *norms, epsilon, *tables, half
        )

    def attend(self, qkv: Rows, a: Attention, out: Operand) -> None:
        """Split attention of all requests (paper section 3.2), over keys and values that have been written.

        Raises ValueError for more query heads a key/value head than the kernels hold.
        """
        if a.group > MAX_GROUP:
            raise ValueError(f"{a.group} query heads share a key/value head; {MAX_GROUP} can")
        bias, reach = None, 0
        if a.bias is not None:
            bias, reach = a.bias.float().contiguous(), a.bias.shape[1] // 2
        self._library.orca_attend(
            self._model,
            qkv,
            out,
            a.layer,
            a.kv_heads,
            a.group,
            a.head_size,
            TYPES[a.dtype],
            a.narrows,
            a.scale,
            a.window,
            a.sees_input,
            a.sees_prompt,
            bias.data_ptr() if bias is not None else None,
            reach,
        )

    def add(self, x: Rows, y: Rows) -> None:
        self._library.orca_add(self._model, x, y)

    # Running

    def run(self, batch: BatchPointers, first: int = 0, last: int | None = None) -> None:
        """Runs steps [first, last). One thread at a time. Raises MemoryError."""
        last = self.length if last is None else last
        if not self._library.orca_run(self._model, first, last, ctypes.byref(batch)):
            raise MemoryError(f"no memory for the activations of {batch.tokens} tokens")

    def view(self, x: Rows, rows: int, columns: int) -> np.ndarray:
        """The first rows and columns of a buffer, [rows, columns] float32. Valid until a larger batch is run."""
        width = ctypes.c_int64()
        start = self._library.orca_rows(self._model, x, rows, ctypes.byref(width))
        if not start:
            raise MemoryError(f"no memory for the activations of {rows} tokens")
        whole = (ctypes.c_float * (rows * width.value)).from_address(start)
        return np.ctypeslib.as_array(whole).reshape(rows, width.value)[:, :columns]


def in_turn(gate: Tensor, up: Tensor) -> Tensor:
    """Interleaves two [N, ..] for `linear_gated`: 8 rows of the gate, 8 of `up`, and so on, and fills up with 0."""
    blocks = -(-len(gate) // GATED_COLUMNS)
    both = gate.new_zeros(2, blocks * GATED_COLUMNS, *gate.shape[1:])
    both[0, : len(gate)], both[1, : len(up)] = gate, up
    return both.view(2, blocks, GATED_COLUMNS, -1).transpose(0, 1).reshape(-1, *gate.shape[1:])


class Run(NamedTuple):
    """Panels [begin, end) of an operation to whose products an adapter adds: for the first half of a panel's columns
    `count` numbers of low = x A^T from `first` on, times B, and for the other half those from `second` on."""

    begin: int
    end: int
    first: int
    second: int
    b: Tensor  # [panels, PANEL, count]


def low_rank(parts: Sequence[DeltaPart], columns: int, up: int) -> tuple[Tensor, list[Run]]:
    """One adapter's parts of an operation, as `Program.add_adapter` takes them -> A [ranks, inputs] of them all, and B.

    A panel of a gate and of `up` has 8 columns of each. Any panel may have columns of several parts, as of the queries
    and of the keys: there B has zeros for what the others add.
    """
    starts = [0, *itertools.accumulate(len(part.a) + len(part.a) % 2 for part in parts)]  # in low, where count is even
    whole = parts[0].b.new_zeros(columns, 2 * starts[-1])  # B of all parts, zeros where one does not add
    bounds = np.zeros((2, columns // GATED_COLUMNS), np.int64)  # of each 8 columns: begin and end in low
    bounds[0] = starts[-1]
    for part, start, end in zip(parts, starts, starts[1:], strict=False):
        outputs, rank = part.b.shape
        whole[part.column : part.column + outputs, start : start + rank] = part.b
        eights = slice(part.column // GATED_COLUMNS, -(-(part.column + outputs) // GATED_COLUMNS))
        bounds[0, eights] = np.minimum(bounds[0, eights], start)
        bounds[1, eights] = np.maximum(bounds[1, eights], end)
    bounds[0, bounds[1] == 0] = 0  # nothing is added there
    halves = (bounds.reshape(2, 2, -1) if up else bounds.reshape(2, -1, 2).swapaxes(1, 2)).swapaxes(0, 1)
    eights = whole.unflatten(0, (-1, GATED_COLUMNS))
    of_half = eights.unflatten(0, (2, -1)) if up else eights.unflatten(0, (-1, 2)).transpose(0, 1)
    firsts, counts = halves[:, 0], (halves[:, 1] - halves[:, 0]).max(0)
    alike = np.vstack([firsts, counts])
    edges = [0, *(np.flatnonzero(np.diff(alike).any(0)) + 1).tolist(), len(counts)]
    runs = list[Run]()
    for begin, end in itertools.pairwise(edges):
        count, first, second = int(counts[begin]), *firsts[:, begin].tolist()
        if count:
            own = [of_half[half, begin:end, :, at : at + count] for half, at in enumerate((first, second))]
            runs.append(Run(begin, end, first, second, torch.cat(own, 1)))
    a = parts[0].a.new_zeros(max(max(run.first, run.second) + run.b.shape[2] for run in runs), parts[0].a.shape[1])
    for part, start in zip(parts, starts, strict=False):
        a[start : start + len(part.a)] = part.a
    return a, runs
