"""The messages of Ollama's chats: from its shape to the messages of a chat.

Its calls need have no ids, and a result then says the name of what was called: ids are made here, in their order.
"""

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from orca.v1.orca_pb2 import ChatMessage
from orca_common.errors import InvalidArgument, echo

from ..openai.body import check_names, get, text
from ..openai.chat.messages import member
from ..openai.content import needed, without

ROLES = ("system", "user", "assistant", "tool")
KNOWN = {role: {"role", "content", "images"} for role in ROLES}  # members of a message, by its role
KNOWN["assistant"] |= {"tool_calls"}
KNOWN["tool"] |= {"tool_name", "tool_call_id"}
IGNORED = {"thinking"}  # thoughts before an answer: a conversation goes on from the answer


class Calls:
    """The calls of a conversation that have no result yet."""

    def __init__(self) -> None:
        self._made, self._open = 0, set[str]()
        self._of: dict[str, deque[str]] = {}  # ids by the function's name, and all by "", the oldest first

    def begin(self, given: str, name: str) -> str:
        """The id of a call. given: its own, or empty."""
        self._made += 1
        found = given or f"call{self._made:05}"  # some templates want nine letters and digits
        self._open.add(found)
        for key in {name, ""}:
            self._of.setdefault(key, deque()).append(found)
        return found

    def answered(self, given: str, name: str) -> str:
        """The id of the call that a result belongs to: the given one, or the first of this name, or the first."""
        found = given or self._first(name) or self._first("")
        self._open.discard(found)
        return found

    def _first(self, name: str) -> str:
        """The oldest open call of a function; "" without one. Those that have a result are dropped on the way."""
        ids = self._of.get(name, deque[str]())
        while ids and ids[0] not in self._open:
            ids.popleft()
        return ids[0] if ids else ""


def messages_of(given: list[Any]) -> list[ChatMessage]:
    """The messages of a body. Raises InvalidArgument."""
    calls = Calls()
    return [message_of(one, f"messages[{n}]", calls) for n, one in enumerate(given)]


def message_of(given: Any, field: str, calls: Calls) -> ChatMessage:
    """One message. field: its name. calls: of those before it."""
    if not isinstance(given, dict):
        raise InvalidArgument(field, "must be an object with role and content")
    message = without(given, IGNORED)
    role = get(message, "role", str, "a string", None, f"{field}.role")
    if role not in ROLES:
        problem = "is missing" if role is None else f"is {echo(role, 20)!r}; the roles are {', '.join(ROLES)}"
        raise InvalidArgument(f"{field}.role", problem)
    check_names(message, KNOWN[role], f"{field}.")
    if get(message, "images", list, "a list", [], f"{field}.images"):
        raise InvalidArgument(f"{field}.images", "must be empty: messages are text alone")
    told = get(message, "tool_calls", list, "a list", [], f"{field}.tool_calls")
    made = [call_of(one, f"{field}.tool_calls[{n}]", calls) for n, one in enumerate(told)]
    identity, name = (member(message, one, field) for one in ("tool_call_id", "tool_name"))
    return ChatMessage(
        role=role,
        content=member(message, "content", field),
        name=name,
        tool_calls=text(json.dumps(made, ensure_ascii=False), f"{field}.tool_calls") if made else "",
        tool_call_id=calls.answered(identity, name) if role == "tool" else "",
    )


def call_of(given: Any, field: str, calls: Calls) -> dict[str, Any]:
    """A call in the shape of chats."""
    if not isinstance(given, dict):
        raise InvalidArgument(field, "must be an object with a function")
    check_names(call := without(given), {"id", "type", "function"}, f"{field}.")
    if (kind := get(call, "type", str, "a string", "function", f"{field}.type")) != "function":
        raise InvalidArgument(f"{field}.type", f"is {echo(kind, 20)!r}; only 'function' is supported")
    field += ".function"
    function: Mapping[str, Any] = without(get(call, "function", dict, "an object", {}, field), {"index"})
    check_names(function, {"name", "arguments"}, f"{field}.")
    name = needed(function, "name", field)
    arguments = get(function, "arguments", dict, "an object", {}, f"{field}.arguments")
    identity = calls.begin(member(call, "id", field.removesuffix(".function")), name)
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
