"""compressed-tensors' layouts, as llm-compressor writes them: integers of four and eight bits, and FP8.

A file also says how activations were meant to be quantized. Here they get codes of eight bits by groups, as `int8.py`
makes them, which is finer than a scale for a token; beside FP8 they stay numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .float8 import NUMBERS
from .layout import Said
from .pieces import ALL, FLOATS, IN, OUT, Axis, Codes, Layout, Piece, Read, fours, of_groups

PACKED, INTEGERS, FP8 = "pack-quantized", "int-quantized", ("float-quantized", "naive-quantized")


@dataclass(frozen=True)
class Compressed:
    """`Layout`"""

    format: str
    bits: int
    symmetric: bool
    strategy: str
    group: int
    block: int = 1  # outputs that share a scale

    scales = ".weight_scale"
    index = ".weight_g_idx"

    @property
    def kept(self) -> str | None:
        if self.format in FP8:
            return None
        return "fours" if self.bits == 4 else "eights" if self.symmetric else None

    @property
    def sentence(self) -> str:
        kind = "FP8" if self.format in FP8 else f"{self.bits} bits"
        return f"compressed-tensors, {kind}, {self.strategy if self.strategy == 'tensor' else of_groups(self.group)}"

    def pieces(self, outputs: int, inputs: int) -> Mapping[str, Piece]:
        outs = Axis(ALL) if self.strategy == "tensor" else Axis(OUT, self.block)
        groups = Axis(ALL, -(-inputs // self.group) if self.group else 1)
        scales = {".weight_scale": Piece(FLOATS, (outs,) if self.strategy == "tensor" else (outs, groups))}
        if self.format in FP8:
            return {".weight": Piece(("F8_E4M3",), (Axis(OUT), Axis(IN)))} | scales
        if self.format == INTEGERS:
            points = {".weight_zero_point": Piece(("I8",), scales[".weight_scale"].axes)}
            return {".weight": Piece(("I8",), (Axis(OUT), Axis(IN)))} | scales | ({} if self.symmetric else points)
        of_word = 32 // self.bits
        points = {".weight_zero_point": Piece(("I32",), (Axis(OUT, of_word), groups))}
        packed = {".weight_packed": Piece(("I32",), (Axis(OUT), Axis(IN, of_word)))}
        return packed | scales | ({} if self.symmetric else points)

    def unpack(self, read: Mapping[str, Read]) -> Codes:
        weight = read.get(".weight") or read[".weight_packed"]
        found = read[".weight_scale"].floats
        scales = read[".weight_scale"].pick(found, 0, self.block) if self.strategy != "tensor" else found[None]
        if self.format in FP8:
            return Codes(weight.raw[..., 0], 0, scales, NUMBERS)
        points = read.get(".weight_zero_point")
        if self.format == INTEGERS:
            zeros = 0 if points is None else points.raw.view(np.int8).reshape(scales.shape)
            return Codes(weight.raw[..., 0].view(np.int8), zeros, scales)
        of_rows = weight.raw.reshape(len(weight.raw), -1)
        codes = weight.pick(fours(of_rows) if self.bits == 4 else of_rows, 1)
        if points is None:
            return Codes(codes, 1 << (self.bits - 1), scales)
        of_columns = points.raw.transpose(1, 0, 2).reshape(points.raw.shape[1], -1)
        return Codes(codes, points.pick((fours(of_columns) if self.bits == 4 else of_columns).T, 0), scales)


def layout(said: Said) -> Layout:
    """Raises FailedPrecondition."""
    if said.get("sparsity_config"):
        said.inside("sparsity_config").one_of("format", ("dense",), "dense")
    if said.get("transform_config"):
        said.inside("transform_config").refuse("config_groups")  # rotations of activations
    groups = said.inside("config_groups")
    if len(names := list(groups.names)) != 1:
        raise said.wrong("config_groups", names, "one group")
    one = groups.inside(names[0])
    weights = one.inside("weights")
    name = one if one.get("format") is not None else said
    form = name.one_of("format", (PACKED, INTEGERS, *FP8))
    said.one_of("quantization_status", ("compressed",), "compressed")
    kind = weights.one_of("type", ("float",) if form in FP8 else ("int",))
    bits = weights.one_of("num_bits", (4, 8) if form == PACKED else (8,))
    strategy = weights.one_of(
        "strategy", ("channel", "group", *{PACKED: (), INTEGERS: ("tensor",)}.get(form, ("tensor", "block")))
    )
    symmetric = weights.one_of("symmetric", (True,) if kind == "float" else (True, False), True)
    if strategy == "block":
        block, group = weights.block("block_structure")
        return Compressed(form, bits, symmetric, strategy, group, block)
    return Compressed(form, bits, symmetric, strategy, weights.group_size() if strategy == "group" else 0)
