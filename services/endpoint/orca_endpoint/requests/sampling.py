"""The sampling parameters of a request: checked by their table, and as the message for the rank that samples."""

import hashlib
from collections.abc import Callable, Mapping

from orca.v1.orca_pb2 import GenerateRequest
from orca.v1.sampling_pb2 import SamplingParams
from orca_common.errors import InvalidArgument
from orca_common.sampling import GREEDY_BELOW, LOGPROBS, MAX_BIASES, SAMPLING, Parameter

DRAWN = [parameter.name for parameter in SAMPLING.values() if parameter.drawn]

Error = Callable[[str, str], InvalidArgument]  # of a field and what is wrong with it


def sampling_params(request: GenerateRequest, request_id: str, vocab_size: int, error: Error) -> SamplingParams | None:
    """The message of a request; None for a plain greedy one. Raises InvalidArgument.

    What changes nothing is left out, so that it costs nothing: values that equal the default, a greedy request's draw.
    """
    asked = SamplingParams()
    for field, value in request.sampling.ListFields():  # those that were given
        parameter, name = SAMPLING[field.name], f"sampling.{field.name}"
        if parameter.kind == "biases":
            _check_biases(value, parameter, name, vocab_size, error)
            getattr(asked, field.name).update({i: bias for i, bias in value.items() if bias})
        else:
            _check(value, parameter, name, error)
            if value != parameter.default:
                setattr(asked, field.name, value)
    if asked.temperature < GREEDY_BELOW:
        for name in ("temperature", *DRAWN):
            asked.ClearField(name)
    elif not request.sampling.HasField("seed"):
        asked.seed = seed_of(request_id)
    for name, parameter in LOGPROBS.items():
        _check(getattr(request, name), parameter, name, error)
    asked.logprobs = request.logprobs or request.top_logprobs > 0
    asked.top_logprobs = min(request.top_logprobs, vocab_size)
    asked.prompt_logprobs = request.prompt_logprobs
    return asked if asked.ByteSize() else None


def _check(value: float, parameter: Parameter, name: str, error: Error) -> None:
    if not parameter.limits.holds(value):
        raise error(name, f"must be {parameter.limits}; it is {value}")


def _check_biases(biases: Mapping[int, float], parameter: Parameter, name: str, vocab_size: int, error: Error) -> None:
    if len(biases) > MAX_BIASES:
        raise error(name, f"has {len(biases)} entries; at most {MAX_BIASES} are allowed")
    for token_id in sorted(biases):
        if token_id >= vocab_size:
            raise error(f"{name}[{token_id}]", f"is no token: the vocabulary has {vocab_size}")
        _check(biases[token_id], parameter, f"{name}[{token_id}]", error)


def seed_of(request_id: str) -> int:
    """The seed of a request that names none. Every retry of a request gets the same one."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little")
