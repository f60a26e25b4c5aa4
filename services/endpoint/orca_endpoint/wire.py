"""Deserializers that never raise: stock gRPC answers a broken message with INTERNAL, which no client input may do."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from orca_common.errors import InvalidArgument

M = TypeVar("M", bound=Message)


def decoder(kind: type[M]) -> Callable[[bytes], M | InvalidArgument]:
    """Parses a message; what it cannot parse becomes the error to answer, which names the field where that is known."""

    def decode(raw: bytes) -> M | InvalidArgument:
        try:
            return kind.FromString(raw)
        except DecodeError:
            field = invalid_text(kind.DESCRIPTOR, raw)
            if field is not None:
                return InvalidArgument(field, "not valid UTF-8")
            return InvalidArgument("message", f"not a valid {kind.DESCRIPTOR.full_name}")

    return decode


def invalid_text(kind: Any, raw: bytes) -> str | None:
    """The path of the first string field of a serialized message that is not UTF-8; None when there is none.

    `kind` is the message's descriptor.
    """
    seen: dict[int, int] = {}
    try:
        for number, value in length_delimited(raw):
            field = kind.fields_by_number.get(number)
            position = seen[number] = seen.get(number, -1) + 1
            if field is None:
                continue
            name = f"{field.name}[{position}]" if field.is_repeated else field.name
            if field.type == FieldDescriptor.TYPE_STRING:
                try:
                    value.decode()
                except UnicodeDecodeError:
                    return name
            elif field.type == FieldDescriptor.TYPE_MESSAGE:
                inner = invalid_text(field.message_type, value)
                if inner is not None:
                    return f"{name}.{inner}"
    except (IndexError, ValueError):  # the wire itself is broken
        pass
    return None


def length_delimited(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """(field number, value) of the strings, bytes and messages in a serialized message. Raises where it is broken."""
    at = 0
    while at < len(raw):
        key, at = varint(raw, at)
        match key & 7:
            case 0:
                _, at = varint(raw, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                size, at = varint(raw, at)
                if at + size > len(raw):
                    raise ValueError("truncated")
                yield key >> 3, raw[at : at + size]
                at += size
            case kind:
                raise ValueError(f"wire type {kind}")


def varint(raw: bytes, at: int) -> tuple[int, int]:
    """A varint and the position after it."""
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("varint too long")
