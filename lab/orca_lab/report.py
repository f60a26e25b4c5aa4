"""A figure's files: points.csv, the picture as SVG and PNG, table.md beside the paper's numbers, and run.json."""

import csv
import json
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orca_common.errors import FailedPrecondition

from . import paper
from .chart import Bars, Curve, Panel, Spot, draw
from .experiments import BATCHES, FIGURES, PHIS, Found, Number, Point, Scale

CAPTIONS = {
    9: "execution time of a batch, engines alone",
    10: "median normalized latency and throughput",
    11: "median latency and throughput of {model}, equal requests",
}


def caption(found: Found) -> str:
    said = CAPTIONS[found.figure].format(model=found.real.get("model", "175B"))
    return f"Figure {found.figure}, {'real' if found.real else 'simulated'}: {said}"


def write(folder: Path, found: Found, scale: Scale, command: str, commit: str) -> list[Path]:
    """Writes all files of a figure; returns them. The PNG is made where librsvg's rsvg-convert is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "points.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Point._fields)
        writer.writerows(found.points)
    picture = folder / "figure.svg"
    picture.write_text(svg_of(found, scale))
    (folder / "table.md").write_text(table_of(found, scale))
    run = {
        "command": command,
        "commit": commit,
        "scale": asdict(scale),
        "phi": PHIS,
        **({"real": found.real} if found.real else {"calibration": "the A100 model of orca_lab.cost"}),
        "numbers": {name: list(number) for name, number in found.numbers.items()},
    }
    (folder / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    files = [folder / name for name in ("points.csv", "figure.svg", "table.md", "run.json")]
    if (program := shutil.which("rsvg-convert")) is not None:
        subprocess.run([program, "--output", folder / "figure.png", picture], check=True)
        files.append(folder / "figure.png")
    return files


def read(folder: Path, figure: int) -> Found:
    """The results that `write` has left. Raises FailedPrecondition without them."""
    try:
        run: dict[str, Any] = json.loads((folder / "run.json").read_text())
        with (folder / "points.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        points = [
            Point(
                *(int(row["figure"]), row["panel"], row["system"], float(row["phi"]), int(row["seed"])),
                *(float(row[name]) for name in ("x", "throughput", "latency_ms", "p99_ms")),
                sustained=row["sustained"] == "True",
            )
            for row in rows
        ]
        numbers = {name: Number(*values) for name, values in run["numbers"].items()}
        return Found(figure, points, numbers, run.get("real", {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = f"orca lab figure {figure} --simulated --out {folder.parent}"
        raise FailedPrecondition(f"{folder} has no results of figure {figure} ({error}); `{said}` makes them") from None


# -- the picture


def svg_of(found: Found, scale: Scale) -> str:
    """The picture of a figure."""
    names = dict.fromkeys(point.panel for point in found.points)
    of = {name: [point for point in found.points if point.panel == name] for name in names}
    if found.figure == 9:
        panels = [_bars(titled(found, name), points, bool(found.real)) for name, points in of.items()]
        note = "lines on bars: phi 1 to 1.47; ×: no memory for keys and values of the longest sequences"
        return draw(caption(found), panels, "bars: medians of three runs, with all three" if found.real else note)
    latency = "median normalized latency, ms per token" if found.figure == 10 else "median latency, ms"
    panels = [
        Panel(
            titled(found, name) if found.figure == 10 else f"input, output {name}",
            "throughput, req/s",
            latency,
            [_curve(label, own) for label, own in by_system(points).items()],
            line=paper.TARGET * 1e3 if (found.figure, name) == (10, "175b") else None,
            line_label="190 ms",
        )
        for name, points in of.items()
    ]
    rings = "rings: arrivals above the sustained rate, where the latency depends on the trace's length"
    note = rings if found.real else f"bands: {len(scale.seeds)} seeds; {rings}"
    return draw(caption(found), panels, note)


def by_system(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Points by system, with phi 1, and FasterTransformer's best setting with the highest phi."""
    found = dict[str, list[Point]]()
    for point in points:
        if point.phi == 1 or (point.phi == PHIS[-1] and point.system == "ft(1,1)"):
            label = point.system + (f" phi {point.phi:g}" if point.phi != 1 else "")
            found.setdefault(label, []).append(point)
    return found


def _curve(label: str, points: Sequence[Point]) -> Curve:
    rates = dict.fromkeys(point.x for point in points)
    spots = list[Spot]()
    for rate in rates:
        seeds = [point for point in points if point.x == rate]
        ms = [point.latency_ms for point in seeds]
        across = statistics.mean(point.throughput for point in seeds)
        spots.append(Spot(across, statistics.mean(ms), min(ms), max(ms), open=not seeds[0].sustained))
    return Curve(label, spots, dashed="ft" in label)


