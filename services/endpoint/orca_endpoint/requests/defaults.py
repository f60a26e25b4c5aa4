"""Reads a model's generation_config.json: the sampling of requests of OpenAI's methods that say nothing."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orca.v1.orca_pb2 import Sampling
from orca_common.bounded_file import json_object, read_bounded, shown
from orca_common.checkpoint import CONFIG_BYTES, LARGEST
from orca_common.errors import FailedPrecondition
from orca_common.sampling import SAMPLING, Parameter

TEMPERATURE = 1.0  # OpenAI's default, for a file that does not say
READ = [parameter for parameter in SAMPLING.values() if parameter.by_model]


@dataclass(frozen=True)
class Defaults:
    """Sampling parameters by their names, and the tokens of an answer; None: the file does not say."""

    sampling: Mapping[str, float] = field(default_factory=lambda: {"temperature": TEMPERATURE})
    max_new_tokens: int | None = None

    def message(self) -> Sampling:
        """The parameters as a message."""
        given: dict[str, Any] = dict(self.sampling)
        return Sampling(**given)


MODEL_SAYS_NOTHING = Defaults()


def read_defaults(folder: Path) -> Defaults:
    """Reads the file. Raises FailedPrecondition with the field's name for a value out of its limits.

    `do_sample: false` is greedy whatever the temperature. A top_k of 0 or -1 means all, as in transformers.
    """
    path = folder / "generation_config.json"
    given: Mapping[str, Any] = {}
    with suppress(FileNotFoundError):
        given = json_object(read_bounded(path, CONFIG_BYTES), path)
    found = {"temperature": TEMPERATURE}
    found |= {one.name: number_in(given, one, path) for one in READ if given.get(one.name) is not None}
    if found.get("top_k", 1) <= 0:
        del found["top_k"]
    if given.get("do_sample") is False:
        found["temperature"] = 0
    most = given.get("max_new_tokens")
    if most is not None and (type(most) is not int or not 1 <= most <= LARGEST):
        raise wrong(path, "max_new_tokens", most, f"between 1 and {LARGEST}")
    return Defaults(found, most)


def number_in(given: Mapping[str, Any], parameter: Parameter, path: Path) -> float:
    """The value of a field, which is there."""
    value, counted = given[parameter.name], parameter.kind == "count"
    if isinstance(value, bool) or not isinstance(value, int if counted else int | float):
        raise wrong(path, parameter.name, value, "a whole number" if counted else "a number")
    if counted and -1 <= value <= 0:
        return value
    if not parameter.limits.holds(value) or value > LARGEST:
        raise wrong(path, parameter.name, value, str(parameter.limits))
    return value


def wrong(path: Path, name: str, value: object, must: str) -> FailedPrecondition:
    return FailedPrecondition(f"model: {path}: {name} is {shown(value)}; it must be {must}")
