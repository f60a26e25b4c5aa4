"""`orca lab`: the paper's experiments, and what another setting would do. docs/lab.md says how each result was made.

Results are on standard output or in files. Progress is on standard error.
"""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from orca_cli import tables
from orca_cli.sentences import sentences
from orca_cli.several import numbers, whole
from orca_cli.suggestions import Command
from orca_common.errors import FailedPrecondition, InvalidArgument

app = typer.Typer(no_args_is_help=True, help="The paper's experiments, and what another setting would do.")
console = Console(highlight=False, markup=False)
if not console.is_terminal:
    console.width = 240  # of lines that a program reads

RESULTS = Path("build/lab")
RUNNERS_UP = 5  # of a plan
Results = Annotated[Path, typer.Option("--out", help="Folder for figure-9, figure-10 and figure-11.")]
Model = Annotated[str | None, typer.Option(help="Live: checkpoint folder or hub name; the demo model if not given.")]
Dtype = Annotated[str, typer.Option(help="Live: type of the weights, and of keys and values.")]
Tp = Annotated[int, typer.Option(min=1, help="Live: tensor ranks of a stage.")]
Pp = Annotated[int, typer.Option(min=1, help="Live: pipeline stages.")]
Engines = Annotated[int, typer.Option(min=1, help="Live: engines, each of tp x pp ranks.")]
Memory = Annotated[
    float | None, typer.Option(min=0, help="Live: GB of a rank that may be used; what is free if not given.")
]
Attempts = Annotated[
    int, typer.Option(min=0, help="Live: runs of a load until one was not disturbed; 0: each run counts.")
]
CalibrationFile = Annotated[
    Path | None, typer.Option("--calibration", help="Live: of this layout; slower runs were disturbed.")
]
MaxBs = Annotated[int, typer.Option("--max-bs", min=1, help="Requests in a batch.")]
Quick = Annotated[bool, typer.Option("--quick/--full", help="A quarter of the lengths, and fewer requests.")]


@app.command(cls=Command)
def figure(
    number: Annotated[int, typer.Argument(min=9, max=11, help="9, 10 or 11.")],
    simulated: Annotated[bool, typer.Option("--simulated", help="On the model of the paper's machines.")] = False,
    real: Annotated[bool, typer.Option("--real", help="On this machine.")] = False,
    quick: Quick = False,
    requests: Annotated[int | None, typer.Option(min=5, help="Requests of a trace.")] = None,
    model: Model = None,
    dtype: Dtype = "auto",
    tp: Tp = 1,
    pp: Pp = 1,
    memory: Memory = None,
    attempts: Attempts = 3,
    calibration: CalibrationFile = None,
    system: Annotated[
        list[str] | None, typer.Option(help="Live: orca(8), ft(8,4) or batchmaker; several if not given. Repeatable.")
    ] = None,
    attention: Annotated[
        str, typer.Option(help="Live, of Figure 9's baseline: by our kernels, or torch, which batches it.")
    ] = "kernels",
    out: Results = RESULTS,
) -> None:
    """Makes a figure of the paper: points.csv, the picture, table.md and run.json."""
    from orca_lab import report
    from orca_lab.experiments import FIGURES, FULL, QUICK

    with sentences(ValueError):
        if simulated == real:
            raise InvalidArgument("simulated, real", "are two ways to make a figure: name one of them")
        if attention not in ("kernels", "torch"):
            raise InvalidArgument("attention", f"is {attention!r}; there are kernels and torch")
        if attention == "torch" and not (real and number == 9):
            raise InvalidArgument("attention", "torch is for Figure 9 with --real")
        code = commit()  # before it runs: a checkout may change meanwhile
        if real:
            from orca_bench import real as live
            from orca_bench.live import Setting

            scale = sized(live.QUICK if quick else live.FULL, requests)
            where = real_of(model, dtype, tp, pp, memory, attempts, calibration)
            where = replace(where, attention=live.By(attention))
            found = live.FIGURES[number](scale, where, say, [Setting.read(one) for one in system or []])
        else:
            scale = sized(QUICK if quick else FULL, requests)
            found = FIGURES[number](scale, say)
        command = " ".join(["orca", *sys.argv[1:]])
        folder = out / (f"figure-{number}-real" if real else f"figure-{number}")
        for path in report.write(folder, found, scale, command, code):
            print(path)
        for kind in ("disturbed", "failed", "no memory"):
            for line in found.real.get(kind, ()):
                say(f"{kind}: {line}")


