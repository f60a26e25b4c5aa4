"""Commands in turn, and the table of what they print."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from orca_bench.compare import Line, better, lines_of, medians, rounds, table
from orca_common.errors import FailedPrecondition
from orca_lab.roofline import Accelerator


def line(engine: str, case: str, seconds: float) -> Line:
    return {"engine": engine, "case": case, "seconds": seconds}


LINES = [
    *(line("orca", "small", seconds) for seconds in (0.3, 0.1, 0.2)),
    *(line("peer", "small", seconds) for seconds in (0.5, 0.6, 9.0)),
    line("peer", "large", 4.0),
    line("orca", "large", 2.0),
    line("third", "large", 1.0),
]


def test_medians() -> None:
    assert medians(LINES) == {"small": {"orca": 0.2, "peer": 0.6}, "large": {"peer": 4.0, "orca": 2.0, "third": 1.0}}


def test_table() -> None:
    assert table(LINES, {"small": 0.1, "large": None}).splitlines() == [
        "| case | orca, s | peer, s | third, s | peer / orca | third / orca | floor, s | orca / floor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| small | 0.200 | 0.600 | - | 3.00 | - | 0.100 | 2.00 |",
        "| large | 2.000 | 4.000 | 1.000 | 2.00 | 0.50 | - | - |",
    ]


def test_commands_run_in_turn(tmp_path: Path) -> None:
    said = f"print('loading'); print({json.dumps(json.dumps(line('a', 'c', 1.0)))}); print('{{\"floor\": 1}}')"
    order = tmp_path / "order"
    other = f"echo second >> {order}; echo '{json.dumps(line('b', 'c', 2.0))}'"
    first = [sys.executable, "-c", f"open({str(order)!r}, 'a').write('first\\n'); {said}"]
    heard: list[str] = []
    found = list(rounds([first, other], 2, heard.append))
    assert [(one["engine"], one["round"]) for one in found] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert order.read_text().split() == ["first", "second"] * 2
    assert heard == [f"round {n} of 2: {command}" for n in (1, 2) for command in (shlex.join(first), other)]


def test_the_better_of_two_measurements_counts() -> None:
    one, other = Accelerator("cpu", 9.0, {"float32": 2.0}), Accelerator("cpu", 8.0, {"float32": 3.0})
    assert better(one, other) == Accelerator("cpu", 9.0, {"float32": 3.0})


def test_a_command_that_fails_ends_it() -> None:
    with pytest.raises(FailedPrecondition, match="`echo x; exit 3` ended with 3"):
        list(lines_of("echo x; exit 3"))
