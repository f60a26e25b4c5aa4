"""The figures, calibrations and validations of a machine, of systems whose times are known: no stack runs."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from orca_bench import live, real
from orca_bench.cases import Request
from orca_bench.engine import EngineOptions
from orca_bench.live import Layout, Setting, stack_of, ways_between
from orca_bench.ranks import Control
from orca_bench.real import Measures, Real, Validated
from orca_common.errors import FailedPrecondition, Unavailable
from orca_lab.baseline.attention import By
from orca_lab.baseline.simulated import simulate_requests
from orca_lab.calibration import Calibration
from orca_lab.cost import Calibrated
from orca_lab.experiments import Disturbed, Found, Number, Point, Scale
from orca_lab.sequence import Compared
from orca_lab.simulator import Result, Served
from orca_lab.workload import AT_ONCE, POISSON, Asked, Lengths, Seeds, Workload, drawn

LAYOUT = Layout(dtype="float32")
COST = Calibrated(((1e-3, 1e-4, 0, 0, 1e-5, 0, 0),), 5e-4)
CALIBRATION = Calibration(COST, ((0.0, 0.0),), 0.002, 0.003, 4096, 10, {"tp": 1, "pp": 1})
SHORT = Lengths((8, 16), (2, 4))


class FakeLive:
    """Stands for a live system: a request takes 0.5 s and a quarter of it to its first token."""

    made: ClassVar[list["FakeLive"]] = []

    def __init__(self, layout: Layout, setting: Setting, keep: Path | None = None) -> None:
        self.layout, self.setting, self.keep = layout, setting, keep
        self.workloads, self.open = list[Workload](), False
        self.disturbed, self.pace = False, 1.25
        self.guards = list[tuple[Calibration | None, int]]()
        FakeLive.made.append(self)

    def __enter__(self) -> "FakeLive":
        self.open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False

    def ways(self) -> tuple[float, float]:
        return 0.25, 0.75

    def recording(self) -> str:
        return f"of {self.setting.label}"

    def serve(self, workload: Workload) -> Result:
        assert self.open
        self.workloads.append(workload)
        return served(workload)

    def guarded(
        self, workload: Workload, calibration: Calibration | None, attempts: int, say: Callable[[str], None]
    ) -> Result | None:
        self.guards.append((calibration, attempts))
        return None if self.disturbed else self.serve(workload)


def served(workload: Workload) -> Result:
    """One after the other."""
    answers, now = list[Served](), 0.0
    for one in workload:
        began = max(now, one.at)
        now = began + 0.5
        answers.append(Served(one, began=began, first=began + 0.125, ended=now, came=[began + 0.125, now]))
    return Result(answers, now, 1, 1, [[0.0]])


@pytest.fixture(autouse=True)
def no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeLive.made.clear()
    monkeypatch.setattr(real, "Live", FakeLive)


def test_the_measures_of_a_run() -> None:
    run = Result(
        [
            Served(Asked(1.0, 9, 2), first=1.5, ended=2.0, came=[1.5, 2.0]),
            Served(Asked(2.0, 9, 4), first=4.0, ended=6.0, came=[4.0, 4.5, 5.0, 6.0]),
            Served(Asked(3.0, 9, 1), first=5.0, ended=5.0, came=[5.0]),
        ],
        *(7.0, 9, 9, []),
    )
    # Normalized: 0.5, 1 and 2 s; to the first token: 0.5, 2 and 2 s; gaps: 0.5 three times, and 1 s.
    assert Measures.of(run) == Measures(3 / 6, 1.0, 2.0, 2.0, 1.0)
    row = Validated(0.5, 1, Measures(2.0, 4.0, 5.0, 8.0, 10.0), Measures(1.0, 5.0, 5.0, 2.0, 30.0))
    assert list(row.errors) == [-0.5, 0.25, 0.0, -0.75, 2.0]


def test_what_a_layout_is_called() -> None:
    one = Real(LAYOUT)
    assert one.panel == "demo_model tp 1 pp 1"
    assert (one.attempts, one.about["guard"]) == (3, "a run counts if one of 3 was not disturbed")
    several = Real(Layout(dtype="float32", tp=2, pp=3, memory=7, engines=4), attempts=0)
    assert several.panel == "demo_model tp 2 pp 3 engines 4"
    about = several.about
    assert about.pop("machine")
    assert about.pop("isa")
    layout = {"dtype": "float32", "tp": 2, "pp": 3, "engines": 4, "memory": 7}
    assert about == {"model": "demo_model", **layout, "guard": "off"}
    assert str(several.layout) == "4 x (tp 2, pp 3)"


def test_the_guard_of_a_system() -> None:
    load, running = drawn(SHORT, AT_ONCE, 1.0, 3, Seeds.of(1)), FakeLive(LAYOUT, Setting(8))
    running.open = True
    for attempts in (0, 2):
        system = Real(LAYOUT, attempts, CALIBRATION).system(running, print)  # pyright: ignore[reportArgumentType]
        assert (system.label, system.serve(load)) == ("orca(8)", served(load))
    assert running.guards == [(CALIBRATION, 2)]
    running.disturbed = True
    with pytest.raises(Disturbed, match=r"^orca\(8\) was disturbed 2 times$"):
        system.serve(load)


def test_a_calibration_sweeps_over_sizes_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then comes a full queue, and half of its load."""
    made = list[tuple[Any, ...]]()
    monkeypatch.setattr(real.Calibration, "of", lambda *given: made.append(given) or CALIBRATION)
    assert real.calibrate(Real(LAYOUT), Setting(5, 5), SHORT, 7, {"commit": "abc"}) is CALIBRATION
    [running] = FakeLive.made
    same = Lengths((8, 8), (16, 16))
    assert running.workloads == [
        *(drawn(same, AT_ONCE, 1.0, size, Seeds.of(size)) for size in (1, 2, 4)),
        drawn(SHORT, AT_ONCE, 1.0, 7, Seeds.of(1)),
        drawn(SHORT, POISSON, 0.5 * 7 / 3.5, 3, Seeds.of(2)),
    ]
    [(recording, ways, about)] = made
    assert (recording, ways) == ("of ft(5,5)", (0.25, 0.75))
    assert about == {"commit": "abc", **Real(LAYOUT).about, "system": "ft(5,5)", "max_bs": 5}


