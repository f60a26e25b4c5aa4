"""The work of the scheduler's core follows the batch, not the pool; the journal's is timed with a file and without."""

import sys
from pathlib import Path

import pytest

from orca_bench import core
from orca_bench.core import journal_microseconds, milliseconds
from orca_scheduler.master.journal import Heading, path_of, read


def calls(batch: int, stages: int) -> int:
    """Functions that are called for 20 iterations more."""

    def count(iterations: int) -> int:
        made = 0

        def profile(*_: object) -> None:
            nonlocal made
            made += 1

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            milliseconds(batch, stages, iterations)
        finally:
            sys.setprofile(before)
        return made

    return count(25) - count(5)


def test_an_iteration_costs_the_same_in_a_pool_of_sixteen_times_as_many() -> None:
    assert calls(8, 16) <= 1.2 * calls(8, 1)


def test_the_journal_is_timed_with_a_file_and_without(tmp_path: Path) -> None:
    assert journal_microseconds(2, 1, 3, None) >= 0
    assert list(tmp_path.iterdir()) == []
    assert journal_microseconds(2, 1, 3, tmp_path) >= 0
    [file] = tmp_path.iterdir()
    assert file == path_of(tmp_path, "engine-0", 1)
    heading, *lines = read(file)
    assert isinstance(heading, Heading)
    assert (heading.lifecycle["shape"]["tp"], heading.lifecycle["shape"]["pp"]) == (1, 1)
    assert len(lines) == 2 * 3, "a step and a note of each iteration"


def test_what_the_command_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The best of five runs, each of the whole and of the journal alone."""
    asked = list[tuple[object, ...]]()

    def timed(answers: list[float]) -> object:
        left = iter(answers)

        def time(*given: object) -> float:
            asked.append(given)
            return next(left)

        return time

    monkeypatch.setattr(core, "milliseconds", timed([0.5, 0.3, 0.25, 0.4, 0.6]))
    monkeypatch.setattr(core, "journal_microseconds", timed([9.0, 8.0, 7.5, 8.5, 9.5, 3.0, 2.5, 2.0, 4.0, 5.0]))
    monkeypatch.setattr(sys, "argv", ["core", "10x3"])
    core.main()
    assert capsys.readouterr().out.splitlines() == [
        "10 x 3: 0.25 ms an iteration, 25.00 us a request of the batch",
        "  the journal: 7.5 us an iteration, 2.0 us without a file",
    ]
    assert asked[:5] == [(10, 3, 60)] * 5
    assert [(one[:3], one[3] is None) for one in asked[5:]] == [((10, 3, 60), n >= 5) for n in range(10)]
