"""Schedulers and ranks of two releases, as they meet in an update. `live` changes the number of a process's release."""

import re
import signal
from pathlib import Path

from scheduler.live import world

from orca_common.protocol import PROTOCOL, drives, obeys
from orca_scheduler.discovery.candidates import Candidate

NEW = PROTOCOL + 1


def test_neighbours_work_together() -> None:
    assert [drives(PROTOCOL + n) for n in (-2, -1, 0, 1)] == [False, True, True, False]
    assert [obeys(PROTOCOL + n) for n in (-1, 0, 1, 2)] == [False, True, True, False]


async def test_old_ranks_serve_under_a_new_scheduler(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1, schedulers=0) as this:
        await this.scheduler(NEW)
        await this.formed("engine-0")
        await this.submit("r", [1, 2, 3], 30)
        await this.completed()


async def test_new_ranks_wait_for_a_new_scheduler(tmp_path: Path) -> None:
    async with world(tmp_path, engines=0, schedulers=0) as this:
        await this.supervisor(NEW)
        old = await this.scheduler()
        await this.until(lambda: old.events("engine cannot form"))
        assert old.events("engine cannot form")[0]["why"].endswith(
            f"speaks protocol {NEW}, and this scheduler of protocol {PROTOCOL} drives {PROTOCOL - 1} and {PROTOCOL}"
        )
        pid = this.rank_pid(0)
        await this.scheduler(NEW)
        old.send(signal.SIGTERM)
        await this.formed("engine-0")
        await this.submit("r", [1, 2, 3], 30)
        await this.completed()
        assert this.rank_pid(0) == pid, "nobody was killed for it"


async def test_ranks_of_two_releases_are_no_engine(tmp_path: Path) -> None:
    async with world(tmp_path, engines=0, schedulers=0) as this:
        old, new = await this.supervisor(), await this.supervisor(NEW)
        scheduler = await this.scheduler(NEW, told=True, pp=2)
        scheduler.tell(Candidate("engine-0", (old.hello["address"], new.hello["address"])))
        await this.until(lambda: scheduler.events("engine cannot form"))
        why = scheduler.events("engine cannot form")[0]["why"]
        assert set(re.findall(r"protocol (\d+)", why)) == {str(PROTOCOL), str(NEW)}
        assert why.endswith("all ranks of an engine speak the same")
        assert "stage 0 rank 0 of engine-0" in why
        assert "stage 1 rank 0 of engine-0" in why
        second = await this.supervisor(NEW)  # the update goes on
        scheduler.tell(Candidate("engine-0", (second.hello["address"], new.hello["address"])))
        await this.formed("engine-0")
        await this.submit("r", [1, 2, 3], 30)
        await this.completed()
