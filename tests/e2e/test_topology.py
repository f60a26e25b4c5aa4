"""`orca topology`, `orca timeline`, and settings that are impossible for a model."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import astuple
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner, Result

from orca_cli.main import app
from orca_cli.timeline import drawing, life_table, plane_table, share_table
from orca_lab.timeline import (
    Iteration,
    Life,
    Member,
    Run,
    Times,
    blocks,
    drawable,
    letters,
    percentile,
    read_run,
    shares,
)
from orca_scheduler.core.selection import Stop

WIDE = {"COLUMNS": "160", "NO_COLOR": "1"}
MS = 1_000_000


def orca(*arguments: str, environment: Mapping[str, str] | None = None) -> Result:
    """The command in this process: it starts none."""
    return CliRunner().invoke(app, arguments, env={**WIDE, **(environment or {})})


def test_topology_of_figure_6() -> None:
    def drawn(columns: str, *options: str) -> str:
        """By a process of its own: a console takes its width when its module is imported."""
        command = [sys.executable, "-m", "orca_cli", "topology", "--pp", "2", "--tp", "3", *options]
        environment = os.environ | {"COLUMNS": columns, "NO_COLOR": "1"}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment).stdout

    shown = drawn("160", "--slices")
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if "│" in line]
    ranks = [row for row in rows if len(row) == 8]
    assert [row[:4] for row in ranks] == [
        [str(n), str(n // 3), str(n % 3), "0 to 1" if n < 3 else "2 to 3"] for n in range(6)
    ]
    assert ["1", "h.0.attn.c_attn.weight", "(192, 576)", "1", "64:128, 256:320, 448:512", "(192, 192)"] in rows
    narrow = drawn("80")
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow


@pytest.mark.parametrize("command", ["topology", "serve"])
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["--tp", "4"], "tp 4: 6 heads cannot be shared evenly by 4 tensor ranks"),
        (["--pp", "5"], "pp 5: 4 layers are too few for 5 stages"),
    ],
)
def test_impossible_settings(command: str, settings: list[str], sentence: str) -> None:
    if command == "serve":
        run = [sys.executable, "-m", "orca_cli", command, *settings]
        done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
        code, said = done.returncode, done.stderr
    else:
        shown = orca(command, *settings)
        code, said = shown.exit_code, shown.stderr
    assert (code, said.count("\n")) == (1, 1), said
    assert sentence in said


def test_a_family_that_orca_has_not(tmp_path: Path) -> None:
    """It was a table of zeros, and status 0."""
    (tmp_path / "config.json").write_text('{"model_type": "bloom", "num_hidden_layers": 2}')
    shown = orca("topology", "--model", str(tmp_path))
    assert (shown.exit_code, shown.stdout) == (1, "")
    served = "gpt2, gpt_neox, gptj, llama, mistral, qwen2, qwen3, gemma3_text, t5, marian"
    assert shown.stderr == f"--model: {tmp_path.name} is of type bloom; Orca has {served}\n"


def journal(folder: Path) -> Path:
    """Two stages of 10 ms, one request at a time: A's iterations 1 and 2, then B's 3 after a pause of 20 ms."""
    numbers = {"max_bs": 1, "n_workers": 2, "block_size": 1, "run_ahead": 0}
    clock = {"now": 1.0, "wall": 1000 * MS}
    lines: list[object] = [
        {"core": numbers, "state": {}, "lifecycle": {}, "term": 1, "clock": clock, "claims": {}},
    ]
    lines.append({"note": {"formed": 5, "slots": 9, "tp": 1, "pp": 2, "now": 1.0, "wall": 1000 * MS}})
    lines.append({"note": {"claims": {"1": "first", "2": "second"}}})

    def run(iteration: int, claim: int, at: int, phase: str = "increment") -> None:
        begins = phase == "initiation"
        members = {"claim": [claim], "row": [0], "start": [0 if begins else 2], "count": [3 if begins else 1]}
        batch = {"iteration": iteration, "members": members, "admitted": int(begins), "free_rows": [], "reserved": 3}
        returned = {"now": 1.0, "iteration": iteration - 1, "made": [[5]]}
        actions = [["ScheduleBatch", batch | {"stop": Stop.POOL}]]
        lines.append({"event": ["BatchReturned", returned], "actions": actions})
        times = [
            [0, 0, at, at, at + MS, at + 10 * MS, at + 11 * MS, 40, 64, 0],
            [1, 0, at + MS, at + 2 * MS, at + 12 * MS, at + 20 * MS, at + 21 * MS, 40, 0, 9 * MS],
        ]
        lines.append({"note": {"iteration": iteration, "times": times}})

    def arrived(now: float, claim: int) -> None:
        request = {"claim": claim, "arrival": claim, "input_tokens": 3, "max_new_tokens": 8}
        lines.append({"event": ["Arrived", {"now": now, "requests": [request]}], "actions": []})

    arrived(1.0, 1)
    run(1, 1, 1000 * MS, "initiation")
    run(2, 1, 1023 * MS)
    arrived(1.064, 2)
    run(3, 2, 1066 * MS, "initiation")
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "journal-engine-0-77.jsonl").write_text(text + '{"torn')
    return folder


def life(folder: Path) -> Life:
    found = read_run(journal(folder)).last
    assert found is not None
    return found


def test_shares(tmp_path: Path) -> None:
    """From 1000 to 1100 ms: three iterations of 10 ms on each stage."""
    first, second = shares(life(tmp_path), (1000 * MS, 1100 * MS))
    # Stage 0: 1 ms builds the batch each time; 2 ms until iteration 2 came, and 2 until 3; the rest had no work.
    assert astuple(first) == pytest.approx((0.33, 0.00, 0.04, 0.63))
    # Stage 1: 9 ms wait for data each time; idle until it took them: 2 ms of 1, 4 of 2 and 4 of 3.
    assert astuple(second) == pytest.approx((0.30, 0.27, 0.10, 0.33))


def test_ready(tmp_path: Path) -> None:
    """When a batch could have been scheduled. Iterations return at 1021, 1044, 1087 ms; A came at 1000, B at 1064."""
    found = life(tmp_path)
    assert [at / MS for at in found.ready().values()] == [1000, 1021, 1064]
    found.run_ahead = 1  # A's second iteration need not wait for its first
    assert [at / MS for at in found.ready().values()] == [1000, 1000, 1064]


def test_timeline(tmp_path: Path) -> None:
    run_dir, trace = journal(tmp_path / "run"), tmp_path / "trace.json"
    shown = orca("timeline", str(run_dir), "--perfetto", str(trace), environment={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.stderr
    stages = [line for line in shown.stdout.splitlines() if line.startswith("stage ")]
    assert [line[:8] for line in stages] == ["stage 0 ", "stage 1 "]
    assert all(line.count("A") == 2 and line.count("B") == 1 for line in stages)
    assert "requests: A first B second A block: " in " ".join(shown.stdout.split())
    assert "A block: the stage ran one iteration" in " ".join(shown.stdout.split()), "there is a legend"
    lines = [line for line in shown.stdout.splitlines() if str(trace) not in line]  # a path may be longer
    assert max(map(len, lines)) <= 80, "it fits the terminal"
    events = json.loads(trace.read_text())["traceEvents"]
    computed = [event for event in events if event["ph"] == "X" and event["name"] in ("A", "B")]
    assert [(event["pid"], event["args"]["iteration"]) for event in computed] == [
        (0, 1),
        (1, 1),
        (0, 2),
        (1, 2),
        (0, 3),
        (1, 3),
    ]
    sizes = {"rows": 3, "control_us": 0.0, "control_bytes": 40, "data_bytes": 64}
    assert computed[0]["args"] == {"iteration": 1, "epoch": 5, "requests": ["first"], **sizes}
    assert computed[0]["dur"] == 9000.0


@pytest.mark.parametrize("columns", [60, 132])
def test_a_timeline_of_many_long_names_fits_any_terminal(tmp_path: Path, columns: int) -> None:
    found = life(tmp_path)
    run = Run("engine-0", [found], {claim: f"a-request-with-a-long-name-{claim}" for claim in range(3)})
    shown = io.StringIO()
    console = Console(width=columns, file=shown)
    console.print(drawing(run, found, 24, console.width))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines[0]) == columns, "and it fills the terminal"
    named = [line.strip() for line in lines if " a-request" in line]
    assert named == ["A a-request-with-a-long-name-1", "B a-request-with-a-long-name-2"], "a line each"


def shown_table(table: Table) -> tuple[str, list[list[str]]]:
    """The title, and the cells of all rows with the head's."""
    shown = io.StringIO()
    Console(width=120, file=shown).print(table)
    title, *lines = shown.getvalue().splitlines()
    rows = [line.strip("│┃").replace("┃", "│").split("│") for line in lines if line[:1] in "│┃"]
    return title.strip(), [[cell.strip() for cell in row] for row in rows]