def test_request_level_batches_by_a_calibration() -> None:
    """The ways to the client and back are added to each request, and to the whole."""
    load = drawn(SHORT, POISSON, 2.0, 6, Seeds.of(3))
    system = real.simulated(Setting(4, 2, delay=0.5), CALIBRATION)
    plain, late = simulate_requests(COST, 4, 2, load, 0.5), system.serve(load)
    assert system.label == "ft(4,2,0.5)"
    assert [(one.first, one.ended) for one in late.requests] == [
        (one.first + 0.005, one.ended + 0.005) for one in plain.requests
    ]
    assert (late.seconds, late.iterations, late.rows) == (plain.seconds + 0.005, plain.iterations, plain.rows)
    assert plain.requests[0].began >= 0.5


def test_iteration_level_by_a_calibration() -> None:
    """With as many engines as were calibrated, and a token's way to its client."""
    load = drawn(SHORT, AT_ONCE, 1.0, 40, Seeds.of(3))
    one = real.simulated(Setting(4), CALIBRATION)
    two = real.simulated(Setting(4), replace(CALIBRATION, about={"engines": 2}))
    assert one.label == "orca(4)"
    first = one.serve([Asked(0.0, 8, 2)]).requests[0]
    stage = [1e-3 + 1e-4 + 8e-5, 1e-3 + 1e-4]
    assert first.came == pytest.approx([0.002 + 5e-4 + stage[0] + 0.003, 0.005 + 1e-3 + sum(stage)])
    assert one.serve(load).seconds / two.serve(load).seconds == pytest.approx(2, rel=0.2)


