"""The paper's figures on this machine, a calibration, and live runs against simulated ones.

The experiments are those of `orca_lab.experiments`; only `serve` is live here. Each system of Figures 10 and 11 is
calibrated by its own journal, and simulated on the same requests.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from orca_common.errors import FailedPrecondition, Unavailable
from orca_lab.baseline.attention import By
from orca_lab.baseline.engine import BatchCore, WholeBatches
from orca_lab.baseline.selections import any_policy
from orca_lab.baseline.simulated import simulate_requests
from orca_lab.calibration import Calibration
from orca_lab.experiments import (
    BATCHES,
    HOMOGENEOUS,
    INPUTS,
    OUTPUTS,
    Disturbed,
    Found,
    Number,
    Point,
    Say,
    Scale,
    System,
    curve,
    sustained,
)
from orca_lab.sequence import Compared, compare
from orca_lab.simulator import Delays, Engine, Result, Simulation
from orca_lab.timeline import percentile
from orca_lab.workload import AT_ONCE, PAPER, POISSON, Lengths, Seeds, Workload, drawn

from .cases import fixed, vocabulary_of
from .engine import Engine as EngineAlone
from .engine import EngineOptions, Timed
from .live import BLOCK_SIZE, Layout, Live, Setting, slots_for
from .machine import isa, processor
from .ranks import Control, Ranks

FULL, QUICK = Scale(200, 400, (1,)), Scale(60, 160, (1,), divide=4)
ATTEMPTS = 3  # runs of a load, until one was not disturbed
ROUNDS = 3  # of a batch in Figure 9: the median counts
ORCA = (8, 16, 32)
FT = ((1, 1), (8, 8), (4, 4), (8, 4))  # the last one where there are several stages
OF_11 = (Setting(1), Setting(8), Setting(1, 1), Setting(8, 8))


@dataclass(frozen=True)
class Real:
    """The layout that is measured. `attempts` 0: each run counts, whatever else the machine does."""

    layout: Layout
    attempts: int = ATTEMPTS
    calibration: Calibration | None = None  # of this layout, for the guard
    attention: By = By.KERNELS  # of Figure 9's baseline

    @property
    def panel(self) -> str:
        layout = self.layout
        several = f" engines {layout.engines}" if layout.engines > 1 else ""
        return f"{layout.checkpoint.name} tp {layout.tp} pp {layout.pp}{several}"

    @property
    def about(self) -> dict[str, Any]:
        """Facts about the machine and the layout, for a reader."""
        layout = self.layout
        return {
            "model": layout.checkpoint.name,
            **{"dtype": layout.dtype, "tp": layout.tp, "pp": layout.pp, "engines": layout.engines},
            "memory": layout.memory,
            **{"machine": processor(), "isa": isa()},
            "guard": f"a run counts if one of {self.attempts} was not disturbed" if self.attempts else "off",
        }

    def system(self, live: Live, say: Say) -> System:
        """A live system with the guard."""
        return System(live.setting.label, partial(self._serve, live, say))

    def _serve(self, live: Live, say: Say, workload: Workload) -> Result:
        """Raises Disturbed."""
        if not self.attempts:
            return live.serve(workload)
        result = live.guarded(workload, self.calibration, self.attempts, say)
        if result is None:
            raise Disturbed(f"{live.setting.label} was disturbed {self.attempts} times")
        return result


# -- the calibration


def calibrate(real: Real, setting: Setting, lengths: Lengths, requests: int, about: Mapping[str, Any]) -> Calibration:
    """A sweep over batch sizes, a saturated run and one at half of its load, of one system. Costs are those of its
    stage reports: batches of a full queue alone say too little of those in the middle."""
    with Live(real.layout, setting) as live:
        ways = live.ways()
        sweep(live, lengths, requests)
        return Calibration.of(live.recording(), ways, about_of(real, setting, about))


def sweep(live: Live, lengths: Lengths, requests: int) -> None:
    size, shortest = 1, lengths.inputs[0]
    while size <= live.setting.max_bs:
        live.serve(drawn(Lengths((shortest, shortest), (16, 16)), AT_ONCE, 1.0, size, Seeds.of(size)))
        size *= 2
    full = live.serve(drawn(lengths, AT_ONCE, 1.0, requests, Seeds.of(1)))
    live.serve(drawn(lengths, POISSON, 0.5 * requests / full.seconds, max(1, requests // 2), Seeds.of(2)))


def about_of(real: Real, setting: Setting, about: Mapping[str, Any]) -> dict[str, Any]:
    return {**about, **real.about, "system": setting.label, "max_bs": setting.max_bs}


def simulated(setting: Setting, calibration: Calibration) -> System:
    """A system in virtual time, by a calibration of it."""
    if setting.mbs:
        return System(setting.label, partial(of_request_level, setting, calibration))
    engine = Engine(calibration.cost, calibration.slots, setting.max_bs, any_policy(setting.selection), BLOCK_SIZE)
    delays = Delays(calibration.way_in, calibration.way_out, ahead=False)

    def serve(workload: Workload) -> Result:
        return Simulation([engine] * calibration.engines, delays, tokens=True).run(workload)

    return System(setting.label, serve)


def of_request_level(setting: Setting, calibration: Calibration, workload: Workload) -> Result:
    """The ways to and from the client are the same for all requests, so they make each one later."""
    result = simulate_requests(calibration.cost, setting.max_bs, setting.mbs, workload, setting.delay)
    late = calibration.way_in + calibration.way_out
    for one in result.requests:
        one.first, one.ended = one.first + late, one.ended + late
    return replace(result, seconds=result.seconds + late)


# -- Figure 9


def figure_9(scale: Scale, real: Real, say: Say, settings: Sequence[Setting] = ()) -> Found:
    """The engines alone: the same batch again and again, without a scheduler; on one rank in this process.

    Bars of the request-level engine are missing where keys and values for the longest sequences do not fit. Between
    several ranks its control messages go by broadcast, and Orca's are sent ahead.
    """
    layout = real.layout
    if layout.engines > 1:
        raise FailedPrecondition("engines: Figure 9 is of one")
    found, checkpoint = Found(9, real=real.about | {"attention": str(real.attention)}), layout.checkpoint
    longest, vocabulary = checkpoint.max_positions, vocabulary_of(checkpoint.vocab_size)
    options = EngineOptions(layout.model, layout.dtype, max_batch_size=max(BATCHES))
    outputs = max(1, OUTPUTS // scale.divide)
    with ExitStack() as opened:
        slots = slots_for(max(BATCHES), longest, BLOCK_SIZE)
        orca, ft = engines_alone(layout, options, replace(options, attention=real.attention), slots, opened)
        blocks = ft.options.block_size_of(checkpoint)
        for inputs in (max(1, inputs // scale.divide) for inputs in INPUTS):
            for batch in BATCHES:
                say(f"figure 9: {inputs} input tokens, batch {batch}")
                case = fixed(batch, inputs, outputs, vocabulary=vocabulary)
                systems = {f"orca({inputs})": orca} | ({f"ft({inputs})": ft} if fits(layout, batch) else {})
                seconds = {label: list[float]() for label in systems}
                for _ in range(1 + ROUNDS):  # in turn; the first round warms up
                    for label, engine in systems.items():
                        whole = WholeBatches(mbs=batch, longest=longest)
                        core = BatchCore(batch, blocks, whole) if label.startswith("ft") else None
                        seconds[label].append(engine.run(case, core).seconds)
                for label, (_, *runs) in seconds.items():
                    for number, one in enumerate(runs, 1):
                        ms = one * 1e3
                        found.points.append(
                            Point(9, real.panel, label, 1.0, number, float(batch), batch / one, ms, ms, sustained=True)
                        )
                    name = f"{real.panel} {label} batch {batch}, ms/token"
                    found.numbers[name] = Number.of([statistics.median(runs) * 1e3 / outputs])
    return found


def engines_alone(
    layout: Layout, ours: EngineOptions, theirs: EngineOptions, slots: int, opened: ExitStack
) -> tuple[Timed, Timed]:
    """Orca's engine and the baseline's: the same one, where no control message goes between ranks and the attention is
    the same."""
    checkpoint = layout.checkpoint
    if layout.tp * layout.pp == 1:
        alone = EngineAlone(ours, checkpoint, slots)
        return alone, alone if theirs == ours else EngineAlone(theirs, checkpoint, slots)
    ahead, broadcast = (
        Timed(options, checkpoint, slots, opened.enter_context(Ranks(options, slots, layout.tp, layout.pp, control)))
        for options, control in ((ours, Control.AHEAD), (theirs, Control.BROADCAST))
    )
    return ahead, broadcast


def fits(layout: Layout, batch: int) -> bool:
    try:
        layout.check_memory(batch)
    except FailedPrecondition:
        return False
    return True


# -- Figures 10 and 11


def figure_10(scale: Scale, real: Real, say: Say, settings: Sequence[Setting] = ()) -> Found:
    """Median normalized latency against throughput on the paper's lengths, measured and simulated."""
    found, lengths = Found(10, real=real.about), scale.lengths(PAPER)
    settings = settings or [*map(Setting, ORCA), *(Setting(*one) for one in (FT if real.layout.pp > 1 else FT[:-1]))]
    curves(found, real.panel, settings, lengths, scale, real, say, normalized=True)
    for panel in (real.panel, f"{real.panel}, simulated"):
        add_ratio(found, panel)
    return found


