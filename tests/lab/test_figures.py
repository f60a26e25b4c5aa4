"""The figures' numbers from results that are known, and their files: tables, curves, bars and axes."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orca_lab import experiments, report
from orca_lab.chart import Bars, Spot, decades_of, ticks_of
from orca_lab.claims import Results
from orca_lab.cost import A100, TABLE_1, Constant, Load
from orca_lab.experiments import (
    FULL,
    QUICK,
    Disturbed,
    Found,
    Number,
    Point,
    Scale,
    System,
    curve,
    highest_rate,
    median_normalized,
    orca,
    phis,
    point_of,
    sustained,
)
from orca_lab.plan import Layout, Scaled, Slo, calibrated, headroom, judge, measured, on_machine
from orca_lab.real_claims import said
from orca_lab.simulator import Result, Served
from orca_lab.whatif import Outcome, Setting, settings_of
from orca_lab.workload import PAPER, POISSON, Asked, Lengths, Seeds, Workload, drawn

ONE = Lengths((10, 10), (4, 4))


def result(requests: list[Served]) -> Result:
    return Result(requests, 0.0, 0, 0, [])


def served(seconds: Callable[[int], float]) -> System:
    """A system whose n-th request takes this long."""

    def serve(workload: Workload) -> Result:
        return result([Served(one, ended=one.at + seconds(n)) for n, one in enumerate(workload)])

    return System("s", serve)


def test_what_a_system_sustains() -> None:
    """Of 100 requests, those that end from the 11th to the 90th."""
    every = served(lambda n: 0.01 * n if n < 10 else 0.5 * n if n < 90 else 100.0 + n)
    assert sustained(every, ONE, Scale(queued=100), 1) == pytest.approx(2.0)


def test_the_highest_rate_below_a_target() -> None:
    """Latencies grow with the rate: 0.01 s a token at one request a second."""
    whole = drawn(ONE, POISSON, 1.0, 50, Seeds.of(3))[-1].at

    def serve(workload: Workload) -> Result:
        rate = whole / workload[-1].at
        return result([Served(one, ended=one.at + 0.04 * rate) for one in workload])

    system, scale = System("s", serve), Scale(requests=50)
    assert median_normalized(system, ONE, 3.0, 50, 3) == pytest.approx(0.03)
    assert highest_rate(system, ONE, scale, 3, target=0.05, guess=4.0) == pytest.approx(5.0, abs=0.03)
    assert highest_rate(system, ONE, scale, 3, target=0.0007, guess=4.0) == 0.0


def test_a_point() -> None:
    """Of 20 requests the first two warm up; the throughput is that of all."""
    requests = [Served(Asked(n + 1.0, 10, 4), ended=n + 2.0 + n / 10) for n in range(20)]
    system = served(float)
    found = point_of(10, "p", system._replace(phi=1.25), 7, 0.5, result(requests), normalized=False, sustained=True)
    rounded = found._replace(latency_ms=round(found.latency_ms, 6), p99_ms=round(found.p99_ms, 6))
    assert rounded == Point(10, "p", "s", 1.25, 7, 0.5, 20 / 21.9, 2050.0, 2900.0, True)
    of_tokens = point_of(10, "p", system, 7, 0.5, result(requests), normalized=True, sustained=False)
    assert (of_tokens.phi, of_tokens.latency_ms, of_tokens.p99_ms, of_tokens.sustained) == (
        *(1, pytest.approx(2050 / 4), pytest.approx(2900 / 4), False),
    )


def test_a_curve() -> None:
    """Its rates are shares of what the first seed sustains; a run that was disturbed is noted and is no point."""
    found, runs = Found(11), list[int]()

    def serve(workload: Workload) -> Result:
        runs.append(len(workload))
        if len(runs) == 3:
            raise Disturbed("busy took 50 %")
        return result([Served(one, ended=one.at + 1 + 0.5 * n) for n, one in enumerate(workload)])

    scale = Scale(requests=20, queued=40, seeds=(1, 2))
    rates = curve(found, "p", System("s", serve), ONE, scale, normalized=False)
    assert rates == [pytest.approx(2.0)]
    assert runs == [40, *[20] * 14]
    shares = [0.1, 0.25, 0.25, 0.5, 0.5, 0.7, 0.7, 0.85, 0.85, 0.95, 0.95, 1.05, 1.05]
    assert [point.x for point in found.points] == pytest.approx([2 * share for share in shares])
    assert [point.seed for point in found.points] == [1, *[1, 2] * 6]
    assert [point.sustained for point in found.points] == [True] * 11 + [False] * 2
    assert {(point.figure, point.panel, point.system) for point in found.points} == {(11, "p", "s")}
    assert found.real == {"disturbed": ["p at 0.2 req/s: busy took 50 %"]}


def test_how_much_is_simulated() -> None:
    assert QUICK.lengths(PAPER) == ((8, 128), (1, 32))
    assert FULL.lengths(PAPER) == PAPER
    assert [scale.of(figure) for scale in (FULL, QUICK, Scale(30, 100)) for figure in (10, 11)] == [
        *((1000, 4000), (333, 400), (250, 1000), (83, 100), (30, 100), (20, 40)),
    ]
    assert (phis(1), phis(2)) == ((1.0,), (1.0, 1.25, 1.47))
    assert [orca(A100.of_the_paper("13b"), 8, policy).label for policy in ("paper", "batchmaker")] == [
        *("orca(8)", "batchmaker"),
    ]
    assert Number.of([2.0, 4.0, 9.0]) == (5.0, 2.0, 9.0)


def test_a_table_of_a_simulation() -> None:
    numbers = {
        "175b ft(8,8) phi 1.47 at 190 ms/token, req/s": Number(0.2, 0.15, 0.25),
        "175b orca(16) at 190 ms/token, req/s": Number(6.4, 6.4, 6.4),
        "101b ft(8,8) sustained, req/s": Number(0.5, 0.5, 0.5),
        "175b orca(128) batch 32, ms/token": Number(123.4, 99.94, 150.0),
        "another": Number(1.0, 1.0, 1.0),
    }
    assert report.table_of(Found(10, [], numbers), QUICK).splitlines() == [
        "Figure 10, simulated: median normalized latency and throughput.",
        "",
        "A100 model, 36 GB of each GPU usable. Poisson traces of 250 requests, seeds 1; a number is the mean, with the "
        "band over the seeds. The sustained rate is that of the middle 80 % of the ends of 1,000 requests that are "
        "there at the start. All lengths are divided by 4.",
        "",
        "| | ours, simulated | the paper's text |",
        "| --- | --- | --- |",
        "| 175b ft(8,8) phi 1.47 at 190 ms/token, req/s | 0.2 (0.15 to 0.25) | 0.185, the best setting |",
        "| 175b orca(16) at 190 ms/token, req/s | 6.4 | 6.81, max_bs not given |",
        "| 101b ft(8,8) sustained, req/s | 0.5 | 0.49, the peak |",
        "| 175b orca(128) batch 32, ms/token | 123 (99.9 to 150) | 95, batch not given |",
        "| another | 1 |  |",
    ]
    assert report.how(11, FULL).startswith("Poisson traces of 333 requests, seeds 1, 2, 3; ")
    assert "of 400 requests" in report.how(11, FULL)
    assert report.how(9, FULL).endswith("phi 1, 1.25 and 1.47, with its band.")


REAL: dict[str, Any] = {
    **{"model": "gpt2", "dtype": "bfloat16", "tp": 1, "pp": 2, "machine": "a machine", "isa": "avx512"},
    **{"guard": "none", "attention": "torch", "disturbed": ["a", "b"], "failed": ["c"], "no memory": ["d", "e"]},
}


def test_a_table_of_a_machine() -> None:
    found = Found(9, [], {"a": Number(1, 1, 1)}, REAL)
    assert report.table_of(found, FULL).splitlines()[:5] == [
        "Figure 9, real: execution time of a batch, engines alone.",
        "",
        "gpt2 in bfloat16, tp 1 and pp 2, on a machine (avx512). Guard: none. Torch batches the baseline's attention. "
        "2 loads were disturbed each time, and are not here. 1 systems failed, and are not whole here. "
        "No memory for d, e. Medians of three runs, both engines in turn.",
        "",
        "| | ours, real | the paper's text |",
    ]
    plain = {name: value for name, value in REAL.items() if name not in ("disturbed", "failed", "no memory")}
    assert report.measured_on(plain | {"attention": "kernels"}).endswith(" Guard: none.")
    assert (
        report.caption(Found(11, real=REAL)) == "Figure 11, real: median latency and throughput of gpt2, equal requests"
    )
    assert report.caption(Found(11)).endswith(" of 175B, equal requests")


def point(system: str, x: float, ms: float, phi: float = 1.0, sustained: bool = True) -> Point:
    return Point(10, "p", system, phi, 1, x, 2 * x, ms, 2 * ms, sustained)


def test_the_curves_of_a_picture() -> None:
    """Seeds of one rate are one spot; of other phis the highest of ft(1,1) alone is drawn."""
    points = [
        *(point("orca(8)", 1.0, 10.0), point("orca(8)", 1.0, 20.0), point("orca(8)", 3.0, 50.0, sustained=False)),
        *(point("ft(1,1)", 1.0, 30.0, 1.47), point("ft(1,1)", 1.0, 30.0, 1.25), point("ft(8,8)", 1.0, 30.0, 1.47)),
    ]
    own = report.by_system(points)
    assert {name: len(one) for name, one in own.items()} == {"orca(8)": 3, "ft(1,1) phi 1.47": 1}
    drawn_as = report._curve("orca(8)", own["orca(8)"])
    assert drawn_as.spots == [Spot(2.0, 15.0, 10.0, 20.0), Spot(6.0, 50.0, 50.0, 50.0, open=True)]
    assert (drawn_as.dashed, report._curve("ft(1,1)", own["ft(1,1) phi 1.47"]).dashed) == (False, True)


def test_the_bars_of_a_picture() -> None:
    """Of three runs the median counts, of several phis the mean; a batch without a run is missing."""
    points = [point("ft(32)", 1.0, ms) for ms in (1.0, 2.0, 6.0)] + [point("orca(32)", 4.0, 5.0)]
    for runs, middle in ((True, 2.0), (False, 3.0)):
        panel = report._bars("t", points, runs)
        assert (panel.title, panel.across, panel.up) == ("t", "batch size", "execution time, ms")
        assert panel.groups == ["1", "2", "4", "8", "16", "32"]
        assert panel.bars == [
            Bars("ft(32)", [(middle, 1.0, 6.0), *[None] * 5]),
            Bars("orca(32)", [None, None, (5.0, 5.0, 5.0), None, None, None]),
        ]


def test_a_figures_files_are_what_was_found(tmp_path: Path) -> None:
    numbers = {"a": Number(2.0, 1.0, 3.0)}
    points = [point("orca(8)", 1.0, 10.0), point("orca(8)", 3.0, 20.0, sustained=False)]
    for real in ({}, REAL):
        found = Found(10, points, numbers, real)
        report.write(tmp_path / "figure-10", found, QUICK, "orca lab figure 10", "c0ffee")
        run = json.loads((tmp_path / "figure-10/run.json").read_text())
        about = {"real": REAL} if real else {"calibration": "the A100 model of orca_lab.cost"}
        scale = {"requests": 250, "queued": 1000, "seeds": [1], "divide": 4}
        assert run == {
            **{"command": "orca lab figure 10", "commit": "c0ffee", "scale": scale, "phi": [1.0, 1.25, 1.47]},
            **about,
            "numbers": {"a": [2.0, 1.0, 3.0]},
        }
        assert report.read(tmp_path / "figure-10", 10) == found
    picture = (tmp_path / "figure-10/figure.svg").read_text()
    assert ">rings: arrivals above the sustained rate, where the latency depends on the trace&#x27;s length<" in picture
    assert "bands: 1 seeds; rings: " in report.svg_of(Found(10, points), QUICK)
    assert ">190 ms<" not in picture
    of_175b = [one._replace(panel="175b") for one in points]
    shown = report.svg_of(Found(10, of_175b), QUICK)
    for words in ("190 ms", "175B", "median normalized latency, ms per token", "throughput, req/s"):
        assert f">{words}<" in shown
    alike = [one._replace(panel="(32,32)", figure=11) for one in points]
    for words in ("input, output (32,32)", "median latency, ms"):
        assert f">{words}<" in report.svg_of(Found(11, alike), QUICK)


def test_results_by_name() -> None:
    """Of phi 1; a curve is below another one where it is not slower by a tenth at any of its rates."""
    orca_8 = [point("orca(8)", 2.0, 30.0), point("orca(8)", 1.0, 10.0), point("orca(8)", 1.0, 20.0)]
    others = [point("ft(1,1)", 1.0, 14.0), point("ft(1,1)", 2.0, 99.0, 1.47), point("ft(8,8)", 1.0, 13.0)]
    above = [point("ft(4,4)", 3.0, 99.0)._replace(panel="q")]
    numbers = {
        "p orca(8) sustained, req/s": Number(3, 3, 3),
        "p ft(1,1) phi 1 sustained, req/s": Number(2, 2, 2),
        "p ft(1,1) phi 1.47 sustained, req/s": Number(1, 1, 1),
    }
    results = Results({10: Found(10, [*orca_8, *others, *above], numbers)})
    assert results.curve(10, "p", "orca(8)") == [(1.0, 15.0), (2.0, 30.0)]
    assert results.curve(10, "p", "ft(1,1)") == [(1.0, 14.0)]
    assert [results.below(10, "p", "orca(8)", worse) for worse in ("ft(1,1)", "ft(8,8)")] == [True, False]
    assert not results.below(10, "p", "ft(8,8)", "orca(8)"), "it has no rate as high"
    assert (results.panels(10), results.systems(10, "p", "ft")) == (["p", "q"], ["ft(1,1)", "ft(8,8)"])
    assert [results.sustained("p", system) for system in ("orca(8)", "ft(1,1)")] == [3, 2]
    assert list(results.named("p ft", " 1.47 sustained, req/s")) == ["p ft(1,1) phi 1.47 sustained, req/s"]
    assert results.number(10, "p orca(8) sustained, req/s") == (3, 3, 3)


def test_what_a_machine_says_of_the_papers_statements() -> None:
    """Of its own numbers, without those that are simulated beside them."""
    panels = [point("orca(8)", 1.0, 10.0)._replace(panel=name) for name in ("gpt2", "gpt2, simulated")]
    ms = {"orca(32)": 9, "ft(32)": 10, "orca(128)": 12, "ft(128)": 10, "orca(7)": 1}
    nine = Found(9, panels, {f"gpt2 {name}, ms/token": Number(value, 0, 0) for name, value in ms.items()})
    rates = {"orca(1)": 1.0, "orca(8)": 4.5678, "ft(1,1)": 2.0, "ft(8,8)": 3.0}
    numbers = {f"gpt2 {name} sustained, req/s": Number(rate, 0, 9) for name, rate in rates.items()}
    numbers |= {f"gpt2, simulated {name} sustained, req/s": Number(99, 0, 0) for name in rates}
    numbers |= {"gpt2 orca over ft": Number(3.456, 0, 0), "gpt2, simulated orca over ft": Number(3.21, 0, 0)}
    ten, eleven = Found(10, panels, numbers), Found(11, panels, numbers)
    real = {9: nine, 10: ten, 11: eleven}
    for (where, statement), words in {
        ("9a", "on 13B, Orca"): "Orca's engine takes 0.90 to 1.20 of the baseline's time",
        ("10b", "that is 36.9 times"): "3.46 times at twice the unloaded latency; 3.21 simulated with the same "
        "calibrations",
        ("10", "a larger max_bs raises"): "orca(1) 1, orca(8) 4.57 req/s sustained",
        ("10", "FasterTransformer's best settings"): "ft(1,1) 2, ft(8,8) 3 req/s sustained",
        ("11", "FasterTransformer gains"): "ft(8,8) sustains 1.50 times ft(1,1)",
        ("11", "Orca is better than ft(8,8)"): "orca(8) sustains 1.52 times ft(8,8)",
        ("11", "orca(1) is a plain pipeline"): "orca(1) sustains 0.50 times ft(1,1)",
        ("11", "another"): "not run",
    }.items():
        assert said(where, statement, real) == words
        assert said(where, statement, {}) == "not run"
    assert said("11", "FasterTransformer gains", {11: Found(11, panels, {})}) == "not run"
    assert said("9a", "on 13B", {9: Found(9, panels, {})}) == "not run"


def test_axes() -> None:
    assert [ticks_of(value) for value in (5, 12, 4.2)] == [[0, 1, 2, 3, 4, 5], [0, 5, 10, 15], [0, 1, 2, 3, 4, 5]]
    assert [decades_of(*pair) for pair in ((1, 10), (3, 40), (3, 3))] == [[1, 2, 5, 10], [2, 5, 10, 20, 50], [2, 5]]


def test_table_1_has_its_memory() -> None:
    """Weights and slots by hand: two bytes a parameter over tp x pp; a key and a value a layer of a stage."""
    for row in experiments.table_1():
        model, tp, pp = TABLE_1[row[0].lower()]
        cost = A100(model, tp, pp)
        assert float(row[6]) == pytest.approx(cost.weight_bytes / 1e9, abs=0.005)
        assert float(row[7]) == pytest.approx(2 * 2 * model.hidden / tp * (model.layers / pp) / 1e3, rel=0.01)
        assert int(row[8].replace(",", "")) == cost.slots


# -- plans and other settings


def test_a_layout_in_words() -> None:
    plain, parts, split = Layout(2, 4, 3, 8), Layout(1, 1, 2, 8, positions=64), Layout(1, 1, 3, 8, prefill=1)
    assert [str(one) for one in (plain, parts, split)] == [
        "3 x (tp 2, pp 4), max_bs 8",
        "2 x (tp 1, pp 1), max_bs 8, positions 64",
        "3 x (tp 1, pp 1), max_bs 8, prefill=1,decode=2",
    ]
    assert plain.values() == (
        "engine:\n  count: 3\n  tp: 2\n  pp: 4\nscheduler:\n  settings:\n    max_batch_size: 8\n    policy: paper\n"
    )
    assert (plain.gpus, plain.way, parts.way, split.way) == (24, "mixed", "chunked", "split")
    assert [one.positions for one in parts._replace(engines=1).others((8, 16, 32))] == [16, 32]
    engines = split.of(Constant(0.1), 100)
    assert [(one.memory_slots, one.max_bs, str(one.role)) for one in engines] == [
        *((96, 8, "prefill"), (96, 8, "decode"), (96, 8, "decode")),
    ]


def test_measures_of_a_run() -> None:
    """At a percentile, without the first tenth of the requests."""
    requests = [
        Served(Asked(0.0, 10, 2), first=9.0, ended=9.0, came=[0.0, 9.0]),
        *(Served(Asked(1.0, 10, 2), first=1.0 + n, ended=3.0 + n, came=[1.0, 1.0 + n, 2.0 + 3 * n]) for n in range(9)),
    ]
    assert measured(result(requests), 0.5) == Slo(4.0, 3.0, 5.0, 0.5)
    assert measured(result([Served(Asked(0.0, 1, 1), first=1.0, ended=2.0)]), 0.5) == Slo(1.0, 2.0, 0.0, 0.5)


def test_the_headroom_of_a_layout() -> None:
    """The load may come that many times as fast, and not by a sixth part of the search's step more."""
    load, slo = drawn(Lengths((20, 60), (5, 20)), POISSON, 1.0, 40, Seeds.of(2)), Slo(normalized=0.3, percentile=0.9)
    layout, cost = Layout(1, 1, 1, 4), Constant(0.1)
    room = headroom(layout, cost, 1000, load, slo)
    assert 1 < room < 8

    def faster(factor: float) -> float:
        return judge(layout, cost, 1000, [one._replace(at=one.at / factor) for one in load], slo).worst

    assert faster(room) <= 1 < faster(room * 8 ** (1 / 32) * 1.001)
    assert headroom(layout, Constant(0.001), 1000, load, slo) == pytest.approx(8.0, rel=0.07)


