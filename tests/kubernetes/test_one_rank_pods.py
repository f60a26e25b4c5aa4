"""gpusPerPod 1: the tensor ranks of a stage stand in pods of their own. Four pods make the engine of tp 2 x pp 2."""

import asyncio

from pauses import Pauses
from reference import Known
from traffic import Under

from release import TWO_PODS, Releases

ONE_RANK_PODS = TWO_PODS | {"engine.gpusPerPod": 1}


async def test_tokens(releases: Releases, known: list[Known]) -> None:
    orca = await releases.get(ONE_RANK_PODS)
    pods = await orca.pods("worker")
    assert [pod.name for pod in pods] == [orca.worker(o) for o in range(4)]
    assert {pod.name: pod.restarts for pod in pods if pod.restarts} == {}
    await orca.cluster.helm("test", orca.name, "--timeout", "120s")

    async with orca.client() as client:

        async def tokens(known: Known) -> list[int]:
            stream = client.generate(known.prompt, max_new_tokens=len(known.tokens), ignore_eos=True)
            await stream.text()
            return [token.token_id for token in stream.tokens]

        assert await asyncio.gather(*(tokens(k) for k in known)) == [k.tokens for k in known]


async def test_a_pod_of_a_stage_is_killed(releases: Releases, traffic: Under, pauses: Pauses) -> None:
    orca = await releases.get(ONE_RANK_PODS)
    async with traffic(orca) as load:
        async with load.disturbed("one of two pods of a stage deleted, grace 0 (gpusPerPod 1)") as seen:
            await orca.cluster.kubectl("delete", "pod", orca.worker(3), "--grace-period=0", "--force")
            await orca.healed()
        pauses(seen)
