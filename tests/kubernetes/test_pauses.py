"""The longest pause inside a stream at two engines and Sentinels, for each thing that ends a part of the release.

`make test-kubernetes PART=pauses` runs this alone.
"""

import faults
import pytest
from faults import Fault, evicted, followed, restarted
from pauses import Pauses
from traffic import Under

from release import NEXT, SENTINELS, Release, Releases

pytestmark = pytest.mark.pauses
ROUNDS = (1, 2, 3)
FAULTS: dict[str, Fault] = {
    "a worker pod lost": faults.worker_killed,
    "the pod of the scheduler that masters an engine lost": faults.scheduler_killed,
    "each endpoint's pod lost": faults.endpoints_killed,
    **{f"the pod of the Sentinels' primary lost, round {n}": faults.primary_killed for n in ROUNDS},
    **{f"the process of the Sentinels' primary killed, round {n}": faults.primary_process_killed for n in ROUNDS},
    "a rank killed": faults.rank_killed,
    "process 1 of a worker killed": faults.first_process_killed,
    **{
        f"a pod evicted: {component}": evicted(component)
        for component in ("worker", "scheduler", "endpoint", "redis", "sentinel")
    },
    **{
        f"restarted: {workload}": restarted(workload)
        for workload in (
            "statefulset/worker",
            "deployment/scheduler",
            "deployment/endpoint",
            "statefulset/redis",
            "statefulset/sentinel",
        )
    },
}


@pytest.fixture
async def orca(releases: Releases) -> Release:
    orca = await releases.get(SENTINELS | {"engine.count": 2})
    await followed(orca)
    return orca


@pytest.mark.parametrize("name", FAULTS)
async def test_a_part_is_away(orca: Release, traffic: Under, pauses: Pauses, name: str) -> None:
    async with traffic(orca) as load:
        async with load.disturbed(name) as seen:
            await FAULTS[name](orca)
            await orca.healed(600)
        pauses(seen)
    assert load.finished >= 20


async def test_an_upgrade_and_its_rollback(orca: Release, traffic: Under, pauses: Pauses) -> None:
    """To another protocol number: all pods but those of Redis are replaced."""
    async with traffic(orca) as load:
        async with load.disturbed("helm upgrade to another protocol number") as seen:
            await orca.upgrade({"image.tag": NEXT})
            await orca.healed(600)
        pauses(seen)
        async with load.disturbed("helm rollback") as seen:
            await orca.rollback()
            await orca.healed(600)
        pauses(seen)