def three_stages() -> Life:
    """Four iterations of 100 ms on three stages of two ranks. The control message's way grows from one to the next."""
    found = Life(5, 1000 * MS, 2, 3, 3, 0)
    for n in range(4):
        iteration = Iteration(n + 1, (Member(1, "increment", 1),))
        for stage, late in enumerate((0, n + 1, 3 * n + 4)):
            for rank in range(2):
                came, done = 1000 + 100 * n + late, 10 * stage + 12
                moments = [(came + ms) * MS for ms in (0, 1, done - 10, done, done + 1 + rank)]
                sizes = [30 + rank if stage else 40, 10 * stage + rank]
                iteration.times[stage, rank] = Times._make([stage, rank, *moments, *sizes, stage * 5 * MS])
        found.iterations.append(iteration)
    return found


def test_the_tables_of_a_timeline() -> None:
    assert shown_table(plane_table(three_stages())) == (
        "planes, 4 iterations",
        [
            ["", "mean of an iteration", "p50", "p99"],
            ["control, all ranks", "202 bytes", "", ""],
            ["data, all ranks", "63 bytes", "", ""],
            ["control hop 0 to 1", "", "2.00 ms", "4.00 ms"],
            ["control hop 1 to 2", "", "5.00 ms", "9.00 ms"],
            ["control 0 to 2", "", "7.00 ms", "13.00 ms"],
        ],
    )
    # From 1026 to 1346 ms. A rank of stage 0 is busy for 12 or 13 ms of each of three iterations, and so on.
    assert shown_table(share_table(three_stages())) == (
        "shares of 0.32 s, since the pipeline had filled",
        [
            ["stage", "busy", "waiting for upstream", "waiting for scheduler", "no work"],
            ["0", "11.7%", "0.0%", "57.2%", "31.1%"],
            ["1", "16.4%", "4.7%", "60.0%", "18.9%"],
            ["2", "24.5%", "9.4%", "66.1%", "0.0%"],
        ],
    )
    alone = Life(1, 0, 1, 1, 1, 0, [Iteration(1, (), {(0, 0): Times(0, 0, 1, 2, 3, 4, 5, 60, 70, 0)})])
    assert shown_table(plane_table(alone)) == (
        "planes, 1 iterations",
        [["", "mean of an iteration"], ["control, all ranks", "60 bytes"], ["data, all ranks", "70 bytes"]],
    )


