"""OpenAI's completions API as values: a JSON body to requests, events to JSON. No I/O.

What Orca cannot do is refused by the field's name, never ignored. Beyond OpenAI's fields: `top_k`, `ignore_eos`,
`stop_token_ids`.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orca.v1.orca_pb2 import GenerateRequest, Sampling, TokenIds
from orca_common.errors import InvalidArgument, NotFound, OrcaError, ResourceExhausted, Unavailable
from orca_pool.records import Reason

from .call import FinishedEvent, TokenEvent
from .validation import HTTP_NAMES

UINT32 = (1 << 32) - 1
DEFAULT_MAX_TOKENS = 16  # OpenAI's
DEFAULT_TEMPERATURE = 1.0

# Fields that are taken at their neutral values alone.
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

# HTTP status and OpenAI's error type of each error, by its gRPC status.
STATUS: Mapping[str, tuple[int, str]] = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "FAILED_PRECONDITION": (400, "invalid_request_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "ALREADY_EXISTS": (409, "invalid_request_error"),
    "ABORTED": (409, "invalid_request_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "cancelled"),
    "INTERNAL": (500, "server_error"),
    "DATA_LOSS": (500, "server_error"),
    "UNAVAILABLE": (503, "server_error"),
    "DEADLINE_EXCEEDED": (504, "timeout"),
}


class ModelNotFound(NotFound):
    """The body names another model."""


class BodyTooLarge(OrcaError):
    """HTTP's 413."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a body, as a request, and what the caller calls its fields."""

    request: GenerateRequest
    names: Mapping[str, str]


@dataclass(frozen=True)
class Completion:
    """A parsed body."""

    prompts: list[Prompt]
    stream: bool
    include_usage: bool
    logprobs: bool


# -- the body
def parse(raw: bytes, model: str, max_prompts: int) -> Completion:
    """Raises InvalidArgument that names the field, or ModelNotFound."""
    body = load(raw)
    for name in body:
        if name not in KNOWN:
            raise InvalidArgument(name, "is not known here")
    body = {name: value for name, value in body.items() if value is not None}
    for name, values in NEUTRAL.items():
        if name in body and (body[name] not in values or isinstance(body[name], bool) != isinstance(values[0], bool)):
            raise InvalidArgument(name, f"must be {json.dumps(values[0])}: other values are not supported")
    wanted = get(body, "model", str, "a string", model)
    if wanted != model:
        raise ModelNotFound(f"model: {wanted!r} is not served here; {model!r} is")
    get(body, "user", str, "a string", "")
    logprobs = get(body, "logprobs", int, "an integer", None)
    if logprobs not in {None, 0, 1}:
        raise InvalidArgument("logprobs", "must be 0 or 1: the chosen token's logprob is given, not those of others")
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
    """The body as an object: standard JSON in UTF-8."""

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

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
    """A string or a list of strings, of characters that can be encoded."""
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
            raise InvalidArgument(f"{field}[{n}]", f"is {item}: no token id")
    return value


def request_of(body: Mapping[str, Any], logprobs: bool) -> GenerateRequest:
    """Everything but the prompt. Ranges that orca.v1 can hold are the validation's matter."""
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
    )


def prompts_of(body: Mapping[str, Any], common: GenerateRequest, max_prompts: int) -> list[Prompt]:
    """One request for each prompt: a string, a list of strings, a list of ids, or a list of such lists."""
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


# -- the answer
def finish_reason(reason: Reason) -> str:
    return "length" if reason is Reason.LENGTH else "stop"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Choice:
    """One prompt's text as it grows."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.tokens: list[TokenEvent] = []
        self.offset = 0  # characters given out
        self.input_tokens = self.output_tokens = 0
        self.finish: str | None = None

    def logprobs(self, event: TokenEvent) -> dict[str, Any]:
        """OpenAI's logprobs of one token. `top_logprobs` is null: the model's other choices are not known here."""
        return {
            "tokens": [event.text],
            "token_logprobs": [event.logprob],
            "top_logprobs": None,
            "text_offset": [self.offset],
        }


class Chunks:
    """The events of a stream as server-sent events. The constant parts are made once: a token costs one small dumps."""

    def __init__(self, request_id: str, model: str, include_usage: bool, logprobs: bool) -> None:
        head = {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._head = json.dumps(head)[:-1]
        self._usage = ',"usage":null' if include_usage else ""
        self._logprobs = logprobs

    def token(self, n: int, choice: Choice, event: TokenEvent) -> bytes:
        """Empty when there is nothing to tell."""
        if not event.text and not self._logprobs:
            return b""
        logprobs = json.dumps(choice.logprobs(event)) if self._logprobs else "null"
        choice.offset += len(event.text)
        return self._chunk(n, event.text, logprobs, "null")

    def finished(self, n: int, event: FinishedEvent) -> bytes:
        return self._chunk(n, event.text, "null", json.dumps(finish_reason(event.reason)))

    def usage(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        counts = json.dumps(usage(prompt_tokens, completion_tokens))
        return f'data: {self._head},"choices":[],"usage":{counts}}}\n\n'.encode()

    def _chunk(self, n: int, text: str, logprobs: str, reason: str) -> bytes:
        choice = f'{{"index":{n},"text":{json.dumps(text)},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return f'data: {self._head},"choices":[{choice}]{self._usage}}}\n\n'.encode()


def completion(request_id: str, model: str, choices: list[Choice], logprobs: bool) -> dict[str, Any]:
    """The whole answer of a request that does not stream."""
    return {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": n,
                "text": "".join(choice.pieces),
                "logprobs": logprobs_of(choice) if logprobs else None,
                "finish_reason": choice.finish,
            }
            for n, choice in enumerate(choices)
        ],
        "usage": usage(sum(c.input_tokens for c in choices), sum(c.output_tokens for c in choices)),
    }


def logprobs_of(choice: Choice) -> dict[str, Any]:
    offsets, at = [], 0
    for event in choice.tokens:
        offsets.append(at)
        at += len(event.text)
    return {
        "tokens": [event.text for event in choice.tokens],
        "token_logprobs": [event.logprob for event in choice.tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def failure(error: OrcaError) -> tuple[int, dict[str, str], dict[str, Any]]:
    """HTTP status, headers and body of an error."""
    status, kind = STATUS.get(error.code.name, (500, "server_error"))
    headers, code, param = {}, None, None
    match error:
        case InvalidArgument():
            param = error.field
        case ModelNotFound():
            param, code = "model", "model_not_found"
        case BodyTooLarge():
            status, kind = 413, "invalid_request_error"
        case ResourceExhausted():
            headers["Retry-After"] = str(max(1, round(error.retry_after)))
        case Unavailable():
            headers["Retry-After"] = "1"
    return status, headers, {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
