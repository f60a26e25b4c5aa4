"""The tools of a chat: functions that its answer may call, and calls that its messages tell; checked."""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

from orca.v1.orca_pb2 import TOOL_CHOICE_NONE, TOOL_CHOICE_REQUIRED, Chat, ToolChoice
from orca_common import strict_json
from orca_common.errors import FailedPrecondition, echo
from orca_common.sampling import MAX_FORM_BYTES

from ..text.tool_calls import Syntax
from .cut_json import closed
from .tool_grammar import Function, ToolForm

MAX_TOOLS = 128  # of one request, as OpenAI has it
MAX_CALLS = 128  # of one message
MAX_DEPTH = 64  # of JSON that is given as a text: objects and lists in one another
OBJECT_DEPTH = 512  # of arguments in an answer: Python reads and writes JSON by recursion, and has some 900 levels left
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
MORE_MEMBERS = frozenset(  # keywords that allow or list further members
    [
        *("additionalProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref", "$dynamicRef"),
        *("if", "dependentSchemas", "dependencies"),
    ]
)
TOOLS = "chat.tools"


class Error(Protocol):
    """Makes the error of a field; place: inside of it, as "[0].function"."""

    def __call__(self, field: str, problem: str, *, place: str = "") -> Exception: ...


@dataclass(frozen=True)
class Tools:
    """The checked tools of a request."""

    syntax: Syntax  # of the model
    functions: list[Function]  # that may be called; none: the model sees the tools, and may not call them
    required: bool
    single: bool

    def form(self, schema: dict[str, Any] | bool | None) -> ToolForm:
        """Makes the form of the answer. schema: of its text, where that is JSON, as `kept` returns it."""
        return {
            "syntax": self.syntax.name,
            "functions": self.functions,
            "required": self.required,
            "single": self.single,
            "schema": schema,
        }


def tools_of(chat: Chat, syntax: Syntax, error: Error) -> Tools:
    """The tools of a chat that has some. Raises what `error` makes."""
    given = tools_in(chat.tools, error)
    functions = [function_of(tool, n, error) for n, tool in enumerate(given)]
    names = [function["name"] for function in functions]
    for n, name in enumerate(names):
        if name in names[:n]:
            raise error(TOOLS, f"is {name!r}, as that of another function", place=f"[{n}].function.name")
    for name in chat.tool_names:
        if name not in names:
            raise error("chat.tool_names", f"names {echo(name, 64)!r}, which is not among the tools")
    if chat.tool_choice not in ToolChoice.values():
        raise error("chat.tool_choice", f"is {chat.tool_choice}, which this release does not know")
    none = chat.tool_choice == TOOL_CHOICE_NONE
    allowed = set(chat.tool_names or names)
    return Tools(
        syntax,
        [] if none else [function for function in functions if function["name"] in allowed],
        required=chat.tool_choice == TOOL_CHOICE_REQUIRED,
        single=chat.one_tool_call,
    )


def tools_in(raw: str, error: Error) -> list[dict[str, Any]]:
    given = json_in(raw, TOOLS, error)
    if not isinstance(given, list) or not given:
        raise error(TOOLS, "must be a list of at least one tool")
    tools = cast(list[Any], given)
    if len(tools) > MAX_TOOLS:
        raise error(TOOLS, f"has {len(tools)} tools; at most {MAX_TOOLS} are allowed")
    return tools


def function_of(tool: Any, n: int, error: Error) -> Function:
    """The function of a tool, which is the n-th."""
    check = Members(TOOLS, error)
    check.type(tool, f"[{n}]")
    function = check.object(tool, f"[{n}].function", {"name", "description", "parameters", "strict"})
    place = f"[{n}].function"
    name = check.text(function, f"{place}.name")
    if not NAME.fullmatch(name):
        raise error(TOOLS, "may hold only letters, digits, _ and -, at most 64 of them", place=f"{place}.name")
    if not isinstance(function.get("description") or "", str):
        raise error(TOOLS, "must be a string", place=f"{place}.description")
    strict = function.get("strict") or False
    if not isinstance(strict, bool):
        raise error(TOOLS, "must be true or false", place=f"{place}.strict")
    schema = function.get("parameters")
    if schema is None:
        return Function(at=n, name=name, strict=strict, parameters=NO_PARAMETERS)
    size, place = len(json.dumps(schema, ensure_ascii=False).encode()), f"{place}.parameters"
    if size > MAX_FORM_BYTES:
        raise error(TOOLS, f"has {size} bytes; at most {MAX_FORM_BYTES} are allowed", place=place)
    if not isinstance(schema, dict):
        raise error(TOOLS, "must be a JSON schema of an object", place=place)
    if schema.get("type", "object") != "object":
        raise error(TOOLS, 'must be "object": arguments have names', place=f"{place}.type")
    if "x-guidance" in schema:
        raise error(TOOLS, "is not for tools", place=f"{place}.x-guidance")
    return Function(at=n, name=name, strict=strict, parameters=closed_by_its_list({"type": "object", **schema}))


