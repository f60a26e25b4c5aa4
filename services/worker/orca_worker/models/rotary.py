"""Rotary position embedding (Su et al., "RoFormer") and its scalings for longer contexts, as config.json names them.

default   angle of pair j at position p: p * theta^(-2j / size)
linear    positions divided by `factor`
llama3    long wavelengths divided by `factor`, short ones kept, those between blended (Llama 3.1)
yarn      the same by numbers of rotations, and cosines and sines scaled (Peng et al., "YaRN")

Frequencies and angles are float32, computed as transformers does, so that its tokens are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orca_common.bounded_file import shown

from .positions import Table

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .fields import Fields

LEAST, LARGEST = 1e-6, 1e12  # of a factor or another number of a scaling
LEAST_THETA = 2.0
KINDS_OF_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Rotary:
    """`size` elements of each head are turned: element j with element j + size / 2."""

    size: int
    positions: int
    theta: float
    scaling: tuple[tuple[str, float], ...] = ()  # the numbers that `kind` needs, by name
    kind: str = "default"

    @classmethod
    def read(cls, fields: Fields, head_size: int, positions: int, theta: float = 10_000.0, part: float = 1.0) -> Rotary:
        """From `rope_parameters`, or `rope_scaling` and `rope_theta` of older files. `part` of a head is turned, unless
        the file says so itself. Raises FailedPrecondition for a kind that is not supported."""
        given = fields.part("rope_parameters" if fields.get("rope_parameters") else "rope_scaling")
        for kind_of_layer in KINDS_OF_LAYERS:
            given.refuse_given(kind_of_layer, "rotary positions by kind of layer")
        theta = fields.number("rope_theta", theta, LEAST_THETA, LARGEST)
        part = fields.number("partial_rotary_factor", part)
        return cls.read_part(given, head_size, positions, theta, part)

    @classmethod
    def read_part(cls, given: Fields, head_size: int, positions: int, theta: float, part: float = 1.0) -> Rotary:
        """Reads an object of such fields alone, with defaults for those that it lacks."""
        kind = given.get("rope_type", given.get("type", "default"))
        if not isinstance(kind, str) or kind not in SCALINGS:
            raise given.refuse(f"asks for rotary positions of the kind {shown(kind)}; known are {', '.join(SCALINGS)}")
        theta = given.number("rope_theta", theta, LEAST_THETA, LARGEST)
        part = given.number("partial_rotary_factor", part)
        numbers = {}
        for name, default in SCALINGS[kind].items():
            if given.get(name) is not None or default is not None:
                numbers[name] = given.number(name, default, LEAST, LARGEST)
            elif name in REQUIRED[kind]:
                raise given.refuse(f"asks for rotary positions of the kind {kind} without {name}")
        if kind == "yarn":
            numbers["truncate"] = float(given.flag("truncate", True))
        size = int(head_size * part)
        if size % 2 or not size:
            raise given.refuse(f"turns {size} of {head_size} elements of a head, not a positive even number")
        return cls(size, positions, theta, tuple(sorted(numbers.items())), kind)

    def tables(self, device: torch.device) -> tuple[Table, Table]:
        """Cosines and sines [positions, size / 2] float32."""
        import torch

        frequencies, factor = self._frequencies()

        def angles(positions: range) -> Tensor:
            return torch.arange(positions.start, positions.stop).float()[:, None] * frequencies

        of = self.positions, self.size // 2, torch.float32, device
        return Table(lambda at: angles(at).cos() * factor, *of), Table(lambda at: angles(at).sin() * factor, *of)

    def _frequencies(self) -> tuple[Tensor, float]:
        """[size / 2] of the pairs, and what cosines and sines are multiplied with."""
        import torch

        has = dict(self.scaling)
        powers = self.theta ** (torch.arange(0, self.size, 2).float() / self.size)
        plain = 1.0 / powers
        if self.kind == "linear":
            return plain / has["factor"], 1.0
        if self.kind == "llama3":
            low, high = has["low_freq_factor"], has["high_freq_factor"]
            before, factor = has["original_max_position_embeddings"], has["factor"]
            wavelengths = 2 * math.pi / plain
            scaled = torch.where(wavelengths > before / low, plain / factor, plain)
            smooth = (before / wavelengths - low) / (high - low)
            blended = (1 - smooth) * scaled / factor + smooth * scaled
            between = ~(wavelengths < before / high) & ~(wavelengths > before / low)
            return torch.where(between, blended, scaled), 1.0
        if self.kind == "yarn":
            before, factor = has["original_max_position_embeddings"], has["factor"]

            def dimension(rotations: float) -> float:
                return self.size * math.log(before / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

            low, high = dimension(has["beta_fast"]), dimension(has["beta_slow"])
            if has["truncate"]:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, self.size - 1)
            ramp = ((torch.arange(self.size // 2).float() - low) / (high - low if high != low else 0.001)).clamp(0, 1)
            kept = 1 - ramp
            return 1.0 / (factor * powers) * (1 - kept) + plain * kept, self._yarn_factor(factor)
        return plain, 1.0

    def _yarn_factor(self, factor: float) -> float:
        has = dict(self.scaling)

        def scale(times: float) -> float:
            return 0.1 * times * math.log(factor) + 1.0 if factor > 1 else 1.0

        if "attention_factor" in has:
            return has["attention_factor"]
        if has.get("mscale") and has.get("mscale_all_dim"):
            return scale(has["mscale"]) / scale(has["mscale_all_dim"])
        return scale(1.0)


# The numbers of each kind, with their defaults; None: without one.
SCALINGS: dict[str, dict[str, float | None]] = {
    "default": {},
    "linear": {"factor": None},
    "llama3": dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": {
        "factor": None,
        "original_max_position_embeddings": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
    },
}
REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": tuple(SCALINGS["llama3"]),
    "yarn": ("factor", "original_max_position_embeddings"),
}
