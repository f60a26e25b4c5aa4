"""The benchmarks run and print what they promise. Their numbers are for a reader, not for a test."""

import re
import subprocess
import sys

import pytest

NUMBER = r"[\d.,]+"


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (
            "control_plane --batches 1,3 --seconds 0.5",
            [rf"batch   {b}: +{NUMBER} us CPU per iteration .*endpoint {NUMBER}, rank .*tokens/s" for b in (1, 3)],
        ),
        ("rank --batch 2", [rf"batch 2: rank's CPU {NUMBER} us an iteration; round trip median {NUMBER} us"]),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_a_benchmark(command: str, lines: list[str]) -> None:
    words = [sys.executable, "-m", *f"orca_bench.{command}".split()]
    run = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    found = run.stdout.splitlines()
    for line in lines:
        assert any(re.match(line, said) for said in found), run.stdout
