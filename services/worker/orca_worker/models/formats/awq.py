"""AWQ's layout (Lin et al., 2024), as AutoAWQ writes it for its "gemm": four bits, packed along outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .layout import Said
from .pieces import ALL, FLOATS, IN, OUT, Array, Axis, Codes, Layout, Piece, Read, fours, of_groups

PACKED = 8  # codes of a word
PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # in a word, counted from the lowest four bits, of its outputs


@dataclass(frozen=True)
class Awq:
    """`Layout`"""

    group: int

    kept = "fours"
    scales = ".scales"
    index = None

    @property
    def sentence(self) -> str:
        return f"AWQ, 4 bits, {of_groups(self.group)}"

    def pieces(self, outputs: int, inputs: int) -> Mapping[str, Piece]:
        groups = Axis(ALL, -(-inputs // self.group) if self.group else 1)
        return {
            ".qweight": Piece(("I32",), (Axis(IN), Axis(OUT, PACKED))),
            ".qzeros": Piece(("I32",), (groups, Axis(OUT, PACKED))),
            ".scales": Piece(FLOATS, (groups, Axis(OUT))),
        }

    def unpack(self, read: Mapping[str, Read]) -> Codes:
        weight, zeros, scales = (read[name] for name in (".qweight", ".qzeros", ".scales"))
        return Codes(weight.pick(_opened(weight.raw), 1).T, zeros.pick(_opened(zeros.raw), 1).T, scales.floats.T)


def _opened(words: Array) -> Array:
    """[rows, words, 4] uint8 -> [rows, outputs] uint8"""
    return fours(words)[:, :, PLACES].reshape(len(words), -1)


def layout(said: Said) -> Layout:
    """Raises FailedPrecondition."""
    said.one_of("bits", (4,))
    said.one_of("version", ("gemm",), "gemm")
    said.one_of("format", ("gemm",), "gemm")
    said.refuse("dynamic", "lm_head")
    return Awq(said.group_size())
