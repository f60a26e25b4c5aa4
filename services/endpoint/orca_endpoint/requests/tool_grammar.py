"""The grammar of an answer to a request with tools, in llguidance's variant of Lark.

A call is bound from its first character on, its arguments by the schema of the function that it names. Text is free,
but holds no trigger of a call.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, TypedDict

from orca_common.forms import JSON_OPTIONS

from ..text.tool_calls import SYNTAXES, Syntax

ANY = "(?s:.*)"


class Function(TypedDict):
    """One function that may be called."""

    at: int  # its place in the request's list of tools
    name: str
    strict: bool  # its caller wants a refusal where an answer cannot be held to the schema
    parameters: dict[str, Any]  # a JSON schema of an object


class ToolForm(TypedDict):
    """The form of an answer that may call functions: the message for the compiler's process."""

    syntax: str  # a name of SYNTAXES
    functions: list[Function]
    required: bool  # a call must come
    single: bool  # one call at most
    schema: dict[str, Any] | bool | None  # of the text, where it is JSON


def tool_grammar(form: ToolForm, token_of: Callable[[str], int | None]) -> str:
    """The grammar. token_of: the token that llguidance knows a mark by, if it is not a plain text to it."""
    syntax = SYNTAXES[form["syntax"]]
    tokens = {mark: i for mark in syntax.marks if (i := token_of(mark)) is not None}
    lines = ["start: " + " | ".join(starts(form, syntax, tokens))]
    lines += [f"TEXT: /{ANY}/ & ~/{'' if syntax.leads else ANY}{escaped(syntax.trigger)}{ANY}/"]
    if form["schema"] is not None:
        lines += [f"answer: {as_json(form['schema'])}"]
    if not form["functions"]:
        return "\n".join(lines)
    trigger, gap = syntax.trigger, " GAP" if syntax.name == "mistral" else ""  # some tokenizers put a space there
    lines += [
        f"pre[lazy]: /{ANY}{escaped(trigger)}/",
        "GAP: / ?/",
        f"calls:{gap} {spelled(syntax.first[len(trigger) :], tokens)} call{more(form, syntax, tokens)}"
        f" {spelled(syntax.last, tokens)}",
        "call: " + " | ".join(f"call_{n}" for n in range(len(form["functions"]))),
    ]
    for n, function in enumerate(form["functions"]):
        head = spelled(function["name"] + syntax.middle, tokens)
        lines += [f"call_{n}: {head} {as_json(function['parameters'])}"]
    return "\n".join(lines)


def starts(form: ToolForm, syntax: Syntax, tokens: dict[str, int]) -> Iterable[str]:
    """The ways in which an answer may begin."""
    text = "TEXT" if form["schema"] is None else "answer"
    if not form["required"]:
        yield text
    if not form["functions"]:
        return
    trigger = spelled(syntax.trigger, tokens)
    if form["schema"] is not None and syntax.trigger.startswith("{"):
        # The lexer takes the longest part that may come: in one piece, the trigger would take `{"` from all JSON.
        trigger = f'"{{" {json.dumps(syntax.trigger[1:])}'
    if form["required"] or form["schema"] is not None or syntax.leads:
        yield f"{trigger} calls"
    elif syntax.trigger in tokens:
        yield f"TEXT? {trigger} calls"
    else:
        yield "pre calls"  # the trigger ends the text lazily


def more(form: ToolForm, syntax: Syntax, tokens: dict[str, int]) -> str:
    if form["single"] or syntax.next is None:
        return ""
    return f" ({spelled(syntax.next, tokens)} call)*"


def spelled(text: str, tokens: dict[str, int]) -> str:
    """A text as a sequence of Lark: marks that are tokens by their ids, all else by its characters."""
    if not tokens:
        return json.dumps(text) if text else ""
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
    return " ".join(f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in parts if part)


def escaped(text: str) -> str:
    """A text inside of a regular expression of Lark."""
    return re.sub(r"([^\w\s<>\"_:])", r"\\\1", text)


def as_json(schema: dict[str, Any] | bool) -> str:
    """The schema as a rule, with our options. schema: as `kept` returns it."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {**JSON_OPTIONS, **schema.get("x-guidance", {})}}
    return f"%json {json.dumps(schema)}"