def figure_11(scale: Scale, real: Real, say: Say, settings: Sequence[Setting] = ()) -> Found:
    """Median latency against throughput on traces of equal requests: the first lengths of the simulated figure."""
    found = Found(11, real=real.about)
    inputs, outputs = HOMOGENEOUS[0]
    lengths = scale.lengths(Lengths((inputs, inputs), (outputs, outputs)))
    panel = f"({lengths.inputs[0]},{lengths.outputs[0]})"
    curves(found, panel, settings or OF_11, lengths, scale, real, say, normalized=False)
    return found


def curves(
    found: Found,
    panel: str,
    settings: Sequence[Setting],
    lengths: Lengths,
    scale: Scale,
    real: Real,
    say: Say,
    normalized: bool,
) -> None:
    """The curve of each system, live; and by a calibration from its own reports, in a panel of its own."""
    for setting in settings:
        if setting.mbs and not fits(real.layout, setting.max_bs):
            found.real.setdefault("no memory", []).append(setting.label)
            continue
        say(f"figure {found.figure}: {panel} {setting.label}")
        began = time.monotonic()
        try:
            with Live(real.layout, setting) as live:
                system, ways = real.system(live, say), live.ways()
                rates = curve(found, panel, system, lengths, scale, normalized)
                calibration = Calibration.of(live.recording(), ways, about_of(real, setting, {}))
        except Disturbed as disturbed:
            found.real.setdefault("disturbed", []).append(f"{panel} with a full queue: {disturbed}")
            continue
        except Unavailable as error:  # what the other systems took minutes for stays
            found.real.setdefault("failed", []).append(f"{panel} {setting.label}: {error}")
            continue
        found.real.setdefault("calibrations", {})[setting.label] = asdict(replace(calibration, about={}))
        found.real.setdefault("seconds", {})[setting.label] = round(time.monotonic() - began)
        model = simulated(setting, calibration)
        said = curve(found, f"{panel}, simulated", model, lengths, scale, normalized)
        found.numbers[f"{panel} {setting.label} sustained, req/s"] = Number.of(rates)
        found.numbers[f"{panel}, simulated {setting.label} sustained, req/s"] = Number.of(said)


