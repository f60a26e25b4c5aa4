"""Adapters that an engine serves beside its model, by name: what the setting `adapters` says."""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from .bounded_file import SHOWN, shown
from .errors import FailedPrecondition

MAX_ADAPTERS, MAX_NAME = 1024, 256


class Adapter(NamedTuple):
    """A folder with `adapter_config.json` and `adapter_model.safetensors`, and the model name that chooses it."""

    name: str
    folder: Path


def read_adapters(said: str) -> tuple[Adapter, ...]:
    """Reads `NAME=FOLDER,NAME=FOLDER`. Raises FailedPrecondition with a sentence for anything else."""
    found = tuple(parse_adapter(one) for one in said.split(",") if one.strip())
    if len(found) > MAX_ADAPTERS:
        raise FailedPrecondition(f"adapters: {len(found)} of them; at most {MAX_ADAPTERS} are served")
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise FailedPrecondition(f"adapters: two have the name {shown(name)}")
    return found


def check_names(adapters: tuple[Adapter, ...], model: str, others: Collection[str] = ()) -> None:
    """Raises FailedPrecondition where an adapter has the name of the model, or of one that shares its address."""
    for name, _ in adapters:
        if name == model:
            raise FailedPrecondition(f"adapters: {shown(name)} is the name of the model itself")
        if name in others:
            raise FailedPrecondition(f"adapters: {shown(name)} is the name of another release's model (other_models)")


def parse_adapter(said: str) -> Adapter:
    """Reads `NAME=FOLDER`. Raises FailedPrecondition with a sentence for anything else."""
    name, equals, folder = (part.strip() for part in said.partition("="))
    if not (name and equals and folder):
        raise FailedPrecondition(f"adapters: {shown(said.strip())} is not NAME=FOLDER")
    if len(name) > MAX_NAME or not name.isprintable():
        raise FailedPrecondition(f"adapters: {name[:SHOWN]!r} is no name of at most {MAX_NAME} printable characters")
    return Adapter(name, Path(folder))
