"""Engines and schedulers come and go by `kubectl scale`, under load."""

from cluster import until
from pauses import Pauses
from release import Release
from traffic import Under


async def scale(orca: Release, kind: str, component: str, replicas: int) -> None:
    await orca.cluster.kubectl("scale", kind, f"{orca.name}-{component}", f"--replicas={replicas}")


async def test_a_second_engine_comes_and_goes(orca: Release, traffic: Under, pauses: Pauses) -> None:
    async with traffic(orca) as load:
        async with load.disturbed("scaled from one engine to two") as seen:
            await scale(orca, "statefulset", "worker", 2 * orca.pods_per_engine)
            await orca.healed()

            async def unused() -> str | None:
                return None if "engine-1" in seen.tokens else f"engine-1 made none of {dict(seen.tokens)}"

            await until(unused)
        pauses(seen)
        async with load.disturbed("scaled from two engines to one") as seen:
            await scale(orca, "statefulset", "worker", orca.pods_per_engine)
            await orca.healed()
        pauses(seen)
    assert [pod.name for pod in await orca.pods("worker")] == [orca.worker(o) for o in orca.ordinals(0)]


async def test_pods_that_make_no_whole_engine_say_so(orca: Release, traffic: Under, pauses: Pauses) -> None:
    spare = orca.worker(orca.pods_per_engine)
    async with traffic(orca) as load:
        async with load.disturbed("scaled to a pod that makes no whole engine") as seen:
            await scale(orca, "statefulset", "worker", orca.pods_per_engine + 1)
            try:

                async def silent() -> str | None:
                    status, _ = await orca.probe(await orca.pod(spare), "/readyz")
                    said = " ".join(await orca.events(spare))
                    if status == 503 and "idles" in said:
                        return None
                    return f"{spare} answers {status}; its events are: {said}"

                await until(silent)
                assert not (await orca.pod(spare)).ready
                assert "idles" in await orca.cluster.kubectl("describe", "pod", spare)
                assert await orca.ready_engines() == ["engine-0"]
            finally:
                await scale(orca, "statefulset", "worker", orca.pods_per_engine)
            await orca.healed()
        pauses(seen)


async def test_schedulers_share_the_engines(two_engines: Release, traffic: Under, pauses: Pauses) -> None:
    """One scheduler drives both engines; a second one that is added takes one of them."""
    orca = two_engines

    async def masters() -> list[str]:
        return [await orca.master(engine) for engine in ("engine-0", "engine-1")]

    async with traffic(orca) as load:
        async with load.disturbed("scaled to one scheduler") as seen:
            await scale(orca, "deployment", "scheduler", 1)

            async def one_has_both() -> str | None:
                found = await masters()
                return None if all(found) and len(set(found)) == 1 else f"the masters are {found}"

            await until(one_has_both)
            await orca.healed()
        pauses(seen)
        async with load.disturbed("a second scheduler added") as seen:
            await scale(orca, "deployment", "scheduler", 2)

            async def each_has_one() -> str | None:
                found = await masters()
                return None if all(found) and len(set(found)) == 2 else f"the masters are {found}"

            await until(each_has_one)
            await orca.healed()
        pauses(seen)
    assert {"engine-0", "engine-1"} == set(seen.tokens)
