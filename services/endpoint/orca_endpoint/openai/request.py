"""The body of OpenAI's `POST /v1/completions`: from JSON to requests.

A field that Orca cannot honour is refused by name, never ignored. `completion_fields` lists them all.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration

from orca.v1.orca_pb2 import GenerateRequest, Sampling, TokenIds
from orca_common.errors import InvalidArgument, echo
from orca_common.sampling import SAMPLING, Kind

from ..requests.validation import HTTP_NAMES
from .body import as_number, check_names, get, load, number, strings, text
from .fields import DEFAULT_TEMPERATURE, NAMES

UINT32 = (1 << 32) - 1
DEFAULT_MAX_TOKENS = 16  # OpenAI's default
LONGEST_GRACE = 1e9  # seconds; the validation knows the setting, this is what the message can hold
METADATA_PAIRS, METADATA_NAME, METADATA_VALUE = 16, 64, 512  # OpenAI's limits

# Fields that are accepted at one value only, with why.
SINGLE_VALUES: Mapping[str, tuple[Any, str]] = {
    "suffix": ("", "no model here inserts text"),
    "store": (False, "nothing is stored"),
}


@dataclass(frozen=True)
class Sample:
    """One generation for a prompt as a request, and the caller's names of its fields."""

    request: GenerateRequest
    names: Mapping[str, str]


@dataclass(frozen=True)
class Completion:
    """A parsed body."""

    samples: list[Sample]  # best_of for each prompt, one prompt after the other
    n: int  # choices that are shown of each prompt
    best_of: int
    stream: bool
    include_usage: bool
    logprobs: int | None  # most probable tokens that are wanted with each token; None: no logprobs at all
    echo: bool
    only_prompt: bool  # max_tokens is 0: the one token that every request makes is not shown
    labels: Mapping[str, str]  # attributes of the requests' spans


def parse(raw: bytes, max_samples: int) -> Completion:
    """Raises InvalidArgument that names the field. max_samples: generations that one body may ask for."""
    body = load(raw)
    if "messages" in body:
        raise InvalidArgument("messages", "is a field of chats; Orca serves completions: give a prompt")
    check_names(body, NAMES)
    body = {name: value for name, value in body.items() if value is not None}
    for name, (value, why) in SINGLE_VALUES.items():
        if name in body and (body[name] != value or type(body[name]) is not type(value)):
            raise InvalidArgument(name, f"must be {json.dumps(value)}: {why}")
    if get(body, "model", str, "a string", None) == "":
        raise InvalidArgument("model", "is empty")
    stream = get(body, "stream", bool, "true or false", False)
    n, best_of = choices_of(body, stream)
    echo = get(body, "echo", bool, "true or false", False)
    logprobs = get(body, "logprobs", int, "an integer", None)
    if logprobs is not None and logprobs < 0:
        raise InvalidArgument("logprobs", f"must be at least 0; it is {logprobs}")
    max_tokens = get(body, "max_tokens", int, "an integer", DEFAULT_MAX_TOKENS)
    if max_tokens < (0 if echo else 1):
        raise InvalidArgument("max_tokens", f"must be at least 1, or 0 with echo; it is {max_tokens}")
    common = request_of(body, max(max_tokens, 1))
    if logprobs is not None or best_of > n:
        common.logprobs = True
    if logprobs is not None:
        common.top_logprobs, common.prompt_logprobs = min(logprobs, UINT32), echo
    return Completion(
        samples=samples_of(body, common, best_of, max_samples),
        n=n,
        best_of=best_of,
        stream=stream,
        include_usage=include_usage_of(body, stream),
        logprobs=logprobs,
        echo=echo,
        only_prompt=max_tokens == 0,
        labels=labels_of(body),
    )


def choices_of(body: Mapping[str, Any], stream: bool) -> tuple[int, int]:
    """n and best_of."""
    n = get(body, "n", int, "an integer", 1)
    if n < 1:
        raise InvalidArgument("n", f"must be at least 1; it is {n}")
    best_of = get(body, "best_of", int, "an integer", n)
    if best_of < n:
        raise InvalidArgument("best_of", f"is {best_of}; it must be at least n, which is {n}")
    if best_of > n and stream:
        raise InvalidArgument("best_of", "more than n cannot be streamed: the best are known at the end")
    return n, best_of


def include_usage_of(body: Mapping[str, Any], stream: bool) -> bool:
    options = get(body, "stream_options", dict, "an object", None)
    if options is None:
        return False
    if not stream:
        raise InvalidArgument("stream_options", "is allowed only with stream")
    prefix = "stream_options."
    check_names(options, {"include_usage", "include_obfuscation"}, prefix)
    if get(options, "include_obfuscation", bool, "true or false", False, prefix + "include_obfuscation"):
        raise InvalidArgument(prefix + "include_obfuscation", "must be false: chunks are not padded")
    return get(options, "include_usage", bool, "true or false", False, prefix + "include_usage")


def labels_of(body: Mapping[str, Any]) -> dict[str, str]:
    """`user` and `metadata` as attributes of a span."""
    labels = {}
    if user := get(body, "user", str, "a string", ""):
        labels["orca.user"] = text(user, "user")
    metadata = get(body, "metadata", dict, "an object", {})
    if len(metadata) > METADATA_PAIRS:
        raise InvalidArgument("metadata", f"has {len(metadata)} members; at most {METADATA_PAIRS} are allowed")
    for name, value in metadata.items():
        field = f"metadata.{text(name, 'metadata')}"
        if len(name) > METADATA_NAME:
            raise InvalidArgument(
                "metadata", f"has a name of {len(name)} characters; at most {METADATA_NAME} are allowed"
            )
        if not isinstance(value, str):
            raise InvalidArgument(field, "must be a string")
        if len(value) > METADATA_VALUE:
            raise InvalidArgument(field, f"has {len(value)} characters; at most {METADATA_VALUE} are allowed")
        labels[f"orca.{field}"] = text(value, field)
    return labels