def test_the_table_of_lives() -> None:
    lives = [Life(n, (1000 + n) * 1000 * MS, 1, 1, 1, 0) for n in range(12)]
    lives[9].lost, lives[10].iterations = "rank 1 ended", three_stages().iterations
    title, [head, *rows] = shown_table(life_table(Run("engine-0", lives, {})))
    assert "12 lives of engine-0, the last 10: one for each formation and" in title
    assert head == ["epoch", "from", "iterations", "how it ended"]
    ends = {9: "rank 1 ended", 11: "the last"}
    assert rows == [
        [
            str(n),
            datetime.fromtimestamp(1000 + n).strftime("%H:%M:%S"),
            "4" if n == 10 else "0",
            ends.get(n, "another master took it over"),
        ]
        for n in range(2, 12)
    ]
    title, rows = shown_table(life_table(Run("engine-1", lives[:10], {})))
    assert title.startswith("10 lives of engine-1: one for each")
    assert len(rows) == 1 + 10


def test_letters_and_percentiles() -> None:
    assert letters([7, 3, 3, 9]) == {3: "A", 7: "B", 9: "C"}
    many = letters(range(27 * 26))
    assert [many[n] for n in (25, 26, 27, 51, 52, 701)] == ["Z", "AA", "AB", "AZ", "BA", "ZZ"]
    assert [percentile([4, 1, 3, 2], p) for p in (0.0, 0.25, 0.26, 0.5, 0.75, 0.76, 1.0)] == [1, 1, 2, 2, 3, 4, 4]
    assert percentile([5], 0.99) == 5


