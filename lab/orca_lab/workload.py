"""Workloads: what requests ask for, and when they arrive. All of it is drawn before the first one is sent.

Lengths, gaps between arrivals and token ids come from three seeds. Gaps are drawn for one request per second and
divided by the rate, so another rate, policy or engine meets the same requests in the same order.

A workload says how many tokens a request has in and out. `prompts` gives it token ids, for a live system.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from orca_common.errors import InvalidArgument
from orca_common.priorities import Priority

PAPER_INPUTS, PAPER_OUTPUTS = (32, 512), (1, 128)  # lengths of the paper's section 6.2
BLOCK = 512  # input tokens for each of a request's `blocks`


class Asked(NamedTuple):
    """One request: when it arrives, in seconds since the start, and its tokens in and out."""

    at: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # of its input: prompts with the same first ones begin alike
    limit: int = 0  # output tokens that it may make, where it ends before them; 0: it ends by its length
    priority: int = Priority.NORMAL  # its class

    @property
    def tokens(self) -> int:
        """Input and output tokens: the positions and the slots that it needs."""
        return self.input_tokens + self.output_tokens


Workload = Sequence[Asked]  # in the order of arrival


class Lengths(NamedTuple):
    """Shortest and longest input and output, in tokens; lengths are uniform between them, both included."""

    inputs: tuple[int, int]
    outputs: tuple[int, int]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, input and output."""
        return self.inputs[1] + self.outputs[1]

    def draw(self, chance: random.Random, requests: int) -> list[tuple[int, int]]:
        """Input and output tokens of `requests` requests."""
        return [(chance.randint(*self.inputs), chance.randint(*self.outputs)) for _ in range(requests)]

    @classmethod
    def read(cls, text: str) -> "Lengths":
        """`paper`, or `INPUT,OUTPUT`, each a number or a range as in 32-512. Raises InvalidArgument."""
        if text == "paper":
            return PAPER
        try:
            inputs, outputs = (one.partition("-") for one in text.split(","))
            lengths = cls(*((int(low), int(high or low)) for low, _, high in (inputs, outputs)))
        except (TypeError, ValueError):
            raise InvalidArgument("lengths", f"is {text!r}, neither `paper` nor as in 32-512,1-128") from None
        if not all(1 <= low <= high for low, high in lengths):
            raise InvalidArgument("lengths", f"is {text!r}; the shortest is 1 token, and comes before the longest")
        return lengths


PAPER = Lengths(PAPER_INPUTS, PAPER_OUTPUTS)


class Arrivals(NamedTuple):
    """How requests arrive. `burstiness`: the gaps' squared coefficient of variation. 1 is Poisson, 0 constant."""

    burstiness: float = 1.0
    at_once: bool = False

    def gaps(self, chance: random.Random, requests: int) -> Iterator[float]:
        """The seconds before each request at a mean rate of one per second. The first one comes at 0."""
        for number in range(requests):
            if number == 0 or self.at_once:
                yield 0.0
            elif self.burstiness == 1:
                yield chance.expovariate(1.0)
            elif self.burstiness == 0:
                yield 1.0
            else:
                yield chance.gammavariate(1 / self.burstiness, self.burstiness)

    @classmethod
    def read(cls, text: str) -> "Arrivals":
        """`poisson`, `constant`, `at-once`, or `gamma:BURSTINESS`. Raises InvalidArgument."""
        known = {"poisson": cls(), "constant": cls(0.0), "at-once": cls(at_once=True)}
        if text in known:
            return known[text]
        try:
            kind, _, number = text.partition(":")
            burstiness = float(number) if kind == "gamma" else -1.0
        except ValueError:
            burstiness = -1.0
        if not 0 < burstiness < 1e6:
            raise InvalidArgument("arrivals", f"is {text!r}; there are {', '.join(known)} and gamma:4, above 0")
        return cls(burstiness)


POISSON, AT_ONCE = Arrivals(), Arrivals(at_once=True)


class Seeds(NamedTuple):
    """One seed for each thing that chance decides."""

    lengths: int
    arrivals: int
    tokens: int

    @classmethod
    def of(cls, seed: int) -> "Seeds":
        return cls(seed, seed, seed)


def drawn(lengths: Lengths, arrivals: Arrivals, rate: float, requests: int, seeds: Seeds) -> list[Asked]:
    """`requests` requests that arrive at `rate` per second on average."""
    sizes = lengths.draw(random.Random(seeds.lengths), requests)
    chance = random.Random(f"arrivals {seeds.arrivals}")  # the same number gives the lengths other draws
    workload, at = list[Asked](), 0.0
    for (inputs, outputs), gap in zip(sizes, arrivals.gaps(chance, requests), strict=True):
        at += gap
        workload.append(Asked(at / rate, inputs, outputs))
    return workload


def prompts(workload: Iterable[Asked], seed: int | str, vocabulary: range) -> Iterator[list[int]]:
    """Random token ids for the prompt of each request. Blocks of the same name have the same tokens."""
    chance = random.Random(f"tokens {seed}")
    for one in workload:
        if not one.blocks:
            yield token_ids(chance, one.input_tokens, vocabulary)
            continue
        named = (token_ids(random.Random(f"{seed} {name}"), BLOCK, vocabulary) for name in one.blocks)
        whole = list(chain.from_iterable(named))
        rest = token_ids(chance, max(0, one.input_tokens - len(whole)), vocabulary)
        yield (whole + rest)[: one.input_tokens]


def token_ids(chance: random.Random, count: int, vocabulary: range) -> list[int]:
    return [chance.choice(vocabulary) for _ in range(count)]
