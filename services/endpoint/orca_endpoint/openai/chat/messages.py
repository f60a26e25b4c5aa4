"""The messages of a chat: from the body to the request.

Clients give the answers of a conversation back as they got them, with members of OpenAI's that say nothing here and
with their own notes. Those are ignored by a table; everything else is taken, or refused by name.
"""

import json
from collections.abc import Mapping
from typing import Any

from orca.v1.orca_pb2 import ChatMessage
from orca_common.errors import InvalidArgument, echo

from ...requests.chat_renderer import ROLES
from ..body import check_names, get, text
from ..content import content_of, without

KNOWN = {role: {"role", "content", "name"} for role in ROLES}  # members of a message, by its role
KNOWN["tool"] |= {"tool_call_id"}
KNOWN["assistant"] |= {"tool_calls", "refusal"}
NO_MEMBERS = {  # of OpenAI's messages
    "audio": "is refused: messages are text alone",
    "function_call": "is refused: it is the older form of tool_calls",
}
TEXT = {"text": "text"}  # types of parts, and the names of their texts
ANSWERED = {**TEXT, "refusal": "refusal"}  # in an assistant's message
CACHED = {"cache_control": "a hint for caches of prompts, which changes no token"}
# Members that are ignored, and why: of any message and its parts; of an assistant's; of its calls, and their functions.
IGNORED = {
    "a message": CACHED,
    "a part": CACHED,
    "an assistant's message": {
        "annotations": "the sources of an answer, which are not its text",
        "parsed": "the content once more, as an object of the client's",
        "reasoning": "thoughts before an answer: a conversation goes on from the answer",
        "reasoning_content": "the same by another name",
        "provider_specific_fields": "notes of the client's",
    },
    "a call": {"index": "its place in the chunks of a stream"},
    "a call's function": {"parsed_arguments": "the arguments once more, as an object of the client's"},
}
OF_ASSISTANT = CACHED | IGNORED["an assistant's message"]


def markdown() -> str:
    """The table of docs/openai.md."""
    rows = [f"| {of} | `{name}` | {why} |" for of, names in IGNORED.items() for name, why in names.items()]
    return "\n".join(["| of | ignored | because it is |", "| --- | --- | --- |", *rows])


def message_of(given: Any, field: str) -> ChatMessage:
    """One message. field: its name."""
    if not isinstance(given, dict):
        raise InvalidArgument(field, "must be an object with role and content")
    role = get(given, "role", str, "a string", None, f"{field}.role")
    if role not in ROLES:
        problem = "is missing" if role is None else f"is {echo(role, 20)!r}; the roles are {', '.join(ROLES)}"
        raise InvalidArgument(f"{field}.role", problem)
    of_assistant = role == "assistant"
    kinds, ignored = (ANSWERED, OF_ASSISTANT) if of_assistant else (TEXT, CACHED)
    message = without(given, ignored)
    if not KNOWN[role].issuperset(message):
        for name, sentence in NO_MEMBERS.items():
            if message.get(name):  # clients give empty ones back with an answer
                raise InvalidArgument(f"{field}.{name}", sentence)
        check_names([name for name in message if name not in NO_MEMBERS], KNOWN[role], f"{field}.")
    calls = get(message, "tool_calls", list, "a list", [], f"{field}.tool_calls")
    content, refusal = message.get("content"), member(message, "refusal", field)
    said = list[str]()
    if content is not None or not of_assistant:
        said.append(content_of(content, f"{field}.content", kinds, ignored))
    return ChatMessage(
        role=role,
        content="\n".join(filter(None, [*said, refusal])),
        name=member(message, "name", field),
        tool_call_id=member(message, "tool_call_id", field),
        tool_calls=text(json.dumps([*map(call_of, calls)], ensure_ascii=False), f"{field}.tool_calls") if calls else "",
    )


def call_of(given: Any) -> Any:
    """A call without what is ignored in it. The renderer checks it, as those of gRPC."""
    if not isinstance(given, dict):
        return given
    call = without(given, IGNORED["a call"])
    if isinstance(function := call.get("function"), dict):
        call["function"] = without(function, IGNORED["a call's function"])
    return call


def member(message: Mapping[str, Any], name: str, field: str) -> str:
    if name not in message:
        return ""
    return text(get(message, name, str, "a string", "", f"{field}.{name}"), f"{field}.{name}")
