"""What is gathered from a real cluster, the one that KUBECONFIG names. It needs no release, and changes nothing."""

import os
from collections.abc import AsyncIterator

import pytest

from orca_cli.doctor.cluster import Cluster
from orca_cli.doctor.examine import examine
from orca_cli.doctor.finding import Level
from orca_cli.doctor.gather import gather
from orca_cli.doctor.snapshot import Unknown
from orca_common.errors import Unavailable

pytestmark = pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="KUBECONFIG names no cluster")


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster.connected("kube-system", None) as cluster:
        yield cluster


async def test_a_cluster_without_a_release(cluster: Cluster) -> None:
    snapshot = await gather(cluster, "no-such-release", None)
    assert not isinstance(snapshot.allowed, Unknown)
    assert not any(snapshot.allowed.values()), "the default account of kube-system may not drive workers"
    assert (snapshot.pods, snapshot.inside, snapshot.unseen) == ((), (), {})
    assert isinstance(snapshot.redis, Unknown)
    assert [finding.level for finding in examine(snapshot)] == [Level.FAULT]


async def test_what_the_server_refuses_has_a_reason(cluster: Cluster) -> None:
    with pytest.raises(Unavailable, match="404, "):
        await cluster.get("/api/v1/nodes/no-such-node")
    with pytest.raises(Unavailable, match="404, "):
        await cluster.run("no-such-pod", "c", "reach.py", "{}")
    assert await cluster.may("system:serviceaccount:kube-system:default", "delete", "", "nodes") is False
