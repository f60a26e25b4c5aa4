"""Engines that follow the load by themselves: `engine.autoscale`."""

import time

from cluster import until
from pauses import Pauses
from traffic import Under

from release import TWO_PODS, Release, Releases

PLACES = 8  # of an engine: a batch of 4 in each of its two stages
ONE, TWO = 5, 2 * PLACES  # streams for which an engine has room, and for which two have
VALUES = TWO_PODS | {
    "scheduler.settings.max_batch_size": 4,
    "engine.autoscale.enabled": True,
    "engine.autoscale.max": 2,
    "engine.autoscale.queueSeconds": 1,
    "engine.autoscale.upSeconds": 20,
    "engine.autoscale.downSeconds": 20,
}


async def asked(orca: Release, engines: int) -> None:
    """Waits until the workers' StatefulSet asks for the pods of this many engines."""
    pods = engines * orca.pods_per_engine

    async def not_yet() -> str | None:
        workers = await orca.cluster.get("statefulset", f"{orca.name}-worker")
        now = workers["spec"]["replicas"]
        return None if now == pods else f"{now} pods are asked for, not {pods}"

    await until(not_yet)


async def test_engines_follow_the_load(releases: Releases, traffic: Under, pauses: Pauses) -> None:
    """From a load for one engine to one for two, and back, while streams run: an error of any stream ends the test."""
    orca = await releases.get(VALUES)
    assert await orca.ready_engines() == ["engine-0"]  # one pod was installed
    async with traffic(orca, ONE) as load:
        async with load.disturbed("the load doubles, and the schedulers add an engine") as seen:
            begun = time.monotonic()
            async with traffic(orca, TWO - ONE):
                await asked(orca, 2)
                print(f"the second engine was asked for after {time.monotonic() - begun:.1f} s")

                async def unused() -> str | None:
                    return None if "engine-1" in seen.tokens else f"engine-1 made none of {dict(seen.tokens)}"

                await until(unused)
                print(f"it made tokens after {time.monotonic() - begun:.1f} s")
                await orca.healed()
        pauses(seen)
        assert await orca.ready_engines() == ["engine-0", "engine-1"]
        async with load.disturbed("the load halves, and the schedulers take the engine away") as seen:
            begun = time.monotonic()
            await asked(orca, 1)
            print(f"the second engine was given up after {time.monotonic() - begun:.1f} s")
            await orca.healed()
        pauses(seen)
    assert [pod.name for pod in await orca.pods("worker")] == [orca.worker(o) for o in orca.ordinals(0)]
    events = [said for said in await orca.events(f"{orca.name}-worker") if said.startswith("scaled from")]
    assert sorted(said.partition(":")[0] for said in events) == [
        "scaled from 1 to 2 pods",
        "scaled from 2 to 4 pods",
        "scaled from 4 to 2 pods",
    ]


async def test_the_scheduler_that_decides_dies(releases: Releases, traffic: Under, pauses: Pauses) -> None:
    """Another one goes on from what is written: it takes the engine away that was to go."""
    orca = await releases.get(VALUES)
    async with traffic(orca, ONE) as load:
        async with load.disturbed("the scheduler that decides is deleted while the load is double") as seen:
            async with traffic(orca, TWO - ONE):
                await orca.cluster.kubectl(
                    "delete", "pod", await orca.master("engine-0"), "--grace-period=0", "--force", "--wait=false"
                )
                await asked(orca, 2)
                await orca.healed()
            await asked(orca, 1)
            await orca.healed()
        pauses(seen)
