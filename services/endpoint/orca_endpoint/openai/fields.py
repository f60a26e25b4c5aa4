"""Fields of bodies in OpenAI's shape, and those that several methods have.

Each method has one list of its fields. Its reader refuses a field that is not there, `openapi` describes the list,
docs/openai.md shows it as a table, and a test holds it against the types of the `openai` package.
"""

import json
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from orca_common.priorities import CLASSES, Priority
from orca_common.sampling import MAX_BIASES, SAMPLING, Parameter

from ..requests.tools import NAME

Support = Literal["supported", "refused", "ours"]

NUMBER, INTEGER, BOOLEAN, STRING = {"type": "number"}, {"type": "integer"}, {"type": "boolean"}, {"type": "string"}
STRINGS = {"oneOf": [STRING, {"type": "array", "items": STRING}]}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
FUNCTION_NAME = STRING | {"pattern": f"^{NAME.pattern}$"}


def thing(required: Iterable[str] = (), **properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object."""
    return {"type": "object", "required": list(required), "properties": properties}


def closed(required: Iterable[str], **properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has no other properties."""
    return thing(required, **properties) | {"additionalProperties": False}


class Field(NamedTuple):
    """One field of the body: whether it is honoured, how, and its type as JSON Schema."""

    name: str
    support: Support  # ours: OpenAI's method has no such field
    how: str
    schema: dict[str, Any]


class Fixed(NamedTuple):
    """A field that is accepted at some values only, which change nothing; at none but null without any."""

    name: str
    values: tuple[Any, ...]
    why: str

    def field(self, support: Support = "refused") -> Field:
        """The field in the list of a method."""
        sentence = f"{self.why[0].upper()}{self.why[1:]}."
        accepted = " and ".join(f"`{json.dumps(value)}`" for value in self.values)
        verb = " are accepted." if len(self.values) > 1 else " is accepted."
        return Field(
            self.name, support, sentence + (f" {accepted}{verb}" if accepted else ""), {"enum": [*self.values]}
        )


CACHES = tuple(
    Fixed(name, (), "the engine's policy says what is cached")
    for name in ("prompt_cache_options", "prompt_cache_retention")
)

# Sampling parameters that OpenAI has, and what is special about a parameter at this door.
THEIRS = {"frequency_penalty", "logit_bias", "presence_penalty", "seed", "temperature", "top_p"}
BY_MODEL = "Absent: what the model's `generation_config.json` says"
NOTES = {
    "temperature": "OpenAI's limit is 2.",
    "top_k": "-1: all.",
    "seed": "The first choice draws with the seed itself, each other one with a seed made of it.",
}


def sampling_field(parameter: Parameter) -> Field:
    """The field of a sampling parameter, by its table."""
    name, limits = parameter.name, str(parameter.limits)
    absent = f"{BY_MODEL}{', or 1' if name == 'temperature' else ''}." if parameter.by_model else None
    sentences = [parameter.sentence, limits and f"{limits[0].upper()}{limits[1:]}.", absent, NOTES.get(name)]
    return Field(
        name, "supported" if name in THEIRS else "ours", " ".join(filter(None, sentences)), schema_of(parameter)
    )


def schema_of(parameter: Parameter) -> dict[str, Any]:
    limits = parameter.limits
    bounds = {"exclusiveMinimum" if limits.above else "minimum": limits.low, "maximum": limits.high}
    match parameter.kind:
        case "number":
            return NUMBER | bounds | ({} if parameter.by_model else {"default": parameter.default})
        case "biases":
            return {"type": "object", "additionalProperties": NUMBER | bounds, "maxProperties": MAX_BIASES}
        case _:  # -1 is a count, and a seed may be negative
            return INTEGER


MODEL = Field(
    "model",
    "supported",
    "A name of `GET /v1/models`. Absent: the model itself; where releases share an address, one must be named.",
    STRING,
)
STOP = Field("stop", "supported", "Up to 16 strings (OpenAI: 4). They are not part of the text.", STRINGS)
STREAM = (
    Field("stream", "supported", "Server-sent events, with `data: [DONE]` at the end.", BOOLEAN),
    Field(
        "stream_options",
        "supported",
        "Only with `stream`. `include_usage`: a last chunk with the usage. `continuous_usage_stats`: the usage so far "
        "in each chunk. `include_obfuscation` must be false.",
        {
            "type": "object",
            "properties": {
                "include_usage": BOOLEAN,
                "continuous_usage_stats": BOOLEAN,
                "include_obfuscation": {"const": False},
            },
            "additionalProperties": False,
        },
    ),
)
USER = Field("user", "supported", "Goes to the request's span as `orca.user`.", STRING)
SAMPLED = tuple(sampling_field(parameter) for parameter in SAMPLING.values())
METADATA = Field(
    "metadata",
    "ours",
    "Up to 16 strings by name (64 characters; values 512), as OpenAI's other methods have it. They go to the "
    "request's span as `orca.metadata.NAME`.",
    {"type": "object", "additionalProperties": STRING, "maxProperties": 16},
)
TIERS = {"auto": 0, "default": Priority.NORMAL, "flex": Priority.LOW, "priority": Priority.HIGH}
ONE_TIER = {"service_tier": ((*TIERS,), "no other is there")}
SERVICE_TIER = Field(
    "service_tier",
    "supported",
    'The class of the request in OpenAI\'s words: `"priority"` is `high`, `"flex"` is `low`, `"default"` is `normal`; '
    '`"auto"` says nothing. Not with another `priority`.',
    {"enum": [*TIERS]},
)
STORE = Field("store", "ours", "false alone: nothing is stored. true is refused.", {"const": False})
OURS = (
    Field("stop_token_ids", "ours", "Generation ends with the first of these tokens.", IDS),
    Field("ignore_eos", "ours", "Go on after the model's end-of-sequence token.", BOOLEAN),
    Field(
        "detach_grace",
        "ours",
        "Seconds for which the request lives on when its connection breaks, so that it can be taken up again.",
        {"type": "number", "minimum": 0, "default": 0},
    ),
    Field(
        "priority",
        "ours",
        "`urgent`, `high`, `normal` or `low`: who goes first in the queue. With API keys, up to the class of the key.",
        {"enum": [*CLASSES], "default": "normal"},
    ),
    Field(
        "min_tokens",
        "ours",
        "Tokens that an answer has at least: before, no token is chosen that would end it. Above 0 not with `stop`, a "
        "form or tools.",
        INTEGER | {"minimum": 0, "default": 0},
    ),
    Field(
        "skip_special_tokens",
        "ours",
        "false: special tokens have a text in the answer, but for the one that ends it.",
        BOOLEAN | {"default": True},
    ),
)


def markdown(fields: Iterable[Field], known: Iterable[Field] = ()) -> str:
    """The table of a method's fields in docs/openai.md; those that completions have alike (`known`) by name alone."""
    hows = {field.name: field.how for field in known}
    rows, alike = ["| field | | |", "| --- | --- | --- |"], dict[str, list[str]]()
    for field in fields:
        if hows.get(field.name) == field.how:
            alike.setdefault(field.support, []).append(f"`{field.name}`")
        else:
            rows.append(f"| `{field.name}` | {field.support} | {field.how} |")
    names = "; ".join(f"{support}: {', '.join(alike[support])}" for support in alike)
    return "\n".join(rows) + (f"\n\nAs for [a completion](#fields-of-a-completion), {names}." if names else "")
