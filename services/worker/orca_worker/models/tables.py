"""Which tables of tokens a checkpoint's files have, without torch: config.json says only which are meant to be one.

transformers 5 ties two tables where config.json says so and the files have one of them, or have both with the same
numbers (`PreTrainedModel.tie_weights`). Files with another head than their table come from merged adapters.
"""

import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from orca_common.bounded_file import open_regular
from orca_common.errors import FailedPrecondition

from .header import Stored, header_of
from .weight_files import weight_files

PARTS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # of a table that both have
CHUNK = 8 << 20  # bytes that are compared at a time

log = logging.getLogger(__name__)


class Tables(NamedTuple):
    """The names of a family's tables. `others`: further names of the first one, as an encoder and a decoder have."""

    tokens: str
    head: str
    others: tuple[str, ...] = ()


class Place(NamedTuple):
    """A tensor's place in a file. `changed`, in ns, tells a file from a later one."""

    file: Path
    tensor: Stored
    changed: int


def has_own_head(folder: Path, prefix: str, tables: Tables) -> bool:
    """Whether a model whose config.json ties its head has another one in its files.

    Raises FailedPrecondition where one of the other names has other numbers, which no family here can use."""
    found = _places(folder, prefix, (tables.tokens, tables.head, *tables.others))
    known = found.get(tables.tokens)
    for name in tables.others:
        if known is not None and name in found and not _equal(known, found[name]):
            raise FailedPrecondition(
                f"model: {name} in {folder} has other numbers than {tables.tokens}; one table is served"
            )
    own = known is not None and tables.head in found and not _equal(known, found[tables.head])
    if own:
        log.warning(
            "the files have another head than config.json ties", extra={"model": str(folder), "head": tables.head}
        )
    return own


def _places(folder: Path, prefix: str, names: tuple[str, ...]) -> dict[str, Place]:
    """Finds tensors by name, with a prefix or without. Wrong files are left to their reader to refuse."""
    found: dict[str, Place] = {}
    try:
        for file in weight_files(folder):
            tensors, changed = header_of(file).tensors, file.stat().st_mtime_ns
            for name in names:
                if (tensor := tensors.get(name, tensors.get(prefix + name))) is not None:
                    found[name] = Place(file, tensor, changed)
    except (FailedPrecondition, OSError):
        return {}
    return found


@lru_cache(maxsize=8)  # the ranks of a topology ask one after the other
def _equal(one: Place, other: Place) -> bool:
    """Whether two tensors have the same bytes, type and shape. Different ones differ in the first chunk."""
    (kind, shape, start, size), begin = one.tensor, other.tensor.start
    if (kind, shape) != other.tensor[:2]:
        return False
    first, second = open_regular(one.file), open_regular(other.file)
    try:
        pieces = ((at, min(CHUNK, size - at)) for at in range(0, size, CHUNK))
        return all(os.pread(first, part, start + at) == os.pread(second, part, begin + at) for at, part in pieces)
    finally:
        os.close(first)
        os.close(second)
