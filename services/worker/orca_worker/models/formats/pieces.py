"""A quantized matrix as other tools keep it in safetensors, without torch: the parts of the layouts of `layout.py`.

A layout names the tensors of a matrix [outputs, inputs], with what each of their axes counts, and unpacks their bytes.
By these axes alone `models/coded.py` checks types and shapes, and reads a rank's outputs or inputs. A number is
(code - zero point) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
OUT, IN, ALL = "outputs", "inputs", "all"
FLOATS = ("F16", "BF16", "F32")


class Axis(NamedTuple):
    """An axis of a tensor: a step stands for `per` outputs or inputs. One of ALL has `per` steps for any part."""

    of: str
    per: int = 1

    def steps(self, outputs: int, inputs: int) -> int:
        return self.per if self.of == ALL else -(-(outputs if self.of == OUT else inputs) // self.per)


@dataclass(frozen=True)
class Piece:
    """A tensor of a matrix: its types in safetensors, and its axes."""

    kinds: tuple[str, ...]
    axes: tuple[Axis, ...]


class Read(NamedTuple):
    """The steps of a tensor that have a part of a matrix."""

    kind: str
    raw: Array  # [.., bytes of an item] uint8
    at: tuple[Array, ...]  # for each axis: where the part's outputs or inputs lie, were they not packed

    @property
    def floats(self) -> Array:
        """[..] float32"""
        return floats(self.raw, self.kind)

    def pick(self, values: Array, number: int, per: int = 1) -> Array:
        """The part's own along axis `number` of the tensor, which is the same one of `values`."""
        at = self.at[number] // per
        is_all = len(at) == values.shape[number] and bool((at == np.arange(len(at))).all())
        return values if is_all else values.take(at, number)


class Codes(NamedTuple):
    """A part of a matrix with n outputs, k inputs; g groups are those of the whole matrix."""

    codes: Array  # [n, k] uint8 or int8
    zeros: Array | int  # [n, g], or one for all
    scales: Array  # [n, g] float32, or [1, 1]
    table: Array | None = None  # [256] float32: what codes stand for, if not for integers

    def numbers(self, rows: slice, group: Array) -> Array:
        """The numbers [rows, k] float32 of some outputs. group [k]: of each input."""

        def of_inputs(values: Array) -> Array:
            return (values if len(values) == 1 else values[rows])[:, group].astype(np.float32, copy=False)

        codes, scales = self.codes[rows], of_inputs(self.scales)
        with np.errstate(invalid="ignore", over="ignore"):  # a scale may be no number; the outputs say so
            if self.table is not None:
                return self.table[codes] * scales
            zeros = np.float32(self.zeros) if isinstance(self.zeros, int) else of_inputs(self.zeros)
            return (codes.astype(np.float32) - zeros) * scales


class Layout(Protocol):
    """The weights of a checkpoint, as its configuration says that they were quantized."""

    @property
    def sentence(self) -> str:
        """Names it for people."""
        ...

    @property
    def group(self) -> int:
        """Inputs that share a scale, one after the other; 0: all of them."""
        ...

    @property
    def kept(self) -> str | None:
        """The first half of a key of `table.CODED`, whose kernels multiply such codes; None: they become numbers."""
        ...

    @property
    def scales(self) -> str:
        """The end of the name of the scales."""
        ...

    @property
    def index(self) -> str | None:
        """The same of a tensor that may be there, with the group of each input."""
        ...

    def pieces(self, outputs: int, inputs: int) -> Mapping[str, Piece]:
        """The tensors of a matrix, by the ends of their names. The first one makes it a quantized one."""
        ...

    def unpack(self, read: Mapping[str, Read]) -> Codes:
        """A part of a matrix."""
        ...


def of_groups(group: int) -> str:
    return f"groups of {group}" if group else "a scale for each output"


# -- bytes


def fours(raw: Array) -> Array:
    """Bytes [.., n] -> their halves [.., 2 n], the lower one first: words of 32 bits from the lowest four on."""
    both = np.empty((*raw.shape, 2), np.uint8)
    np.bitwise_and(raw, 15, out=both[..., 0])
    np.right_shift(raw, 4, out=both[..., 1])
    return both.reshape(*raw.shape[:-1], -1)


def floats(raw: Array, kind: str) -> Array:
    """Bytes [.., item] -> numbers [..] float32."""
    raw = np.ascontiguousarray(raw)
    if kind == "F32":
        return raw.view("<f4")[..., 0]
    if kind == "F16":
        return raw.view("<f2")[..., 0].astype(np.float32)
    if kind == "BF16":
        return (raw.view("<u2")[..., 0].astype(np.uint32) << 16).view(np.float32)
    assert kind == "F8_E8M0", kind
    return np.ldexp(np.float32(1), raw[..., 0].astype(np.int32) - 127)
