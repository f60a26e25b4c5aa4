"""The parts of a body that all methods read alike: from JSON to a request without its prompt.

A field that Orca cannot honour is refused by name, never ignored.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.duration_pb2 import Duration

from orca.v1.orca_pb2 import GenerateRequest, Sampling
from orca_common.errors import InvalidArgument, echo
from orca_common.priorities import CLASSES
from orca_common.sampling import SAMPLING, Kind

from .answer import UsageIn
from .body import as_number, check_names, get, load, number, strings, text, whole
from .fields import TIERS
from .forms import Wanted

UINT32 = (1 << 32) - 1
LONGEST_GRACE = 1e9  # seconds; the validation knows the setting, this is what the message can hold
METADATA_PAIRS, METADATA_NAME, METADATA_VALUE = 16, 64, 512  # OpenAI's limits

STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats", "include_obfuscation"})
COPIES = 32 << 20  # bytes of all generations of one body, each with its prompt
Values = Mapping[str, tuple[Sequence[Any], str]]  # fields that are accepted at some values only: these, and why
FIXED: Values = {"store": ((False,), "nothing is stored")}


@dataclass(frozen=True)
class Sample:
    """One generation for a prompt as a request, and the caller's names of its fields."""

    request: GenerateRequest
    names: Mapping[str, str]
    kept: bytes = b""  # what is kept beside it
    open_end: bool = False  # without a number of tokens the answer has all that fit


class Samples(Protocol):
    """The generations of a body, `each` for each prompt, one prompt after the other: a list, or what makes them."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sample]: ...
    def __getitem__(self, k: int, /) -> Sample: ...
    def clear(self) -> None:
        """Releases them."""
        ...


@dataclass(frozen=True)
class Asked:
    """A parsed body."""

    samples: Samples
    each: int  # generations of one prompt
    stream: bool
    detaches: bool  # it may live on without its client
    usage_in: UsageIn
    labels: Mapping[str, str]  # attributes of the requests' spans
    loose: Collection[str]  # fields with schemas of which an answer need only follow what can be enforced


def read(raw: bytes, known: Collection[str], others: Mapping[str, str], fixed: Values = FIXED) -> dict[str, Any]:
    """Reads the fields of a body that are not null.

    others: a sentence for each field of other methods. Raises InvalidArgument for these, and for unknown fields.
    """
    body = load(raw)
    for name, sentence in others.items():
        if name in body:
            raise InvalidArgument(name, sentence)
    check_names(body, known)
    body = {name: value for name, value in body.items() if value is not None}
    check_fixed(body, fixed)
    if get(body, "model", str, "a string", None) == "":
        raise InvalidArgument("model", "is empty")
    return body


def check_fixed(given: Mapping[str, Any], fixed: Values, prefix: str = "") -> None:
    """Raises InvalidArgument for the first member that has another value than those that are accepted."""
    for name, (values, why) in fixed.items():
        if name in given and not any(given[name] == value and type(given[name]) is type(value) for value in values):
            raise InvalidArgument(prefix + name, f"must be {' or '.join(map(json.dumps, values or [None]))}: {why}")


def scores_of(body: Mapping[str, Any]) -> tuple[bool, int]:
    """Whether an answer has logprobs, and how many of the most probable tokens at each place."""
    logprobs, top = get(body, "logprobs", bool, "true or false", False), get(body, "top_logprobs", int, "an integer", 0)
    if top < 0:
        raise InvalidArgument("top_logprobs", f"must be at least 0; it is {top}")
    if top and not logprobs:
        raise InvalidArgument("top_logprobs", "is allowed only with logprobs")
    return logprobs, min(top, UINT32)


def usage_in(body: Mapping[str, Any], stream: bool, known: Collection[str] = STREAM_OPTIONS) -> UsageIn:
    """The chunks that have a usage. known: the options that there are."""
    options = get(body, "stream_options", dict, "an object", None)
    if options is None:
        return UsageIn()
    if not stream:
        raise InvalidArgument("stream_options", "is allowed only with stream")
    prefix = "stream_options."
    check_names(options, known, prefix)
    if get(options, "include_obfuscation", bool, "true or false", False, prefix + "include_obfuscation"):
        raise InvalidArgument(prefix + "include_obfuscation", "must be false: chunks are not padded")
    names = ("include_usage", "continuous_usage_stats")
    return UsageIn(*(get(options, name, bool, "true or false", False, prefix + name) for name in names))


def labels_of(body: Mapping[str, Any]) -> dict[str, str]:
    """`user` and `metadata` as attributes of a span."""
    labels = {}
    if user := get(body, "user", str, "a string", ""):
        labels["orca.user"] = text(user, "user")
    if safety := get(body, "safety_identifier", str, "a string", ""):
        labels["orca.safety_identifier"] = text(safety, "safety_identifier")
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


def request_of(
    body: Mapping[str, Any], max_tokens: int, defaults: Mapping[str, float], form: Wanted | None
) -> GenerateRequest:
    """All of a request but its prompt. Checks ranges that orca.v1 cannot hold; the validation checks the others.

    defaults: sampling parameters that hold where the body does not say. form: of the answer.
    """
    grace = number(body, "detach_grace", 0.0)
    if not 0 <= grace <= LONGEST_GRACE:
        raise InvalidArgument("detach_grace", f"must be a number of seconds from 0 on; it is {grace}")
    duration = Duration()
    duration.FromMilliseconds(round(grace * 1000))
    least = get(body, "min_tokens", int, "an integer", 0)
    if least < 0:
        raise InvalidArgument("min_tokens", f"must be at least 0; it is {least}")
    return GenerateRequest(
        priority=priority_of(body),
        min_new_tokens=min(least, UINT32),
        show_special_tokens=not get(body, "skip_special_tokens", bool, "true or false", True),
        max_new_tokens=min(max_tokens, UINT32),
        sampling=sampling_of(body, defaults),
        stop=strings(body.get("stop", []), "stop"),
        stop_token_ids=token_ids(body.get("stop_token_ids", []), "stop_token_ids"),
        ignore_eos=get(body, "ignore_eos", bool, "true or false", False),
        model=body.get("model", ""),
        detach_grace=duration,
        **({} if form is None else {form.kind: form.text}),  # pyright: ignore[reportArgumentType]
    )


def priority_of(body: Mapping[str, Any]) -> Any:
    """The class of a request, a number of orca.v1.Priority; 0: the body does not say."""
    asked, by_tier = get(body, "priority", str, "a string", None), TIERS.get(body.get("service_tier", ""), 0)
    if asked is None:
        return by_tier
    if asked not in CLASSES:
        raise InvalidArgument("priority", f"must be {' or '.join(CLASSES)}; it is {echo(asked, 20)}")
    if by_tier not in (0, CLASSES[asked]):
        raise InvalidArgument("service_tier", f"is another class than priority, which is {asked}")
    return CLASSES[asked]


def tier_name(body: Mapping[str, Any]) -> dict[str, str]:
    """The caller's name of `priority`, where it is another."""
    return {} if "priority" in body else {"priority": "service_tier"}


