"""Load for a server: what is asked for, and when. All of it is drawn before the first request is sent.

Arrivals are a Poisson process, so the load is open: a request is sent at its moment however slow the server is with
those before it. The same seed draws the same lengths and arrivals for every rate, only closer together at a higher one.
Token ids depend on the rate too, so that a server that remembers prompts has not seen those of the rate before.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from orca_common.errors import InvalidArgument

from .cases import PAPER_INPUTS, PAPER_OUTPUTS, VOCABULARY, Request


class Lengths(NamedTuple):
    """Shortest and longest input and output, in tokens; lengths are uniform between them."""

    inputs: tuple[int, int]
    outputs: tuple[int, int]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, input and output."""
        return self.inputs[1] + self.outputs[1]

    @classmethod
    def read(cls, text: str) -> "Lengths":
        """`paper`, or `INPUT,OUTPUT`, each a number or a range as in 32-512. Raises InvalidArgument."""
        if text == "paper":
            return cls(PAPER_INPUTS, PAPER_OUTPUTS)
        try:
            inputs, outputs = (one.partition("-") for one in text.split(","))
            lengths = cls(*((int(low), int(high or low)) for low, _, high in (inputs, outputs)))
        except (TypeError, ValueError):
            raise InvalidArgument("lengths", f"is {text!r}, neither `paper` nor as in 32-512,1-128") from None
        if not all(1 <= low <= high for low, high in lengths):
            raise InvalidArgument("lengths", f"is {text!r}; the shortest is 1 token, and comes before the longest")
        return lengths


class Planned(NamedTuple):
    """A request, and when it arrives: seconds since the start."""

    at: float
    request: Request


def poisson(
    rate: float, requests: int, seed: int, lengths: Lengths, vocabulary: range = VOCABULARY
) -> Sequence[Planned]:
    """`requests` arrivals at `rate` requests per second on average; the first one is at 0."""
    chance, words = random.Random(seed), random.Random(f"{seed} at {float(rate)}")
    sizes = [(chance.randint(*lengths.inputs), chance.randint(*lengths.outputs)) for _ in range(requests)]
    load, at = list[Planned](), 0.0
    for inputs, outputs in sizes:
        load.append(Planned(at / rate, Request([words.choice(vocabulary) for _ in range(inputs)], outputs)))
        at += chance.expovariate(1.0)
    return load
