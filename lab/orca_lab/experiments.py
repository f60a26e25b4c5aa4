"""The paper's experiments in simulation: the points of Figures 9, 10 and 11, and the numbers that tables compare.

Everything runs on the A100 model (`cost.py`) in virtual time: Orca by the live core, FasterTransformer by
`baseline/simulated.py`. The first tenth of a trace's requests warms up and is in no median.

phi, the cost of FasterTransformer's control messages, is an input from the paper's Figure 9c and proves nothing about
it. On one stage, where the paper finds both engines alike, it is 1.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from orca_common.errors import FailedPrecondition

from .baseline.selections import any_policy
from .baseline.simulated import Batched, simulate_requests
from .cost import A100, TABLE_1
from .paper import BEST_FT, TARGET
from .simulator import Engine, Result, simulate
from .workload import AT_ONCE, PAPER, POISSON, Lengths, Seeds, Workload, drawn

PHIS = (1.0, 1.25, 1.47)
BATCHES = (1, 2, 4, 8, 16, 32)
INPUTS = (32, 128)
OUTPUTS = 32
ORCA = (8, 16, 32, 64, 128)
FT = ((1, 1), (8, 8), (4, 4), (16, 16), (8, 4), (8, 2))  # (max_bs, mbs): the paper's best two first
SHARES = (0.1, 0.25, 0.5, 0.7, 0.85, 0.95, 1.05)  # of what a system sustains: the rates of its curve
HOMOGENEOUS = ((32, 32), (128, 32), (128, 128), (512, 32), (512, 128))  # Figure 11's lengths are ours: see paper.md E5
TRACES = (500, 1000, 2000, 4000)  # requests


@dataclass(frozen=True)
class Scale:
    """How much is simulated. `queued`: requests that are there at the start, where the sustained rate is measured."""

    requests: int = 1000
    queued: int = 4000
    seeds: tuple[int, ...] = (1, 2, 3)
    divide: int = 1  # lengths

    def lengths(self, lengths: Lengths) -> Lengths:
        inputs, outputs = (tuple(max(1, bound // self.divide) for bound in pair) for pair in lengths)
        return Lengths(*((low, high) for low, high in (inputs, outputs)))

    def of(self, figure: int) -> tuple[int, int]:
        """Requests of a trace, and of a full queue. Figure 11 has a third and a tenth: its requests are alike."""
        if figure == 11:
            return max(20, self.requests // 3), max(40, self.queued // 10)
        return self.requests, self.queued


FULL, QUICK = Scale(), Scale(250, 1000, (1,), divide=4)


class Disturbed(FailedPrecondition):
    """A live run does not count: other processes disturbed it, again and again. The message says which one."""


class System(NamedTuple):
    """A label as in the paper's figures, and how it serves a workload. A live one raises Disturbed."""

    label: str
    serve: Callable[[Workload], Result]
    phi: float = 1.0


def orca(cost: A100, max_bs: int, policy: str = "paper") -> System:
    engine = Engine(cost, cost.slots, max_bs, any_policy(policy))
    return System(f"orca({max_bs})" if policy == "paper" else policy, partial(simulate, engine))


def ft(cost: A100, max_bs: int, mbs: int) -> System:
    serve: Callable[[Workload], Result] = partial(simulate_requests, cost, max_bs, mbs)
    return System(f"ft({max_bs},{mbs})", serve, cost.phi)


def phis(pp: int) -> tuple[float, ...]:
    return PHIS if pp > 1 else (1.0,)


# -- what is measured


def sustained(system: System, lengths: Lengths, scale: Scale, seed: int) -> float:
    """Requests per second with a queue that is never empty: those of the middle 80 % of the ends."""
    result = system.serve(drawn(lengths, AT_ONCE, 1.0, scale.queued, Seeds.of(seed)))
    ends = sorted(one.ended for one in result.requests)
    first, last = len(ends) // 10, len(ends) - len(ends) // 10 - 1
    return (last - first) / (ends[last] - ends[first])


def normalized_of(result: Result) -> float:
    """The median of the seconds per token, without the run's beginning."""
    return statistics.median(one.normalized for one in result.warm)


def median_normalized(system: System, lengths: Lengths, rate: float, requests: int, seed: int) -> float:
    """Median seconds per token of a Poisson trace."""
    return normalized_of(system.serve(drawn(lengths, POISSON, rate, requests, Seeds.of(seed))))


def highest_rate(system: System, lengths: Lengths, scale: Scale, seed: int, target: float, guess: float) -> float:
    """The highest rate at which the median is at most `target` seconds per token on this seed's trace; 0: it never is.

    The same requests arrive closer together, so the median grows with the rate but for small jumps.
    """
    low, high = 0.02 * guess, 1.5 * guess
    if median_normalized(system, lengths, low, scale.requests, seed) > target:
        return 0.0
    for _ in range(8):
        middle = (low + high) / 2
        if median_normalized(system, lengths, middle, scale.requests, seed) <= target:
            low = middle
        else:
            high = middle
    return low


