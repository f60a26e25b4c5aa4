"""A process that dies is started again, after waits that begin again; the screen gets one line a state."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from orca.v1 import worker_pb2 as pb
from orca_common.backoff import FIRST, LONGEST, WORKED, Backoff
from orca_local import keeping, rank_ends
from orca_local.child import Child
from orca_local.keeping import UNSTEADY, keep
from orca_local.rank_ends import RankEnds

LISTENS = """echo '{"status": "127.0.0.1:1"}'; """


def test_waits_begin_again_after_some_work() -> None:
    """A process that has worked is started again at once: Redis's third death once waited 0.8 s, its fifth 3.2 s."""
    backoff = Backoff()
    waits = [backoff.after(lived=1.0) for _ in range(8)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (FIRST, LONGEST)
    assert backoff.after(lived=WORKED + 1) == 0.0
    assert backoff.after(lived=1.0) == FIRST


async def test_a_process_that_never_stays_up(tmp_path: Path) -> None:
    """Its first deaths are told, then that it does not stay up and why; then no more."""
    said: list[str] = []
    command = ["sh", "-c", LISTENS + "echo 'the reason' >&2; exit 3"]
    child = Child("endpoint", "endpoint-0", command, {}, tmp_path / "log")
    await child.start()
    keeping = asyncio.create_task(keep(child, lambda: None, said.append, said.append))
    while child.restarts < UNSTEADY + 1:  # each comes behind a death and its line
        await asyncio.sleep(0.02)
    keeping.cancel()
    with suppress(asyncio.CancelledError):
        await keeping
    await child.end(5)
    told = [line for line in said if "ended with status 3" in line]
    assert len(told) == UNSTEADY, said
    assert told[-1].endswith("again (the reason); it is started until it stays up")


async def test_deaths_far_apart_are_told_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has lived for long is not said to stay down, however often it has died in a long run."""
    monkeypatch.setattr(keeping, "QUIET", 0.0)
    said: list[str] = []
    command = ["sh", "-c", LISTENS + "exit 3"]
    child = Child("endpoint", "endpoint-0", command, {}, tmp_path / "log")
    await child.start()
    task = asyncio.create_task(keep(child, lambda: None, said.append, said.append))
    while len(told := [line for line in said if "ended with status 3" in line]) < UNSTEADY + 1:
        await asyncio.sleep(0.02)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await child.end(5)
    assert all(line.endswith("ended with status 3, starting it again") for line in told), told


async def test_a_process_that_cannot_start_again(tmp_path: Path) -> None:
    """Each reason is told once."""
    said: list[str] = []
    tries = tmp_path / "tries"
    tries.touch()
    once = f"[ -s {tries} ] && {{ echo x >>{tries}; echo 'no memory' >&2; exit 1; }}; echo x >>{tries}; "
    child = Child("scheduler", "scheduler-0", ["sh", "-c", once + LISTENS + "exit 0"], {}, tmp_path / "log")
    await child.start()
    keeping = asyncio.create_task(keep(child, lambda: None, said.append, said.append))
    while len(tries.read_text().split()) < 4:
        await asyncio.sleep(0.02)
    keeping.cancel()
    with suppress(asyncio.CancelledError):
        await keeping
    await child.end(5)
    assert said[1:] == ["scheduler-0 did not start: no memory; it is tried again and again"]


def test_the_ends_of_ranks_are_told() -> None:
    """By name and pid; a rank that dies again and again is told of UNSTEADY times."""
    said: list[str] = []
    ends = RankEnds(2, 2, said.append)

    def table(*pids: int) -> list[pb.RankEntry]:
        return [pb.RankEntry(local_rank=number, pid=pid) for number, pid in enumerate(pids)]

    ends.compare(3, [], table(7, 8))
    assert not said
    for pid in range(8, 14):
        ends.compare(3, table(7, pid), table(7, 0))
        ends.compare(3, table(7, 0), table(7, pid + 1))
    assert said == [
        "engine-1 rank 3 (pid 8) ended, supervisor-3 starts it again",
        "engine-1 rank 3 (pid 9) ended, supervisor-3 starts it again",
        "engine-1 rank 3 (pid 10) ended, again; supervisor-3 starts it until it stays up",
    ]


def test_ends_of_a_rank_far_apart_are_told_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_ends, "QUIET", 0.0)
    said: list[str] = []
    ends = RankEnds(1, 1, said.append)
    for pid in range(8, 14):
        ends.compare(0, [pb.RankEntry(pid=pid)], [pb.RankEntry(pid=pid + 1)])
    assert said == [f"engine-0 rank 0 (pid {pid}) ended, supervisor-0 starts it again" for pid in range(8, 14)]