def test_what_is_drawn_of_a_run(tmp_path: Path) -> None:
    """To the column, with its colours and its legend; names of requests to the twelfth, and how many more there are."""
    found = life(tmp_path)

    def drawn(of: Life, count: int, columns: int) -> list[str]:
        shown = io.StringIO()
        Console(width=100, file=shown).print(drawing(Run("engine-0", [of], {1: "first"}), of, count, columns))
        return [line.rstrip() for line in shown.getvalue().splitlines()]

    legend = [
        "        A block: the stage ran one iteration of the requests with these letters; the same batch has",
        "        the same colour. ·: it ran nothing.",
    ]
    assert drawn(found, 24, 51) == [
        "stage 0  A  ▏······· A ▏················· B  ▏·····",
        "stage 1 ······ A ▏······· A  ▏················ B  ▏",
        *("        86.0 ms, iterations 1 to 3", "        requests:", "          A first", "          B 2"),
        *legend,
    ]
    assert drawn(found, 2, 30)[:3] == [
        "stage 0 A ▏············ B ▏···",
        "stage 1 ····A ▏············B ▏",
        "        63.0 ms, iterations 2 to 3",
    ]
    assert drawn(found, 24, 5)[0] == "stage 0 A▏···A ▏·······B ▏··", "twenty columns at least"
    lines = [
        part for part in drawing(Run("engine-0", [found], {}), found, 24, 51).renderables if isinstance(part, Text)
    ]
    styles = [[str(span.style) for span in line.spans if "white" in str(span.style)] for line in lines]
    assert styles == [["white on dark_blue", "white on dark_blue", "white on dark_green"]] * 2
    members = tuple(Member(claim, "increment", 1) for claim in range(14))
    moments = [Times(0, 0, at, at, at + 2 * MS, at + 9 * MS, at + 10 * MS, 1, 1, 0) for at in (0, 1000 * MS)]
    late = Life(1, 0, 1, 1, 1, 0, [Iteration(n, members, {(0, 0): at}) for n, at in enumerate(moments, 3)])
    assert drawn(late, 24, 48) == [
        "stage 0              ABCDEFGHIJKLMN            ▏",
        "        8.0 ms, iterations 4 to 4; 2 would be too small to see",
        "        requests:",
        *(f"          {letter} {'first' if n == 1 else n}" for n, letter in enumerate("ABCDEFGHIJKL")),
        "          and 2 more",
        *legend,
    ]


def two_stages(*moments: tuple[int, int, int, int]) -> Life:
    """When each iteration began and ended on either stage, in ms."""
    found = Life(1, 0, 1, 2, 2, 0)
    for n, at in enumerate(moments, 1):
        times = {(s, 0): Times(s, 0, 0, 0, at[2 * s] * MS, 0, at[2 * s + 1] * MS, 0, 0, 0) for s in range(2)}
        found.iterations.append(Iteration(n, (Member(n, "increment", 1),), times))
    return found


