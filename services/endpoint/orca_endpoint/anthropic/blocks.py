"""The messages of Anthropic's API: from blocks to the messages of a chat."""

import json
from collections.abc import Mapping
from typing import Any

from orca.v1.orca_pb2 import ChatMessage
from orca_common.errors import InvalidArgument, echo

from ..openai.body import check_names, get, text
from ..openai.content import Placed, content_of, needed, part_of, without

ROLES = ("user", "assistant", "system")
TEXT = {"text": "text"}  # the type of a block of text, and the name of its text
CACHED = {"cache_control": "a hint for caches of prompts, which changes no token"}
THOUGHTS = "thoughts before an answer: a conversation goes on from the answer"
# Members that are ignored, and why.
IGNORED: Mapping[str, Mapping[str, str]] = {
    "a text": {
        **CACHED,
        "citations": "the sources of an answer, which are not its text",
        "parsed_output": "the text once more, as an object of the client's",
    },
    "a call": {**CACHED, "caller": "what has called: the answer itself"},
    "a result": {**CACHED, "is_error": "that the result is an error: its text says so"},
    "a tool": CACHED,
}
BLOCKS = {"thinking": THOUGHTS, "redacted_thinking": THOUGHTS}  # blocks of answers that are ignored


def markdown() -> str:
    """The table of docs/openai.md."""
    rows = [f"| {of} | `{name}` | {why} |" for of, names in IGNORED.items() for name, why in names.items()]
    rows += [f"| a block of type `{kind}` | all | {why} |" for kind, why in BLOCKS.items()]
    return "\n".join(["| of | ignored | because it is |", "| --- | --- | --- |", *rows])


def messages_of(body: Mapping[str, Any]) -> list[Placed]:
    """The chat of a body. Raises InvalidArgument."""
    found = list[Placed]()
    if "system" in body:
        content = content_of(body["system"], "system", TEXT, IGNORED["a text"])
        found.append(Placed(ChatMessage(role="system", content=content), "system"))
    given = body.get("messages")
    if given is None:
        raise InvalidArgument("messages", "is missing")
    if not isinstance(given, list) or not given:
        raise InvalidArgument("messages", "must be a list of at least one message")
    for n, one in enumerate(given):
        found += turns_of(one, f"messages[{n}]")
    if found[-1].message.role == "assistant":
        problem = "is the assistant's and the last: no answer goes on from a beginning"
        raise InvalidArgument(found[-1].place.partition(".")[0], problem)
    return found


def turns_of(given: Any, place: str) -> list[Placed]:
    """Makes a message into those of a chat, in which each result of a call has its own."""
    if not isinstance(given, dict):
        raise InvalidArgument(place, "must be an object with role and content")
    message = without(given)
    check_names(message, {"role", "content"}, f"{place}.")
    role = get(message, "role", str, "a string", None, f"{place}.role")
    if role not in ROLES:
        problem = "is missing" if role is None else f"is {echo(role, 20)!r}; the roles are {', '.join(ROLES)}"
        raise InvalidArgument(f"{place}.role", problem)
    content, field = message.get("content"), f"{place}.content"
    if not isinstance(content, list):
        return [Placed(ChatMessage(role=role, content=content_of(content, field, TEXT)), place)]
    found, texts, calls = list[Placed](), list[str](), list[dict[str, Any]]()

    def say() -> None:
        """Ends the message so far."""
        if texts or calls:
            told = json.dumps(calls, ensure_ascii=False) if calls else ""
            found.append(Placed(ChatMessage(role=role, content="\n".join(texts), tool_calls=told), place))
            texts.clear()

    for n, block in enumerate(content):
        at = f"{field}[{n}]"
        kind = block.get("type") if isinstance(block, dict) else None
        kind = kind if isinstance(kind, str) else None
        if kind == "tool_result" and role == "user":
            say()
            found.append(Placed(result_of(block, at), at))
        elif kind == "tool_use" and role == "assistant":
            calls.append(call_of(block, at))
        elif not (role == "assistant" and kind in BLOCKS):
            texts.append(part_of(block, at, TEXT, IGNORED["a text"]))
    say()
    return found or [Placed(ChatMessage(role=role), place)]


def result_of(block: Mapping[str, Any], place: str) -> ChatMessage:
    """The result of a call, as a tool's message."""
    said = without(block, IGNORED["a result"])
    check_names(said, {"type", "tool_use_id", "content"}, f"{place}.")
    content = content_of(said.get("content", ""), f"{place}.content", TEXT, IGNORED["a text"])
    return ChatMessage(role="tool", tool_call_id=needed(said, "tool_use_id", place), content=content)


def call_of(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A call in the shape of chats."""
    call = without(block, IGNORED["a call"])
    check_names(call, {"type", "id", "name", "input"}, f"{place}.")
    arguments = get(call, "input", dict, "an object", {}, f"{place}.input")
    text(json.dumps(arguments, ensure_ascii=False), f"{place}.input")
    function = {"name": needed(call, "name", place), "arguments": arguments}
    return {"id": needed(call, "id", place), "type": "function", "function": function}
