"""Faults under load: no stream ends with an error, every token is the right one, and the pause is written down."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest
from cluster import until
from pauses import Pauses
from processes import inside
from traffic import Under

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
    await delete(orca, f"{orca.name}-redis-0")


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


async def first_process_killed(orca: Release) -> None:
    pod = await orca.pod(orca.worker(1))
    process = inside(pod.container, 1)  # from inside, no signal reaches process 1
    if process is None:
        pytest.skip("the processes of the cluster's containers cannot be seen here")
    os.kill(process, signal.SIGKILL)

    async def missing() -> str | None:
        return None if (await orca.pod(pod.name)).restarts > pod.restarts else f"{pod.name} has not restarted"

    await until(missing)


FAULTS = [
    pytest.param(worker_killed, "a worker pod deleted, grace 0", marks=pytest.mark.ci),
    pytest.param(worker_deleted, "a worker pod deleted, with grace"),
    pytest.param(scheduler_killed, "the scheduler that masters the engine deleted, grace 0", marks=pytest.mark.ci),
    pytest.param(scheduler_deleted, "the scheduler that masters the engine deleted, with grace"),
    pytest.param(endpoints_killed, "each endpoint deleted, grace 0", marks=pytest.mark.ci),
    pytest.param(endpoints_deleted, "each endpoint deleted, with grace"),
    pytest.param(redis_killed, "Redis deleted, grace 0"),
    pytest.param(redis_and_worker_killed, "Redis and a worker pod deleted at once, grace 0"),
    pytest.param(all_restarted, "endpoints, schedulers, workers and Redis restarted at once"),
    pytest.param(rank_killed, "a rank killed in its container"),
    pytest.param(fork_server_killed, "a fork server killed in its container, then a rank"),
    pytest.param(first_process_killed, "process 1 of a worker's container killed"),
]


@pytest.mark.parametrize(("fault", "name"), FAULTS)
async def test_no_stream_notices_more_than_a_pause(
    orca: Release, traffic: Under, pauses: Pauses, fault: Fault, name: str
) -> None:
    async with traffic(orca) as load:
        async with load.disturbed(name) as seen:
            await fault(orca)
            await orca.healed()
        pauses(seen)
    assert load.finished >= 20
