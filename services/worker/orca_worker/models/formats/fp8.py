"""FP8 as transformers' `quant_method` "fp8" has it: E4M3 with a scale for each block of outputs and inputs, or one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .float8 import NUMBERS
from .layout import Said
from .pieces import ALL, FLOATS, IN, OUT, Axis, Codes, Layout, Piece, Read


@dataclass(frozen=True)
class Fp8:
    """`Layout`"""

    block: int  # outputs; 0: one scale for the whole matrix
    group: int

    kept = None
    scales = ".weight_scale_inv"  # it is multiplied with
    index = None

    @property
    def sentence(self) -> str:
        return f"FP8, {f'blocks of {self.block} x {self.group}' if self.block else 'one scale for a matrix'}"

    def pieces(self, outputs: int, inputs: int) -> Mapping[str, Piece]:
        blocks = (Axis(OUT, self.block), Axis(ALL, -(-inputs // self.group))) if self.block else (Axis(ALL),)
        return {
            ".weight": Piece(("F8_E4M3",), (Axis(OUT), Axis(IN))),
            ".weight_scale_inv": Piece((*FLOATS, "F8_E8M0"), blocks),
        }

    def unpack(self, read: Mapping[str, Read]) -> Codes:
        codes, found = read[".weight"].raw[..., 0], read[".weight_scale_inv"]
        scales = found.pick(found.floats, 0, self.block) if self.block else found.floats.reshape(1, 1)
        return Codes(codes, 0, scales, NUMBERS)


def layout(said: Said) -> Layout:
    """Raises FailedPrecondition."""
    if said.get("weight_block_size") is None:
        return Fp8(0, 0)
    return Fp8(*said.block("weight_block_size"))
