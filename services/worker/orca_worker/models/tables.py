"""Which tables of tokens a checkpoint's files have, without torch: config.json says only which are meant to be one.

transformers 5 ties two tables where config.json says so and the files have one of them, or have both with the same
numbers (`PreTrainedModel.tie_weights`). Files with another head than their table come from merged adapters.
"""

import logging
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from orca_common.bounded_file import open_regular
from orca_common.errors import FailedPrecondition

from .weight_files import header_of, weight_files

PARTS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # of a table that both have
CHUNK = 8 << 20  # bytes that are compared at a time

log = logging.getLogger(__name__)


class Tables(NamedTuple):
    """The names of a family's tables. `others`: further names of the first one, as an encoder and a decoder have."""

    tokens: str
    head: str
    others: tuple[str, ...] = ()


class Stored(NamedTuple):
    """A tensor in a file. Where all is equal, the numbers are; `changed`, in ns, tells a file from a later one."""

    file: Path
    start: int
    size: int
    kind: tuple[Any, Any]  # type and shape, as the file has them
    changed: int


def has_own_head(folder: Path, prefix: str, tables: Tables) -> bool:
    """Whether a model whose config.json ties its head has another one in its files.

    Raises FailedPrecondition where one of the other names has other numbers, which no family here can use."""
    found = _stored(folder, prefix, (tables.tokens, tables.head, *tables.others))
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


def _stored(folder: Path, prefix: str, names: tuple[str, ...]) -> dict[str, Stored]:
    """Finds tensors by name, with a prefix or without. Wrong files are left to their reader to refuse."""
    found: dict[str, Stored] = {}
    try:
        for file, start, changed, header in _headers(folder):
            for name in names:
                info = header.get(name, header.get(prefix + name))
                if isinstance(info, dict) and isinstance(span := info.get("data_offsets"), list) and len(span) == 2:
                    kind = info.get("dtype"), str(info.get("shape"))
                    found[name] = Stored(file, start + span[0], span[1] - span[0], kind, changed)
    except (FailedPrecondition, OSError, TypeError):
        return {}
    return found


def _headers(folder: Path) -> Iterator[tuple[Path, int, int, dict[str, Any]]]:
    for file in weight_files(folder):
        start, header = header_of(file)
        yield file, start, file.stat().st_mtime_ns, header


@lru_cache(maxsize=8)  # the ranks of a topology ask one after the other
def _equal(one: Stored, other: Stored) -> bool:
    """Whether two tensors have the same bytes, type and shape. Different ones differ in the first chunk."""
    if (one.size, one.kind) != (other.size, other.kind):
        return False
    first, second = open_regular(one.file), open_regular(other.file)
    try:
        pieces = ((at, min(CHUNK, one.size - at)) for at in range(0, one.size, CHUNK))
        return all(
            os.pread(first, size, one.start + at) == os.pread(second, size, other.start + at) for at, size in pieces
        )
    finally:
        os.close(first)
        os.close(second)
