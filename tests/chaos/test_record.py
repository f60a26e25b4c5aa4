"""A run that was stopped goes on with the rounds that it has not run; the report counts all of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from orca_chaos.faults import OF_LINKS, OF_PROCESSES, Fault, Kind, Victim, plan
from orca_chaos.record import Record
from orca_chaos.report import Report, Round, counted
from orca_common.errors import FailedPrecondition, InvalidArgument

VICTIMS = [Victim("rank", "rank-0.0", OF_PROCESSES), Victim("scheduler > redis", "scheduler-0 > redis", OF_LINKS)]


def ended(number: int, pause: float, late: float = 0.0) -> Round:
    faults = tuple(plan(7, number, VICTIMS))
    return Round(number, faults, (True,) * len(faults), pause, 5.0, late)


def test_a_record_is_read_again(tmp_path: Path) -> None:
    record = Record(tmp_path / "rounds", 7)
    for number in range(1, 30):
        assert not record.has(number, plan(7, number, VICTIMS))
        record.add(ended(number, number / 10))
    again = Record(tmp_path / "rounds", 7)
    assert again.rounds == record.rounds
    assert all(again.has(number, plan(7, number, VICTIMS)) for number in range(1, 30))
    assert str(Report(again.rounds.values())) == str(Report(record.rounds.values()))


def test_a_line_that_was_not_written_to_its_end_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rounds"
    record = Record(path, 7)
    record.add(ended(1, 0.1))
    record.add(ended(2, 0.1))
    path.write_bytes(path.read_bytes()[:-7])
    again = Record(path, 7)
    assert list(again.rounds) == [1]
    again.add(ended(2, 0.1))
    assert Record(path, 7).rounds == record.rounds


def test_a_record_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rounds"
    Record(path, 7).add(ended(1, 0.1))
    with pytest.raises(FailedPrecondition, match="rounds of seed 7"):
        Record(path, 8)
    with pytest.raises(FailedPrecondition, match=r"round 1 .* had other faults"):
        Record(path, 7).has(1, plan(7, 1, VICTIMS[1:]))
    path.write_text("{}\n")
    with pytest.raises(InvalidArgument, match="line 1"):
        Record(path, 7)


def test_the_report_counts_faults_and_leaves_out_what_this_program_was_late_for() -> None:
    alone = next(n for n in range(1, 100) if [f.label for f in plan(7, n, VICTIMS)] == ["stop rank"])
    several = next(n for n in range(1, 100) if len(plan(7, n, VICTIMS)) > 1)
    lasted = plan(7, alone, VICTIMS)[0].seconds
    missed = replace(ended(alone, 60.0), hit=(False,))
    rounds = [ended(alone, lasted + 1.25), ended(alone, 50.0, late=20.0), missed, ended(several, 9.5)]
    report = Report(rounds)
    assert report.longest() == pytest.approx(1.25)
    row = next(line for line in report.table().splitlines() if line.startswith("| stop rank |"))
    assert row.split(" | ")[2:] == ["1", f"{lasted + 1.25:.1f} s", "1.2 s |"]
    said = str(report)
    assert counted(1, "round") == "1 round"
    assert said.startswith(f"4 rounds, {2 + len(rounds[3].faults)} faults (1 found nothing to hit)")
    assert "longest pause of rounds with several faults: 9.5 s" in said
    assert "without a pause: 1 round, as this program itself was late" in said
    assert "own time: not measured, because no fault was alone" in str(Report(rounds[3:]))


def test_a_report_as_a_whole() -> None:
    kill, stop = (Fault(0.5, kind, VICTIMS[0], seconds) for kind, seconds in ((Kind.KILL, 0.0), (Kind.STOP, 2.0)))
    rounds = [
        Round(1, (kill,), (True,), 1.26, 3.0, 0.0),
        Round(2, (kill,), (True,), 1.5, 3.0, 0.5),
        Round(3, (stop,), (True,), 1.0, 3.0, 0.0),
        Round(4, (kill, stop), (True, False), 4.5, 6.0, 0.0),
        Round(5, (stop,), (True,), 9.0, 9.0, 0.75),
    ]
    assert str(Report(rounds)).splitlines() == [
        "5 rounds, 5 faults (1 found nothing to hit)",
        "",
        "| fault | times | alone | longest pause | beyond the fault's own time |",
        "| --- | --- | --- | --- | --- |",
        "| kill rank | 3 | 2 | 1.5 s | 1.5 s |",
        "| stop rank | 2 | 1 | 1.0 s | 0.0 s |",
        "",
        "longest pause of one fault beyond its own time: 1.5 s (the aim is 3 s)",
        "longest pause of rounds with several faults: 4.5 s",
        "without a pause: 1 round, as this program itself was late by more than 0.5 s",
    ]
    assert [str(one) for one in rounds[3:]] == [
        "longest pause 4.5 s, all well after 6.0 s",
        "longest pause 9.0 s, all well after 9.0 s (not counted: this program itself was late by 0.8 s)",
    ]
    assert str(Report(rounds[:1])).startswith("1 round, 1 fault\n")