def titled(found: Found, panel: str) -> str:
    """A panel's title: the paper writes the names of its models in capitals."""
    return panel if found.real else panel.upper()


def _bars(title: str, points: Sequence[Point], runs: bool) -> Panel:
    """runs: points of a bar are runs, whose median counts; otherwise they are models with another phi."""
    middle = statistics.median if runs else statistics.mean
    bars = list[Bars]()
    inputs = sorted({int(point.system.split("(")[1][:-1]) for point in points})
    for label in [f"{system}({one})" for one in inputs for system in ("ft", "orca")]:
        values = list[tuple[float, float, float] | None]()
        for batch in BATCHES:
            own = [point.latency_ms for point in points if (point.system, point.x) == (label, batch)]
            values.append((middle(own), min(own), max(own)) if own else None)
        bars.append(Bars(label, values))
    return Panel(title, "batch size", "execution time, ms", bars=bars, groups=[str(batch) for batch in BATCHES])


# -- the table


def of_the_paper(name: str) -> str:
    """The paper's number for one of ours; empty where its text has none."""
    if name.startswith("175b ft(") and "at 190" in name:
        return f"{paper.FT_175B}, the best setting"
    if name.startswith("175b orca(") and "at 190" in name:
        return f"{paper.ORCA_175B}, max_bs not given"
    if name == "101b ft(8,8) sustained, req/s":
        return f"{paper.FT_PEAK_101B}, the peak"
    if name == "175b orca(128) batch 32, ms/token":
        return f"{paper.TARGET * 500:.0f}, batch not given"
    return ""


def table_of(found: Found, scale: Scale) -> str:
    """Our numbers and the paper's, in Markdown."""
    on = measured_on(found.real) if found.real else "A100 model, 36 GB of each GPU usable."
    head = [
        f"{caption(found)}.",
        "",
        f"{on} {how(found.figure, scale, bool(found.real))}",
        "",
        f"| | ours, {'real' if found.real else 'simulated'} | the paper's text |",
        "| --- | --- | --- |",
    ]
    rows = [f"| {name} | {shown(number)} | {of_the_paper(name)} |" for name, number in found.numbers.items()]
    return "\n".join([*head, *rows]) + "\n"


def measured_on(real: Mapping[str, Any]) -> str:
    """Says what a live figure was measured on, and what does not count."""
    model, dtype, tp, pp, machine, isa = (real[key] for key in ("model", "dtype", "tp", "pp", "machine", "isa"))
    said = [f"{model} in {dtype}, tp {tp} and pp {pp}, on {machine} ({isa}). Guard: {real['guard']}."]
    if real.get("attention") == "torch":
        said.append("Torch batches the baseline's attention.")
    if disturbed := real.get("disturbed"):
        said.append(f"{len(disturbed)} loads were disturbed each time, and are not here.")
    if failed := real.get("failed"):
        said.append(f"{len(failed)} systems failed, and are not whole here.")
    if missing := real.get("no memory"):
        said.append(f"No memory for {', '.join(missing)}.")
    return " ".join(said)


def how(figure: int, scale: Scale, real: bool = False) -> str:
    """Says in a sentence or two how the numbers of a table were made."""
    lengths = "" if scale.divide == 1 else f" All lengths are divided by {scale.divide}."
    if figure == 9 and real:
        return f"Medians of three runs, both engines in turn.{lengths}"
    if figure == 9:
        return f"On more than one stage a number of ft is the mean over phi 1, 1.25 and 1.47, with its band.{lengths}"
    requests, queued = scale.of(figure)
    seeds = ", ".join(map(str, scale.seeds))
    return (
        f"Poisson traces of {requests:,} requests, seeds {seeds}; a number is the mean, with the band over the seeds. "
        f"The sustained rate is that of the middle 80 % of the ends of {queued:,} requests that are there at the "
        f"start.{lengths}"
    )


def shown(number: Number) -> str:
    """A number with its band, where it has one."""
    mean, low, high = (f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in number)
    return mean if low == high else f"{mean} ({low} to {high})"


def figures_in(folder: Path) -> dict[int, Found]:
    """The results of all figures. Raises FailedPrecondition where one was not made."""
    return {figure: read(folder / f"figure-{figure}", figure) for figure in FIGURES}


def real_figures_in(folder: Path) -> dict[int, Found]:
    """The results of those live figures that were made."""
    places = {figure: folder / f"figure-{figure}-real" for figure in FIGURES}
    return {figure: read(place, figure) for figure, place in places.items() if place.is_dir()}