def test_figure_9_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines in turn, the first round is not counted; the baseline's bars are missing where memory is."""
    ran = list[tuple[str, int, int, int, int | None]]()
    seconds = iter([9.0, 9.0, 1.0, 3.0, 4.0, 4.0, 2.0, 8.0, 9.0, 2.0, 6.0, 4.0])

    def engine(name: str) -> Any:
        def run(case: list[Request], core: Any) -> SimpleNamespace:
            [(inputs, outputs)] = {(len(one.prompt), one.output) for one in case}
            ran.append((name, len(case), inputs, outputs, core and core.limits.max_bs))
            return SimpleNamespace(seconds=next(seconds))

        return SimpleNamespace(run=run, options=SimpleNamespace(block_size_of=lambda checkpoint: 16))

    asked = list[tuple[Any, ...]]()

    def alone(layout: Layout, ours: EngineOptions, theirs: EngineOptions, slots: int, opened: ExitStack) -> Any:
        asked.append((layout, ours, theirs, slots))
        return engine("orca"), engine("ft")

    monkeypatch.setattr(real, "engines_alone", alone)
    monkeypatch.setattr(real, "BATCHES", (1, 2))
    monkeypatch.setattr(real, "INPUTS", (32,))
    monkeypatch.setattr(real, "fits", lambda layout, batch: batch < 2)
    said, how = list[str](), Real(LAYOUT, attention=By.TORCH)
    found = real.figure_9(Scale(divide=4), how, said.append)
    options = EngineOptions(None, "float32", max_batch_size=2)
    assert asked == [(LAYOUT, options, replace(options, attention=By.TORCH), 2 * 512)]
    assert said == [f"figure 9: 8 input tokens, batch {batch}" for batch in (1, 2)]
    assert ran == [("orca", 1, 8, 8, None), ("ft", 1, 8, 8, 1)] * 4 + [("orca", 2, 8, 8, None)] * 4
    panel = "demo_model tp 1 pp 1"
    taken = {("orca(8)", 1): (1, 4, 2), ("ft(8)", 1): (3, 4, 8), ("orca(8)", 2): (2, 6, 4)}
    assert found.points == [
        Point(9, panel, label, 1.0, n, float(batch), batch / one, one * 1e3, one * 1e3, sustained=True)
        for (label, batch), runs in taken.items()
        for n, one in enumerate(runs, 1)
    ]
    assert found.numbers == {
        f"{panel} {label} batch {batch}, ms/token": Number(*[sorted(runs)[1] * 1e3 / 8] * 3)
        for (label, batch), runs in taken.items()
    }
    assert found.real == how.about | {"attention": "torch"}
    with pytest.raises(FailedPrecondition, match="Figure 9 is of one"):
        real.figure_9(Scale(), Real(replace(LAYOUT, engines=2)), said.append)


def test_the_engines_of_figure_9(monkeypatch: pytest.MonkeyPatch) -> None:
    """One serves both on one rank, where they attend alike; otherwise each has its own way for control messages."""
    opened, ended = list[tuple[Any, ...]](), list[Control]()

    class Ranks:
        def __init__(self, *given: Any) -> None:
            self.given = given

        def __enter__(self) -> "Ranks":
            opened.append(self.given)
            return self

        def __exit__(self, *_: object) -> None:
            ended.append(self.given[-1])

    monkeypatch.setattr(real, "EngineAlone", lambda options, checkpoint, slots: (options.attention, slots))
    monkeypatch.setattr(real, "Timed", lambda options, checkpoint, slots, ranks: (options, slots, ranks.given[-1]))
    monkeypatch.setattr(real, "Ranks", Ranks)
    ours = EngineOptions(None, "float32")
    theirs = replace(ours, attention=By.TORCH)
    with ExitStack() as stack:
        one, other = real.engines_alone(LAYOUT, ours, ours, 64, stack)
        assert one is other
        assert one == (By.KERNELS, 64)
        assert real.engines_alone(LAYOUT, ours, theirs, 64, stack) == ((By.KERNELS, 64), (By.TORCH, 64))
        for tp, pp in ((2, 1), (1, 3)):
            assert real.engines_alone(replace(LAYOUT, tp=tp, pp=pp), ours, theirs, 64, stack) == (
                *((ours, 64, Control.AHEAD), (theirs, 64, Control.BROADCAST)),
            )
        assert opened == [
            (options, 64, tp, pp, control)
            for tp, pp in ((2, 1), (1, 3))
            for options, control in ((ours, Control.AHEAD), (theirs, Control.BROADCAST))
        ]
        assert ended == []
    assert ended == [Control.BROADCAST, Control.AHEAD] * 2