@app.command(cls=Command)
def baseline(
    max_bs: MaxBs = 8,
    mbs: Annotated[int | None, typer.Option(min=1, help="Requests in a microbatch; max_bs if not given.")] = None,
    queue_delay: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds for which a batch that is not full waits for more requests.")
    ] = 0.0,
    model: Model = None,
    dtype: Dtype = "auto",
    tp: Tp = 1,
    pp: Pp = 1,
    memory: Memory = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of gRPC; 0 takes a free one.")] = 50051,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of HTTP; 0 takes a free one.")] = 8000,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder; a new one if not given.")] = None,
) -> None:
    """Serves with request-level batches in FasterTransformer's manner, behind Orca's doors, until Ctrl-C."""
    import asyncio

    from orca_bench.live import Layout, Setting, stack_of
    from orca_cli import serving

    with sentences(ValueError):
        layout = Layout(model, dtype, tp, pp, bytes_of(memory))
        setting = Setting(max_bs, min(mbs or max_bs, max_bs), delay=queue_delay)
        folder = None if run_dir is None else str(run_dir)
        settings, program = stack_of(layout, setting, port=port, http_port=http_port, run_dir=folder, ui=False)
        asyncio.run(serving.serve(settings, scheduler=program))


@app.command(cls=Command)
def calibrate(
    max_bs: MaxBs = 32,
    mbs: Annotated[int, typer.Option(min=0, help="Of the baseline; 0: of Orca.")] = 0,
    quick: Quick = False,
    requests: Annotated[int | None, typer.Option(min=5, help="Requests that are there at the start.")] = None,
    model: Model = None,
    dtype: Dtype = "auto",
    tp: Tp = 1,
    pp: Pp = 1,
    engines: Engines = 1,
    memory: Memory = None,
    out: Annotated[Path, typer.Option(help="The file.")] = RESULTS / "calibration.json",
) -> None:
    """Measures a layout on this machine, and fits the times of its stages: a sweep, then a full queue."""
    from orca_bench.live import Setting
    from orca_bench.real import FULL, QUICK
    from orca_bench.real import calibrate as measure
    from orca_lab.workload import PAPER

    with sentences(ValueError):
        scale, where = QUICK if quick else FULL, real_of(model, dtype, tp, pp, memory, 0, None, engines)
        about = {"command": " ".join(["orca", *sys.argv[1:]]), "commit": commit()}
        found = measure(where, Setting(max_bs, mbs), scale.lengths(PAPER), requests or scale.queued, about)
        found.write(out)
        for stage, (mean, total) in enumerate(found.errors):
            say(f"stage {stage}: {mean:.1%} an iteration on the half that was held out, {total:+.1%} the sum")
        print(out)


