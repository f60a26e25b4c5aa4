"""The layouts in which other tools keep quantized matrices in safetensors, by `quant_method`: one file, one line each.

The fields of `quantization_config` are checked before the weights are fetched. `pieces.py` has what a layout is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from orca_common.bounded_file import shown
from orca_common.errors import FailedPrecondition

if TYPE_CHECKING:
    from .pieces import Layout

LAYOUTS = {"gptq": "gptq", "awq": "awq", "compressed-tensors": "compressed_tensors", "fp8": "fp8"}


class Said:
    """The fields of `quantization_config`. A wrong field, or one that is not read, is refused by its name."""

    def __init__(self, config: Mapping[str, Any], model: str, method: str) -> None:
        self._config, self._model, self._method = config, model, method

    def get(self, name: str, default: Any = None) -> Any:
        value = self._config.get(name)
        return default if value is None else value

    @property
    def names(self) -> Sequence[str]:
        return list(self._config)

    def inside(self, name: str) -> Said:
        """An object among the fields."""
        value = self.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return Said(cast(dict[str, Any], value), self._model, self._method)

    def one_of(self, name: str, allowed: Sequence[Any], default: Any = None) -> Any:
        value = self.get(name, default)
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise self.wrong(name, value, " or ".join(map(str, allowed)))
        return value

    def whole(self, name: str, least: int, most: int) -> int:
        value = self.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, value, f"a number from {least} to {most}")
        return value

    def group_size(self) -> int:
        """Inputs that share a scale; 0: all do, for which files have -1."""
        return 0 if self.get("group_size") == -1 else self.whole("group_size", 1, 1 << 24)

    def block(self, name: str) -> tuple[int, int]:
        """The outputs and the inputs of a block."""
        value = self.get(name)
        if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int and 0 < n < 1 << 24 for n in value)):
            raise self.wrong(name, value, "two numbers above 0")
        return value[0], value[1]

    def refuse(self, *names: str) -> None:
        """Fields that ask for something that is not read."""
        for name in names:
            if value := self.get(name):
                raise self.wrong(name, value, "read")

    def wrong(self, name: str, value: Any, wanted: str) -> FailedPrecondition:
        problem = f"were quantized by {self._method} with {name} {shown(value)}, which is not {wanted}"
        return FailedPrecondition(f"model: the weights of {self._model} {problem}")


def layout_of(config: Mapping[str, Any] | None, model: str) -> Layout | None:
    """The layout by a model's `quantization_config`, whose method is one of LAYOUTS. Raises FailedPrecondition."""
    if config is None:
        return None
    method = config["quant_method"]
    made: Layout = import_module(f".{LAYOUTS[method]}", __package__).layout(Said(config, model, method))
    return made
