"""A release of Orca on a cluster: installed by the chart, looked at from outside, and called by the client library."""

import asyncio
import http.client
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from cluster import Cluster, Failed, Pod, until

from orca.v1 import worker_pb2 as pb
from orca.v1.worker_pb2_grpc import SupervisorStub
from orca_client import AsyncOrcaClient, OrcaError
from orca_pool.keys import Keys

ROOT = Path(__file__).parents[1]
CHART, VALUES = ROOT / "helm", ROOT / "helm/values-cpu.yaml"
REGISTRY = os.environ.get("IMAGE_REGISTRY") or "localhost:5000"
TAG = os.environ.get("IMAGE_TAG") or "dev"
JAEGER = os.environ.get("JAEGER", "true") == "true"
NEXT = os.environ.get("IMAGE_NEXT", "next")  # of the same images with another protocol number, by images.sh
IMAGES = {
    "image.registry": REGISTRY,
    "image.tag": TAG,
    "image.pullPolicy": "Always",  # a node keeps images, and a tag may be pushed again
    "redis.image": f"{REGISTRY}/redis:7.0",
    "jaeger.image": f"{REGISTRY}/jaeger:2.13.0",
    "wait.enabled": "false",  # most tests look for themselves, and some install what does not come up
}
GRPC, STATUS, SUPERVISOR = 50051, 9090, 50050
PATIENCE = 600.0  # seconds that the clients wait for an endpoint, longer than any fault of the suite lasts
ENDED, HOOKS = ("Succeeded", "Failed"), ("check", "wait", "test")
LABELS = "app.kubernetes.io/instance"

Values = Mapping[str, object]

# 20 streams run in one batch, so that none of them waits in the queue.
TWO_PODS: dict[str, object] = {
    "engine.slots": 8192,
    "scheduler.settings.max_batch_size": 20,
    "jaeger.enabled": JAEGER,
}
# Made by tests/kubernetes/images.sh: its Redis is older than WAITAOF.
VALKEY = {"redis.image": f"{REGISTRY}/valkey:8", "redis.program": "valkey"}
SENTINELS = TWO_PODS | VALKEY | {"redis.mode": "sentinel", "redis.password.generate": True}


