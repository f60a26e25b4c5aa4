"""Chaos on a release in Kubernetes: pods are deleted without grace, ranks killed and frozen inside their pods.

The network of a cluster is left alone: a policy does not end connections that exist.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import stream

from .client import Caller
from .faults import Fault, Kind, Victim

PODS = ("endpoint", "scheduler", "worker", "redis")
ASK = 10  # seconds for one call to the API server
# Sends a signal to the children of process 1, which are the ranks, in the order of their numbers.
SIGNAL = """
import os, pathlib, sys
def parent(pid):
    try: return int(pathlib.Path('/proc', pid, 'stat').read_text().rpartition(')')[2].split()[1])
    except OSError: return 0
ranks = sorted(int(p.name) for p in pathlib.Path('/proc').glob('[0-9]*') if parent(p.name) == 1)
number, pid = int(sys.argv[1]), int(sys.argv[2])
pid = pid or (ranks[0] if ranks else 0)
if pid in ranks: os.kill(pid, number); print(pid)
"""
NUMBERS = {Kind.KILL: 9, Kind.STOP: 19}
CONTINUE = 18


@asynccontextmanager
async def cluster_target(
    release: str, namespace: str | None, addresses: Sequence[str], redis_url: str | None
) -> AsyncIterator["ClusterTarget"]:
    """The release that runs in the cluster of KUBECONFIG, in `namespace` or in that of the current context."""
    await asyncio.to_thread(config.load_kube_config)
    _, current = config.list_kube_config_contexts()
    caller = Caller(addresses)
    try:
        engines = len((await caller.model()).engines)
    finally:
        await caller.close()
    where = namespace or current["context"].get("namespace", "default")
    target = ClusterTarget(release, where, addresses, redis_url, engines)
    await target.look()
    yield target


class ClusterTarget:
    """`Target` on the pods of a release."""

    def __init__(
        self, release: str, namespace: str, addresses: Sequence[str], redis_url: str | None, engines: int
    ) -> None:
        self._release, self._namespace = release, namespace
        self._api = client.CoreV1Api()
        self._count = Counter[str]()  # pods by component, before the first fault
        self._stopped: dict[Fault, tuple[str, str]] = {}  # pod and number of the process that a fault froze
        self.addresses, self.redis_url, self.engines = addresses, redis_url, engines
        self.pool = f"{namespace}.{release}"

    @property
    def endpoints(self) -> int:
        return self._count["endpoint"]

    async def look(self) -> None:
        """Counts the pods as they are meant to be."""
        self._count = Counter(component for component, _ in await asyncio.to_thread(self._pods))

    def victims(self) -> Sequence[Victim]:
        """Pods by their place in the list of their component's, since those of a Deployment change their names."""
        pods = [Victim(c, f"{c}-{n}", (Kind.KILL,)) for c in PODS for n in range(self._count[c])]
        return [*pods, *(Victim("rank", f"rank-{n}", tuple(NUMBERS)) for n in range(self._count["worker"]))]

    async def begin(self, fault: Fault) -> bool:
        component, _, number = fault.victim.name.partition("-")
        kind = "worker" if component == "rank" else component
        found = [pod for c, pod in await asyncio.to_thread(self._pods) if c == kind]
        if int(number) >= len(found):
            return False
        name = found[int(number)].metadata.name
        try:
            if component != "rank":
                await asyncio.to_thread(self._delete, name)
                return True
            pid = await asyncio.to_thread(self._signal, name, NUMBERS[fault.kind], "0")
        except ApiException:
            return False  # the pod has gone meanwhile
        if pid and fault.kind is Kind.STOP:
            self._stopped[fault] = name, pid
        return bool(pid)

    async def end(self, fault: Fault) -> None:
        if fault in self._stopped:
            name, pid = self._stopped.pop(fault)
            try:
                await asyncio.to_thread(self._signal, name, CONTINUE, pid)
            except ApiException:
                return  # the pod, and what was frozen in it, has ended

    async def ailing(self) -> str | None:
        pods = await asyncio.to_thread(self._pods)
        counted = Counter(component for component, _ in pods)
        if counted != self._count:
            return f"there are {dict(counted)} pods instead of {dict(self._count)}"
        for _, pod in pods:
            conditions = {c.type: c.status for c in pod.status.conditions or ()}
            if pod.metadata.deletion_timestamp is not None or conditions.get("Ready") != "True":
                return f"{pod.metadata.name} is not Ready"
        return None

    async def leftovers(self) -> list[str]:
        return []  # the journals are in the pods

    # -- the API server; all of these block

    def _pods(self) -> list[tuple[str, Any]]:
        selector = f"app.kubernetes.io/instance={self._release}"
        found: Any = self._api.list_namespaced_pod(self._namespace, label_selector=selector, _request_timeout=ASK)
        labelled = [((pod.metadata.labels or {}).get("app.kubernetes.io/component", ""), pod) for pod in found.items]
        return sorted((one for one in labelled if one[0] in PODS), key=lambda one: (one[0], str(one[1].metadata.name)))

    def _delete(self, name: str) -> None:
        self._api.delete_namespaced_pod(name, self._namespace, grace_period_seconds=0, _request_timeout=ASK)

    def _signal(self, pod: str, number: int, pid: str) -> str:
        """Sends a signal to a rank of a pod: to the one of this number, "0": to the first. Returns its number or ""."""
        command = ["python", "-c", SIGNAL, str(number), pid]
        with client.ApiClient() as own:  # `stream` changes its client while it runs, and faults overlap
            said: str = stream(
                client.CoreV1Api(own).connect_get_namespaced_pod_exec,
                *(pod, self._namespace),
                command=command,
                **{"stdin": False, "stdout": True, "stderr": False, "tty": False, "_request_timeout": ASK},
            )
        return said.strip()
