"""`redis.mode: sentinel`: the primary is killed again and again under load, and no stream notices more than a pause."""

import os

import pytest
from faults import followed, primary_killed
from pauses import Pauses
from traffic import Under

from release import SENTINELS, TWO_PODS, VALKEY, Release, Releases

ROUNDS = int(os.environ.get("ROUNDS", "10"))


@pytest.fixture
async def watched(releases: Releases) -> Release:
    return await releases.get(SENTINELS)


async def test_the_primary_is_killed(watched: Release, traffic: Under, pauses: Pauses) -> None:
    orca = watched
    async with traffic(orca) as load:
        for number in range(1, ROUNDS + 1):
            await followed(orca)
            async with load.disturbed(f"the primary of Redis killed, round {number}") as seen:
                await primary_killed(orca)
                await orca.healed()
                await load.flows()
            pauses(seen)
    assert load.finished >= 20


@pytest.mark.parametrize(
    ("component", "name"),
    [("redis", "all servers of Redis restarted, one by one"), ("sentinel", "all Sentinels restarted, one by one")],
)
async def test_servers_are_restarted(
    watched: Release, traffic: Under, pauses: Pauses, component: str, name: str
) -> None:
    """The primary hands over before it stops."""
    orca = watched
    await followed(orca)
    async with traffic(orca) as load:
        async with load.disturbed(name) as seen:
            await orca.cluster.kubectl("rollout", "restart", f"statefulset/{orca.name}-{component}")
            await orca.healed(600)
            await followed(orca)
        pauses(seen)


async def test_a_replica_that_no_sentinel_knows(watched: Release) -> None:
    """It was new when its primary died, of whom Sentinels learn about replicas: it followed the old one for ever."""
    orca, execute = watched, watched.cluster.execute
    await followed(orca)
    primary = await orca.primary()
    first, second = (pod.name for pod in await orca.pods("redis") if pod.name != primary)
    await execute(second, "sh", "-c", f"$CLI replicaof {first} 6379")
    for pod in await orca.pods("sentinel"):
        await execute(pod.name, "sh", "-c", "$CLI -p 26379 sentinel reset orca")
    await followed(orca)


async def test_all_servers_and_sentinels_are_killed(watched: Release, traffic: Under, pauses: Pauses) -> None:
    """Their data is on their disks, and so is the name of the primary."""
    orca = watched
    async with traffic(orca) as load:
        async with load.disturbed("all servers of Redis and all Sentinels killed at once") as seen:
            pods = [pod.name for component in ("redis", "sentinel") for pod in await orca.pods(component)]
            await orca.cluster.kubectl("delete", "pod", *pods, "--grace-period=0", "--force")
            await orca.healed(600)
            await followed(orca)
            await load.flows()
        pauses(seen)


async def test_an_upgrade_keeps_the_password(watched: Release) -> None:
    orca = watched

    async def password() -> str:
        return (await orca.cluster.get("secret", f"{orca.name}-redis"))["data"]["password"]

    before = await password()
    await orca.upgrade({"endpoint.settings.max_waiting": 77})
    assert await password() == before
    await orca.upgrade({})
    await orca.healed()


async def test_one_server_becomes_three(releases: Releases, traffic: Under, pauses: Pauses) -> None:
    """An upgrade from `redis.mode` single, without a password, to Sentinels with one: the requests stay."""
    orca = await releases.get(TWO_PODS | VALKEY)
    async with traffic(orca) as load:
        async with load.disturbed("helm upgrade from a single Redis to Sentinels with a password") as seen:
            await orca.upgrade(SENTINELS)
            await orca.healed(600)
            await load.flows()
        pauses(seen)
    await releases.remove()