class Release:
    """One release. `values`: what differs from helm/values-cpu.yaml, by its path, such as "worker.settings.threads"."""

    def __init__(self, cluster: Cluster, values: Values, name: str = "orca") -> None:
        self.cluster, self.name, self.values = cluster, name, IMAGES | dict(values)
        self._before = 1  # the revision that the last upgrade began with
        self.pods_per_engine = int(str(values.get("engine.pp", 2))) * 2 // int(str(values.get("engine.gpusPerPod", 2)))

    # -- helm

    async def install(self, *, wait: bool = True) -> str:
        """`helm install`. Returns what helm says."""
        return await self.cluster.helm("install", self.name, *self._chart(), "--create-namespace", *_waiting(wait))

    async def render(self) -> str:
        """`helm install --dry-run=server`: the documents that an installation would make on this cluster."""
        return await self.cluster.helm("install", self.name, *self._chart(), "--dry-run=server")

    async def upgrade(self, values: Values, *, wait: bool = True) -> None:
        """`helm upgrade` to these values besides those of the installation."""
        self._before = (await self._state())["version"]
        await self.cluster.helm("upgrade", self.name, *self._chart(values), *_waiting(wait))

    async def change(self, values: Values, flag: str) -> None:
        """`helm upgrade --wait` to these values, and to those of before by the flag: --reuse-values or its like."""
        self._before = (await self._state())["version"]
        sets = [word for path, value in values.items() for word in ("--set", f"{path}={value}")]
        await self.cluster.helm("upgrade", self.name, str(CHART), flag, *sets, *_waiting(True))

    async def rollback(self) -> None:
        """`helm rollback` to the revision before the last upgrade, without waiting for it.

        By its number: an upgrade that never began has made no revision, and Helm would go to an older one.
        """
        await self.cluster.helm("rollback", self.name, str(self._before))

    async def deployed(self) -> bool:
        """Whether Helm has done its last revision well: not so when it was ended amid a change, which bars the next."""
        return (await self._state())["info"]["status"] == "deployed"

    async def _state(self) -> Any:
        """The last revision, as `helm status` tells it."""
        return json.loads(await self.cluster.helm("status", self.name, "--output", "json"))

    async def uninstall(self) -> str:
        """`helm uninstall --wait`. Returns what helm says, when all pods are gone."""
        said = await self.cluster.helm("uninstall", self.name, "--wait", "--timeout", "300s")
        await until(self._gone)
        return said

    async def purge(self) -> None:
        """Uninstalls it and gives its volumes back: a cluster may have few."""
        await self.uninstall()
        await self.cluster.delete_claims("--selector", f"{LABELS}={self.name}")

    def _chart(self, values: Values = {}) -> list[str]:  # noqa: B006 it is only read
        given = self.values | dict(values)
        sets = [word for path, value in given.items() for word in ("--set", f"{path}={value}")]
        return [str(CHART), "--values", str(VALUES), *sets]

    async def _gone(self) -> str | None:
        # A failed hook stays for its log. Others that have ended are about to be collected.
        names = [pod.name for pod in await self.pods() if pod.phase not in ENDED or pod.component not in HOOKS]
        return f"{names} are still there" if names else None

    # -- what is there

    async def pods(self, component: str = "") -> list[Pod]:
        """The release's pods, by name."""
        label = f",app.kubernetes.io/component={component}" if component else ""
        pods = await self.cluster.pods(f"{LABELS}={self.name}{label}")
        return [pod for pod in pods if pod.component]

    async def pod(self, name: str) -> Pod:
        """One of the release's pods."""
        return next(pod for pod in await self.pods() if pod.name == name)

    async def healed(self, seconds: float = 300) -> None:
        """Waits until every workload has all its pods, of its newest revision, and all of them are Ready."""
        await until(self._ailing, seconds)

    async def _ailing(self) -> str | None:
        selector = f"{LABELS}={self.name}"
        workloads = await self.cluster.get("deployments,statefulsets", "--selector", selector)
        pods = await self.pods()
        for workload in workloads:
            name, spec, status = workload["metadata"]["name"], workload["spec"], workload["status"]
            component = spec["selector"]["matchLabels"]["app.kubernetes.io/component"]
            own = [pod for pod in pods if pod.component == component]
            if status.get("observedGeneration") != workload["metadata"]["generation"]:
                return f"{name}: its controller has not seen the last change"
            if len(own) != spec["replicas"] or any(pod.leaving for pod in own):
                return f"{name}: {len(own)} pods instead of {spec['replicas']}"
            if workload["kind"] == "Deployment" and status.get("updatedReplicas", 0) != spec["replicas"]:
                return f"{name}: not all pods are of the newest revision"
            if workload["kind"] == "StatefulSet" and any(pod.revision != status["updateRevision"] for pod in own):
                return f"{name}: not all pods are of the newest revision"
            for pod in own:
                if not pod.ready:
                    return f"{pod.name} is not Ready: {pod.conditions.get('Ready') or pod.phase}"
        return None

    async def ready_engines(self) -> list[str]:
        """The engines that have all their pods Ready."""
        ready = {pod.name for pod in await self.pods("worker") if pod.ready and not pod.leaving}
        count = len(ready) + self.pods_per_engine  # more ordinals than there may be
        engines = {n: [self.worker(o) for o in self.ordinals(n)] for n in range(count)}
        return [f"engine-{n}" for n, names in engines.items() if ready.issuperset(names)]

    def ordinals(self, engine: int) -> range:
        """The ordinals of an engine's pods."""
        return range(engine * self.pods_per_engine, (engine + 1) * self.pods_per_engine)

    def worker(self, ordinal: int) -> str:
        return f"{self.name}-worker-{ordinal}"

    async def master(self, engine: str) -> str:
        """The name of the scheduler's pod that holds an engine's lease; "" when nobody does."""
        # By its exact name: a recycled volume may hold the pools of earlier releases too.
        key = f"{Keys(f'{self.cluster.namespace}.{self.name}').prefix}leases"
        lease = await self.redis("hget", key, engine)
        _, _, owner = lease.strip().rpartition(" ")  # '<counter> <term> <owner>'
        if not owner:
            return ""
        return next((p.name for p in await self.pods("scheduler") if owner.startswith(p.name)), "")

    async def primary(self) -> str:
        """The name of the Redis pod that takes writes."""
        if self.values.get("redis.mode") != "sentinel":
            return f"{self.name}-redis-0"
        asked = ["-p", "26379", "sentinel", "get-master-addr-by-name", "orca"]
        said = await self.cluster.execute(f"{self.name}-sentinel-0", "sh", "-c", f"$CLI {' '.join(asked)}")
        return said.split()[0]

    async def redis(self, *command: str) -> str:
        """Asks the primary. Returns what it answers."""
        client = f"{self.values.get('redis.program', 'redis')}-cli"
        return await self.cluster.execute(await self.primary(), client, *command)

    async def events(self, name: str) -> list[str]:
        """The messages of the events of an object."""
        found = await self.cluster.get("events", "--field-selector", f"involvedObject.name={name}")
        return [event["message"] for event in found]

    async def log(self, name: str, *, previous: bool = False) -> str:
        """The log of a pod's first container, or of the one before its last restart."""
        return await self.cluster.kubectl("logs", name, *(["--previous"] if previous else []))

    # -- what it says itself

    def host(self, service: str = "endpoint") -> str:
        """The DNS name of one of its Services."""
        return f"{self.name}-{service}.{self.cluster.namespace}.svc.cluster.local"

    def targets(self) -> list[str]:
        """gRPC targets of the endpoints, as docs/call.md names them: the Service, and its pods by the headless name."""
        return [f"{self.host()}:{GRPC}", f"dns:///{self.host('endpoint-headless')}:{GRPC}"]

    def client(self, target: int = 0, **settings: Any) -> AsyncOrcaClient:
        """A client of one of the targets."""
        return AsyncOrcaClient(self.targets()[target], resume_timeout=PATIENCE, **settings)

    async def epochs(self) -> dict[str, int]:
        """The epoch of each engine."""
        async with self.client() as client:
            return {engine.id: engine.epoch for engine in (await client.get_model()).engines}

    async def formed_again(self, before: Mapping[str, int], seconds: float = 300) -> None:
        """Waits until one of the engines has another epoch than before."""

        async def missing() -> str | None:
            try:
                now = await self.epochs()
            except OrcaError as error:
                return str(error)
            return None if now != before else f"the epochs are still {before}"

        await until(missing, seconds)

    async def probe(self, pod: Pod, path: str) -> tuple[int, str]:
        """What a pod's status port answers: the HTTP status, and the reason why not all is well ("": it is).

        0 with a reason: nobody answered.
        """
        status, said = await asyncio.to_thread(_status, pod.address, path)
        return status, said["reason"] or ""

    async def fork_server(self, pod: Pod) -> int | None:
        """The pid of a worker's fork server inside its pod; None while none runs."""
        _, said = await asyncio.to_thread(_status, pod.address, "/readyz")
        return said.get("fork_server")

    async def kill_inside(self, pod: Pod, pid: int) -> None:
        """Sends SIGKILL to a process of a pod, by its pid there."""
        await self.cluster.execute(pod.name, "python", "-c", f"import os, signal; os.kill({pid}, signal.SIGKILL)")

    async def rank_pids(self, pod: Pod) -> list[int]:
        """The ranks of a worker's pod: their pids inside it."""
        async with grpc.aio.insecure_channel(f"{pod.address}:{SUPERVISOR}") as channel:
            async for table in SupervisorStub(channel).Watch(pb.WatchRequest(), wait_for_ready=True, timeout=30):
                return [rank.pid for rank in table.ranks]
        raise Failed(f"the supervisor of {pod.name} says nothing")


