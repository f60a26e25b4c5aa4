"""`wait.enabled`: Helm ends with the reason when a rollout stops, the other engine serves on, and a rollback heals."""

import re

import pytest
from cluster import Failed
from pauses import Pauses
from traffic import Under

from release import REGISTRY, TWO_PODS, Release, Releases

GATED = TWO_PODS | {"engine.count": 2, "wait.enabled": True, "wait.patienceSeconds": 15}
LITTLE = {f"worker.resources.{kind}.memory": "100Mi" for kind in ("requests", "limits")}
FAULTS = {  # values, what Helm says, and how many engines serve on
    "a wrong image": ({"worker.image": f"{REGISTRY}/orca-worker:none"}, "not found", 1),
    "a wrong model path": ({"model.path": "/opt/orca/none"}, "/opt/orca/none: there is no such folder", 1),
    "more memory than a node has": ({"worker.memory.rank": 900000}, "Insufficient memory", 1),
    # The kernel ends the container, or where kubelet has it so a process in it, which then dies again and again.
    "too little memory for its ranks": (LITTLE, "engine-0 of ", 1),
    # Schedulers of the new tp drive no older pods.
    "heads that tp does not divide": (
        {"engine.tp": 4, "model.numHeads": 12},
        "6 heads cannot be shared evenly by 4",
        0,
    ),
}


@pytest.fixture
async def gated(releases: Releases) -> Release:
    return await releases.get(GATED)


@pytest.mark.parametrize("name", FAULTS)
async def test_an_upgrade_that_stops_is_an_error(gated: Release, traffic: Under, pauses: Pauses, name: str) -> None:
    """Under load: the other engine serves on, and without another one all streams wait for the rollback."""
    values, reason, left = FAULTS[name]
    async with traffic(gated) as load:
        async with load.disturbed(f"helm upgrade to {name}, and helm rollback") as seen:
            try:
                with pytest.raises(Failed, match=re.escape(reason)):
                    await gated.upgrade(values, wait=False)  # it would wait for endpoints of the wrong model first
                assert len(await gated.ready_engines()) == left
                if left:
                    await load.flows()
            finally:
                await gated.rollback()
            await gated.healed(600)
        pauses(seen)


async def test_helm_test_fails_when_one_of_two_engines_is_dead(gated: Release) -> None:
    await gated.cluster.helm("test", gated.name)
    try:
        with pytest.raises(Failed, match="not found"):
            await gated.upgrade({"worker.image": f"{REGISTRY}/orca-worker:none", "test.timeoutSeconds": 60}, wait=False)
        with pytest.raises(Failed, match="orca-test failed"):
            await gated.cluster.helm("test", gated.name)
        assert len(await gated.ready_engines()) == 1
    finally:
        await gated.rollback()
    await gated.healed(600)
