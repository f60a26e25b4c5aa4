"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat: from the body to the request.

The tools themselves are checked with the request, as those of gRPC.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from orca.v1.orca_pb2 import TOOL_CHOICE_NONE, TOOL_CHOICE_REQUIRED, TOOL_CHOICE_UNSPECIFIED, Chat, ToolChoice
from orca_common.errors import InvalidArgument, echo

from ..body import check_names, get, text
from ..fields import BOOLEAN, FUNCTION_NAME, STRING, Field, closed

IS_FUNCTION = {"const": "function"}
FUNCTION = closed(
    ["name"],
    name=FUNCTION_NAME,
    description=STRING,
    parameters={"type": "object"},
    strict=BOOLEAN,
)
NAMED = closed(["type", "function"], type=IS_FUNCTION, function=closed(["name"], name=STRING))
ALLOWED = closed(
    ["type", "allowed_tools"],
    type={"const": "allowed_tools"},
    allowed_tools=closed(
        ["mode", "tools"], mode={"enum": ["auto", "required"]}, tools={"type": "array", "items": NAMED}
    ),
)
CALL = closed(
    ["id", "type", "function"],
    id=STRING,
    type=IS_FUNCTION,
    function=closed(["name", "arguments"], name=STRING, arguments=STRING),
)
FIELDS = (
    Field(
        "tools",
        "supported",
        "Functions that the answer may call, up to 128, where the model's chat template takes tools in a way "
        "that is known here. The arguments follow `parameters`; a keyword that cannot be enforced is refused with "
        "`strict`, and [left out](#schemas) without it. Tools of type custom are refused. Not with `ignore_eos`.",
        {
            "type": "array",
            "maxItems": 128,
            "items": closed(["type", "function"], type=IS_FUNCTION, function=FUNCTION),
        },
    ),
    Field(
        "tool_choice",
        "supported",
        "`auto` (the default): text, calls, or calls after a text; `none`: text; `required`: calls; a function by its "
        "name: one call of it; `allowed_tools`: `auto` or `required` with some of the tools.",
        {"oneOf": [{"enum": ["none", "auto", "required"]}, NAMED, ALLOWED]},
    ),
    Field("parallel_tool_calls", "supported", "false: one call at most. Some models make one at most anyway.", BOOLEAN),
)
CHOICES: Mapping[str, ToolChoice] = {
    "none": TOOL_CHOICE_NONE,
    "auto": TOOL_CHOICE_UNSPECIFIED,
    "required": TOOL_CHOICE_REQUIRED,
}


class Chosen(NamedTuple):
    """The calls that a request allows."""

    choice: ToolChoice = TOOL_CHOICE_UNSPECIFIED  # whether functions are called
    names: Sequence[str] = ()  # of those that may be called; none: all
    single: bool = False  # one call at most


def put_tools(body: Mapping[str, Any], chat: Chat) -> None:
    """Adds the tools of a body to its chat."""
    single = not get(body, "parallel_tool_calls", bool, "true or false", True)
    given = get(body, "tools", list, "a list", [])
    chosen = choice_of(body.get("tool_choice"))
    if not given and "tool_choice" in body and chosen.choice != TOOL_CHOICE_NONE:
        raise InvalidArgument("tool_choice", "is allowed only with tools")
    put_functions(given, chosen._replace(single=single or chosen.single), chat)


def put_functions(tools: Sequence[Any], chosen: Chosen, chat: Chat) -> None:
    """Adds tools in the shape of chats to a chat, if there are any."""
    if tools:
        chat.tools = text(json.dumps(tools, ensure_ascii=False), "tools")
        chat.tool_choice, chat.one_tool_call = chosen.choice, chosen.single
        chat.tool_names.extend(chosen.names)


def choice_of(given: Any) -> Chosen:
    """The choice of a chat's body."""
    field = "tool_choice"
    if given is None:
        return Chosen()
    if isinstance(given, str):
        if given not in CHOICES:
            raise InvalidArgument(field, f"is {echo(given, 20)!r}; it may be {', '.join(CHOICES)}, or an object")
        return Chosen(CHOICES[given])
    if not isinstance(given, dict):
        raise InvalidArgument(field, f"must be {', '.join(CHOICES)}, or an object")
    choice = cast(dict[str, Any], given)
    if choice.get("type") != "allowed_tools":
        return Chosen(TOOL_CHOICE_REQUIRED, [name_in(choice, field)], single=True)
    check_names(choice, {"type", "allowed_tools"}, f"{field}.")
    field += ".allowed_tools"
    allowed = get(choice, "allowed_tools", dict, "an object", {}, field)
    check_names(allowed, {"mode", "tools"}, f"{field}.")
    mode = get(allowed, "mode", str, "a string", None, f"{field}.mode")
    if mode not in {"auto", "required"}:
        raise InvalidArgument(f"{field}.mode", "must be auto or required")
    tools = get(allowed, "tools", list, "a list", [], f"{field}.tools")
    if not tools:
        raise InvalidArgument(f"{field}.tools", "must be a list of at least one function")
    return Chosen(CHOICES[mode], [name_in(tool, f"{field}.tools[{n}]") for n, tool in enumerate(tools)])


def name_in(given: Any, field: str) -> str:
    """The name in {"type": "function", "function": {"name": ..}}."""
    if not isinstance(given, dict):
        raise InvalidArgument(field, "must be an object")
    kind = get(given, "type", str, "a string", None, f"{field}.type")
    if kind != "function":
        problem = "is missing" if kind is None else f"is {echo(kind, 20)!r}"
        raise InvalidArgument(f"{field}.type", f"{problem}; it may be 'function'")
    check_names(given, {"type", "function"}, f"{field}.")
    function = get(given, "function", dict, "an object", {}, f"{field}.function")
    check_names(function, {"name"}, f"{field}.function.")
    name = get(function, "name", str, "a string", None, f"{field}.function.name")
    if name is None:
        raise InvalidArgument(f"{field}.function.name", "is missing")
    return text(name, f"{field}.function.name")
