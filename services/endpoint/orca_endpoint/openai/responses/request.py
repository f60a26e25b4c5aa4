"""The body of OpenAI's `POST /v1/responses`: from JSON to a request, and what is kept beside it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orca.v1.orca_pb2 import TOOL_CHOICE_REQUIRED, Chat, ChatMessage
from orca_common.errors import InvalidArgument
from orca_common.sampling import SAMPLING

from ...requests.defaults import MODEL_SAYS_NOTHING, Defaults
from ..answer import UsageIn
from ..body import check_names, get, text
from ..chat.request import OUR_NAMES as OF_CHATS
from ..chat.request import template_kwargs
from ..chat.tools import CHOICES, Chosen, choice_of, put_functions
from ..content import Placed, needed, places_of
from ..fields import THEIRS
from ..forms import as_form, loose_in
from ..replies import Question
from ..request import UINT32, Sample, labels_of, read, request_of, tier_name, usage_in
from ..response_format import format_in
from .fields import FIXED, INCLUDABLE, LOGPROBS, NAMES
from .items import Reference, items_of, joined
from .kept import Kept

OF_OTHERS = {
    "messages": "is a field of chats, at /v1/chat/completions; a response has an input",
    "chat_template": "is refused: the template is the model's own; chat_template_kwargs reach it",
}
OUR_NAMES = {**OF_CHATS, "chat.messages": "input", "max_new_tokens": "max_output_tokens"}
TOOL = {"description": None, "parameters": None, "strict": None}  # of a response, where the caller does not say


@dataclass(frozen=True)
class Input(Question):
    """A parsed body. Its chat has no messages yet: some of them are kept elsewhere."""

    instructions: Sequence[Placed]
    items: Sequence[Placed | Reference]
    previous: str  # the id of the response that it goes on from; empty: none
    kept: Kept  # what the response tells again; without its conversation
    store: bool


def parse(raw: bytes, defaults: Defaults = MODEL_SAYS_NOTHING) -> Input:
    """Raises InvalidArgument that names the field. defaults: the model's."""
    body = read(raw, NAMES, OF_OTHERS, FIXED)
    stream = get(body, "stream", bool, "true or false", False)
    usage_in({name: body[name] for name in ("stream_options",) if name in body}, stream, {"include_obfuscation"})
    logprobs, top = logprobs_of(body)
    max_tokens = get(body, "max_output_tokens", int, "an integer", 0)
    if "max_output_tokens" in body and max_tokens < 1:
        raise InvalidArgument("max_output_tokens", f"must be at least 1; it is {max_tokens}")
    wanted = text_of(body)
    form = None if wanted is None else as_form(wanted)
    common = request_of(body, max_tokens, defaults.sampling, form)
    common.logprobs, common.top_logprobs = logprobs, min(top, UINT32)
    chat = Chat(template_kwargs=template_kwargs(body, quiet=has_no_effort(body)))
    put_flat_tools(body, chat)
    common.chat.CopyFrom(chat)
    previous = text(get(body, "previous_response_id", str, "a string", ""), "previous_response_id")
    instructions = text(get(body, "instructions", str, "a string", ""), "instructions")
    system = [Placed(ChatMessage(role="system", content=instructions), "instructions")] if instructions else []
    if "input" not in body:
        raise InvalidArgument("input", "is missing")
    get(body, "prompt_cache_key", str, "a string", None)  # it changes nothing
    labels, store = labels_of(body), get(body, "store", bool, "true or false", True)
    return Input(
        samples=[Sample(common, {**OUR_NAMES, **tier_name(body), **({} if form is None else {form.kind: form.field})})],
        each=1,
        stream=stream,
        detaches=common.detach_grace.ToNanoseconds() > 0,
        usage_in=UsageIn(),
        labels=labels,
        loose=loose_in(form),
        theirs=str,
        instructions=system,
        items=items_of(body["input"]),
        previous=previous,
        kept=Kept(int(time.time()), fields_of(body, defaults.sampling, store), logprobs, []),
        store=store,
    )


def asked(given: Input, before: Sequence[Placed], items: Sequence[Placed]) -> Input:
    """The question with its conversation. before: what the previous response answered, and its answer. items: those of
    the input, with what it refers to."""
    turns = joined([*before, *items])
    shown = [*given.instructions, *turns]
    (sample,) = given.samples
    sample.request.chat.messages.extend([one.message for one in shown])
    kept = given.kept._replace(messages=[one.message for one in turns])
    return replace(
        given, samples=[replace(sample, kept=kept.packed() if given.store else b"")], theirs=places_of(shown, "input")
    )


