"""The body of Anthropic's `POST /v1/messages`: from JSON to a request."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from orca.v1.orca_pb2 import (
    TOOL_CHOICE_NONE,
    TOOL_CHOICE_REQUIRED,
    TOOL_CHOICE_UNSPECIFIED,
    Chat,
    ToolChoice,
)
from orca_common.errors import InvalidArgument, echo

from ..openai.answer import UsageIn
from ..openai.body import check_names, get, strings, text
from ..openai.chat.request import OUR_NAMES as OF_CHATS
from ..openai.chat.request import template_kwargs
from ..openai.chat.tools import Chosen, put_functions
from ..openai.content import needed, places_of, without
from ..openai.forms import Wanted, loose_in
from ..openai.replies import Question
from ..openai.request import Sample, read, request_of
from ..requests.defaults import MODEL_SAYS_NOTHING, Defaults
from .blocks import IGNORED, messages_of
from .fields import FIXED, NAMES, OF_PROMPTS

OF_OTHERS = {
    "stop": "is a field of chats; messages have stop_sequences",
    "input": "is a field of responses; messages have messages",
    "chat_template": "is refused: the template is the model's own; chat_template_kwargs reach it",
}
OUR_NAMES = {**OF_CHATS, "max_new_tokens": "max_tokens", "stop": "stop_sequences"}
COUNTED = {*(field.name for field in OF_PROMPTS), "output_config", *FIXED}  # fields of `count_tokens`
SCHEMA = "output_config.format.schema"
CHOICES: Mapping[str, ToolChoice] = {
    "auto": TOOL_CHOICE_UNSPECIFIED,
    "any": TOOL_CHOICE_REQUIRED,
    "tool": TOOL_CHOICE_REQUIRED,
    "none": TOOL_CHOICE_NONE,
}


def parse(raw: bytes, defaults: Defaults = MODEL_SAYS_NOTHING) -> Question:
    """Raises InvalidArgument that names the field. defaults: the model's."""
    body = read(raw, NAMES, OF_OTHERS, FIXED)
    chat, theirs = chat_of(body)
    max_tokens = get(body, "max_tokens", int, "an integer", None)
    if max_tokens is None or max_tokens < 1:
        raise InvalidArgument("max_tokens", "is missing" if max_tokens is None else "must be at least 1")
    metadata = get(body, "metadata", dict, "an object", {})
    check_names([name for name, value in metadata.items() if value is not None], {"user_id"}, "metadata.")
    user = text(get(metadata, "user_id", str, "a string", "", "metadata.user_id"), "metadata.user_id")
    form = form_of(body)
    common = request_of(body, max_tokens, defaults.sampling, form)
    common.stop.extend(strings(get(body, "stop_sequences", list, "a list", []), "stop_sequences"))
    common.chat.CopyFrom(chat)
    return Question(
        samples=[Sample(common, {**OUR_NAMES, **({} if form is None else {form.kind: form.field})})],
        each=1,
        stream=get(body, "stream", bool, "true or false", False),
        detaches=common.detach_grace.ToNanoseconds() > 0,
        usage_in=UsageIn(),
        labels={"orca.user": user} if user else {},
        loose=loose_in(form),
        theirs=theirs,
    )


def prompt_of(raw: bytes) -> tuple[str, Chat, Callable[[str], str]]:
    """The model that a body of `count_tokens` names, its chat, and the caller's name of a place in it. Raises
    InvalidArgument."""
    body = read(raw, COUNTED, OF_OTHERS, FIXED)
    get(body, "output_config", dict, "an object", None)  # a form is no part of a prompt
    return body.get("model", ""), *chat_of(body)


def chat_of(body: Mapping[str, Any]) -> tuple[Chat, Callable[[str], str]]:
    """The chat of a body, and the caller's name of a place in it."""
    get(body, "cache_control", dict, "an object", None)  # it changes nothing
    placed = messages_of(body)
    chat = Chat(
        messages=[one.message for one in placed], template_kwargs=template_kwargs(body, quiet="thinking" in body)
    )
    tools, chosen = get(body, "tools", list, "a list", []), choice_of(body)
    if not tools and (chosen.names or chosen.choice == TOOL_CHOICE_REQUIRED):
        raise InvalidArgument("tool_choice", "is allowed only with tools")
    put_functions([tool_of(one, f"tools[{n}]") for n, one in enumerate(tools)], chosen, chat)
    theirs = places_of(placed, "messages")
    return chat, lambda field: theirs(field).replace("].parameters", "].input_schema")


def tool_of(given: Any, place: str) -> dict[str, Any]:
    """A tool in the shape of chats. The compiler of forms checks the function."""
    if not isinstance(given, dict):
        raise InvalidArgument(place, "must be an object")
    tool = without(given, IGNORED["a tool"])
    if (kind := tool.get("type", "custom")) != "custom":
        raise InvalidArgument(f"{place}.type", f"is {echo(str(kind), 40)!r}; only 'custom' is supported")
    check_names(tool, {"type", "name", "description", "input_schema", "strict"}, f"{place}.")
    function = {name: value for name, value in tool.items() if name not in ("type", "input_schema")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def choice_of(body: Mapping[str, Any]) -> Chosen:
    """The calls that a body allows."""
    given, field = get(body, "tool_choice", dict, "an object", None), "tool_choice"
    if given is None:
        return Chosen()
    kind = get(given, "type", str, "a string", None, f"{field}.type")
    if kind not in CHOICES:
        problem = "is missing" if kind is None else f"is {echo(kind, 20)!r}"
        raise InvalidArgument(f"{field}.type", f"{problem}; it may be {', '.join(CHOICES)}")
    check_names(given, {"type", "disable_parallel_tool_use", *(["name"] if kind == "tool" else [])}, f"{field}.")
    single = get(given, "disable_parallel_tool_use", bool, "true or false", False, f"{field}.disable_parallel_tool_use")
    names = [needed(given, "name", field)] if kind == "tool" else []
    return Chosen(CHOICES[kind], names, single or kind == "tool")


def form_of(body: Mapping[str, Any]) -> Wanted | None:
    """The form of the text; None: it is free."""
    config = without(get(body, "output_config", dict, "an object", {}))
    if config.get("effort") is not None:
        why = "where a chat template knows one, give it in chat_template_kwargs"
        raise InvalidArgument("output_config.effort", f"must be null: {why}")
    check_names(config, {"format"}, "output_config.")
    given = get(config, "format", dict, "an object", None, "output_config.format")
    if given is None:
        return None
    check_names(given, {"type", "schema"}, "output_config.format.")
    if given.get("type") != "json_schema":
        raise InvalidArgument("output_config.format.type", "must be json_schema")
    schema = get(given, "schema", dict, "an object", None, SCHEMA)
    if schema is None:
        raise InvalidArgument(SCHEMA, "is missing")
    return Wanted("json_schema", json.dumps(schema), SCHEMA)
