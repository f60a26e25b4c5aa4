"""What happens to the node and to the API server, under load."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from cluster import until
from pauses import Pauses
from processes import inside, named
from traffic import Under

from orca_pool.keys import Keys
from release import LABELS, Release

FROZEN = 60.0  # seconds without an API server: longer than a node's lease and a watch's bookmarks
OUTAGE = 64.0  # seconds without Redis and DNS: longer than two detach graces


async def test_a_node_is_drained(orca: Release, traffic: Under, pauses: Pauses) -> None:
    """The drain ends by itself. On a cluster of one node nothing serves until the node may be used again."""
    node = (await orca.pod(orca.worker(0))).node
    nodes = await orca.cluster.get("nodes")
    options = ["--ignore-daemonsets", "--delete-emptydir-data", f"--pod-selector={LABELS}={orca.name}"]
    async with traffic(orca) as load:
        async with load.disturbed(f"the node drained ({len(nodes)} in all), then uncordoned") as seen:
            try:
                await orca.cluster.kubectl("drain", node, *options, "--timeout=300s", seconds=330)
            finally:
                await orca.cluster.kubectl("uncordon", node)
            await orca.healed()
        pauses(seen)


@contextmanager
def frozen(process: int, seconds: float) -> Iterator[None]:
    """Stops a process while the block runs. A helper lets it go on if this process should die meanwhile."""
    guard = subprocess.Popen(["sh", "-c", f"sleep {2 * seconds}; kill -CONT {process}"], start_new_session=True)
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)
        os.killpg(guard.pid, signal.SIGTERM)
        guard.wait()


async def test_the_api_server_is_away(orca: Release, traffic: Under, pauses: Pauses) -> None:
    """Live engines depend on nobody but their own lanes: nothing forms again, and no stream waits."""
    servers = named("kube-apiserver")
    if not servers:
        pytest.skip("the API server's process cannot be seen here")
    before = await orca.epochs()
    async with traffic(orca) as load:
        async with load.disturbed(f"the API server stopped for {FROZEN:.0f} s") as seen:
            with frozen(servers[0], FROZEN):
                await asyncio.sleep(FROZEN)  # this long is what is tested
                assert await orca.epochs() == before
            await orca.healed()
        pauses(seen)
    assert await orca.epochs() == before


async def test_a_rank_is_killed_while_the_api_server_is_away(orca: Release, traffic: Under, pauses: Pauses) -> None:
    """An engine forms again without Kubernetes."""
    servers = named("kube-apiserver")
    if not servers:
        pytest.skip("the API server's process cannot be seen here")
    before, pod = await orca.epochs(), await orca.pod(orca.worker(0))
    victim = inside(pod.container, (await orca.rank_pids(pod))[0])
    assert victim is not None
    async with traffic(orca) as load:
        async with load.disturbed("a rank killed while the API server is stopped") as seen:
            with frozen(servers[0], FROZEN):
                os.kill(victim, signal.SIGKILL)
                await orca.formed_again(before, 60)
            await orca.healed()
        pauses(seen)


async def test_redis_and_dns_are_away(orca: Release, traffic: Under, pauses: Pauses) -> None:
    """Just after all endpoints were declared dead, and for longer than a detach grace, which begins anew after it.

    So it came about on a node that stood still: streams ended CANCELLED though their clients waited.
    """
    dns = named("coredns")
    endpoints = [inside(pod.container, 1) for pod in await orca.pods("endpoint")]
    if not dns or None in endpoints:
        pytest.skip("the processes of DNS or of the endpoints cannot be seen here")
    redis = f"{orca.name}-redis"
    key = f"{Keys(f'{orca.cluster.namespace}.{orca.name}').prefix}endpoints"

    async def living() -> str | None:
        said = await orca.redis("zcard", key)
        return None if said.strip() == "0" else f"{said.strip()} endpoints live"

    async with traffic(orca) as load:
        title = f"both endpoints declared dead, then Redis and DNS away for {OUTAGE:.0f} s"
        async with load.disturbed(title) as seen:
            with ExitStack() as without_dns:
                with ExitStack() as without_endpoints:
                    for process in filter(None, endpoints):
                        without_endpoints.enter_context(frozen(process, OUTAGE))
                    await until(living)
                    for process in dns:
                        without_dns.enter_context(frozen(process, OUTAGE))
                    await orca.cluster.kubectl("scale", "statefulset", redis, "--replicas=0")
                    await orca.cluster.kubectl("wait", "--for=delete", f"pod/{redis}-0", "--timeout=120s")
                await asyncio.sleep(OUTAGE)  # this long is what is tested
            await orca.cluster.kubectl("scale", "statefulset", redis, "--replicas=1")
            await orca.healed()
        pauses(seen)
    assert load.finished >= 20
