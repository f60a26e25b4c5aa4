"""The form that a body gives its answer: `response_format`, or vLLM's `structured_outputs` and `guided_*`."""

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from orca_common.errors import InvalidArgument

from ..requests.schemas.patterns import spelled
from ..requests.tools import TOOLS
from .body import check_names, get, text
from .fields import STRING, Field, closed
from .response_format import ANY_OBJECT, RESPONSE_FORMAT, Format, format_in

CHOICES = {"type": "array", "items": STRING, "minItems": 1}
JSON = {"oneOf": [{"type": "object"}, STRING]}
MEMBERS = {"json": JSON, "regex": STRING, "choice": CHOICES, "grammar": STRING, "json_object": {"const": True}}
STRUCTURED = "structured_outputs"
FIELDS = (
    Field(
        STRUCTURED,
        "ours",
        "vLLM's name of a [form](call.md#answers-with-a-form) of the answer, one of: `json`, a schema, as with "
        "`strict`; `regex`; `choice`, a list of texts; `grammar`, in llguidance's variant of Lark; `json_object`. Not "
        "with `response_format` or `ignore_eos`.",
        closed([], **MEMBERS),
    ),
    *(
        Field(f"guided_{name}", "ours", f"The older name of `{STRUCTURED}.{name}`.", MEMBERS[name])
        for name in ("json", "regex", "choice", "grammar")
    ),
)


class Wanted(NamedTuple):
    """A form that is asked for."""

    kind: str  # a name of `sampling.FORMS`
    text: str
    field: str  # the caller's name of it
    loose: bool = False  # only as far as it can be enforced


def form_of(body: Mapping[str, Any]) -> Wanted | None:
    """The form of the answer; None for text. Raises InvalidArgument, also for several."""
    found = list[Wanted]()
    if (one := format_in(body, RESPONSE_FORMAT.name)) is not None:
        found.append(as_form(one))
    given = get(body, STRUCTURED, dict, "an object", {})
    check_names(given, MEMBERS, f"{STRUCTURED}.")
    found += [one for name in MEMBERS if (one := read_form(given, name, f"{STRUCTURED}.{name}")) is not None]
    for field in FIELDS[1:]:
        if (one := read_form({field.name: body.get(field.name)}, field.name, field.name)) is not None:
            found.append(one)
    if len(found) > 1:
        raise InvalidArgument(found[1].field, f"is not allowed with {found[0].field}: an answer has one form")
    if given == {} and STRUCTURED in body and not found:
        raise InvalidArgument(STRUCTURED, f"has none of {', '.join(MEMBERS)}")
    return found[0] if found else None


def as_form(wanted: Format) -> Wanted:
    """The form of an answer in JSON."""
    return Wanted("json_schema", wanted.schema, wanted.field, not wanted.strict)


def read_form(given: Mapping[str, Any], name: str, field: str) -> Wanted | None:
    """One form by its name; None: it is not there."""
    value = given.get(name)
    if value is None:
        return None
    match name.removeprefix("guided_"):
        case "json":
            if not isinstance(value, dict | str):
                raise InvalidArgument(field, "must be a JSON schema: an object, or its text")
            return Wanted("json_schema", value if isinstance(value, str) else json.dumps(value), field)
        case "json_object":
            if value is not True:
                raise InvalidArgument(field, "must be true")
            return Wanted("json_schema", ANY_OBJECT, field)
        case "choice":
            return Wanted("regex", choice(value, field), field)
        case kind:
            return Wanted(kind, text(get(given, name, str, "a string", "", field), field), field)


def choice(given: Any, field: str) -> str:
    """The regular expression of one of some texts."""
    if not isinstance(given, list) or not given or not all(isinstance(one, str) for one in given):
        raise InvalidArgument(field, "must be a list of at least one string")
    return "|".join("".join(map(spelled, map(ord, text(one, field)))) or "(?:)" for one in given)


def loose_in(form: Wanted | None) -> Collection[str]:
    """Our fields with schemas that need be followed only where they can be. Tools say it one by one."""
    return {TOOLS, "json_schema"} if form is not None and form.loose else {TOOLS}
