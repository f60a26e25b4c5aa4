"""The input of a response: from items to the messages of a chat, and from the items of an answer.

Clients give the items of an answer back as they got them. Members that say nothing here are ignored by a table;
everything else is taken, or refused by name.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orca.v1.orca_pb2 import ChatMessage
from orca_common.errors import InvalidArgument, echo

from ...requests.tools import Members, call_of
from ..body import check_names, get, text
from ..content import Placed, content_of, needed, without

ROLES = ("user", "assistant", "system", "developer")
KINDS = ("message", "function_call", "function_call_output", "item_reference", "reasoning")
TEXTS = {"input_text": "text", "output_text": "text"}  # types of parts, and the names of their texts
ANSWERED = {**TEXTS, "refusal": "refusal"}  # in an assistant's message
OF_ANSWERS = {"id": "its name, which an answer had", "status": "whether it was whole"}
# Members that are ignored, and why.
IGNORED: Mapping[str, Mapping[str, str]] = {
    "a message": {**OF_ANSWERS, "phase": "whether it was the last of its answer"},
    "a part": {
        "annotations": "the sources of an answer, which are not its text",
        "logprobs": "the logprobs that an answer had",
        "parsed": "the text once more, as an object of the client's",
    },
    "a call": {
        **OF_ANSWERS,
        "parsed_arguments": "the arguments once more, as an object of the client's",
    },
    "a call's output": OF_ANSWERS,
}
THOUGHTS = "thoughts before an answer: a conversation goes on from the answer"


def markdown() -> str:
    """The table of docs/openai.md."""
    rows = [f"| {of} | `{name}` | {why} |" for of, names in IGNORED.items() for name, why in names.items()]
    rows.append(f"| an item of type `reasoning` | all | {THOUGHTS} |")
    return "\n".join(["| of | ignored | because it is |", "| --- | --- | --- |", *rows])


class Reference(NamedTuple):
    """An item of an answer that is kept."""

    id: str
    place: str


def items_of(given: Any) -> list[Placed | Reference]:
    """The items of `input`."""
    if isinstance(given, str):
        return [Placed(ChatMessage(role="user", content=text(given, "input")), "input")]
    if not isinstance(given, list) or not given:
        raise InvalidArgument("input", "must be a text, or a list of at least one item")
    found = (item_of(one, f"input[{n}]") for n, one in enumerate(given))
    return [one for one in found if one is not None]


def item_of(given: Any, place: str) -> Placed | Reference | None:
    """One item; None: it is ignored."""
    if not isinstance(given, dict):
        raise InvalidArgument(place, "must be an object")
    kind = get(given, "type", str, "a string", "message", f"{place}.type")
    match kind:
        case "message":
            return Placed(message_of(given, place), place)
        case "function_call":
            call = without(given, IGNORED["a call"])
            check_names(call, {"type", "call_id", "name", "arguments"}, f"{place}.")
            return Placed(ChatMessage(role="assistant", tool_calls=json.dumps([checked_call(call, place)])), place)
        case "function_call_output":
            said = without(given, IGNORED["a call's output"])
            check_names(said, {"type", "call_id", "output"}, f"{place}.")
            call_id = needed(said, "call_id", place)
            content = content_of(said.get("output"), f"{place}.output", TEXTS, IGNORED["a part"])
            return Placed(ChatMessage(role="tool", tool_call_id=call_id, content=content), place)
        case "item_reference":
            check_names(given, {"type", "id"}, f"{place}.")
            return Reference(needed(given, "id", place), place)
        case "reasoning":
            return None
        case _:
            problem = f"is {echo(kind, 40)!r}; it may be {', '.join(KINDS)}"
            raise InvalidArgument(f"{place}.type", problem)


def message_of(given: Mapping[str, Any], place: str) -> ChatMessage:
    message = without(given, IGNORED["a message"])
    check_names(message, {"type", "role", "content"}, f"{place}.")
    role = get(message, "role", str, "a string", None, f"{place}.role")
    if role not in ROLES:
        problem = "is missing" if role is None else f"is {echo(role, 20)!r}; the roles are {', '.join(ROLES)}"
        raise InvalidArgument(f"{place}.role", problem)
    kinds = ANSWERED if role == "assistant" else TEXTS
    content = content_of(message.get("content"), f"{place}.content", kinds, IGNORED["a part"])
    return ChatMessage(role=role, content=content)


def checked_call(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The call of an item in the shape of chats. Its arguments are an object of JSON, or were cut."""

    def error(field: str, problem: str, *, place: str = "") -> InvalidArgument:
        return InvalidArgument(field + place.replace(".function", "").replace(".id", ".call_id"), problem)

    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call_of(call := {"id": item.get("call_id"), "type": "function", "function": function}, "", Members(place, error))
    return call


def message_in(item: Mapping[str, Any]) -> ChatMessage:
    """The message of an item of an answer of ours."""
    if item["type"] == "message":
        return ChatMessage(role="assistant", content="".join(part["text"] for part in item["content"]))
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    return ChatMessage(role="assistant", tool_calls=json.dumps([call]))


def joined(messages: Sequence[Placed]) -> list[Placed]:
    """The messages with the calls of one answer in one message, behind its text."""
    answers = list[tuple[Placed, list[ChatMessage]]]()  # each message with those that are calls of the same answer
    for one in messages:
        if (
            answers
            and answers[-1][0].message.role == "assistant"
            and one.message.tool_calls
            and not one.message.content
        ):
            answers[-1][1].append(one.message)
        else:
            answers.append((one, []))
    return [with_calls(first, more) if more else first for first, more in answers]


def with_calls(first: Placed, more: Sequence[ChatMessage]) -> Placed:
    """An assistant's message with the calls of others, too."""
    calls = [call for one in (first.message, *more) for call in json.loads(one.tool_calls or "[]")]
    said = ChatMessage(role="assistant", content=first.message.content, tool_calls=json.dumps(calls))
    return Placed(said, first.place)
