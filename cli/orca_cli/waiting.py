"""Carries out the command `orca wait`."""

from collections.abc import Iterable

from orca_scheduler.discovery.kubernetes import Collection
from orca_scheduler.discovery.pods import Manifest
from orca_scheduler.discovery.wait import wait

from .doctor.cluster import Cluster

PATHS = {
    "statefulsets": "/apis/apps/v1/namespaces/{}/statefulsets",
    "pods": "/api/v1/namespaces/{}/pods",
    "events": "/api/v1/namespaces/{}/events",
}


async def wait_for(release: str, namespace: str | None, context: str | None, timeout: float, patience: float) -> None:
    """Waits in the cluster that `orca doctor` would check. Raises OrcaError with a sentence."""
    async with Cluster.connected(namespace, context) as cluster:

        async def list_of(collection: Collection) -> Iterable[Manifest]:
            path = PATHS[collection.kind].format(cluster.namespace)
            selectors = {"labelSelector": collection.labels, "fieldSelector": collection.fields}
            return await cluster.list(path, collection.kind, **{name: s for name, s in selectors.items() if s})

        await wait(list_of, release, timeout, patience)
