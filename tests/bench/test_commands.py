"""The benchmarks run and print what they promise. Their numbers are for a reader, not for a test."""

import re
import sys
from importlib import import_module

import pytest
import stacks  # noqa: F401  # its stacks begin warm

NUMBER = r"[\d.,]+"


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (
            "control_plane --batches 1,3 --seconds 0.5",
            [rf"batch   {b}: +{NUMBER} us CPU per iteration .*endpoint {NUMBER}, rank .*tokens/s" for b in (1, 3)],
        ),
        pytest.param(
            "rank --batch 2",
            [rf"batch 2: rank's CPU {NUMBER} us an iteration; round trip median {NUMBER} us"],
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_a_benchmark(
    command: str, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has torch already, and whose stacks are forked from what has it."""
    module, *words = command.split()
    monkeypatch.setattr(sys, "argv", [module, *words])
    import_module(f"orca_bench.{module}").main()
    found = capsys.readouterr().out.splitlines()
    for line in lines:
        assert any(re.match(line, said) for said in found), found