@app.command(cls=Command)
def validate(
    calibration: Annotated[Path, typer.Option(help="Of this layout, by `orca lab calibrate`.")],
    max_bs: MaxBs = 32,
    quick: Quick = False,
    requests: Annotated[int, typer.Option(min=5, help="Requests of a run.")] = 200,
    runs: Annotated[int, typer.Option(min=1, help="Runs at each share of what is sustained.")] = 3,
    shares: Annotated[str, typer.Option(help="Of what is sustained.")] = "0.3,0.5,0.7",
    model: Model = None,
    dtype: Dtype = "auto",
    tp: Tp = 1,
    pp: Pp = 1,
    memory: Memory = None,
    attempts: Attempts = 3,
) -> None:
    """Compares live runs with simulated ones: errors with their signs, and whether the iterations are the same."""
    from orca_bench.live import Setting
    from orca_bench.real import BOUNDS, Measures
    from orca_bench.real import validate as run

    with sentences(ValueError):
        at = numbers("--shares", shares)
        where = real_of(model, dtype, tp, pp, memory, attempts, calibration)
        found = run(where, Setting(max_bs), where.calibration, paper_lengths(quick), requests, runs, say, at)
        measures = (name.replace("_", " ") for name in Measures._fields)
        heads = ("share", "run", *measures, "within bounds", "pace", "normalized at pace")
        rows = tables.plain(heads, words=0)
        for row in found.rows:
            errors = list(row.errors)
            within = all(abs(error) <= bound for error, bound in zip(errors, BOUNDS, strict=True))
            shown = (f"{error:+.1%}" for error in errors)
            pace = "" if row.pace is None else f"{row.pace - 1:+.1%}"
            paced = "" if row.paced is None else f"{row.paced.normalized / row.live.normalized - 1:+.1%}"
            rows.add_row(f"{row.share:.0%}", str(row.run), *shown, "yes" if within else "no", pace, paced)
        rows.add_row("bound", "", *(f"{bound:.0%}" for bound in BOUNDS), "", "", "")
        console.print(rows)
        for skipped in found.skipped:
            print(f"disturbed: {skipped}")
        same = found.compared
        print(f"iterations: {same.iterations}, {same.different} of them with another batch than simulated")


@app.command("validate-whatif", cls=Command)
def validate_whatif(
    calibration: Annotated[Path, typer.Option(help="Of this layout, by `orca lab calibrate`.")],
    recorded: Annotated[int, typer.Option(min=1, help="max_batch_size of the record.")] = 8,
    max_bs: Annotated[str, typer.Option(help="Values that are predicted, and run.")] = "4,16,32",
    quick: Quick = False,
    requests: Annotated[int, typer.Option(min=5, help="Requests of a run.")] = 200,
    model: Model = None,
    dtype: Dtype = "auto",
    tp: Tp = 1,
    pp: Pp = 1,
    memory: Memory = None,
    attempts: Attempts = 3,
) -> None:
    """Records a live run, predicts others from it, and runs them: errors with their signs."""
    from orca_bench.checks import check_whatif

    with sentences(ValueError):
        where = real_of(model, dtype, tp, pp, memory, attempts, calibration)
        lengths, others = paper_lengths(quick), whole("--max-bs", max_bs)
        show_checks(check_whatif(where, where.calibration, recorded, others, lengths, requests, say))


@app.command("validate-plan", cls=Command)
def validate_plan(
    calibration: Annotated[list[Path], typer.Option(help="Of each layout, by `orca lab calibrate`. Repeatable.")],
    quick: Quick = False,
    requests: Annotated[int, typer.Option(min=20, help="Requests of a run.")] = 200,
    model: Model = None,
    dtype: Dtype = "auto",
    memory: Memory = None,
    attempts: Attempts = 3,
) -> None:
    """Runs the calibrated layouts of this machine, and simulates them: errors with their signs, and the order."""
    from orca_bench.checks import check_plan
    from orca_bench.live import Layout
    from orca_lab.calibration import Calibration

    with sentences(ValueError):
        layout, of = Layout(model, dtype, memory=bytes_of(memory)), [Calibration.read(path) for path in calibration]
        show_checks(check_plan(layout, attempts, of, paper_lengths(quick), requests, say))


@app.command(cls=Command)
def table(
    number: Annotated[int, typer.Argument(min=1, max=1, help="1.")],
) -> None:
    """Prints Table 1 of the paper, with the memory that follows from it."""
    from orca_lab.experiments import table_1

    heads = ("model", "parameters, billions", "layers", "hidden", "inter", "intra")
    rows = tables.plain((*heads, "weights of a GPU, GB", "a slot, kB", "slots of a GPU"))
    for row in table_1():
        rows.add_row(*row)
    console.print(rows)