def add_ratio(found: Found, panel: str) -> None:
    """The rates at twice the unloaded normalized latency, and Orca's best over the baseline's best."""
    points = [point for point in found.points if point.panel == panel]
    unloaded = min((p.latency_ms for p in points if p.system.startswith("orca")), default=0.0)
    best = {"orca": 0.0, "ft": 0.0}
    for system in dict.fromkeys(point.system for point in points):
        if (sustains := found.numbers.get(f"{panel} {system} sustained, req/s")) is None:
            continue  # it failed behind these points
        limit = sustains.mean
        own = sorted((p.x, p.latency_ms) for p in points if p.system == system)
        rate = min(limit, highest(own, 2 * unloaded))
        found.numbers[f"{panel} {system} at {2 * unloaded:.4g} ms/token, req/s"] = Number.of([rate])
        kind = system.split("(")[0]
        best[kind] = max(best[kind], rate)
    if best["ft"]:
        found.numbers[f"{panel} orca over ft"] = Number.of([best["orca"] / best["ft"]])


def highest(points: Sequence[tuple[float, float]], most: float) -> float:
    """The rate up to which a curve of (rate, latency) stays at or below `most`, on straight lines between its points;
    0: it begins above."""
    if not points or points[0][1] > most:
        return 0.0
    for (low, before), (high, after) in pairwise(points):
        if after > most:
            return low + (high - low) * (most - before) / (after - before)
    return points[-1][0]


