"""A long iteration is no stuck device: by recorded times, and by those of machines that are made up."""

import gzip
import json
import random
from pathlib import Path

import pytest
from scheduler.test_recorded import FOLDER, converted

from orca_scheduler import timers
from orca_scheduler.core.core import BatchReturned, EngineLost, ScheduleBatch
from orca_scheduler.lifecycle.progress import PAIRS, Durations, Progress, Work
from orca_scheduler.master.journal import CoreStep, replay


def prompt(tokens: int) -> Work:
    return Work.of([0], [tokens])


def increment(start: int) -> Work:
    return Work.of([start], [1])


def test_a_standstill_counts_from_the_last_progress() -> None:
    progress = Progress(Durations(), stages=1)
    assert progress.latest == 0
    assert progress.stuck(1000.0, since=0.0) is None  # nothing is in flight
    progress.sent(1, increment(5), 1000.0)
    assert progress.stuck(1030.0, since=0.0) is None
    assert progress.stuck(1031.0, since=0.0) == 31.0
    assert progress.stuck(1031.0, since=1020.0) is None  # this process was late itself
    progress.sent(2, increment(6), 1000.0)
    progress.returned(1025.0)
    progress.returned(1026.0)  # a second behind the one before
    progress.sent(3, increment(7), 2000.0)
    progress.sent(4, increment(8), 2010.0)
    assert progress.stuck(2249.0, since=0.0) is None
    assert progress.stuck(2251.0, since=0.0) == 251.0  # ten times 25 s
    assert (progress.oldest, progress.latest) == (3, 4)
    progress.returned(2100.0)
    assert progress.oldest == 4
    assert progress.stuck(2251.0, since=0.0) is None
    assert progress.stuck(3110.0, since=0.0) == 1010.0


@pytest.mark.parametrize("seed", range(20))
def test_no_machine_is_stuck_because_a_prompt_is_long(seed: int) -> None:
    """Iterations of any size in any order, ten times slower at worst than the fastest of their size."""
    chance = random.Random(seed)
    overhead, position = 10 ** chance.uniform(-4, 0), 10 ** chance.uniform(-5, -1)
    pair = position / PAIRS * 10 ** chance.uniform(-3, 0)
    durations, now, told = Durations(), 1000.0, 0
    for life in range(5):
        progress = Progress(durations, stages=1)
        for number in range(100):
            counts, starts = [1], [9]  # before anything was measured
            if life or number:
                members = range(chance.randint(1, 8))
                counts = [int(10 ** chance.uniform(0, 4.5)) if chance.random() < 0.3 else 1 for _ in members]
                starts = [int(10 ** chance.uniform(0, 4)) for _ in members]
            work = Work.of(starts, counts)
            attended = sum(count * (start + count) for start, count in zip(starts, counts, strict=True))
            takes = overhead + position * sum(counts) + pair * attended
            takes *= chance.uniform(1, timers.STUCK_TIMES)
            if takes > timers.STUCK_MOST:
                continue
            progress.sent(number, work, now)
            now += takes
            told += takes > timers.STUCK
            assert progress.stuck(now, since=0.0) is None, (work, takes)
            progress.returned(now)
    assert told or position < 1e-2, "some are long"


def test_what_is_not_long_is_found_soon_after_a_long_one() -> None:
    progress = Progress(Durations(), stages=1)
    for number, (work, seconds) in enumerate([(increment(9), 0.02), (prompt(1000), 1.0), (prompt(30_000), 600.0)]):
        progress.sent(number, work, 1000.0 * number)
        progress.returned(1000.0 * number + seconds)
    progress.sent(3, increment(30), 10_000.0)
    assert progress.stuck(10_031.0, since=0.0) == 31.0
    progress.returned(10_031.0)
    progress.sent(4, prompt(30_000), 11_000.0)
    assert progress.stuck(16_999.0, since=0.0) is None
    assert progress.stuck(17_001.0, since=0.0) == 6_001.0


def test_stages_and_a_first_prompt() -> None:
    """A stage before the last may take as long as was seen of the last one; before anything was seen, a slow machine
    has its time, and no iteration has more than a neighbour waits."""
    progress, others = Progress(Durations(), stages=4), Durations()
    progress.sent(1, prompt(1000), 0.0)
    assert progress.stuck(500.0, since=0.0) is None
    progress.returned(10.0)
    progress.sent(2, prompt(1000), 20.0)
    assert progress.stuck(419.0, since=0.0) is None
    assert progress.stuck(421.0, since=0.0) == 401.0
    others.keep("weights")
    others.took(prompt(1000), 10.0)
    assert others.at_most(prompt(1000)) == 10.0
    others.keep("weights")
    assert others.at_most(prompt(1000)) == 10.0
    others.keep("others")
    assert others.at_most(prompt(1000)) > 100.0
    longest = Progress(others, stages=1)
    longest.sent(1, prompt(1_000_000), 0.0)
    assert longest.stuck(timers.STUCK_MOST + 1, since=0.0) == timers.STUCK_MOST + 1


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("1*")))
def test_recorded_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of stacks under `orca chaos` on a busy machine, with a least bound of 3 s."""
    monkeypatch.setattr(timers, "STUCK", 3.0)
    lines = [converted(json.loads(line)) for line in gzip.decompress((FOLDER / name).read_bytes()).splitlines()]
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    durations, returned = Durations(), 0
    progress = Progress(durations, stages=2)
    for step, _ in replay(path):
        if not isinstance(step, CoreStep):
            continue
        match step.event:
            case BatchReturned(now):
                assert progress.stuck(now, since=0.0) is None, step.event
                progress.returned(now)
                returned += 1
            case EngineLost():
                progress = Progress(durations, stages=2)
            case _:
                pass
        for batch in (action for action in step.actions if isinstance(action, ScheduleBatch)):
            members = batch.members
            work = Work.of([member.start for member in members], [member.count for member in members])
            progress.sent(batch.iteration, work, step.event.now)
    assert returned > 20