@pytest.mark.parametrize(("pp", "settings"), [(1, 6), (2, 7)])
def test_the_systems_of_figure_10(pp: int, settings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ratios = list[tuple[Any, ...]](), list[str]()
    monkeypatch.setattr(real, "curves", lambda found, *given, normalized: asked.append((*given, normalized)))
    monkeypatch.setattr(real, "add_ratio", lambda found, panel: ratios.append(panel))
    how, scale = Real(replace(LAYOUT, pp=pp)), Scale(divide=4)
    assert real.figure_10(scale, how, print) == Found(10, real=how.about)
    [(panel, systems, lengths, *rest)] = asked
    assert (panel, lengths, rest) == (f"demo_model tp 1 pp {pp}", Lengths((8, 128), (1, 32)), [scale, how, print, True])
    labels = ["orca(8)", "orca(16)", "orca(32)", "ft(1,1)", "ft(8,8)", "ft(4,4)", "ft(8,4)"]
    assert [one.label for one in systems] == labels[:settings]
    assert ratios == [panel, f"{panel}, simulated"]
    real.figure_10(scale, how, print, [Setting(3)])
    assert asked[1][1] == [Setting(3)]


def test_the_systems_of_figure_11(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[Any, ...]]()
    monkeypatch.setattr(real, "curves", lambda found, *given, normalized: asked.append((*given, normalized)))
    assert real.figure_11(Scale(divide=4), Real(LAYOUT), print) == Found(11, real=Real(LAYOUT).about)
    [(panel, systems, lengths, *_, normalized)] = asked
    assert (panel, lengths, normalized) == ("(8,8)", Lengths((8, 8), (8, 8)), False)
    assert [one.label for one in systems] == ["orca(1)", "orca(8)", "ft(1,1)", "ft(8,8)"]
    real.figure_11(Scale(), Real(LAYOUT), print, [Setting(3)])
    assert asked[1][:3] == ("(32,32)", [Setting(3)], Lengths((32, 32), (32, 32)))


def test_the_curves_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each system that ran, and one for each that is simulated by its own reports. The others are named."""
    drew, said = list[tuple[Any, ...]](), list[str]()

    def curve(found: Found, panel: str, system: Any, lengths: Lengths, scale: Scale, normalized: bool) -> list[float]:
        drew.append((panel, system.label, lengths, scale, normalized))
        if "simulated" in panel:
            return [3.0]
        if system.label == "orca(2)":
            raise Disturbed("orca(2) was disturbed 3 times")
        if system.label == "orca(3)":
            raise Unavailable("it ended")
        return [1.0, 2.0]

    monkeypatch.setattr(real, "curve", curve)
    monkeypatch.setattr(real, "fits", lambda layout, batch: batch == 4)
    monkeypatch.setattr(real.Calibration, "of", lambda recording, ways, about: replace(CALIBRATION, about=about))
    monkeypatch.setattr(real, "time", SimpleNamespace(monotonic=iter([0.0, 7.4, 10.0, 20.0, 30.0, 32.6]).__next__))
    found, scale = Found(10), Scale()
    settings = [Setting(4), Setting(8, 8), Setting(2), Setting(3), Setting(4, 2)]
    real.curves(found, "p", settings, SHORT, scale, Real(LAYOUT), said.append, normalized=True)
    ran = ["orca(4)", "orca(2)", "orca(3)", "ft(4,2)"]
    assert said == [f"figure 10: p {label}" for label in ran]
    assert [(one[0], one[1]) for one in drew] == [
        *(("p", "orca(4)"), ("p, simulated", "orca(4)"), ("p", "orca(2)")),
        *(("p", "orca(3)"), ("p", "ft(4,2)"), ("p, simulated", "ft(4,2)")),
    ]
    assert {one[2:] for one in drew} == {(SHORT, scale, True)}
    its = asdict(replace(CALIBRATION, about={}))
    assert found.real == {
        "calibrations": {"orca(4)": its, "ft(4,2)": its},
        "seconds": {"orca(4)": 7, "ft(4,2)": 3},
        "no memory": ["ft(8,8)"],
        "disturbed": ["p with a full queue: orca(2) was disturbed 3 times"],
        "failed": ["p orca(3): it ended"],
    }
    assert found.numbers == {
        f"p{kind} {label} sustained, req/s": number
        for label in ("orca(4)", "ft(4,2)")
        for kind, number in (("", Number(1.5, 1.0, 2.0)), (", simulated", Number(3.0, 3.0, 3.0)))
    }
    assert not any(running.open for running in FakeLive.made)


def test_what_fits() -> None:
    """Into the memory of a rank: a token of the demo model takes 6 kB in float32, and a sequence has 512."""
    small = replace(LAYOUT, memory=30_000_000)
    assert [real.fits(small, batch) for batch in (1, 2, 4, 8, 16)] == [True, True, True, False, False]


def test_a_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """At shares of what is sustained; runs that were disturbed are named."""
    said, asked = list[str](), list[tuple[Any, ...]]()

    def serve(workload: Workload) -> Result:
        if len(asked) == 2:
            asked.append(("disturbed",))
            raise Disturbed("again")
        asked.append((workload,))
        return served(workload)

    limits = list[tuple[Any, ...]]()
    monkeypatch.setattr(real.Real, "system", lambda self, running, say: SimpleNamespace(serve=serve))
    monkeypatch.setattr(real, "sustained", lambda *given: limits.append(given) or 8.0)
    costs = list[Any]()
    monkeypatch.setattr(real, "simulated", lambda _, of: costs.append(of.cost) or SimpleNamespace(serve=served))
    monkeypatch.setattr(real, "compare", lambda journal: Compared(9, 1) if journal == FakeLive.made[0].keep else None)
    found = real.validate(Real(LAYOUT), Setting(4), CALIBRATION, SHORT, 6, 2, said.append, [0.25, 0.5])
    loads = [drawn(SHORT, POISSON, share * 8.0, 6, Seeds.of(run)) for share in (0.25, 0.5) for run in (1, 2)]
    assert asked == [(loads[0],), (loads[1],), ("disturbed",), (loads[3],)]
    assert found.rows == [
        Validated(share, run, Measures.of(served(load)), Measures.of(served(load)), 1.25, Measures.of(served(load)))
        for share, run, load in ((0.25, 1, loads[0]), (0.25, 2, loads[1]), (0.5, 2, loads[3]))
    ]
    assert costs == [CALIBRATION.cost.at_pace(1.25), CALIBRATION.cost] * 3
    assert costs[0].coefficients[0][0] == 1.25 * CALIBRATION.cost.coefficients[0][0] > 0
    assert (found.compared, found.skipped) == (Compared(9, 1), ["50%, run 1: again"])
    assert said == [f"{share} of 8 req/s, run {run}" for share in ("25%", "50%") for run in (1, 2)]
    [(_, lengths, scale, seed)] = limits
    assert (lengths, scale, seed) == (SHORT, replace(real.FULL, queued=6), 1)


# -- the parts of a live system


def test_the_settings_of_a_live_stack(tmp_path: Path) -> None:
    settings, program = stack_of(Layout(None, "float32", 2, 3, engines=2), Setting(8), run_dir=str(tmp_path))
    values = settings.model_dump()
    names = ("dtype", "device", "tp", "pp", "engines", "max_batch_size", "block_size", "policy", "run_dir")
    assert program is None
    assert [values[name] for name in names] == ["float32", "cpu", 2, 3, 2, 8, 16, "paper", str(tmp_path)]
    _, program = stack_of(LAYOUT, Setting.read("batchmaker"))
    assert program is not None
    assert (program.app, program.arguments) == (live.LAB, ["--lab-selection", "batchmaker"])
    settings, program = stack_of(LAYOUT, Setting(8, 4, delay=0.5))
    assert program is not None
    assert program.arguments == ["--lab-selection", "request-level,mbs=4,longest=512,delay=0.5"]
    assert settings.model_dump()["policy"] != "request-level"


def test_the_ways_to_a_client_and_back() -> None:
    """Medians over the last requests that have moments, of all engines."""
    moments = [(100.0, 200.0), (1.25, 1.5), (3.5, 3.75), (0.0, 0.0), (2.125, 2.5)]
    # In: 0.25, 0.125, 0.5 and 1 s; back: 0.5, 1, 1.25 and 2 s.
    assert ways_between([(1.0, 2.0), (2.0, 3.5), (3.0, 5.0), (99.0, 202.0)], moments) == (0.375, 1.125)
    assert ways_between([(5.0, 0.0)] * 3, moments[1:]) == (0.0, 0.0)
