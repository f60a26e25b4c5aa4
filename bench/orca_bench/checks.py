"""Answers of `orca lab whatif` and `orca lab plan` beside live runs of what they answer about."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from orca_lab.calibration import Calibration
from orca_lab.experiments import FULL, Disturbed, Say, normalized_of, sustained
from orca_lab.plan import Layout as Planned
from orca_lab.plan import Slo, judge
from orca_lab.recording import Recording
from orca_lab.whatif import Outcome, WhatIf, settings_of
from orca_lab.workload import POISSON, Lengths, Seeds, Workload, drawn

from .live import Layout, Live, Setting
from .real import Real, simulated

SHARE = 0.8  # of what the recorded setting sustains
OF_A_PLAN = 0.5  # of what the weakest layout sustains


class Checked(NamedTuple):
    """A measure of a live run, and its prediction. `bound`: of the error; None: it has none."""

    of: str  # a setting or a layout
    measure: str
    live: float
    said: float
    bound: float | None

    @property
    def error(self) -> float:
        return self.said / self.live - 1


class Report(NamedTuple):
    """`skipped`: runs that did not count. `notes`: what else is to be said of the rows."""

    rows: list[Checked]
    skipped: list[str]
    notes: list[str]


# -- what-if

BOUNDS: Mapping[str, float] = {"throughput": 0.05, "normalized": 0.20}  # that errors are to stay below


def check_whatif(
    real: Real,
    calibration: Calibration,
    recorded: int,
    others: Sequence[int],
    lengths: Lengths,
    requests: int,
    say: Say,
) -> Report:
    """Records a run with `max_bs` `recorded`, predicts it and the other values from the record, and runs those.

    The rate is SHARE of what the recorded setting sustains by the calibration.
    """
    model = simulated(Setting(recorded), calibration)
    rate = SHARE * sustained(model, lengths, FULL, 1)
    workload, report = drawn(lengths, POISSON, rate, requests, Seeds.of(1)), Report([], [], [])
    say(f"max_bs {recorded} at {rate:.3g} req/s")
    what = WhatIf(record(real, Setting(recorded), workload, say))
    for setting in [what.setting, *settings_of(what.setting, others, (), None, ())]:
        said, name = what.predict(setting), f"max_bs {setting.max_bs}"
        if setting == what.setting:
            outcome, name = what.recorded, f"{name}, the record"
        else:
            say(name)
            try:
                outcome = Outcome.of(record(real, Setting(setting.max_bs), workload, say).requests)
            except Disturbed as disturbed:
                report.skipped.append(f"{name}: {disturbed}")
                continue
        for measure, live, answer in zip(Outcome._fields, outcome, said.outcome, strict=True):
            report.rows.append(Checked(name, measure.replace("_", " "), live, answer, BOUNDS.get(measure)))
        if said.extrapolated:
            report.notes.append(f"{name}: extrapolated, {said.extrapolated}")
    return report


def record(real: Real, setting: Setting, workload: Workload, say: Say) -> Recording:
    """A run of a fresh stack: its journal has no other requests but those that warm it up. Raises Disturbed."""
    for _ in range(max(1, real.attempts)):
        with Live(real.layout, setting) as live:
            if not real.attempts:
                live.serve(workload)
            elif live.guarded(workload, real.calibration, 1, say) is None:
                continue
            return live.recording()
    raise Disturbed(f"{setting.label} was disturbed {real.attempts} times")


# -- plans


def check_plan(
    model: Layout, attempts: int, calibrations: Sequence[Calibration], lengths: Lengths, requests: int, say: Say
) -> Report:
    """Runs each calibrated layout of a machine with a full queue, and with OF_A_PLAN of what the weakest one sustains;
    and simulates both as `orca lab plan` does. A note says for each measure whether the order is the measured one.

    model: the model, its dtype and its memory.
    """
    report, scale = Report([], [], []), replace(FULL, queued=requests)
    settings = [Setting(one.about["max_bs"]) for one in calibrations]
    limits = [
        sustained(simulated(setting, one), lengths, scale, 1)
        for setting, one in zip(settings, calibrations, strict=True)
    ]
    workload = drawn(lengths, POISSON, OF_A_PLAN * min(limits), requests, Seeds.of(1))
    for setting, one, limit in zip(settings, calibrations, limits, strict=True):
        layout = replace(model, tp=one.about["tp"], pp=one.about["pp"], engines=one.engines)
        real, planned = Real(layout, attempts, one), Planned(layout.tp, layout.pp, layout.engines, setting.max_bs)
        say(f"{planned}: {limit:.3g} req/s simulated")
        said = judge(planned, one.cost, one.slots, workload, Slo(percentile=0.5)).measures.normalized
        try:
            with Live(layout, setting) as live:
                system = real.system(live, say)
                rate = sustained(system, lengths, scale, 1)
                normalized = normalized_of(system.serve(workload))
        except Disturbed as disturbed:
            report.skipped.append(f"{planned}: {disturbed}")
            continue
        report.rows.append(Checked(str(planned), SUSTAINED, rate, limit, BOUNDS["throughput"]))
        report.rows.append(Checked(str(planned), NORMALIZED, normalized, said, BOUNDS["normalized"]))
    report.notes.extend(orders(report.rows))
    return report


SUSTAINED, NORMALIZED = "sustained, req/s", "normalized, s"


def orders(rows: Sequence[Checked]) -> list[str]:
    """Says which rows of a measure are predicted in another order than they were measured in. Two that were measured
    within the bound of each other have none."""
    found = list[str]()
    for name in dict.fromkeys(row.measure for row in rows):
        pairs = list(combinations([row for row in rows if row.measure == name], 2))
        apart = [(a, b) for a, b in pairs if abs(a.live / b.live - 1) > (a.bound or 0.0)]
        wrong = [(a, b) for a, b in apart if (a.said < b.said) != (a.live < b.live)]
        found += [f"{name}: {a.of} and {b.of} were predicted in the other order" for a, b in wrong]
        if not wrong:
            far = f"{len(apart)} of {len(pairs)} pairs differ by more than the bound"
            found.append(f"{name}: the order is the measured one ({far})")
    return found
