"""The sampling parameters of a request: the one table of their types, limits and defaults, with a sentence on each.

The endpoint checks requests by it and makes the message for the ranks. The fields of the OpenAI door with their
description and page come from it, and so does the table of docs/call.md. The messages (orca.proto, sampling.proto), the
client's arguments and the options of `orca generate` name the same parameters: tests/test_sampling_parameters.py.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from orca.v1.sampling_pb2 import SamplingParams

from .scores import MAX_TOP

MAX_BIASES = 1024  # entries of logit_bias
MAX_FORM_BYTES = 1 << 16  # of a schema, a regular expression or a grammar
GREEDY_BELOW = 1e-5  # smaller divisors make logits overflow float32; the draw is the greedy one by then anyway

Kind = Literal["number", "count", "seed", "biases", "flag", "form"]
ANY: Mapping[Kind, str] = {
    "seed": "64 bits",
    "flag": "true or false",
    "form": f"at most {MAX_FORM_BYTES} bytes",
}  # the values of a kind without limits


class Range(NamedTuple):
    """The numbers from `low` to `high`, both included unless `above`; None: no limit on that side."""

    low: float | None = None
    high: float | None = None
    above: bool = False  # `low` itself is too low

    def holds(self, value: float) -> bool:
        """Whether the number is inside. NaN never is, where there is a limit."""
        if self.low is not None and not (self.low < value if self.above else self.low <= value):
            return False
        return self.high is None or value <= self.high

    def __str__(self) -> str:
        """The limits as the end of "must be ..."; empty without limits."""
        if self.low is not None and self.high is not None and not self.above:
            return f"between {self.low:g} and {self.high:g}"
        low = "" if self.low is None else f"{'above' if self.above else 'at least'} {self.low:g}"
        return " and ".join(filter(None, [low, "" if self.high is None else f"at most {self.high:g}"]))


class Parameter(NamedTuple):
    """One parameter. A value that equals its default changes nothing."""

    name: str
    kind: Kind
    limits: Range  # of a number or a count, and of each of the biases
    default: float | str  # a number, or in words
    sentence: str
    drawn: bool = False  # a part of the draw, so that it changes nothing for a greedy request
    by_model: bool = False  # a model's generation_config.json may give it, for OpenAI's methods


def by_name(*parameters: Parameter) -> Mapping[str, Parameter]:
    return {parameter.name: parameter for parameter in parameters}


# How a token is chosen: the fields of orca.v1.Sampling, in its order.
SAMPLING = by_name(
    Parameter(
        "temperature",
        "number",
        Range(0, 100),
        0,
        "Divides the logits before the draw. 0 is greedy: always the most probable token.",
        by_model=True,
    ),
    Parameter(
        "top_k",
        "count",
        Range(1),
        "all",
        "Draw among this number of the most probable tokens.",
        drawn=True,
        by_model=True,
    ),
    Parameter(
        "top_p",
        "number",
        Range(0, 1, above=True),
        1,
        "Draw among the most probable tokens that together reach this share.",
        drawn=True,
        by_model=True,
    ),
    Parameter("seed", "seed", Range(), "made from the request id", "The same seed gives the same text.", drawn=True),
    Parameter(
        "min_p",
        "number",
        Range(0, 1),
        0,
        "Drop tokens less probable than this share of the most probable one.",
        drawn=True,
        by_model=True,
    ),
    Parameter(
        "repetition_penalty",
        "number",
        Range(0, 100, above=True),
        1,
        "Divides the logits of the tokens of prompt and output where they are above 0, and multiplies them elsewhere.",
        by_model=True,
    ),
    Parameter(
        "presence_penalty", "number", Range(-2, 2), 0, "Subtracted once from the logit of each token of the output."
    ),
    Parameter(
        "frequency_penalty",
        "number",
        Range(-2, 2),
        0,
        "Subtracted from a token's logit for each time that it is in the output.",
    ),
    Parameter(
        "logit_bias",
        "biases",
        Range(-100, 100),
        "none",
        f"Token id to a number that is added to the token's logit; at most {MAX_BIASES} tokens.",
    ),
)

# The logprobs that come with the tokens: fields of orca.v1.GenerateRequest.
LOGPROBS = by_name(
    Parameter("logprobs", "flag", Range(), "false", "Each token with its logprob."),
    Parameter(
        "top_logprobs",
        "count",
        Range(high=MAX_TOP),
        0,
        "This number of the most probable tokens at each place, and each token's logprob.",
    ),
    Parameter(
        "prompt_logprobs",
        "flag",
        Range(),
        "false",
        "The prompt's tokens with their logprobs, in the message of token 0.",
    ),
)

# The forms of an answer: fields of orca.v1.GenerateRequest, of which a request has one. The ranks get one grammar.
FORMS = by_name(
    Parameter("json_schema", "form", Range(), "none", "The answer is JSON that this schema describes."),
    Parameter("regex", "form", Range(), "none", "The whole answer matches this regular expression."),
    Parameter("grammar", "form", Range(), "none", "The answer follows this grammar, in llguidance's variant of Lark."),
)
EVERY = {**SAMPLING, **LOGPROBS, **FORMS}


def scores_prompt(sampling: SamplingParams) -> bool:
    """Whether the tokens of the prompt are to have logprobs: each of them is computed."""
    return sampling.prompt_logprobs


def markdown(parameters: Iterable[Parameter] = EVERY.values()) -> str:
    """The table of docs/call.md."""
    rows = [
        f"| `{one.name}` | {str(one.limits) or ANY[one.kind]} | {one.default} | {one.sentence} |" for one in parameters
    ]
    return "\n".join(["| parameter | limits | absent | |", "| --- | --- | --- | --- |", *rows])