def sampling_of(body: Mapping[str, Any], defaults: Mapping[str, float]) -> Sampling:
    """The parameters that change something."""
    found: dict[str, Any] = dict(defaults)
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
        token = whole(token_id)
        if token is None:
            raise InvalidArgument(name, f"has the name {token_id[:20]!r}, which is no token id")
        if token in found:
            raise InvalidArgument(f"{name}[{token}]", "comes twice")
        found[token] = as_number(value, f"{name}[{token}]")
    return found


# How a sampling parameter of a kind is read: from the body, by its name, which is there.
READERS: Mapping[Kind, Callable[[Mapping[str, Any], str], Any]] = {
    "number": a_number,
    "count": a_count,
    "seed": a_seed,
    "biases": biases,
}


def check_copies(size: int, field: str) -> None:
    """Raises InvalidArgument for generations whose prompts are too much together. size: their bytes."""
    if size > COPIES:
        raise InvalidArgument(field, f"the generations have {size} bytes of prompts; {COPIES} are allowed together")


def generation(common: GenerateRequest, k: int) -> GenerateRequest:
    """Copies a request for the k-th generation of a prompt, which draws with a seed of its own."""
    request = GenerateRequest()
    request.CopyFrom(common)
    if k and request.sampling.HasField("seed"):
        request.sampling.seed = seed_of_sample(common.sampling.seed, k)
    return request


def seed_of_sample(seed: int, k: int) -> int:
    """The seed of a prompt's k-th generation; that of the first is the caller's own."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{k}".encode()).digest()[:8], "little")
