"""GPTQ's layout (Frantar et al., 2022), as AutoGPTQ and gptqmodel write it: four bits, packed along inputs.

Where groups follow the order of activations (`desc_act`), `g_idx` has the group of each input, and inputs stay in their
places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .layout import Said
from .pieces import ALL, FLOATS, IN, OUT, Axis, Codes, Layout, Piece, Read, fours, of_groups

PACKED = 8  # codes of a word
FIRST = "gptq"  # the version in which words of zero points are one less


@dataclass(frozen=True)
class Gptq:
    """`Layout`"""

    group: int
    version: str

    kept = "fours"
    scales = ".scales"
    index = ".g_idx"

    @property
    def sentence(self) -> str:
        return f"GPTQ, 4 bits, {of_groups(self.group)}"

    def pieces(self, outputs: int, inputs: int) -> Mapping[str, Piece]:
        groups = Axis(ALL, -(-inputs // self.group) if self.group else 1)
        return {
            ".qweight": Piece(("I32",), (Axis(IN, PACKED), Axis(OUT))),
            ".qzeros": Piece(("I32",), (groups, Axis(OUT, PACKED))),
            ".scales": Piece(FLOATS, (groups, Axis(OUT))),
        }

    def unpack(self, read: Mapping[str, Read]) -> Codes:
        weight, zeros, scales = (read[name] for name in (".qweight", ".qzeros", ".scales"))
        codes = fours(weight.raw.transpose(1, 0, 2).reshape(weight.raw.shape[1], -1))
        words = zeros.raw.view("<u4")[..., 0]
        if self.version == FIRST:
            words = words + np.uint32(0x11111111)  # to the whole word: a zero in it has borrowed from the next one
        points = fours(words.astype("<u4").view(np.uint8))
        return Codes(codes[:, weight.at[0]], zeros.pick(points, 1).T, scales.floats.T)


def layout(said: Said) -> Layout:
    """Raises FailedPrecondition."""
    said.one_of("bits", (4,))
    said.one_of("pack_dtype", ("int32",), "int32")
    said.refuse("dynamic", "lm_head")
    name = "checkpoint_format" if said.get("checkpoint_format") is not None else "format"
    return Gptq(said.group_size(), said.one_of(name, (FIRST, "gptq_v2"), FIRST))
