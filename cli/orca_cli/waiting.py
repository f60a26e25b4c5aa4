"""Carries out the command `orca wait`."""

from collections.abc import Iterable

from orca_scheduler.discovery.kubernetes import Collection, path_of
from orca_scheduler.discovery.pods import Manifest
from orca_scheduler.discovery.wait import wait

from .doctor.cluster import Cluster


async def wait_for(release: str, namespace: str | None, context: str | None, timeout: float, patience: float) -> None:
    """Waits in the cluster that `orca doctor` would check. Raises OrcaError with a sentence."""
    async with Cluster.connected(namespace, context) as cluster:

        async def list_of(collection: Collection) -> Iterable[Manifest]:
            path = path_of(cluster.namespace, collection.kind)
            selectors = {"labelSelector": collection.labels, "fieldSelector": collection.fields}
            return await cluster.list(path, collection.kind, **{name: s for name, s in selectors.items() if s})

        await wait(list_of, release, timeout, patience)
