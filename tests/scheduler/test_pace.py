"""The pace of an engine's requests: exact, because time is given."""

import pytest

from orca_scheduler.master.pace import Pace


def run(pace: Pace, seconds: float, iteration: float, batch: int, running: int, begun: float = 0.0) -> float:
    """An engine that returns a batch in each `iteration` seconds, without a break. Returns when it stops."""
    now = begun
    pace.scheduled(now)
    while now < begun + seconds:
        now += iteration
        pace.returned(now, batch, running, idle=False)
    pace.returned(now, 0, 0, idle=True)
    return now


def test_nothing_is_known_before_the_first_token() -> None:
    pace = Pace()
    assert pace.seconds == 0
    pace.scheduled(1.0)
    assert pace.seconds == 0


@pytest.mark.parametrize(("batch", "running", "expected"), [(8, 8, 0.02), (8, 16, 0.04), (1, 1, 0.02)])
def test_requests_that_take_turns_wait_for_each_other(batch: int, running: int, expected: float) -> None:
    """With two batches in flight a request is in every second one."""
    pace = Pace()
    run(pace, 1.0, 0.02, batch, running)
    assert pace.seconds == pytest.approx(expected)


def test_the_last_seconds_of_work_count() -> None:
    pace = Pace()
    now = run(pace, 10.0, 0.01, 8, 8)
    run(pace, 8.0, 0.05, 8, 8, begun=now + 3600)  # an idle hour says nothing
    assert pace.seconds == pytest.approx(0.05, rel=0.1)


def test_the_time_of_an_outage_does_not_count() -> None:
    """An engine that is far behind waits for the pool."""
    pace = Pace()
    pace.scheduled(0.0)
    pace.returned(0.01, 8, 8, idle=False)
    pace.held(60.0)
    pace.returned(60.01, 8, 8, idle=False)
    assert pace.seconds == pytest.approx(0.01)
    pace.returned(60.02, 8, 8, idle=True)
    pace.held(120.0)
    pace.scheduled(180.0)
    pace.returned(180.01, 8, 8, idle=True)
    assert pace.seconds == pytest.approx(0.01)


def test_what_was_in_flight_when_the_ranks_were_lost_does_not_count() -> None:
    pace = Pace()
    now = run(pace, 1.0, 0.01, 8, 8)
    pace.scheduled(now)
    pace.lost()
    run(pace, 1.0, 0.01, 8, 8, begun=now + 60)
    assert pace.seconds == pytest.approx(0.01)
