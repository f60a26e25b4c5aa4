"""`response_format`, which holds an answer to JSON: the same for completions and chats."""

import json
from collections.abc import Mapping
from typing import Any

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
SCHEMA = "response_format.json_schema.schema"  # the caller's name of our `json_schema`
KINDS = ("text", "json_object", "json_schema")


def schema_of(body: Mapping[str, Any]) -> str | None:
    """The schema that the answer follows, as JSON; None for text."""
    wanted = get(body, "response_format", dict, "an object", None)
    if wanted is None:
        return None
    field = "response_format.type"
    kind = get(wanted, "type", str, "a string", None, field)
    if kind not in KINDS:
        problem = "is missing" if kind is None else f"is {echo(kind, 20)!r}"
        raise InvalidArgument(field, f"{problem}; it may be {', '.join(KINDS)}")
    check_names(wanted, {"type", "json_schema"} if kind == "json_schema" else {"type"}, "response_format.")
    if kind == "text":
        return None
    if kind == "json_object":
        return '{"type": "object"}'
    field = "response_format.json_schema"
    given = get(wanted, "json_schema", dict, "an object", None, field)
    if given is None:
        raise InvalidArgument(field, "is missing")
    check_names(given, {"name", "schema", "strict", "description"}, f"{field}.")
    for name in ("name", "description"):
        get(given, name, str, "a string", "", f"{field}.{name}")
    get(given, "strict", bool, "true or false", False, f"{field}.strict")
    schema = get(given, "schema", dict, "an object", None, SCHEMA)
    if schema is None:
        raise InvalidArgument(SCHEMA, "is missing")
    return json.dumps(schema)


def is_strict(body: Mapping[str, Any]) -> bool:
    """Whether each keyword of a schema, which was read, must be enforced."""
    return bool((body.get("response_format") or {}).get("json_schema", {}).get("strict"))
