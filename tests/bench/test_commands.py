"""The benchmarks run and print what they promise. Their numbers are for a reader, not for a test."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stacks  # noqa: F401  # its stacks begin warm
from typer.testing import CliRunner

from orca_bench import control_plane
from orca_bench.engine import EngineOptions
from orca_cli.main import app

NUMBER = r"[\d.,]+"


@pytest.mark.long
def test_the_control_plane_s_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has torch already, and whose stacks are forked from what has it."""
    monkeypatch.setattr(sys, "argv", ["control_plane", "--batches", "1,3", "--seconds", "0.5"])
    control_plane.main()
    found = capsys.readouterr().out.splitlines()
    for batch in (1, 3):
        line = rf"batch   {batch}: +{NUMBER} us CPU per iteration .*endpoint {NUMBER}, rank .*tokens/s"
        assert any(re.match(line, said) for said in found), found


ENGINE = "--max-batch-size 4 --kernels torch --quantize int8 --kv-dtype int8 --runs 5 --cases c --case a --case b"
OPTIONS = ["--model", "m", "--dtype", "float32", "--device", "cpu", "--threads", "2"]


@pytest.mark.parametrize(
    ("line", "name", "handed"),
    [
        (
            [*OPTIONS, *ENGINE.split()],
            "engine",
            (EngineOptions("m", "float32", "cpu", 2, 4, "torch", "int8", "int8"), Path("c"), ["a", "b"], 5),
        ),
        ([], "engine", (EngineOptions(None, "auto", "auto", 0, 32, "auto", None, None), None, [], 3)),
        ([*OPTIONS, "--only", "x", "--seconds", "3"], "kernels", (EngineOptions("m", "float32", "cpu", 2), "x", 3.0)),
        ([], "kernels", (EngineOptions(None, "auto", "auto", 0), "", 1.0)),
    ],
    ids=["engine", "an engine as it is", "kernels", "kernels as they are"],
)
def test_options_are_handed_on(
    line: list[str], name: str, handed: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines go to standard output and to the file, each as it comes."""
    calls, file = list[tuple[Any, ...]](), tmp_path / "lines"

    def lines(*given: Any) -> Iterator[dict[str, int]]:
        calls.append(given)
        yield {"n": 1}
        assert file.read_text() == '{"n": 1}\n'
        yield {"n": 2}

    monkeypatch.setattr(f"orca_bench.{name}.lines", lines)
    done = CliRunner().invoke(app, ["bench", name, *line, "--json-file", str(file)])
    assert (done.exit_code, calls) == (0, [handed]), done.output
    assert [json.loads(one) for one in done.stdout.splitlines()] == [{"n": 1}, {"n": 2}]
    assert file.read_text() == done.stdout