def closed_by_its_list(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of arguments without others than those that it lists, unless it says that there may be others."""
    listed, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, dict) or schema.keys() & MORE_MEMBERS:
        return schema
    if not isinstance(required, list) or not all(
        isinstance(name, str) and name in listed for name in cast(list[Any], required)
    ):
        return schema  # it needs a member that it does not list
    return {**schema, "additionalProperties": False}


def calls_of(raw: str, n: int, error: Error) -> list[dict[str, Any]]:
    """The calls that the n-th message tells, for a template: their arguments are objects."""
    field, place = "chat.messages", f"[{n}].tool_calls"
    check = Members(field, error)
    calls = json_in(raw, field, error, place)
    if not isinstance(calls, list) or not calls:
        raise error(field, "must be a list of at least one call", place=place)
    if len(calls) > MAX_CALLS:
        raise error(field, f"has {len(calls)} calls; at most {MAX_CALLS} are allowed", place=place)
    return [call_of(call, f"{place}[{k}]", check) for k, call in enumerate(cast(list[Any], calls))]


def call_of(call: Any, place: str, check: "Members") -> dict[str, Any]:
    """One call with its arguments as an object."""
    check.type(call, place, {"id"})
    check.text(call, f"{place}.id")
    function = check.object(call, f"{place}.function", {"name", "arguments"})
    check.text(function, f"{place}.function.name")
    arguments, place = function.get("arguments") or {}, f"{place}.function.arguments"  # some clients give "" for none
    if isinstance(arguments, str):
        arguments = json_in(whole(arguments), check.field, check.error, place)
    if not isinstance(arguments, dict):
        raise check.error(check.field, "must be an object of JSON", place=place)
    return {**call, "function": {**function, "arguments": arguments}}


def whole(arguments: str) -> str:
    """The JSON of a call's arguments. Those of an answer that was cut are closed where they end."""
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        with suppress(ValueError):
            return closed(arguments)
    return arguments


def object_of(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object. Raises FailedPrecondition for those that cannot be written as one: JSON can
    spell what its writer refuses."""
    problem = "are nested too deeply"
    try:
        found = json.loads(whole(arguments.strip() or "{}"))
        if not deeper(found, OBJECT_DEPTH):
            json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
            return found
    except RecursionError:
        pass
    except ValueError:
        problem = "have a number that is too large, or half of a character"
    raise FailedPrecondition(f"the arguments of a call cannot be given as an object: they {problem}")


class Members:
    """Checks the members of objects inside of one field."""

    def __init__(self, field: str, error: Error) -> None:
        self.field, self.error = field, error

    def type(self, given: Any, place: str, more: Iterable[str] = ()) -> None:
        """An object of the type function."""
        self._known(given, place, {"type", "function", *more})
        kind = given.get("type")
        if kind != "function":
            problem = "is missing" if kind is None else f"is {echo(str(kind), 20)!r}"
            raise self.error(self.field, f"{problem}; only 'function' is supported", place=f"{place}.type")

    def object(self, parent: Mapping[str, Any], place: str, known: set[str]) -> dict[str, Any]:
        """A member that is an object with these members, by the last name of its place."""
        found = parent.get(place.rpartition(".")[2])
        if found is None:
            raise self.error(self.field, "is missing", place=place)
        self._known(found, place, known)
        return found

    def text(self, parent: Mapping[str, Any], place: str) -> str:
        """A member that is a text and must be there."""
        found = parent.get(place.rpartition(".")[2])
        if not isinstance(found, str):
            raise self.error(self.field, "is missing" if found is None else "must be a string", place=place)
        return found

    def _known(self, given: Any, place: str, known: set[str]) -> None:
        if not isinstance(given, dict):
            raise self.error(self.field, "must be an object", place=place)
        for name, value in cast(dict[str, Any], given).items():
            if name not in known and value is not None:
                raise self.error(self.field, "is not known to Orca", place=f"{place}.{echo(name, 64)}")


def json_in(raw: str, field: str, error: Error, place: str = "") -> Any:
    """The value of a JSON text whose characters can be encoded. It is not too deep for those who walk it."""
    try:
        value = strict_json.loads(raw)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise error(field, "not valid Unicode: it holds a lone surrogate", place=place) from None
    except (ValueError, RecursionError) as wrong:
        raise error(field, f"is not JSON ({wrong})", place=place) from None
    if deeper(value, MAX_DEPTH):
        raise error(field, f"is too deep: at most {MAX_DEPTH} objects and lists may be in one another", place=place)
    return value


def deeper(value: Any, levels: int) -> bool:
    """Whether more objects and lists are in one another than `levels`."""
    layer = [value]
    for _ in range(levels):
        inner = [one for one in layer if isinstance(one, dict | list)]
        layer = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
        if not layer:
            return False
    return any(isinstance(one, dict | list) for one in layer)
