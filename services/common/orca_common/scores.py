"""The binary form of logprobs beyond those of the chosen tokens, from the rank that samples to the endpoint.

A place in a text has `top_logprobs` entries TOP, the most probable token first. A token of a prompt has its own SCORE
before them. Where there is nothing to tell, as for a prompt's first token, a logprob is NaN.
"""

import math
import struct

from orca.v1.sampling_pb2 import SamplingParams

MAX_TOP = 20  # top_logprobs of a request

TOP = struct.Struct("<If")  # token id, logprob
SCORE = struct.Struct("<f")  # logprob
NOTHING = TOP.pack(0, math.nan)

Top = tuple[tuple[int, float], ...]  # (token id, logprob) of a place, the most probable first


def size_of_tops(asked: SamplingParams) -> int:
    """The bytes of the tops that come with each token of a request; 0: it asks for none."""
    return asked.top_logprobs * TOP.size


def size_of_prompt(asked: SamplingParams) -> int:
    """The bytes that come with each token of a request's prompt; 0: it asks for none."""
    return SCORE.size + size_of_tops(asked) if asked.prompt_logprobs else 0


def unpack_tops(data: bytes, count: int) -> list[Top]:
    """The tops of consecutive places with `count` entries each."""
    entries = list(TOP.iter_unpack(data))
    places = (entries[at : at + count] for at in range(0, len(entries), count))
    return [tuple((i, value) for i, value in place if not math.isnan(value)) for place in places]


def unpack_prompt(data: bytes, count: int) -> list[tuple[float | None, Top]]:
    """(logprob, top) of each token of a prompt; None for the first one."""
    size = SCORE.size + count * TOP.size
    scored = []
    for at in range(0, len(data), size):
        (value,) = SCORE.unpack_from(data, at)
        top = unpack_tops(data[at + SCORE.size : at + size], count) if count else [()]
        scored.append((None if math.isnan(value) else value, top[0]))
    return scored
