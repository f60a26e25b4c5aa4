"""Parses requests, and refuses fields that this release does not know. protobuf would keep them and say nothing."""

from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from orca_common.errors import InvalidArgument

LOOKED = 1000  # messages of a request in which an unknown field is looked for: 2 ms

M = TypeVar("M", bound=Message)


def parse_known(kind: type[M], raw: bytes) -> M:
    """Parses a message. Raises DecodeError, and InvalidArgument for a field that a newer client has set, at any depth.

    protobuf drops unknown fields by itself: a look at each message took 55 ms for 64 KiB of a chat, instead of 0.2.
    """
    message = kind.FromString(raw)
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        raise _refusal(kind.FromString(raw))
    return message


def _refusal(message: Message) -> InvalidArgument:
    """Names the unknown field of a message that has one, if it is in the first LOOKED messages inside of it."""
    for place, one in islice(_inside(message, ""), LOOKED):
        unknown = UnknownFieldSet(one)
        if len(unknown):
            number, name = unknown[0].field_number, one.DESCRIPTOR.name
            problem = f"this release knows no field {number} of {name}; the client may be newer"
            return InvalidArgument(f"{place}{number}", problem)
    return InvalidArgument("message", "has a field that this release does not know; the client may be newer")


def _inside(message: Message, place: str) -> Iterator[tuple[str, Message]]:
    """Yields a message and all inside of it, each with the beginning of its fields' names."""
    yield place, message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            for n, one in enumerate(value):
                yield from _inside(one, f"{place}{field.name}[{n}].")
        else:
            yield from _inside(value, f"{place}{field.name}.")
