"""The body of OpenAI's `POST /v1/completions`: from JSON to requests.

A field that Orca cannot honour is refused by name, never ignored. `top_k`, `ignore_eos` and `stop_token_ids` are ours,
beyond OpenAI's fields.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orca.v1.orca_pb2 import GenerateRequest, Sampling, TokenIds
from orca_common.errors import InvalidArgument, echo

from .validation import HTTP_NAMES

UINT32 = (1 << 32) - 1
DEFAULT_MAX_TOKENS = 16  # OpenAI's default
DEFAULT_TEMPERATURE = 1.0

# Fields of OpenAI's that are accepted at their neutral values only.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
}
KNOWN = {
    *NEUTRAL,
    "ignore_eos",
    "logprobs",
    "max_tokens",
    "model",
    "prompt",
    "seed",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
    "user",
}


@dataclass(frozen=True)
class Prompt:
    """One prompt of a body as a request, and the caller's names of its fields."""

    request: GenerateRequest
    names: Mapping[str, str]


@dataclass(frozen=True)
class Completion:
    """A parsed body."""

    prompts: list[Prompt]
    stream: bool
    include_usage: bool
    logprobs: bool


def parse(raw: bytes, max_prompts: int) -> Completion:
    """Raises InvalidArgument that names the field."""
    body = load(raw)
    for name in body:
        if name not in KNOWN:
            raise InvalidArgument(name, "is not known to Orca")
    body = {name: value for name, value in body.items() if value is not None}
    for name, values in NEUTRAL.items():
        if name in body and (body[name] not in values or isinstance(body[name], bool) != isinstance(values[0], bool)):
            raise InvalidArgument(name, f"must be {json.dumps(values[0])}: other values are not supported")
    if get(body, "model", str, "a string", None) == "":
        raise InvalidArgument("model", "is empty")
    get(body, "user", str, "a string", "")
    logprobs = get(body, "logprobs", int, "an integer", None)
    if logprobs not in {None, 0, 1}:
        raise InvalidArgument("logprobs", "must be 0 or 1: only the chosen token's logprob is given")
    options = get(body, "stream_options", dict, "an object", {})
    include_usage = get(options, "include_usage", bool, "true or false", False, "stream_options.include_usage")
    common = request_of(body, logprobs is not None)
    return Completion(
        prompts=prompts_of(body, common, max_prompts),
        stream=get(body, "stream", bool, "true or false", False),
        include_usage=include_usage,
        logprobs=logprobs is not None,
    )


def load(raw: bytes) -> dict[str, Any]:
    """The body as an object. Raises InvalidArgument unless it is standard JSON in UTF-8."""

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        body = json.loads(raw.decode(), parse_constant=constant)
    except UnicodeDecodeError:
        raise InvalidArgument("body", "not valid UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("body", f"not valid JSON ({error})") from None
    if not isinstance(body, dict):
        raise InvalidArgument("body", "must be a JSON object")
    return body


def get(body: Mapping[str, Any], name: str, kind: type, what: str, default: Any, field: str | None = None) -> Any:
    """A field of one type; `default` when it is absent."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidArgument(field or name, f"must be {what}")
    return value


def number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(name, "must be a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgument(name, "is too large") from None


def strings(value: Any, field: str) -> list[str]:
    """A string or a list of strings, as a list. Raises InvalidArgument for characters that cannot be encoded."""
    if isinstance(value, str):
        return [text(value, field)]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidArgument(field, "must be a string or a list of strings")
    return [text(item, f"{field}[{n}]") for n, item in enumerate(value)]


def text(value: str, field: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        raise InvalidArgument(field, "not valid Unicode: it holds a lone surrogate") from None
    return value


def token_ids(value: Any, field: str) -> list[int]:
    if not isinstance(value, list):
        raise InvalidArgument(field, "must be a list of token ids")
    for n, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int):
            raise InvalidArgument(f"{field}[{n}]", "must be a token id")
        if not 0 <= item <= UINT32:
            raise InvalidArgument(f"{field}[{n}]", f"is {echo(str(item), 20)}, which is no token id")
    return value


def request_of(body: Mapping[str, Any], logprobs: bool) -> GenerateRequest:
    """All of the request but its prompt. Checks ranges that orca.v1 cannot hold; the validation checks the others."""
    max_tokens = get(body, "max_tokens", int, "an integer", DEFAULT_MAX_TOKENS)
    if max_tokens < 1:
        raise InvalidArgument("max_tokens", f"must be at least 1; it is {max_tokens}")
    sampling = Sampling(temperature=number(body, "temperature", DEFAULT_TEMPERATURE))
    if "top_p" in body:
        sampling.top_p = number(body, "top_p", 1.0)
    if "top_k" in body:
        top_k = get(body, "top_k", int, "an integer", None)
        if top_k < 1:
            raise InvalidArgument("top_k", f"must be at least 1; it is {top_k}")
        sampling.top_k = min(top_k, UINT32)
    if "seed" in body:
        seed = get(body, "seed", int, "an integer", None)
        if not -(1 << 63) <= seed < 1 << 64:
            raise InvalidArgument("seed", "must have at most 64 bits")
        sampling.seed = seed % (1 << 64)
    return GenerateRequest(
        max_new_tokens=min(max_tokens, UINT32),
        sampling=sampling,
        stop=strings(body.get("stop", []), "stop"),
        stop_token_ids=token_ids(body.get("stop_token_ids", []), "stop_token_ids"),
        ignore_eos=get(body, "ignore_eos", bool, "true or false", False),
        logprobs=logprobs,
        model=body.get("model", ""),
    )


def prompts_of(body: Mapping[str, Any], common: GenerateRequest, max_prompts: int) -> list[Prompt]:
    """One request for each prompt. The field is a string, a list of strings, a list of ids, or a list of such lists."""
    value = body.get("prompt")
    if value is None:
        raise InvalidArgument("prompt", "is missing")
    if isinstance(value, list) and not value:
        raise InvalidArgument("prompt", "the prompt is empty")
    several = isinstance(value, list) and isinstance(value[0], str | list)
    items = value if several else [value]
    if len(items) > max_prompts:
        raise InvalidArgument("prompt", f"has {len(items)} prompts; at most {max_prompts} are allowed")
    prompts = []
    for n, item in enumerate(items):
        field = f"prompt[{n}]" if several else "prompt"
        request = GenerateRequest()
        request.CopyFrom(common)
        if isinstance(item, str):
            request.text = text(item, field)
        elif isinstance(item, list):
            request.token_ids.CopyFrom(TokenIds(ids=token_ids(item, field)))
        else:
            raise InvalidArgument(field, "must be a string or a list of token ids")
        prompts.append(Prompt(request, {**HTTP_NAMES, "text": field, "token_ids.ids": field}))
    return prompts
