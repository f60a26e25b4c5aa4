"""A stuck device is told from a long initiation."""

from orca_scheduler.progress import STUCK_SECONDS, Progress


def test_stuck() -> None:
    progress = Progress()
    assert progress.stuck(1000.0, since=0.0) is None, "nothing is in flight"
    progress.sent(7, 10.0)
    progress.sent(8, 11.0)
    assert progress.oldest == 7
    assert progress.stuck(10.0 + STUCK_SECONDS, since=0.0) is None
    assert progress.stuck(11.0 + STUCK_SECONDS, since=0.0) == STUCK_SECONDS + 1
    assert progress.stuck(11.0 + STUCK_SECONDS, since=20.0) is None, "this process was late itself until then"
    progress.returned(20.0)  # 10 s: now ten times that is the bound
    assert progress.oldest == 8
    assert progress.stuck(119.0, since=0.0) is None
    assert progress.stuck(121.0, since=0.0) == 101.0
