"""Engines and pods come and go while the scheduler runs and serves: every stream has exactly the right tokens."""

import os
import signal
from dataclasses import replace
from pathlib import Path

from scheduler.live import Process, World, world
from scheduler.test_takeover import load

from orca_scheduler.discovery.candidates import Candidate


def engine(number: int, supervisor: Process, *, replace: bool = False) -> Candidate:
    return Candidate(f"engine-{number}", (supervisor.hello["address"],), replace=replace)


async def engines_of(this: World, requests: int) -> set[str]:
    """All engines that have claimed one of these requests."""
    return {name for n in range(requests) for _, name in (await this.read(f"r{n}")).engines}


async def test_an_engine_is_added(tmp_path: Path) -> None:
    async with world(tmp_path, engines=2, schedulers=0, seconds=0.02) as this:
        scheduler = await this.scheduler(told=True)
        scheduler.tell(engine(0, this.supervisors[0]))
        await this.formed("engine-0")
        for n in range(12):  # eight of them wait
            await this.submit(f"r{n}", [n, 2 * n], 60)
        scheduler.tell(engine(0, this.supervisors[0]), engine(1, this.supervisors[1]))
        await this.completed()
        assert await engines_of(this, 12) == {"engine-0", "engine-1"}
        assert [await this.losses(f"r{n}") for n in range(12)] == [0] * 12


async def test_an_engine_is_removed(tmp_path: Path) -> None:
    async with world(tmp_path, engines=2, schedulers=0, seconds=0.05) as this:
        scheduler = await this.scheduler(told=True)
        scheduler.tell(*(engine(n, supervisor) for n, supervisor in enumerate(this.supervisors)))
        await this.formed("engine-0", "engine-1")
        await load(this, 8, 100, seed=12)
        assert await engines_of(this, 8) == {"engine-0", "engine-1"}
        scheduler.tell(engine(0, this.supervisors[0]))

        async def gone() -> bool:
            return await this.engine("engine-1") == {}

        await this.until(gone)
        assert min(await this.progress()) < 100, "the load was to outlast the engine"
        await this.completed()
        assert [(await this.read(f"r{n}")).engines[-1][1] for n in range(8)] == ["engine-0"] * 8
        assert [await this.losses(f"r{n}") for n in range(8)] == [0] * 8


async def test_an_engine_that_is_to_go_finishes_what_it_began(tmp_path: Path) -> None:
    """It begins nothing more, until it is to stay after all."""
    async with world(tmp_path, engines=2, schedulers=0, seconds=0.02) as this:
        first, second = (engine(n, supervisor) for n, supervisor in enumerate(this.supervisors))
        scheduler = await this.scheduler(told=True)
        scheduler.tell(first, second)
        await this.formed("engine-0", "engine-1")
        await load(this, 8, 100, seed=16)  # all that both can hold
        began = {name for n in range(8) if (name := f"r{n}") and (await this.read(name)).engines[0][1] == "engine-1"}
        assert began
        scheduler.tell(first, replace(second, ending=True))

        async def knows() -> bool:
            return not (await this.pool.engine_uses())["engine-1"].rows

        await this.until(knows)
        for n in range(8, 16):
            await this.submit(f"r{n}", [n, 2 * n], 20)
        await this.completed()
        for n in range(16):
            engines = [name for _, name in (await this.read(f"r{n}")).engines]
            assert engines == (["engine-1"] if f"r{n}" in began else ["engine-0"])
        use = (await this.pool.engine_uses())["engine-1"]
        assert (use.requests, use.rows) == (0, 0)
        scheduler.tell(first, second)

        async def begins() -> bool:
            return (await this.pool.engine_uses())["engine-1"].rows > 0

        await this.until(begins)
        for n in range(16, 24):
            await this.submit(f"r{n}", [n, 2 * n], 60)
        await this.completed()
        assert "engine-1" in {name for n in range(16, 24) for _, name in (await this.read(f"r{n}")).engines}
        assert not scheduler.events("rank lost")


async def test_pods_are_replaced_at_other_addresses(tmp_path: Path) -> None:
    """In an update: the engine comes to rest, its pods are made anew, and it goes on with the new ones."""
    async with world(tmp_path, engines=1, schedulers=0, seconds=0.02) as this:
        scheduler = await this.scheduler(told=True)
        scheduler.tell(engine(0, this.supervisors[0]))
        before = (await this.formed("engine-0"))["engine-0"]
        await load(this, 4, 60, seed=13)
        scheduler.tell(engine(0, this.supervisors[0], replace=True))
        assert await scheduler.replaces() == "engine-0"
        scheduler.tell(Candidate("engine-0", ("",), "orca-worker-0 is being deleted"))
        await this.supervisors[0].end()
        scheduler.tell(engine(0, await this.supervisor()))
        await this.completed()
        after = (await this.formed("engine-0"))["engine-0"]
        assert after["term"] == before["term"]
        assert int(after["epoch"]) > int(before["epoch"])
        assert not scheduler.events("rank lost"), "it was at rest"
        assert [await this.losses(f"r{n}") for n in range(4)] == [0] * 4


async def test_a_pod_that_is_lost_comes_back_at_another_address(tmp_path: Path) -> None:
    """Its node is gone: the engine is lost at once, and forms as soon as the pod has an address again."""
    async with world(tmp_path, engines=1, schedulers=0, seconds=0.02) as this:
        scheduler = await this.scheduler(told=True)
        scheduler.tell(engine(0, this.supervisors[0]))
        await this.formed("engine-0")
        await load(this, 4, 60, seed=14)
        pid = this.rank_pid(0)
        this.supervisors[0].send(signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        scheduler.tell(Candidate("engine-0", ("",), "the node of orca-worker-0 is gone"))
        await this.until(lambda: scheduler.events("engine is incomplete"))
        scheduler.tell(engine(0, await this.supervisor()))
        await this.completed()


async def test_a_replacement_goes_on_under_the_next_master(tmp_path: Path) -> None:
    """The scheduler dies after it has asked for new pods. The next one asks again, and serves with them."""
    async with world(tmp_path, engines=1, schedulers=0, seconds=0.02) as this:
        first = await this.scheduler(told=True)
        first.tell(engine(0, this.supervisors[0]))
        await this.formed("engine-0")
        await load(this, 4, 60, seed=15)
        first.tell(engine(0, this.supervisors[0], replace=True))
        assert await first.replaces() == "engine-0"

        async def nothing_is_claimed() -> bool:  # what a scheduler holds when it dies counts as a loss
            return not (await this.pool.engine_uses())["engine-0"].requests

        await this.until(nothing_is_claimed)
        first.send(signal.SIGKILL)
        second = await this.scheduler(told=True)
        second.tell(engine(0, this.supervisors[0], replace=True))
        assert await second.replaces() == "engine-0"
        await this.supervisors[0].end()
        second.tell(engine(0, await this.supervisor()))
        await this.completed()
        assert [await this.losses(f"r{n}") for n in range(4)] == [0] * 4