@app.command(cls=Command)
def claims(out: Results = RESULTS) -> None:
    """Prints each statement of the paper's section 6 with the paper's number, ours, and a verdict, in Markdown."""
    from orca_lab import report
    from orca_lab.claims import Results, claims, markdown

    with sentences(ValueError):
        print(markdown(claims(Results(report.figures_in(out)), report.real_figures_in(out))), end="")


@app.command(cls=Command)
def trace(
    source: Annotated[Path, typer.Argument(help="Azure's, BurstGPT's or Mooncake's file, our CSV, or a journal.")],
    cut: Annotated[str | None, typer.Option(help="Keep what arrives from second A until before B: A,B.")] = None,
    thin: Annotated[float | None, typer.Option(min=0, max=1, help="Keep this share, by chance.")] = None,
    faster: Annotated[float | None, typer.Option(min=1e-6, help="Requests come this number of times as fast.")] = None,
    fit: Annotated[int | None, typer.Option(min=2, help="Tokens of the longest request, input and output.")] = None,
    clip: Annotated[bool, typer.Option("--clip", help="Longer ones are clipped, and not dropped.")] = False,
    seed: Annotated[int, typer.Option(help="Decides what --thin keeps.")] = 0,
    out: Annotated[Path | None, typer.Option(help="CSV file for the result.")] = None,
) -> None:
    """Reads a recorded trace, says what is in it, and changes it: each change with its count."""
    from orca_lab import traces

    with sentences(ValueError):
        found = traces.read(source)
        if cut is not None:
            found = found.cut(*numbers("--cut", cut, 2, positive=False))
        if thin is not None:
            found = found.thin(thin, seed)
        if faster is not None:
            found = found.faster(faster)
        if fit is not None:
            found = found.fit(fit, clip)
        for change in found.changes:
            print(change)
        if not found.requests:
            raise FailedPrecondition(f"trace: {source} has no request left")
        seconds, count = found.requests[-1].at, len(found.requests)
        inputs = sum(one.input_tokens for one in found.requests) / count
        outputs = sum(one.output_tokens for one in found.requests) / count
        print(f"{count} requests in {seconds:.6g} s, {inputs:.1f} input and {outputs:.1f} output tokens on average")
        if out is not None:
            traces.write(out, found.requests)


@app.command(cls=Command)
def replay(
    journal: Annotated[Path, typer.Argument(help="A journal of a live or simulated engine.")],
) -> None:
    """Steps the scheduler through a journal again. Ends with status 1 at the first step that comes out otherwise."""
    from orca_lab.replay import Steps

    with sentences(ValueError):
        steps = Steps(journal)
        for other in steps:
            print(f"step {other.step}, {other.event}\ngave   {other.recorded}\nand now {other.again}")
            raise typer.Exit(1)
        print(f"{steps.count} events gave the same actions")


