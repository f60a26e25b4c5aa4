"""The fields of OpenAI's `POST /v1/completions`, and which of them Orca honours: the one list of them.

`completion_request` refuses what is not here, `openapi` describes it, docs/openai.md shows it as a table, and a test
holds the list against the types of the `openai` package.
"""

from typing import Any, Literal, NamedTuple

Support = Literal["supported", "refused", "ours"]

NUMBER, INTEGER, BOOLEAN, STRING = {"type": "number"}, {"type": "integer"}, {"type": "boolean"}, {"type": "string"}
STRINGS = {"oneOf": [STRING, {"type": "array", "items": STRING}]}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


class Field(NamedTuple):
    """One field of the body: whether it is honoured, how, and its type as JSON Schema."""

    name: str
    support: Support  # ours: OpenAI has no such field of completions
    how: str
    schema: dict[str, Any]


FIELDS = (
    Field(
        "model",
        "supported",
        "The name that `GET /v1/models` tells. Absent: whichever is served; where it tells several, one must be named.",
        STRING,
    ),
    Field(
        "prompt",
        "supported",
        "Text, token ids, or a list of either. null is refused: a prompt is needed.",
        {"oneOf": [STRING, {"type": "array", "items": STRING}, IDS, {"type": "array", "items": IDS}]},
    ),
    Field(
        "best_of",
        "supported",
        "So many are generated for each prompt, and the `n` with the highest mean logprob are returned, the best "
        "first. At least `n`; more than `n` cannot be streamed. All of them are counted in `usage`.",
        {"type": "integer", "minimum": 1},
    ),
    Field("echo", "supported", "The prompt comes before each text, with `logprobs` its logprobs too.", BOOLEAN),
    Field(
        "frequency_penalty",
        "supported",
        "From -2 to 2, over the tokens generated so far.",
        {"type": "number", "minimum": -2, "maximum": 2},
    ),
    Field(
        "logit_bias",
        "supported",
        "Token id to a number from -100 to 100, at most 1024 of them.",
        {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    ),
    Field(
        "logprobs",
        "supported",
        "0 to 20 (OpenAI: 5): the logprob of each token, and as many of the most probable ones in `top_logprobs`.",
        {"type": "integer", "minimum": 0, "maximum": 20},
    ),
    Field(
        "max_tokens",
        "supported",
        "16 when absent. 0 with `echo`: the prompt alone.",
        {"type": "integer", "minimum": 0, "default": 16},
    ),
    Field("n", "supported", "Choices for each prompt.", {"type": "integer", "minimum": 1, "default": 1}),
    Field(
        "presence_penalty",
        "supported",
        "From -2 to 2, over the tokens generated so far.",
        {"type": "number", "minimum": -2, "maximum": 2},
    ),
    Field(
        "seed",
        "supported",
        "The same seed gives the same text. The first choice draws with the seed itself, each other one with a seed "
        "made of it.",
        INTEGER,
    ),
    Field("stop", "supported", "Up to 16 strings (OpenAI: 4). They are not part of the text.", STRINGS),
    Field("stream", "supported", "Server-sent events, with `data: [DONE]` at the end.", BOOLEAN),
    Field(
        "stream_options",
        "supported",
        "Only with `stream`. `include_usage`: a last chunk with the usage. `include_obfuscation` must be false.",
        {
            "type": "object",
            "properties": {"include_usage": BOOLEAN, "include_obfuscation": {"const": False}},
            "additionalProperties": False,
        },
    ),
    Field("suffix", "refused", "No model here inserts text. An empty string is accepted.", {"const": ""}),
    Field(
        "temperature",
        "supported",
        "From 0 (greedy) to 100 (OpenAI: 2); 1 when absent.",
        {"type": "number", "minimum": 0, "maximum": 100, "default": 1},
    ),
    Field(
        "top_p",
        "supported",
        "Above 0, at most 1.",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "default": 1},
    ),
    Field("user", "supported", "Goes to the request's span as `orca.user`.", STRING),
    Field(
        "metadata",
        "ours",
        "Up to 16 strings by name (64 characters; values 512), as OpenAI's other methods have it. They go to the "
        "request's span as `orca.metadata.NAME`.",
        {"type": "object", "additionalProperties": STRING, "maxProperties": 16},
    ),
    Field("store", "ours", "false alone: nothing is stored. true is refused.", {"const": False}),
    Field("top_k", "ours", "Draw among so many of the most probable tokens. -1: all.", INTEGER),
    Field(
        "min_p",
        "ours",
        "Drop tokens less probable than this share of the most probable one.",
        {"type": "number", "minimum": 0, "maximum": 1},
    ),
    Field(
        "repetition_penalty",
        "ours",
        "Above 0, at most 100, over the tokens of prompt and output; 1 changes nothing.",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
    ),
    Field("stop_token_ids", "ours", "Generation ends with the first of these tokens.", IDS),
    Field("ignore_eos", "ours", "Go on after the model's end-of-sequence token.", BOOLEAN),
    Field(
        "detach_grace",
        "ours",
        "Seconds for which the request lives on when its connection breaks, so that it can be taken up again.",
        {"type": "number", "minimum": 0, "default": 0},
    ),
)

NAMES = frozenset(field.name for field in FIELDS)


def markdown() -> str:
    """The table of docs/openai.md."""
    rows = [f"| `{field.name}` | {field.support} | {field.how} |" for field in FIELDS]
    return "\n".join(["| field | | |", "| --- | --- | --- |", *rows])
