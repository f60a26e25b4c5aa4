"""The benchmarks run and print what they promise. Their numbers are for a reader, not for a test."""

import re
import sys

import pytest
import stacks  # noqa: F401  # its stacks begin warm

from orca_bench import control_plane

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
