"""The content of a message, as several APIs have it: a text, or parts with texts; and the places of messages."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from orca.v1.orca_pb2 import ChatMessage
from orca_common.errors import InvalidArgument, echo

from .body import check_names, get, text

IN_TOOLS = re.compile(r"(tools\[\d+\])\.function")  # a place in a chat, whose functions are objects of their own


class Placed(NamedTuple):
    """A message of a chat, and where it stands in the caller's body."""

    message: ChatMessage
    place: str


def places_of(placed: Sequence[Placed], name: str) -> Callable[[str], str]:
    """Makes the function that gives the caller's name of a place in a chat. name: the field of its messages, which may
    be others there. Its tools have no object for their function."""
    of_chat = re.compile(rf"{name}\[(\d+)\]")

    def theirs(field: str) -> str:
        found = of_chat.match(field)
        return IN_TOOLS.sub(r"\1", field) if found is None else placed[int(found[1])].place

    return theirs


def without(given: Mapping[str, Any], ignored: Collection[str] = ()) -> dict[str, Any]:
    """The members that are not null, without those that are ignored."""
    return {name: value for name, value in given.items() if value is not None and name not in ignored}


def content_of(given: Any, field: str, kinds: Mapping[str, str], ignored: Collection[str] = ()) -> str:
    """A text, or the texts of parts, joined by line breaks. kinds: the types that parts may have, each with the name of
    its text. ignored: members of a part. Raises InvalidArgument."""
    if given is None:
        raise InvalidArgument(field, "is missing")
    if isinstance(given, str):
        return text(given, field)
    if not isinstance(given, list):
        raise InvalidArgument(field, "must be a string or a list of parts")
    return "\n".join(part_of(one, f"{field}[{n}]", kinds, ignored) for n, one in enumerate(given))


def part_of(given: Any, field: str, kinds: Mapping[str, str], ignored: Collection[str] = ()) -> str:
    """The text of one part."""
    if not isinstance(given, dict):
        raise InvalidArgument(field, f"must be an object of type {next(iter(kinds))}")
    kind = get(given, "type", str, "a string", None, f"{field}.type")
    if kind not in kinds:
        only = " and ".join(map(repr, kinds))
        problem = "is missing" if kind is None else f"is {echo(kind, 20)!r}; only {only} is supported"
        raise InvalidArgument(f"{field}.type", problem)
    part, name = without(given, ignored), kinds[kind]
    check_names(part, {"type", name}, f"{field}.")
    return needed(part, name, field)


def needed(given: Mapping[str, Any], name: str, place: str) -> str:
    """A text that an object must have. place: the object's."""
    field = f"{place}.{name}"
    found = get(given, name, str, "a string", None, field)
    if found is None:
        raise InvalidArgument(field, "is missing")
    return text(found, field)
