"""A server under load, through its own door: an open load at one rate after the other, or closed cases."""

import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orca_common.errors import Unavailable
from orca_lab.workload import Arrivals, Lengths

from .cases import WARM_UP_SEED, Case, fixed
from .drive import Door, Ended, closed_case, open_loop
from .load import load_of
from .machine import isa
from .measures import Answer, summary

Start = Callable[[str, int], Ended]  # what is about to run, and its number of requests -> what each end is told to


@dataclass(frozen=True)
class OpenLoad:
    """The part that all loads of a sweep have in common."""

    rates: Sequence[float]
    requests: int
    seed: int
    lengths: str  # as Lengths.read takes it
    vocabulary: range
    arrivals: str = "poisson"  # as Arrivals.read takes it


async def warm_up(door: Door, inputs: int, outputs: int, vocabulary: range, patience: float) -> None:
    """Four requests that are not reported. Raises Unavailable with the server's words when one fails."""
    case = fixed(4, inputs, outputs, WARM_UP_SEED, vocabulary)
    answers = await closed_case(door, case, patience=patience)
    complain(answers)


def complain(answers: Sequence[Answer]) -> None:
    """Raises Unavailable when a request has failed."""
    failed = [answer for answer in answers if answer.error]
    if failed:
        first = failed[0].error
        hint = "; --vocab-size keeps token ids below the vocabulary's" if "vocabulary" in first else ""
        raise Unavailable(f"{len(failed)} of {len(answers)} requests failed, the first with: {first}{hint}")


async def open_lines(door: Door, load: OpenLoad, start: Start, patience: float) -> AsyncIterator[dict[str, Any]]:
    """A line for each rate. A rate begins when all requests of the one before have ended. Failed requests are counted.

    Raises InvalidArgument, or Unavailable when the server does not even serve the warm-up.
    """
    lengths, arrivals = Lengths.read(load.lengths), Arrivals.read(load.arrivals)
    await warm_up(door, lengths.inputs[0], min(8, lengths.outputs[1]), load.vocabulary, patience)
    for rate in load.rates:
        planned = load_of(rate, load.requests, load.seed, lengths, load.vocabulary, arrivals)
        answers = await open_loop(door, planned, start(f"{rate:g} requests/s", len(planned)), patience)
        about = {"engine": door.label, "rate": rate, "lengths": load.lengths, "arrivals": load.arrivals}
        yield {**about, "seed": load.seed, **summary(answers), "isa": isa()}


async def case_lines(
    door: Door, cases: Mapping[str, Case], runs: int, vocabulary: range, start: Start, patience: float
) -> AsyncIterator[dict[str, Any]]:
    """A line for each run of each case, in the form of the engine's lines. Raises Unavailable when a request fails."""
    shortest = min(len(one.prompt) for case in cases.values() for one in case)
    await warm_up(door, min(32, shortest), 8, vocabulary, patience)
    for (name, case), number in itertools.product(cases.items(), range(1, runs + 1)):
        answers = await closed_case(door, case, start(f"{name}, run {number}", len(case)), patience)
        complain(answers)
        yield {"engine": door.label, "case": name, **summary(answers), "run": number, "isa": isa()}
