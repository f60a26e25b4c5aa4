"""Faults of a release: each ends a part of it. All is well again when `Release.healed` returns."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable

import pytest
from cluster import until
from processes import inside

from release import Release

Fault = Callable[[Release], Awaitable[None]]


async def delete(orca: Release, name: str, *, grace: bool = False) -> None:
    how = [] if grace else ["--grace-period=0", "--force"]
    await orca.cluster.kubectl("delete", "pod", name, *how)


async def worker_killed(orca: Release) -> None:
    await delete(orca, orca.worker(0))


async def worker_deleted(orca: Release) -> None:
    await delete(orca, orca.worker(1), grace=True)


async def scheduler_killed(orca: Release) -> None:
    await delete(orca, await orca.master("engine-0"))


async def scheduler_deleted(orca: Release) -> None:
    await delete(orca, await orca.master("engine-0"), grace=True)


async def endpoints_killed(orca: Release) -> None:
    """One after the other: a new one is Ready before the next goes."""
    for pod in await orca.pods("endpoint"):
        await delete(orca, pod.name)
        await orca.healed()


async def endpoints_deleted(orca: Release) -> None:
    for pod in await orca.pods("endpoint"):
        await delete(orca, pod.name, grace=True)
        await orca.healed()


async def redis_killed(orca: Release) -> None:
    await delete(orca, await orca.primary())


async def redis_and_worker_killed(orca: Release) -> None:
    await asyncio.gather(redis_killed(orca), worker_killed(orca))


async def all_restarted(orca: Release) -> None:
    """Endpoints, schedulers, workers and Redis are replaced at the same time."""
    names = [f"deployment/{orca.name}-endpoint", f"deployment/{orca.name}-scheduler"]
    names += [f"statefulset/{orca.name}-worker", f"statefulset/{orca.name}-redis"]
    await orca.cluster.kubectl("rollout", "restart", *names)


async def rank_killed(orca: Release) -> None:
    pod, epochs = await orca.pod(orca.worker(0)), await orca.epochs()
    await orca.kill_inside(pod, (await orca.rank_pids(pod))[1])
    await orca.formed_again(epochs)


async def fork_server_killed(orca: Release) -> None:
    """No rank notices. A rank that dies later is forked by the next one."""
    pod, epochs = await orca.pod(orca.worker(0)), await orca.epochs()
    before = await orca.fork_server(pod)
    assert before is not None
    await orca.kill_inside(pod, before)

    async def missing() -> str | None:
        return None if await orca.fork_server(pod) not in (None, before) else f"{pod.name} has no new fork server"

    await until(missing)
    assert await orca.epochs() == epochs
    await rank_killed(orca)


async def process_1_killed(orca: Release, name: str) -> None:
    """By SIGKILL from outside, as the kernel does it: there is no hook and no grace. Returns when it has restarted."""
    pod = await orca.pod(name)
    process = inside(pod.container, 1)  # from inside, no signal reaches process 1
    if process is None:
        pytest.skip("the processes of the cluster's containers cannot be seen here")
    os.kill(process, signal.SIGKILL)

    async def missing() -> str | None:
        return None if (await orca.pod(name)).restarts > pod.restarts else f"{name} has not restarted"

    await until(missing)


async def first_process_killed(orca: Release) -> None:
    await process_1_killed(orca, orca.worker(1))


async def followed(orca: Release, replicas: int = 2) -> None:
    """Waits until all replicas follow the primary."""

    async def missing() -> str | None:
        said = await orca.redis("info", "replication")
        found = said.count("state=online")
        return None if found == replicas else f"{found} of {replicas} replicas follow: {said}"

    await until(missing)


async def another(orca: Release, before: str) -> None:
    """Waits until another pod is the primary."""

    async def same() -> str | None:
        return None if await orca.primary() != before else f"{before} is still the primary"

    await until(same)


async def primary_killed(orca: Release) -> None:
    """The pod of the primary that the Sentinels watch. Returns when another one is."""
    primary = await orca.primary()
    await delete(orca, primary)
    await another(orca, primary)


async def primary_process_killed(orca: Release) -> None:
    """The server that the Sentinels watch, which cannot hand over. Returns when another one is the primary."""
    primary = await orca.primary()
    await process_1_killed(orca, primary)
    await another(orca, primary)


def evicted(component: str) -> Fault:
    """One of a component's pods, by the API that a drain uses: it is refused when no pod may be away."""

    async def evict(orca: Release) -> None:
        name = (await orca.pods(component))[0].name if component != "redis" else await orca.primary()
        metadata = {"name": name, "namespace": orca.cluster.namespace}
        eviction = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata})
        path = f"/api/v1/namespaces/{orca.cluster.namespace}/pods/{name}/eviction"
        await orca.cluster.kubectl("create", "--raw", path, "--filename", "-", given=eviction)

    return evict


def restarted(workload: str) -> Fault:
    """All pods of a workload, as KIND/COMPONENT, by `kubectl rollout restart`."""

    async def restart(orca: Release) -> None:
        kind, component = workload.split("/")
        await orca.cluster.kubectl("rollout", "restart", f"{kind}/{orca.name}-{component}")

    return restart