class Point(NamedTuple):
    """One run: a row of points.csv. Latencies in ms: per token in Figure 10, of a request in 9 and 11."""

    figure: int
    panel: str
    system: str
    phi: float
    seed: int
    x: float  # batch size (9), or requests per second that arrived (10, 11)
    throughput: float  # requests per second; from the first arrival to the last end
    latency_ms: float  # of the batch (9), or the median
    p99_ms: float
    sustained: bool  # the rate is at most what the system sustains


class Number(NamedTuple):
    """A number of a table: the mean over seeds, or over phi and seeds, and the lowest and highest."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Number":
        return cls(statistics.mean(values), min(values), max(values))


@dataclass
class Found:
    """The results of a figure: points for its picture, and numbers by name. `real`: what it was measured on, and which
    runs did not count, because other processes disturbed them; empty for a simulation."""

    figure: int
    points: list[Point] = field(default_factory=list[Point])
    numbers: dict[str, Number] = field(default_factory=dict[str, Number])
    real: dict[str, Any] = field(default_factory=dict[str, Any])


Say = Callable[[str], None]


# -- Figure 9


def figure_9(scale: Scale, say: Say) -> Found:
    """The same batch injected again and again until it ends, without a scheduler and without pipelining.

    Bars of FasterTransformer are missing where keys and values for the longest sequences do not fit.
    """
    found = Found(9)
    for name in ("13b", "101b", "175b"):
        say(f"figure 9: {name}")
        plain = A100.of_the_paper(name)
        for inputs in INPUTS:
            inputs_, outputs = max(1, inputs // scale.divide), max(1, OUTPUTS // scale.divide)
            for batch in BATCHES:
                runs = [(f"orca({inputs})", plain)]
                if plain.allocates(batch):
                    runs += [(f"ft({inputs})", replace(plain, phi=phi)) for phi in phis(plain.pp)]
                by_system = dict[str, list[float]]()
                for label, cost in runs:
                    seconds = Batched(cost, batch).seconds([(inputs_, outputs)] * batch)
                    by_system.setdefault(label, []).append(seconds)
                    ms = seconds * 1e3
                    point = Point(9, name, label, cost.phi, 0, float(batch), batch / seconds, ms, ms, True)
                    found.points.append(point)
                for label, values in by_system.items():
                    found.numbers[f"{name} {label} batch {batch}, ms/token"] = Number.of(
                        [seconds * 1e3 / outputs for seconds in values]
                    )
    return found


# -- Figures 10 and 11


def curve(found: Found, panel: str, system: System, lengths: Lengths, scale: Scale, normalized: bool) -> list[float]:
    """Adds the points of a system's curve; returns what it sustains, for each seed."""
    rates = [sustained(system, lengths, scale, seed) for seed in scale.seeds[:1]]
    for share in SHARES:
        rate = share * rates[0]
        for seed in scale.seeds:
            try:
                result = system.serve(drawn(lengths, POISSON, rate, scale.requests, Seeds.of(seed)))
            except Disturbed as disturbed:
                found.real.setdefault("disturbed", []).append(f"{panel} at {rate:.3g} req/s: {disturbed}")
                continue
            found.points.append(point_of(found.figure, panel, system, seed, rate, result, normalized, share <= 1))
    return rates


def point_of(
    figure: int, panel: str, system: System, seed: int, rate: float, result: Result, normalized: bool, sustained: bool
) -> Point:
    """A run, without its first tenth of requests."""
    values = sorted((one.normalized if normalized else one.latency) * 1e3 for one in result.warm)
    first, last = result.requests[0].asked.at, max(one.ended for one in result.requests)
    return Point(
        *(figure, panel, system.label, system.phi, seed, rate),
        throughput=len(result.requests) / (last - first),
        latency_ms=statistics.median(values),
        p99_ms=values[min(len(values) - 1, int(0.99 * len(values)))],
        sustained=sustained,
    )


