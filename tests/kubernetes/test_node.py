"""What happens to the node and to the API server, under load."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pauses import Pauses
from processes import inside, named
from traffic import Under

from release import LABELS, Release

FROZEN = 60.0  # seconds without an API server: longer than a node's lease and a watch's bookmarks


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