FIGURES: dict[int, Callable[[Scale, Real, Say, Sequence[Setting]], Found]] = {9: figure_9, 10: figure_10, 11: figure_11}


# -- live against simulated


class Measures(NamedTuple):
    """The measures of one run. Times in seconds; requests per second."""

    throughput: float
    normalized: float  # median
    normalized_p99: float
    first_token: float  # median
    gap_p99: float

    @classmethod
    def of(cls, result: Result) -> "Measures":
        """Measures a run that has the moment of each token."""
        each = [one.normalized for one in result.requests]
        gaps = [after - before for one in result.requests for before, after in pairwise(one.came or ())]
        first = statistics.median(one.first_token for one in result.requests)
        rate = len(result.requests) / (result.seconds - result.requests[0].asked.at)
        return cls(rate, statistics.median(each), percentile(each, 0.99), first, percentile(gaps, 0.99))


class Validated(NamedTuple):
    """One share of what is sustained: measures of a live and of the simulated run.

    pace: `Live.pace` of the former, and paced: measures of a run that is simulated at that pace.
    """

    share: float
    run: int
    live: Measures
    simulated: Measures
    pace: float | None = None
    paced: Measures | None = None

    @property
    def errors(self) -> Iterator[float]:
        """The errors with their signs, in the order of `Measures`."""
        for said, was in zip(self.simulated, self.live, strict=True):
            yield said / was - 1


BOUNDS = Measures(0.02, 0.04, 0.10, 0.08, 0.20)  # that errors are to stay below
SHARES = (0.3, 0.5, 0.7)


class Validation(NamedTuple):
    rows: list[Validated]
    compared: Compared  # the sequence of the iterations of all runs
    skipped: list[str]  # runs that did not count


def _predicted(setting: Setting, calibration: Calibration, workload: Workload, pace: float) -> Measures:
    at_pace = replace(calibration, cost=calibration.cost.at_pace(pace))
    return Measures.of(simulated(setting, at_pace).serve(workload))


def validate(
    real: Real,
    setting: Setting,
    calibration: Calibration,
    lengths: Lengths,
    requests: int,
    runs: int,
    say: Say,
    shares: Sequence[float] = SHARES,
) -> Validation:
    """Live runs against simulated ones at shares of what is sustained, and whether the iterations are the same."""
    rows, skipped = list[Validated](), list[str]()
    with TemporaryDirectory() as folder:
        journal = Path(folder, "journal-engine-0-1.jsonl")
        with Live(real.layout, setting, keep=journal) as live:
            system = real.system(live, say)
            limit = sustained(system, lengths, replace(FULL, queued=requests), 1)
            for share in shares:
                for run in range(1, runs + 1):
                    workload = drawn(lengths, POISSON, share * limit, requests, Seeds.of(run))
                    say(f"{share:.0%} of {limit:.3g} req/s, run {run}")
                    try:
                        measured = Measures.of(system.serve(workload))
                    except Disturbed as disturbed:
                        skipped.append(f"{share:.0%}, run {run}: {disturbed}")
                        continue
                    predict = partial(_predicted, setting, calibration, workload)
                    paced = None if live.pace is None else predict(live.pace)
                    rows.append(Validated(share, run, measured, predict(1.0), live.pace, paced))
        return Validation(rows, compare(journal), skipped)