def test_other_costs_are_those_of_stages_alone() -> None:
    cost = Constant(0.1, stages=3, host=0.2, hop_seconds=0.3, pull=0.4)
    scaled, load = Scaled(cost, 1.5), Load(1, 1, 1, 0, 0, 0, 1)
    assert scaled.stage(0, load) == pytest.approx(0.15)
    assert (scaled.stages, scaled.host, scaled.hop(load), scaled.pull) == (
        *(cost.stages, cost.host, cost.hop(load), cost.pull),
    )


def test_which_layouts_of_a_machine_were_calibrated() -> None:

    def of(engines: int, pp: int) -> Any:
        return SimpleNamespace(about={"tp": 1, "pp": pp, "max_bs": 8}, engines=engines, cost=Constant(1.0), slots=64)

    several = [of(1, 1), of(2, 2)]
    costs = on_machine(several)
    assert costs(Layout(1, 1, 1, 8)) == (several[0].cost, 64)
    assert costs(Layout(1, 2, 2, 4)) == (several[1].cost, 64)
    assert costs(Layout(1, 2, 1, 8)) == "tp 1 and pp 1 and tp 1 and pp 2 were calibrated"
    assert costs(Layout(1, 1, 1, 9)) == "batches of up to 8 were calibrated"
    assert on_machine(several[:1])(Layout(1, 1, 5, 8)) == (several[0].cost, 64), "any number of engines like it"
    assert on_machine(several[:1])(Layout(1, 1, 5, 8, prefill=1)) == "no transfer between engines was calibrated"
    assert calibrated(several, (4, 8)) == [Layout(1, pp, n, size) for n, pp in ((1, 1), (2, 2)) for size in (4, 8)]


def test_the_outcome_of_a_day() -> None:
    requests = [(Asked(2.0 + n, 10, 2), 3.0 + 2 * n, 4.0 + 3 * n) for n in range(5)]
    assert Outcome.of(requests) == Outcome(5 / 14, 3.0, 5.0, 3.0, 14.0)


def test_settings_that_are_asked_for() -> None:
    base = Setting(8, 2, 64, "paper")
    assert settings_of(base, [], [], None, []) == [base]
    assert [str(one) for one in settings_of(base, [3, 4], [1, 2], 32, ["a", "b"])] == [
        f"max_bs {size}, pp {pp}, 32 slots, {policy}" for policy in "ab" for pp in (1, 2) for size in (3, 4)
    ]
