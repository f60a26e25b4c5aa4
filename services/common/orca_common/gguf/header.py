"""The header of a GGUF file: it is read here and nowhere else, and believed only as a whole.

A file (version 2 or 3, little-endian) has three parts: named fields, a description of each tensor, and the tensors,
each at a multiple of the alignment. A tensor of blocks has rows of whole blocks (ggml's page on GGUF).
"""

import os
import struct
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..bounded_file import open_regular, shown
from ..errors import FailedPrecondition

# Bounds of what a stranger's file may make a service read. A vocabulary of 256,000 tokens with its merges has 15 MB and
# 1.3 million items, which take up to 16 times their bytes in a list.
HEADER_BYTES, MAX_ITEMS, MAX_TENSORS, MAX_AXES, NAME_BYTES = 64 << 20, 1 << 22, 1 << 16, 4, 1 << 10
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class Kind(NamedTuple):
    """A type of tensors."""

    name: str
    block: int  # numbers that lie together
    bytes: int  # of a block


KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    8: Kind("Q8_0", 32, 34),
    12: Kind("Q4_K", 256, 144),
    14: Kind("Q6_K", 256, 210),
    30: Kind("BF16", 1, 2),
}
BY_NAME = {kind.name: kind for kind in KINDS.values()}
# Those that are not read, for sentences.
OTHERS = {
    **{3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}


class Tensor(NamedTuple):
    """A tensor in a file."""

    kind: str  # the name of one of KINDS
    shape: tuple[int, ...]  # row-major, as in safetensors
    start: int  # of its bytes in the file
    size: int  # bytes


class Gguf(NamedTuple):
    """A header."""

    fields: dict[str, Any]  # numbers, texts, and lists of them
    tensors: dict[str, Tensor]
    start: int  # of the tensors in the file


def gguf_header(file: Path) -> Gguf:
    """Reads a file's header. Raises FileNotFoundError, and FailedPrecondition for one that is wrong, by the tensor's
    name."""
    try:
        with open(open_regular(file), "rb") as opened:
            return _Reader(file, opened, os.fstat(opened.fileno()).st_size).header()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise broken(file, error.strerror or str(error)) from None


def broken(file: Path, problem: str) -> FailedPrecondition:
    """The error of a file that cannot be read."""
    return FailedPrecondition(f"model: {file} cannot be read ({problem})")


class _Reader:
    def __init__(self, file: Path, opened: BinaryIO, size: int) -> None:
        self._file, self._opened, self._size = file, opened, size
        self._at = self._items = 0  # items: of all lists so far

    def header(self) -> Gguf:
        if (magic := self._take(4, "its first bytes")) != b"GGUF":
            raise self._broken(f"it begins with {magic!r}, not with GGUF")
        version = self._number("I")
        if version not in (2, 3):
            raise self._broken(f"it has version {version}; 2 and 3 are read")
        tensors, fields = self._number("Q"), self._number("Q")
        if max(tensors, fields) > MAX_TENSORS:
            raise self._broken(f"it has {tensors} tensors and {fields} fields; at most {MAX_TENSORS} of each are read")
        found: dict[str, Any] = {}
        for _ in range(fields):
            name = self._name("the name of a field")
            if name in found:
                raise self._broken(f"it has {shown(name)} twice")
            found[name] = self._value(name, self._number("I"))
        described = [self._tensor() for _ in range(tensors)]
        return self._placed(found, described)

    def _placed(self, fields: dict[str, Any], described: list[tuple[str, Kind, tuple[int, ...], int]]) -> Gguf:
        """Checks where the tensors lie: within the file, and none on another one."""
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise self._broken(f"general.alignment is {shown(alignment)}, not a multiple of 8")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        end, before = start, ""
        for name, kind, shape, offset in sorted(described, key=lambda one: one[3]):
            if name in tensors:
                raise self._broken(f"it has {shown(name)} twice")
            tensors[name] = placed = Tensor(kind.name, shape, start + offset, prod(shape) // kind.block * kind.bytes)
            if offset % alignment:
                raise self._broken(f"{shown(name)} begins at byte {offset}, which is no multiple of {alignment}")
            if placed.start < end:
                raise self._broken(f"{shown(name)} begins at byte {offset}, within {before}")
            end, before = placed.start + placed.size, shown(name)
            if end > self._size:
                raise self._broken(f"{before} ends at byte {end} of a file of {self._size}")
        return Gguf(fields, tensors, start)

    def _tensor(self) -> tuple[str, Kind, tuple[int, ...], int]:
        name = self._name("the name of a tensor")
        axes = self._number("I")
        if not 1 <= axes <= MAX_AXES:
            raise self._broken(f"{shown(name)} has {axes} axes, not 1 to {MAX_AXES}")
        shape = tuple(self._number("Q") for _ in range(axes))[::-1]
        number, offset = self._number("I"), self._number("Q")
        kind = KINDS.get(number)
        if kind is None:
            read = ", ".join(BY_NAME)
            raise self._broken(f"{shown(name)} has the type {OTHERS.get(number, number)}; Orca reads {read}")
        if not all(1 <= length < 1 << 40 for length in shape) or shape[-1] % kind.block:
            raise self._broken(f"{shown(name)} of type {kind.name} has the shape {list(shape)}")
        return name, kind, shape, offset

    def _value(self, name: str, kind: int) -> Any:
        if kind == STRING:
            return self._text(name)
        if kind == ARRAY:
            return self._array(name)
        if kind not in NUMBERS:
            raise self._broken(f"the field {shown(name)} has the type {kind}")
        return self._number(NUMBERS[kind])

    def _array(self, name: str) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        least = 8 if kind == STRING else struct.calcsize(NUMBERS.get(kind, "B"))
        self._items += count
        if self._items > MAX_ITEMS or count > (self._end - self._at) // least:
            most = f"at most {MAX_ITEMS} of all fields are read"
            raise self._broken(f"the field {shown(name)} has {count} items; {most}")
        if kind == STRING:
            return [self._text(name) for _ in range(count)]
        if kind not in NUMBERS:
            raise self._broken(f"the field {shown(name)} is a list of the type {kind}")
        form = f"<{count}{NUMBERS[kind]}"
        return list(struct.unpack(form, self._take(struct.calcsize(form), name)))

    def _number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form), "a number"))[0]

    def _name(self, what: str) -> str:
        text = self._text(what, NAME_BYTES)
        if not text.isprintable():
            raise self._broken(f"{what} is {shown(text)}")
        return text

    def _text(self, what: str, most: int = HEADER_BYTES) -> str:
        length = self._number("Q")
        if length > most:
            raise self._broken(f"{shown(what)} has {length} bytes; at most {most} are read")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError:
            raise self._broken(f"{shown(what)} is not UTF-8") from None

    @property
    def _end(self) -> int:
        return min(self._size, HEADER_BYTES)

    def _take(self, count: int, what: str) -> bytes:
        if self._at + count > self._end:
            where = "the file ends" if self._end == self._size else f"a header of more than {HEADER_BYTES} bytes"
            raise self._broken(f"{where} within {shown(what)}")
        self._at += count
        taken = self._opened.read(count)
        if len(taken) < count:  # it became shorter meanwhile
            raise self._broken(f"the file ends within {shown(what)}")
        return taken

    def _broken(self, problem: str) -> FailedPrecondition:
        return broken(self._file, problem)