def token_ids(value: Any, field: str) -> list[int]:
    if not isinstance(value, list):
        raise InvalidArgument(field, "must be a list of token ids")
    for n, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int):
            raise InvalidArgument(f"{field}[{n}]", "must be a token id")
        if not 0 <= item <= UINT32:
            raise InvalidArgument(f"{field}[{n}]", f"is {echo(str(item), 20)}, which is no token id")
    return value


def request_of(body: Mapping[str, Any], max_tokens: int) -> GenerateRequest:
    """All of a request but its prompt. Checks ranges that orca.v1 cannot hold; the validation checks the others."""
    grace = number(body, "detach_grace", 0.0)
    if not 0 <= grace <= LONGEST_GRACE:
        raise InvalidArgument("detach_grace", f"must be a number of seconds from 0 on; it is {grace}")
    duration = Duration()
    duration.FromMilliseconds(round(grace * 1000))
    return GenerateRequest(
        max_new_tokens=min(max_tokens, UINT32),
        sampling=sampling_of(body),
        stop=strings(body.get("stop", []), "stop"),
        stop_token_ids=token_ids(body.get("stop_token_ids", []), "stop_token_ids"),
        ignore_eos=get(body, "ignore_eos", bool, "true or false", False),
        model=body.get("model", ""),
        detach_grace=duration,
    )


def sampling_of(body: Mapping[str, Any]) -> Sampling:
    """The parameters that change something."""
    found: dict[str, Any] = {"temperature": DEFAULT_TEMPERATURE}
    found |= {name: READERS[one.kind](body, name) for name, one in SAMPLING.items() if name in body}
    return Sampling(**{name: value for name, value in found.items() if value != SAMPLING[name].default})


def a_number(body: Mapping[str, Any], name: str) -> float:
    return as_number(body[name], name)


def a_count(body: Mapping[str, Any], name: str) -> int | None:
    """At least 1; None: as if it were absent."""
    value = get(body, name, int, "an integer", None)
    if value == -1:
        return None
    if value < 1:
        raise InvalidArgument(name, f"must be at least 1, or -1 for all; it is {value}")
    return min(value, UINT32)


def a_seed(body: Mapping[str, Any], name: str) -> int:
    value = get(body, name, int, "an integer", None)
    if not -(1 << 63) <= value < 1 << 64:
        raise InvalidArgument(name, "must have at most 64 bits")
    return value % (1 << 64)


def biases(body: Mapping[str, Any], name: str) -> dict[int, float]:
    found = {}
    for token_id, value in get(body, name, dict, "an object", {}).items():
        if not (token_id.isascii() and token_id.isdecimal()) or int(token_id[:11]) > UINT32:
            raise InvalidArgument(name, f"has the name {token_id[:20]!r}, which is no token id")
        if int(token_id) in found:
            raise InvalidArgument(f"{name}[{int(token_id)}]", "comes twice")
        found[int(token_id)] = as_number(value, f"{name}[{int(token_id)}]")
    return found


# How a sampling parameter of a kind is read: from the body, by its name, which is there.
READERS: Mapping[Kind, Callable[[Mapping[str, Any], str], Any]] = {
    "number": a_number,
    "count": a_count,
    "seed": a_seed,
    "biases": biases,
}


def samples_of(body: Mapping[str, Any], common: GenerateRequest, best_of: int, limit: int) -> list[Sample]:
    """`best_of` requests for each prompt. The field is a string, a list of strings, of ids, or of lists of ids."""
    value = body.get("prompt")
    if value is None:
        raise InvalidArgument("prompt", "is missing")
    if isinstance(value, list) and not value:
        raise InvalidArgument("prompt", "the prompt is empty")
    several = isinstance(value, list) and isinstance(value[0], str | list)
    items = value if several else [value]
    if len(items) * best_of > limit:
        if best_of == 1:
            raise InvalidArgument(
                "prompt", f"has {len(items)} prompts; at most {limit} are allowed (the server's max_prompts)"
            )
        each = f" for each of {len(items)} prompts" if len(items) > 1 else ""
        problem = f"{best_of}{each} are too many; at most {limit} are allowed together (the server's max_prompts)"
        raise InvalidArgument("best_of" if "best_of" in body else "n", problem)
    samples = []
    for n, item in enumerate(items):
        field = f"prompt[{n}]" if several else "prompt"
        names = {**HTTP_NAMES, "text": field, "token_ids.ids": field}
        for k in range(best_of):
            request = GenerateRequest()
            request.CopyFrom(common)
            if isinstance(item, str):
                request.text = text(item, field)
            elif isinstance(item, list):
                request.token_ids.CopyFrom(TokenIds(ids=token_ids(item, field)))
            else:
                one = "must be a string or a list of token ids"
                raise InvalidArgument(
                    field, one if several else "must be a string, a list of token ids, or a list of either"
                )
            if k and request.sampling.HasField("seed"):
                request.sampling.seed = seed_of_sample(common.sampling.seed, k)
            samples.append(Sample(request, names))
    return samples


def seed_of_sample(seed: int, k: int) -> int:
    """The seed of a prompt's k-th generation; that of the first is the caller's own."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{k}".encode()).digest()[:8], "little")