def logprobs_of(body: Mapping[str, Any]) -> tuple[bool, int]:
    """Whether texts have logprobs, and how many of the most probable tokens."""
    include = get(body, "include", list, "a list", [])
    for n, one in enumerate(include):
        if one not in INCLUDABLE:
            raise InvalidArgument(f"include[{n}]", f"may be {', '.join(INCLUDABLE)}")
    top = get(body, "top_logprobs", int, "an integer", 0)
    if top < 0:
        raise InvalidArgument("top_logprobs", f"must be at least 0; it is {top}")
    if top and LOGPROBS not in include:
        raise InvalidArgument("top_logprobs", f"is allowed only with {LOGPROBS} in include")
    return LOGPROBS in include, top


def text_of(body: Mapping[str, Any]) -> Any:
    """The format of the text; None: it is free."""
    given = get(body, "text", dict, "an object", {})
    check_names([name for name in given if given[name] is not None], {"format", "verbosity"}, "text.")
    if given.get("verbosity") not in (None, "medium"):
        raise InvalidArgument("text.verbosity", "must be medium: no model here has it")
    return format_in(given, "text.format", flat=True)


def has_no_effort(body: Mapping[str, Any]) -> bool:
    """Whether the body asks for no thoughts. Raises InvalidArgument for a length of thoughts."""
    given = get(body, "reasoning", dict, "an object", {})
    for name, value in given.items():
        if value is not None and (name, value) != ("effort", "none"):
            check_names([name], {"effort", "summary", "generate_summary"}, "reasoning.")
            why = "where a chat template knows one, give it in chat_template_kwargs"
            raise InvalidArgument(f"reasoning.{name}", f"must be null{' or none' if name == 'effort' else ''}: {why}")
    return given.get("effort") is not None


def put_flat_tools(body: Mapping[str, Any], chat: Chat) -> None:
    """Adds the tools, whose functions have no object of their own here."""
    single = not get(body, "parallel_tool_calls", bool, "true or false", True)
    tools = get(body, "tools", list, "a list", [])
    chosen = flat_choice_of(body.get("tool_choice"))
    if not tools and (chosen.names or chosen.choice == TOOL_CHOICE_REQUIRED):
        raise InvalidArgument("tool_choice", "is allowed only with tools")
    put_functions([nested(tool) for tool in tools], chosen._replace(single=single or chosen.single), chat)


def nested(tool: Any) -> Any:
    """A tool in the shape of chats. The compiler of forms checks it."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool if not isinstance(tool, dict) else {"type": tool.get("type")}
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def flat_choice_of(given: Any) -> Chosen:
    """The choice of a body."""
    if not isinstance(given, dict):
        return choice_of(given)
    if given.get("type") != "allowed_tools":
        return Chosen(TOOL_CHOICE_REQUIRED, [flat_name_in(given, "tool_choice")], single=True)
    check_names(given, {"type", "mode", "tools"}, "tool_choice.")
    mode = get(given, "mode", str, "a string", None, "tool_choice.mode")
    if mode not in {"auto", "required"}:
        raise InvalidArgument("tool_choice.mode", "must be auto or required")
    tools = get(given, "tools", list, "a list", [], "tool_choice.tools")
    if not tools:
        raise InvalidArgument("tool_choice.tools", "must be a list of at least one function")
    return Chosen(CHOICES[mode], [flat_name_in(tool, f"tool_choice.tools[{n}]") for n, tool in enumerate(tools)])


def flat_name_in(given: Any, field: str) -> str:
    """The name in {"type": "function", "name": ..}."""
    if not isinstance(given, dict):
        raise InvalidArgument(field, "must be an object")
    check_names(given, {"type", "name"}, f"{field}.")
    if given.get("type") != "function":
        raise InvalidArgument(f"{field}.type", "must be 'function'")
    return needed(given, "name", field)


def fields_of(body: Mapping[str, Any], defaults: Mapping[str, float], store: bool) -> dict[str, Any]:
    """The members of the response's object that say how it was asked for, with those that the body does not have."""
    numbers = [one for one in SAMPLING.values() if one.name in THEIRS and one.kind == "number"]
    may_be_null = ("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key", "user")
    return {
        **{name: body.get(name) for name in (*may_be_null, "safety_identifier")},
        **{one.name: body.get(one.name, defaults.get(one.name, one.default)) for one in numbers},
        "background": False,
        "max_tool_calls": None,
        "metadata": body.get("metadata", {}),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "reasoning": {"effort": None, "summary": None},
        "service_tier": body.get("service_tier", "default"),
        "store": store,
        "text": {"format": {"type": "text"}, **{k: v for k, v in body.get("text", {}).items() if v is not None}},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": [{**TOOL, **tool} for tool in body.get("tools", []) if isinstance(tool, dict)],
        "top_logprobs": body.get("top_logprobs", 0),
        "truncation": "disabled",
    }