def test_blocks_have_columns_of_their_own() -> None:
    """At least one, behind those before them, as long as there are some."""
    found = two_stages((0, 1, 90, 99), (1, 2, 99, 120), (2, 30, 130, 140), (98, 99, 150, 160), (101, 102, 170, 180))
    columns = [
        [(one.first, one.last, one.iteration.number) for one in blocks(found, stage, 0, 100 * MS, 10)]
        for stage in (0, 1)
    ]
    assert columns == [[(0, 1, 1), (1, 2, 2), (2, 3, 3)], [(9, 10, 1)]]
    assert [one.iteration.number for one in blocks(found, 0, 2 * MS, 100 * MS, 10)] == [2, 3]


def test_what_ran_before_the_first_that_is_drawn_is_left_out() -> None:
    """The last stage still runs the iteration before, while the first one begins what is drawn."""
    found = two_stages((1000, 1010, 1012, 1030), (1011, 1020, 1031, 1040))
    shown = io.StringIO()
    Console(width=100, file=shown).print(drawing(Run("engine-0", [found], {}), found, 1, 37))
    assert [line.rstrip() for line in shown.getvalue().splitlines()[:3]] == [
        "stage 0    A    ▏" + 20 * "·",
        "stage 1 " + 20 * "·" + "   A    ▏",
        "        29.0 ms, iterations 2 to 2",
    ]


def test_a_pause_is_drawn_as_long_as_it_was(tmp_path: Path) -> None:
    """Iterations of 10 ms on each stage, the last one 23 ms after the one before."""
    found = life(tmp_path)
    assert [iteration.number for iteration in drawable(found, 24, 72)] == [1, 2, 3]
    assert [iteration.number for iteration in drawable(found, 24, 8)] == [2, 3], "a column is no longer than 10 ms"
    assert [iteration.number for iteration in drawable(found, 24, 3)] == [3]


def test_a_timeline_tells_of_earlier_lives(tmp_path: Path) -> None:
    first = journal(tmp_path) / "journal-engine-0-77.jsonl"
    whole = first.read_text().removesuffix('{"torn')
    first.write_text(whole + json.dumps({"note": {"lost": "rank 1 ended"}}) + "\n")
    (tmp_path / "journal-engine-0-78.jsonl").write_text(whole)
    shown = orca("timeline", str(tmp_path), environment={"COLUMNS": "80"})
    assert "2 lives of engine-0" in shown.stdout
    assert [line.count("rank 1 ended") for line in shown.stdout.splitlines() if "rank 1" in line] == [1]


def test_a_timeline_finds_the_last_run_by_itself(tmp_path: Path) -> None:
    state = tmp_path / "state"
    for name in ("2026-01-01T00-00-00", "2026-01-02T00-00-00"):
        (state / "orca/runs" / name / "logs").mkdir(parents=True)
    journal(state / "orca/runs" / name)
    shown = orca("timeline", environment={"XDG_STATE_HOME": str(state)})
    assert shown.exit_code == 0, shown.stderr
    assert f"run folder {state / 'orca/runs' / name}" in shown.stdout


def test_a_folder_without_a_journal(tmp_path: Path) -> None:
    shown = orca("timeline", str(tmp_path))
    assert shown.exit_code == 1
    assert "holds no journal with an iteration of engine-0" in shown.stderr


def test_what_a_timeline_cannot_find_or_write(tmp_path: Path) -> None:
    run_dir = journal(tmp_path / "run")
    missing = tmp_path / "none"
    refused = {
        (str(missing),): f"{missing}: there is no such folder",
        (str(run_dir), "--engine", "e"): f"--engine: {run_dir} holds no journal of e; it has engine-0",
        (str(run_dir), "--perfetto", str(missing / "x")): (
            f"--perfetto: {missing / 'x'} cannot be written (No such file or directory)"
        ),
    }
    for arguments, sentence in refused.items():
        done = CliRunner().invoke(app, ["timeline", *arguments])
        assert (done.exit_code, done.stderr) == (1, f"{sentence}\n")
