"""Engines and schedulers come and go by `kubectl scale`, under load."""

import itertools

import pytest
from cluster import Failed, until
from pauses import Pauses
from traffic import Under

from release import CHART, Release


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


async def test_helm_leaves_a_number_alone_that_is_null(orca: Release, traffic: Under, pauses: Pauses) -> None:
    """An unrelated upgrade took an engine away. The switch to null keeps the number as well, and so do both flags.

    The numbers of the values are asked for again only when they are those of the cluster.
    """
    free: dict[str, object] = {"engine.count": "null", "endpoint.replicas": "null"}
    pods = {"worker": 2 * orca.pods_per_engine, "endpoint": 3}
    await scale(orca, "statefulset", "worker", pods["worker"])
    await scale(orca, "deployment", "endpoint", pods["endpoint"])
    unrelated = itertools.count(1000)
    try:
        async with traffic(orca) as load:
            async with load.disturbed("scaled by kubectl, then three helm upgrades of an unrelated value") as seen:
                await orca.upgrade(free)
                for flag in ("--reuse-values", "--reset-then-reuse-values"):
                    await orca.change({"endpoint.settings.max_waiting": next(unrelated)}, flag)
                    await orca.healed()
                    assert {component: len(await orca.pods(component)) for component in pods} == pods
                await load.flows()
            pauses(seen)
    finally:
        await scale(orca, "statefulset", "worker", orca.pods_per_engine)
        await scale(orca, "deployment", "endpoint", 2)
        await orca.upgrade({})
    await orca.healed()


async def test_a_switch_of_the_model_keeps_the_other_values(orca: Release) -> None:
    """Helm forgets a null beside --reuse-values, and the chart says which flag does not."""
    switch = ("--set", "model.path=null,model.hub.name=openai-community/gpt2", "--dry-run=server")
    with pytest.raises(Failed, match="--reset-then-reuse-values"):
        await orca.cluster.helm("upgrade", orca.name, str(CHART), "--reuse-values", *switch)
    documents = await orca.cluster.helm("upgrade", orca.name, str(CHART), "--reset-then-reuse-values", *switch)
    assert "--hub=openai-community/gpt2" in documents
    assert f"{orca.values['image.registry']}/orca-worker:{orca.values['image.tag']}" in documents


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