class Releases:
    """The release that is installed at the moment: at most one, because a small cluster has no room for two."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._current: Release | None = None
        self._values: Values = {}
        self._broken: list[Values] = []  # an installation takes minutes to fail, and the next one would, too

    async def get(self, values: Values) -> Release:
        """A release with these values, all of whose pods are Ready, and that the next test can change and roll back."""
        if self._current is not None and self._values == values:
            try:
                await self._current.healed(120)
                if await self._current.deployed():
                    return self._current
            except Failed:
                pass
        if values in self._broken:
            raise Failed(f"a release with {dict(values)} did not come up before")
        await self.remove()
        release = Release(self.cluster, values)
        self._current, self._values = release, values
        try:
            await release.install()
            await release.healed()
        except Failed:
            self._broken.append(values)
            raise
        assert reachable(release.host()), "run the suite where the cluster's Services can be reached, as on a node"
        return release

    async def remove(self) -> str:
        """Uninstalls what is installed. Returns what helm says."""
        if self._current is None:
            return ""
        release, self._current = self._current, None
        return await release.uninstall()


def _waiting(wait: bool) -> list[str]:
    """The time is also that of hooks, which Helm awaits in any case."""
    return [*(["--wait"] if wait else []), "--timeout", "400s"]


def _status(address: str, path: str) -> tuple[int, dict[str, Any]]:
    """What a status port answers. 0: nobody answered, and why is the reason."""
    connection = http.client.HTTPConnection(address, STATUS, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    except OSError as error:
        return 0, {"reason": str(error)}
    finally:
        connection.close()


def reachable(host: str) -> bool:
    """Whether a Service's name resolves here."""
    try:
        socket.getaddrinfo(host, GRPC)
    except OSError:
        return False
    return True


async def run_pod(cluster: Cluster, name: str, image: str, *command: str, claim: str = "") -> None:
    """A pod that runs a command once, as the restricted Pod Security Standard wants it. claim: mounted at /data."""
    inside = {
        "name": name,
        "image": image,
        "command": list(command),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    user = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
    data = {"name": "data", **({"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}})}
    spec = {"restartPolicy": "Never", "securityContext": user, "containers": [inside], "volumes": [data]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    await cluster.kubectl("apply", "--filename", "-", given=json.dumps(pod))


@asynccontextmanager
async def foreign_pod(cluster: Cluster, name: str) -> AsyncIterator[str]:
    """A pod that is nobody's, with a Python, for as long as the block runs. Gives its name."""
    await run_pod(cluster, name, f"{REGISTRY}/python:3.11-slim", "sleep", "infinity")
    try:
        await cluster.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=120s")
        yield name
    finally:
        await cluster.kubectl("delete", "pod", name, "--grace-period=0", "--force")