@app.command(cls=Command)
def whatif(
    journal: Annotated[Path, typer.Argument(help="A journal of a live or simulated engine.")],
    max_bs: Annotated[str | None, typer.Option(help="Values of max_batch_size, as in 8,16,32.")] = None,
    pp: Annotated[str | None, typer.Option(help="Numbers of stages, as in 1,2.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Slots of the engine.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="A scheduling policy; may be repeated.")] = None,
) -> None:
    """Predicts a recorded day with other settings. The recorded setting comes first, with its errors."""
    from orca_lab.recording import Recording
    from orca_lab.whatif import WhatIf, settings_of

    with sentences(ValueError):
        what = WhatIf(Recording.read(journal))
        first = what.predict(what.setting)
        wanted = settings_of(what.setting, whole("--max-bs", max_bs), whole("--pp", pp), slots, policy or [])
        answers = [first, *(what.predict(one) for one in wanted if one != what.setting)]
        fits = ", ".join(
            f"stage {n}: {mean:.1%} each, {total:+.1%} the sum" for n, (mean, total) in enumerate(what.fit_errors)
        )
        print(f"costs fitted to half of the iterations; errors on the other half: {fits}")
        print(
            "errors of the recorded setting: " + ", ".join(f"{name} {error:+.1%}" for name, error in what.errors(first))
        )
        heads = ("setting", "requests/s", "ms a token", "p99", "first token, ms", "mean batch", "")
        rows = tables.plain(heads)
        measured = ("recorded, as measured", what.recorded, "", "")
        predicted = [(str(a.setting), a.outcome, f"{a.mean_batch:.1f}", a.extrapolated) for a in answers]
        for name, outcome, batch, beyond in (measured, *predicted):
            ms = (outcome.normalized, outcome.normalized_p99, outcome.first_token)
            said = f"extrapolated: {beyond}" if beyond else ""
            rows.add_row(name, f"{outcome.throughput:.3g}", *(f"{one * 1e3:.4g}" for one in ms), batch, said)
        console.print(rows)


@app.command(cls=Command)
def plan(
    model: Annotated[str, typer.Option(help="13b, 101b, 175b or 341b, on GPUs.")] = "13b",
    hardware: Annotated[
        list[str] | None,
        typer.Option(help="a100-40, a100-80, or a calibration's file. Several files: the layouts of one machine."),
    ] = None,
    rate: Annotated[float, typer.Option(min=1e-6, help="Requests per second, as in a Poisson process.")] = 1.0,
    lengths: Annotated[str, typer.Option(help="paper, or as in 32-512,1-128.")] = "paper",
    trace: Annotated[Path | None, typer.Option(help="Instead of rate and lengths: a recorded trace.")] = None,
    requests: Annotated[int, typer.Option(min=20, help="Requests to simulate.")] = 1000,
    first_token: Annotated[float, typer.Option(min=0, help="Seconds to the first token at most; 0: any.")] = 0.0,
    normalized: Annotated[float, typer.Option(min=0, help="Seconds a token at most, end to end; 0: any.")] = 0.0,
    gap: Annotated[float, typer.Option(min=0, help="Seconds between tokens at most; 0: any.")] = 0.0,
    percentile: Annotated[float, typer.Option(min=0.01, max=0.9999, help="At which these hold.")] = 0.99,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs at most, or engines of a calibration's layout.")] = 32,
    max_bs: Annotated[str | None, typer.Option(help="Values of max_batch_size, as in 8,16,32.")] = None,
    positions: Annotated[str | None, typer.Option(help="By which prompts are cut, as in 128,256.")] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 1,
) -> None:
    """Finds the smallest layout that carries a load within bounds, with its headroom and values of the chart: mixed,
    with prompts in parts, or with prompts on engines of their own."""
    from orca_lab import traces
    from orca_lab.calibration import Calibration
    from orca_lab.cost import HARDWARE, TABLE_1
    from orca_lab.plan import MAX_BS, POSITIONS, Layout, Slo, Way, calibrated, on_gpus, on_machine, with_other_costs
    from orca_lab.plan import plan as search
    from orca_lab.workload import POISSON, Lengths, Seeds, drawn

    with sentences(ValueError):
        slo = Slo(first_token, normalized, gap, percentile)
        if not any(slo[:3]):
            raise InvalidArgument("first_token, normalized, gap", "are all 0: give a bound")
        if trace is None:
            workload = drawn(Lengths.read(lengths), POISSON, rate, requests, Seeds.of(seed))
        else:
            workload = traces.read(trace).requests[:requests]
        if not workload:
            raise FailedPrecondition(f"trace: {trace} has no request")
        names, sizes = hardware or ["a100-40"], whole("--max-bs", max_bs) or MAX_BS
        among = list[Layout]()
        if names[0] in HARDWARE and len(names) == 1:
            if model not in TABLE_1:
                raise InvalidArgument("model", f"is {model!r}; there are {', '.join(TABLE_1)}")
            shape = TABLE_1[model][0]
            costs, layers = on_gpus(shape, HARDWARE[names[0]]), shape.layers
        else:
            of = [Calibration.read(Path(name)) for name in names]
            costs, layers = on_machine(of), of[0].about["pp"]
            among = calibrated(of, sizes) if len(of) > 1 else among
        cuts = whole("--positions", positions) or POSITIONS
        found = search(costs, workload, slo, gpus, layers, sizes, say, cuts, among)
        reasons = Counter(why for _, why in found.dropped)
        for why, count in reasons.most_common():
            print(f"dropped {count}: {why}")
        heads = ("", "layout", "GPUs", "first token, ms", "ms a token", "gap, ms", "inside", "headroom")
        rows = tables.plain(heads, words=2)
        best = {way: found.best(way) for way in Way}
        chosen = [one for one in best.values() if one is not None]
        others = [one for one in (*found.held, *((one, 0.0) for one in found.failed)) if one not in chosen]
        chosen.sort(key=lambda one: (-one[1], one[0].worst))
        for n, (one, room) in enumerate([*chosen, *others[:RUNNERS_UP]]):
            ms = (f"{value * 1e3:.4g}" for value in one.measures[:3])
            way = str(one.layout.way) if n < len(chosen) else ""
            said = f"{room:.2f}" if room else one.why or "too slow"
            rows.add_row(way, str(one.layout), str(one.layout.gpus), *ms, f"{one.inside:.0%}", said)
        console.print(rows)
        for way in [way for way, one in best.items() if one is None]:
            print(f"{way}: no layout was tried")
        if not found.held:
            raise FailedPrecondition(
                "hardware: none of its layouts holds" if among else f"gpus: no layout of up to {gpus} holds"
            )
        best = found.held[0][0].layout
        for by, other in with_other_costs(costs, best, workload, slo):
            print(f"with all costs {by - 1:+.0%} it {'holds' if other.worst <= 1 else 'does not hold'}")
        print(best.values(), end="")


# -- parts of commands


def say(sentence: str) -> None:
    """Progress."""
    typer.echo(sentence, err=True)


def show_checks(report: Any) -> None:
    """Prints predictions beside what was measured."""
    rows = tables.plain(("", "measure", "live", "predicted", "error", "bound", "within"), words=2)
    for row in report.rows:
        within = "" if row.bound is None else "yes" if abs(row.error) <= row.bound else "no"
        bound = "" if row.bound is None else f"{row.bound:.0%}"
        rows.add_row(row.of, row.measure, f"{row.live:.4g}", f"{row.said:.4g}", f"{row.error:+.1%}", bound, within)
    console.print(rows)
    for note in report.notes:
        print(note)
    for skipped in report.skipped:
        print(f"disturbed: {skipped}")


def paper_lengths(quick: bool) -> Any:
    """The paper's lengths of requests, or a quarter of them."""
    from orca_bench.real import FULL, QUICK
    from orca_lab.workload import PAPER

    return (QUICK if quick else FULL).lengths(PAPER)


def sized(scale: Any, requests: int | None) -> Any:
    """The scale with another number of requests, where one was given."""
    if requests is None:
        return scale
    return replace(scale, requests=requests, queued=requests * scale.queued // scale.requests)


def bytes_of(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else round(gigabytes * 1e9)


def real_of(
    model: str | None,
    dtype: str,
    tp: int,
    pp: int,
    memory: float | None,
    attempts: int,
    calibration: Path | None,
    engines: int = 1,
) -> Any:
    """The layout that is measured, and its guard. Raises FailedPrecondition for a file that is no calibration of it."""
    from orca_bench.live import Layout
    from orca_bench.real import Real
    from orca_lab.calibration import Calibration

    layout = Layout(model, dtype, tp, pp, bytes_of(memory), engines)
    of = Calibration.read(calibration) if calibration is not None else None
    if of is not None and (of.about["tp"], of.about["pp"], of.engines) != (tp, pp, engines):
        its = replace(layout, tp=of.about["tp"], pp=of.about["pp"], engines=of.engines)
        raise FailedPrecondition(f"calibration: {calibration} is of {its}, and {layout} runs")
    return Real(layout, attempts, of)


def commit() -> str:
    """The commit of the checkout that runs, with + where files have changed; empty outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    place = Path(__file__).parent
    try:
        return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
