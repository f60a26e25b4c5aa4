"""`response_format`, which holds an answer to JSON: that of completions and chats, and `text.format` of responses."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from orca_common.errors import InvalidArgument, echo

from .body import check_names, get
from .fields import BOOLEAN, STRING, Field, closed

FORMAT = {
    "oneOf": [
        {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "additionalProperties": False},
        closed(
            ["type", "json_schema"],
            type={"const": "json_schema"},
            json_schema=closed(
                ["name", "schema"], name=STRING, schema={"type": "object"}, strict=BOOLEAN, description=STRING
            ),
        ),
    ]
}
RESPONSE_FORMAT = Field(
    "response_format",
    "supported",
    "`text`; `json_object`: the answer is an object of JSON; `json_schema`: it is JSON that the schema describes. A "
    "keyword that cannot be enforced is refused with `strict`, and [left out](#schemas) without it. Not with "
    "`ignore_eos`.",
    FORMAT,
)
KINDS = ("text", "json_object", "json_schema")
ANY_OBJECT = '{"type": "object"}'  # the schema of an answer that is any object
MEMBERS = {"name", "schema", "strict", "description"}  # of a json_schema


class Format(NamedTuple):
    """The JSON that an answer is held to."""

    schema: str  # as JSON
    field: str  # the caller's name of it
    strict: bool  # each keyword must be enforced


def format_in(body: Mapping[str, Any], field: str, flat: bool = False) -> Format | None:
    """The format that a member of a body asks for; None: text. field: its name, with those before it.

    flat: the schema and its name stand beside the type, as responses have it. Raises InvalidArgument.
    """
    given = get(body, field.rpartition(".")[2], dict, "an object", None, field)
    if given is None:
        return None
    kind = get(given, "type", str, "a string", None, f"{field}.type")
    if kind not in KINDS:
        problem = "is missing" if kind is None else f"is {echo(kind, 20)!r}"
        raise InvalidArgument(f"{field}.type", f"{problem}; it may be {', '.join(KINDS)}")
    more = (MEMBERS if flat else {"json_schema"}) if kind == "json_schema" else set[str]()
    check_names(given, {"type", *more}, f"{field}.")
    if kind == "text":
        return None
    if kind == "json_object":
        return Format(ANY_OBJECT, f"{field}.type", False)
    if not flat:
        field += ".json_schema"
        given = get(given, "json_schema", dict, "an object", None, field)
        if given is None:
            raise InvalidArgument(field, "is missing")
        check_names(given, MEMBERS, f"{field}.")
    for name in ("name", "description"):
        get(given, name, str, "a string", "", f"{field}.{name}")
    strict = get(given, "strict", bool, "true or false", False, f"{field}.strict")
    schema = get(given, "schema", dict, "an object", None, f"{field}.schema")
    if schema is None:
        raise InvalidArgument(f"{field}.schema", "is missing")
    return Format(json.dumps(schema), f"{field}.schema", strict)