def targets(scale: Scale) -> dict[str, float]:
    """Seconds per token of each model of Figure 10 at which rates are compared: the paper's for 175B, twice our own
    Figure 9's normalized time (batch 32, 128 input tokens) for the others."""
    inputs, outputs = max(1, 128 // scale.divide), max(1, OUTPUTS // scale.divide)
    own = {
        name: 2 * Batched(A100.of_the_paper(name), 32).seconds([(inputs, outputs)] * 32) / outputs
        for name in ("101b", "341b")
    }
    return {"101b": own["101b"], "175b": TARGET, "341b": own["341b"]}


def figure_10(scale: Scale, say: Say, models: Sequence[str] = ("101b", "175b", "341b")) -> Found:
    """Median normalized latency against throughput, on the paper's lengths."""
    found, lengths = Found(10), scale.lengths(PAPER)
    for name in models:
        plain = A100.of_the_paper(name)
        systems = [orca(plain, max_bs) for max_bs in ORCA]
        settings = [(max_bs, mbs) for max_bs, mbs in FT if plain.allocates(max_bs) and (plain.pp > 1 or max_bs == mbs)]
        systems += [ft(plain, *setting) for setting in settings]
        systems += [ft(replace(plain, phi=phi), *best) for phi in phis(plain.pp)[1:] for best in BEST_FT]
        numbers = dict[str, list[float]]()
        for system in systems:
            say(f"figure 10: {name} {system.label}" + (f" phi {system.phi:g}" if system.phi != 1 else ""))
            capacity = curve(found, name, system, lengths, scale, normalized=True)
            label = f"{name} {system.label}" + (f" phi {system.phi:g}" if plain.pp > 1 and "ft" in system.label else "")
            ms = targets(scale)[name]
            best = [highest_rate(system, lengths, scale, seed, ms, capacity[0]) for seed in scale.seeds]
            numbers[f"{label} sustained, req/s"] = capacity
            numbers[f"{label} at {ms * 1e3:.0f} ms/token, req/s"] = best
        found.numbers |= {key: Number.of(values) for key, values in numbers.items()}
    if "175b" in models:
        found.numbers |= of_trace_lengths(scale, say)
        found.numbers |= of_batchmaker(scale, say)
    return found


def of_trace_lengths(scale: Scale, say: Say) -> dict[str, Number]:
    """How a median above the sustained rate depends on the trace: orca(16) of 175B at 6.8 req/s, the paper's rate."""
    say("figure 10: trace lengths")
    system, lengths = orca(A100.of_the_paper("175b"), 16), scale.lengths(PAPER)
    return {
        f"175b orca(16) at 6.8 req/s, {requests} requests, ms/token": Number.of(
            [median_normalized(system, lengths, 6.8, requests, seed) * 1e3 for seed in scale.seeds]
        )
        for requests in (TRACES if scale.requests >= 1000 else (scale.requests,))
    }


def of_batchmaker(scale: Scale, say: Say) -> dict[str, Number]:
    """BatchMaker's cells on 175B, up to what orca(1) sustains."""
    say("figure 10: BatchMaker")
    cost, lengths = A100.of_the_paper("175b"), scale.lengths(PAPER)
    alone = orca(cost, 1)
    rate = sustained(alone, lengths, replace(scale, queued=max(10, scale.queued // 4)), scale.seeds[0])
    numbers = {"175b orca(1) sustained, req/s": Number.of([rate])}
    for policy in ("batchmaker", "batchmaker-strict"):
        system = orca(cost, 32, policy)
        for share in (0.5, 1.0):
            results = [
                system.serve(drawn(lengths, POISSON, share * rate, scale.requests, Seeds.of(seed)))
                for seed in scale.seeds
            ]
            where = f"175b {policy} at {share:g} of orca(1)'s sustained rate"
            numbers[f"{where}, mean batch"] = Number.of([result.mean_batch for result in results])
            medians = [normalized_of(result) * 1e3 for result in results]
            numbers[f"{where}, ms/token"] = Number.of(medians)
    return numbers


def figure_11(scale: Scale, say: Say) -> Found:
    """Median latency against throughput of 175B, on traces of equal requests."""
    found, plain = Found(11), A100.of_the_paper("175b")
    requests, queued = scale.of(11)
    scale = replace(scale, requests=requests, queued=queued)
    for inputs, outputs in HOMOGENEOUS:
        lengths = scale.lengths(Lengths((inputs, inputs), (outputs, outputs)))
        panel = f"({inputs},{outputs})"
        systems = [orca(plain, max_bs) for max_bs in (1, 8, 32)]
        systems += [ft(plain, *setting) for setting in ((1, 1), (8, 8), (8, 4))]
        for system in systems:
            say(f"figure 11: {panel} {system.label}")
            capacity = curve(found, panel, system, lengths, scale, normalized=False)
            found.numbers[f"{panel} {system.label} sustained, req/s"] = Number.of(capacity)
    return found


FIGURES: dict[int, Callable[[Scale, Say], Found]] = {9: figure_9, 10: figure_10, 11: figure_11}


def table_1() -> Iterator[tuple[str, ...]]:
    """Rows of Table 1, and what follows: parameters in billions, GB and slots of a GPU of which 36 GB are used."""
    for name, (model, tp, pp) in TABLE_1.items():
        cost = A100(model, tp, pp)
        yield (
            name.upper(),
            f"{model.parameters / 1e9:.1f}",
            *(str(model.layers), str(model.hidden), str(pp), str(tp)),
            f"{cost.weight_bytes / 1e9:.2f}",
            f"{cost.slot_bytes / 1e3:.1f}",
            f"{cost.slots:,}",
        )
