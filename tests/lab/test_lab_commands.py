"""`orca lab`: every command on little work. Counts, orders, files and columns are checked, and no times."""

import csv
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orca_cli.main import app
from orca_lab import claims, report
from orca_lab.baseline.selections import any_policy
from orca_lab.cost import Calibrated
from orca_lab.experiments import BATCHES, FT, ORCA, SHARES, Point
from orca_lab.record import Recorder
from orca_lab.recording import Recording
from orca_lab.simulator import Delays, Engine, Simulation
from orca_lab.whatif import WhatIf
from orca_lab.workload import POISSON, Lengths, Seeds, drawn

COST = Calibrated(((4e-3, 0, 1e-4, 2e-7, 3e-5, 1e-8, 5e-5), (5e-3, 0, 1e-4, 2e-7, 3e-5, 1e-8, 1e-4)), 1e-3, 5e-4)
LIVE = Delays(claim=1.5e-3, ahead=False)


def orca_lab(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["lab", *map(str, arguments)])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The figures, on few and short requests."""
    folder = tmp_path_factory.mktemp("lab")
    for number in (9, 10, 11):
        done = orca_lab("figure", number, "--simulated", "--quick", "--requests", 20, "--out", folder)
        assert done.exit_code == 0, done.stderr
        files = [Path(line).name for line in done.stdout.splitlines()]
        assert files[:4] == ["points.csv", "figure.svg", "table.md", "run.json"]
    return folder


@pytest.mark.parametrize("number", [9, 10, 11])
def test_a_figures_files(results: Path, number: int) -> None:
    folder = results / f"figure-{number}"
    rows = list(csv.DictReader((folder / "points.csv").read_text().splitlines()))
    assert list(rows[0]) == list(Point._fields)
    assert {row["figure"] for row in rows} == {str(number)}
    root = ET.fromstring((folder / "figure.svg").read_text())
    circles = len(list(root.iter("{http://www.w3.org/2000/svg}circle")))
    run = json.loads((folder / "run.json").read_text())
    assert list(run) == ["command", "commit", "scale", "phi", "calibration", "numbers"]
    table = (folder / "table.md").read_text().splitlines()
    assert len([line for line in table if line.startswith("| ")]) == 2 + len(run["numbers"])
    if number == 9:
        ran = {(row["panel"], float(row["x"])) for row in rows if row["system"] == "ft(32)"}
        assert ran == {
            *(("13b", batch) for batch in BATCHES if batch < 8),
            *(("101b", batch) for batch in BATCHES if batch < 16),
            *(("175b", batch) for batch in BATCHES if batch < 32),
        }
    else:
        spots = {
            (row["panel"], row["system"], row["phi"], row["x"])
            for row in rows
            if row["phi"] == "1.0" or (row["system"], row["phi"]) == ("ft(1,1)", "1.47")
        }
        assert circles == len(spots)
        assert [row["sustained"] for row in rows[: len(SHARES)]] == [str(share <= 1) for share in SHARES]
    if number == 10:
        labels = {f"orca({n})" for n in ORCA} | {f"ft({a},{b})" for a, b in FT}
        assert {row["system"] for row in rows if row["panel"] == "175b"} == labels
    found = report.read(folder, number)
    assert [tuple(map(str, point)) for point in found.points] == [tuple(row.values()) for row in rows]


def test_every_claim_has_a_verdict(results: Path) -> None:
    done = orca_lab("claims", "--out", results)
    assert done.exit_code == 0, done.stderr
    _, _, about, _, head, _, *rows = done.stdout.splitlines()
    assert about.startswith("The verdicts are on the simulation.")
    assert head.endswith("| verdict |")
    verdicts = {str(one) for one in claims.Verdict}
    assert len(rows) > 20
    assert all(row.split(" | ")[-1].removesuffix(" |") in verdicts for row in rows)
    small = [row for row in rows if row.startswith(("| 4.1 |", "| 4.2 |"))]  # by simulations of their own
    assert len(small) == 3
    assert all(row.endswith(f"| {claims.Verdict.REPRODUCED} |") for row in small)
    assert all(row.count(" | ") == head.count(" | ") for row in rows)


def test_claims_without_results(tmp_path: Path) -> None:
    done = orca_lab("claims", "--out", tmp_path)
    assert done.exit_code == 1
    assert f"`orca lab figure 9 --simulated --out {tmp_path}` makes them" in done.stderr


def test_table_1() -> None:
    done = orca_lab("table", 1)
    rows = [line.split() for line in done.stdout.splitlines()[-4:]]
    assert [row[:6] for row in rows] == [
        ["13B", "12.9", "40", "5120", "1", "1"],
        ["101B", "101.2", "80", "10240", "1", "8"],
        ["175B", "174.6", "96", "12288", "2", "8"],
        ["341B", "340.6", "120", "15360", "4", "8"],
    ]


def test_a_trace_is_changed_and_counted(tmp_path: Path) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text("at,input_tokens,output_tokens\n" + "".join(f"{n},{10 * n + 1},5\n" for n in range(10)))
    done = orca_lab("trace", source, "--cut", "2,8", "--faster", 2, "--fit", 60, "--out", out)
    assert done.stdout.splitlines() == [
        "cut to 2 .. 8 s: 4 left out",
        "2 times as fast: 6 moved",
        "fitted to 60 tokens: 2 dropped",
        "4 requests in 1.5 s, 36.0 input and 5.0 output tokens on average",
    ]
    assert orca_lab("trace", out).stdout.splitlines() == done.stdout.splitlines()[-1:]
    assert "--cut" in orca_lab("trace", source, "--cut", "2").stderr
    assert "has no request left" in orca_lab("trace", source, "--fit", 2).stderr
    source.write_text("at,input_tokens,output_tokens\n1,2,x\n")
    assert orca_lab("trace", source).stderr == (
        f"trace: {source}, line 2, column 'output_tokens': is 'x', which is no number of tokens\n"
    )


def record(folder: Path, engine: Engine, requests: int = 150) -> Path:
    """The journal of a simulated day, as a live engine would write it. Requests end before their limits."""
    folder.mkdir(exist_ok=True)
    workload = [one._replace(limit=40) for one in drawn(Lengths((8, 60), (1, 30)), POISSON, 18, requests, Seeds.of(1))]
    recorder = Recorder(folder, [engine], workload)
    Simulation([engine], LIVE, recorder.listener, recorder.watch).run(workload)
    recorder.close()
    return recorder.paths[0]


def test_a_journal_replays_or_shows_the_first_difference(tmp_path: Path) -> None:
    path = record(tmp_path, Engine(COST, 1600, 8))
    done = orca_lab("replay", path)
    events = sum(line.startswith('{"event"') for line in path.read_text().splitlines())
    assert done.stdout == f"{events} events gave the same actions\n"
    assert orca_lab("replay", record(tmp_path, Engine(COST, 1600, 8, any_policy("batchmaker")))).exit_code == 0
    path = record(tmp_path, Engine(COST, 1600, 8))
    lines = path.read_text().splitlines(keepends=True)
    batches = [n for n, line in enumerate(lines) if '"ScheduleBatch"' in line]
    lines[batches[9]] = lines[batches[9]].replace('"reserved":', '"reserved":1')
    path.write_text("".join(lines))
    done = orca_lab("replay", path)
    assert done.exit_code == 1
    assert done.stdout.startswith("step ")
    path.write_text("{}\n")
    assert orca_lab("replay", path).stderr.startswith(f"{path} is no journal")


def test_what_if_predicts_the_record_and_other_settings(tmp_path: Path) -> None:
    engine = Engine(COST, 1600, 8)
    path = record(tmp_path / "recorded", engine)
    what = WhatIf(Recording.read(path))
    assert all(mean < 1e-4 for mean, _ in what.fit_errors)
    assert what.recording.claim == pytest.approx(LIVE.claim, rel=1e-3)
    again = what.predict(what.setting)
    assert all(abs(error) < 1e-3 for _, error in what.errors(again))
    assert again.extrapolated == ""
    other = what.predict(replace(what.setting, max_bs=2))
    truth = WhatIf(Recording.read(record(tmp_path / "other", replace(engine, max_bs=2)))).recorded
    assert other.outcome == pytest.approx(truth, rel=0.01)
    assert truth.normalized > 1.2 * what.recorded.normalized
    done = orca_lab("whatif", path, "--max-bs", "3,8,16", "--pp", "1,2")
    assert done.exit_code == 0, done.stderr
    fits, errors, _, measured, first, *answers = done.stdout.splitlines()
    assert fits.startswith("costs fitted to half of the iterations")
    assert errors.startswith("errors of the recorded setting: throughput ")
    assert measured.startswith("recorded, as measured")
    assert first.startswith("max_bs 8, pp 2, 1600 slots, paper")
    assert len(answers) == 5
    assert all("extrapolated: pp 1 was not recorded" in line for line in answers if " pp 1," in line)
    assert "policy: there is no" in orca_lab("whatif", path, "--policy", "nothing").stderr


def test_what_if_of_too_little(tmp_path: Path) -> None:
    path = record(tmp_path, Engine(COST, 1600, 8), requests=1)
    with path.open("rb") as file:
        head = b"".join(file.readlines()[:6])
    path.write_bytes(head)
    assert "iterations with reports; 20 are needed" in orca_lab("whatif", path).stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--real", "--attention", "cudnn"), "attention: is 'cudnn'; there are kernels and torch"),
        (("--simulated", "--attention", "torch"), "attention: torch is for Figure 9 with --real"),
    ],
)
def test_an_attention_that_is_not_there(given: tuple[str, ...], said: str) -> None:
    done = orca_lab("figure", 9, *given)
    assert done.exit_code != 0
    assert said in done.stderr
