"""Load for a server: the workloads of `orca_lab.workload`, with prompts. All of it is drawn before the first is sent.

The load is open: a request is sent at its moment however slow the server is with those before it. The same seed draws
the same lengths and arrivals for every rate, only closer together at a higher one. Token ids depend on the rate too, so
that a server that remembers prompts has not seen those of the rate before.
"""

from collections.abc import Sequence
from typing import NamedTuple

from orca_lab.workload import POISSON, Arrivals, Lengths, Seeds, Workload, drawn, prompts

from .cases import VOCABULARY, Request


class Planned(NamedTuple):
    """A request, and when it arrives: seconds since the start."""

    at: float
    request: Request


def with_prompts(workload: Workload, seed: int | str, vocabulary: range = VOCABULARY) -> Sequence[Planned]:
    """The requests of a workload with random prompts."""
    texts = prompts(workload, seed, vocabulary)
    return [Planned(one.at, Request(text, one.output_tokens)) for one, text in zip(workload, texts, strict=True)]


def load_of(
    rate: float,
    requests: int,
    seed: int,
    lengths: Lengths,
    vocabulary: range = VOCABULARY,
    arrivals: Arrivals = POISSON,
) -> Sequence[Planned]:
    """`requests` arrivals at `rate` requests per second on average; the first one is at 0."""
    workload = drawn(lengths, arrivals, rate, requests, Seeds.of(seed))
    return with_prompts(workload, f"{seed} at {float(rate)}", vocabulary)
