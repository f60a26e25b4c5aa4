"""Reads the fields of a config.json, without torch: each has a default and bounds, and a wrong one stops the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orca_common.bounded_file import shown
from orca_common.checkpoint import Checkpoint
from orca_common.errors import FailedPrecondition

MAX_LAYERS, MAX_WIDTH = 4096, 1 << 17  # above those of any published model

# Hugging Face's names of activations -> our names of the functions
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "tanh_gelu",
    "gelu_fast": "tanh_gelu",
    "gelu_accurate": "tanh_gelu",
    "gelu_pytorch_tanh": "tanh_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


class Fields:
    """The fields of a checkpoint's config.json, or of an object in it. `family`: its name in sentences."""

    def __init__(self, checkpoint: Checkpoint, family: str, given: Mapping[str, Any] | None = None) -> None:
        self._checkpoint, self._family = checkpoint, family
        self._given = checkpoint.config if given is None else given

    def refuse(self, problem: str) -> FailedPrecondition:
        return FailedPrecondition(f"model: config.json of {self._checkpoint.name} {problem}")

    def lacks(self, thing: str) -> FailedPrecondition:
        """For a model that asks for something that is not supported."""
        return self.refuse(f"asks for {thing}, which {self._family} here does not have")

    def refuse_given(self, name: str, thing: str) -> None:
        """Raises FailedPrecondition where the field asks for something."""
        if self._given.get(name):
            raise self.lacks(f"{thing} ({name})")

    def get(self, name: str, default: Any = None) -> Any:
        """The field as it stands; null is as good as no field."""
        value = self._given.get(name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Whether the file has the field, be it null."""
        return name in self._given

    def part(self, name: str) -> Fields:
        """The object in a field; an empty one where there is no such field."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.refuse(f"gives {name} {shown(value)}, not an object")
        return Fields(self._checkpoint, self._family, value)

    def whole(self, name: str, default: int | None, most: int = MAX_WIDTH) -> int:
        """A number from 1 to `most`; without a default the field must be there."""
        value = self.get(name, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.refuse(f"gives {name} {shown(value)}, not a number from 1 to {most}")
        return value

    def number(self, name: str, default: float | None, least: float = 0.0, most: float = 1.0) -> float:
        """A number from `least` to `most`."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not least <= value <= most:
            raise self.refuse(f"gives {name} {shown(value)}, not a number from {least:g} to {most:g}")
        return float(value)

    def head_size(self, hidden: int, heads: int) -> int:
        """The elements of each of the heads that share a hidden size. Raises FailedPrecondition for uneven shares."""
        if hidden % heads:
            raise self.refuse(f"cuts a hidden size of {hidden} in {heads} heads")
        return hidden // heads

    def kv_heads(self, heads: int, default: int) -> int:
        """The number of key/value heads that `heads` query heads share. Raises FailedPrecondition for uneven shares."""
        kv_heads = self.whole("num_key_value_heads", default)
        if heads % kv_heads:
            raise self.refuse(f"shares {kv_heads} key/value heads among {heads} heads")
        return kv_heads

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            raise self.refuse(f"gives {name} {shown(value)}, not true or false")
        return value

    def activation(self, name: str, default: str) -> str:
        """Our name of the activation that a field names."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.refuse(
                f"asks for the activation {shown(value)}; {self._family} here has {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[value]
