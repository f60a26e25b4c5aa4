"""A Kubernetes cluster as tests use it: `kubectl` and `helm` as programs, and what they say as plain values."""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MISSING = next(
    (
        reason
        for reason, missing in (
            ("KUBECONFIG names no cluster", not os.environ.get("KUBECONFIG")),
            ("there is no kubectl", shutil.which("kubectl") is None),
            ("there is no helm", shutil.which("helm") is None),
        )
        if missing
    ),
    None,
)  # why nothing can be done here; None: a cluster is there


class Failed(AssertionError):
    """A command did not end well. The message is the command and all that it said."""


@dataclass(frozen=True)
class Pod:
    """A pod, as the API server tells it."""

    name: str
    uid: str
    component: str  # endpoint, scheduler, worker, redis, jaeger; "" for a pod that is not the release's own
    revision: str  # of its StatefulSet; "" for others
    phase: str
    ready: bool
    leaving: bool
    restarts: int
    address: str
    node: str
    image: str  # of its first container
    container: str  # id of its first container at the container runtime; "" before it runs
    conditions: dict[str, str]  # message by type


class Cluster:
    """One namespace of the cluster that KUBECONFIG names."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    async def kubectl(self, *arguments: str, given: str | None = None, seconds: float = 300) -> str:
        """What kubectl prints. Raises Failed."""
        return await call("kubectl", "--namespace", self.namespace, *arguments, given=given, seconds=seconds)

    async def helm(self, *arguments: str, seconds: float = 420) -> str:
        """Returns what helm prints. Raises Failed. HELM names another program, such as Helm 4."""
        return await call(os.environ.get("HELM") or "helm", "--namespace", self.namespace, *arguments, seconds=seconds)

    async def get(self, *arguments: str) -> Any:
        """An object, or the `items` of a list, of `kubectl get`."""
        found = json.loads(await self.kubectl("get", *arguments, "--output", "json"))
        return found.get("items", found)

    async def pods(self, selector: str = "") -> list[Pod]:
        """The pods with these labels, by name."""
        found = await self.get("pods", "--selector", selector)
        return sorted((_pod(pod) for pod in found), key=lambda pod: pod.name)

    async def delete_claims(self, *which: str) -> None:
        """Deletes volume claims, by name or with an option of kubectl such as --all, and gives their volumes back."""
        await self.kubectl("delete", "pvc", *which)
        await self.give_back()

    async def give_back(self) -> None:
        """Gives the volumes of deleted claims back where an administrator would have to do that. Their files stay."""
        claims = {claim["metadata"]["uid"] for claim in await self.get("pvc")}
        for volume in await self.get("persistentvolumes"):
            of, kept = volume["spec"].get("claimRef", {}), volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
            if kept and of.get("namespace") == self.namespace and of.get("uid") not in claims:
                patch = '[{"op": "remove", "path": "/spec/claimRef"}]'
                name = volume["metadata"]["name"]
                await self.kubectl("patch", "persistentvolume", name, "--type=json", "--patch", patch)

    async def execute(self, pod: str, *command: str) -> str:
        """Runs a command in the first container of a pod. Returns what it prints."""
        return await self.kubectl("exec", pod, "--", *command)

    async def collect(self, folder: Path) -> None:
        """Writes down what somebody needs who looks for a failure's cause: pods, events and logs."""
        folder.mkdir(parents=True, exist_ok=True)

        async def write(name: str, *arguments: str) -> None:
            try:
                said = await self.kubectl(*arguments, seconds=60)
            except Failed as failed:
                said = str(failed)
            (folder / name).write_text(said)

        await write("objects.txt", "get", "all,pvc,networkpolicy", "--output", "wide")
        await write("describe-pods.txt", "describe", "pods")
        await write("events.txt", "get", "events", "--sort-by", ".lastTimestamp")
        try:
            pods = await self.pods()
        except Failed:
            return
        for pod in pods:
            await write(f"{pod.name}.log", "logs", pod.name, "--all-containers", "--prefix")
            if pod.restarts:
                await write(f"{pod.name}-previous.log", "logs", pod.name, "--all-containers", "--previous")


async def call(*command: str, given: str | None = None, seconds: float = 300) -> str:
    """Runs a command with `given` on its standard input. Returns what it prints. Raises Failed."""
    pipe = asyncio.subprocess.PIPE
    stdin = asyncio.subprocess.DEVNULL if given is None else pipe
    process = await asyncio.create_subprocess_exec(*command, stdin=stdin, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(seconds):
            output, errors = await process.communicate(None if given is None else given.encode())
    except TimeoutError:
        raise Failed(f"{' '.join(command)}: no end after {seconds:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise Failed(f"{' '.join(command)}: {errors.decode()}{output.decode()}")
    return output.decode()


async def until(condition: Callable[[], Awaitable[str | None]], seconds: float = 300) -> None:
    """Waits until the condition returns None. Raises Failed with what it said last: why it does not hold yet.

    A look that fails, because the API server is away for a moment, is made again.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            missing = await condition()
        except Failed as failed:
            missing = str(failed)
        if missing is None:
            return
        if time.monotonic() > end:
            raise Failed(f"after {seconds:.0f} s: {missing}")
        await asyncio.sleep(0.5)


def _pod(found: dict[str, Any]) -> Pod:
    metadata, status = found["metadata"], found["status"]
    labels = metadata.get("labels", {})
    containers = status.get("containerStatuses", [])
    conditions = {c["type"]: c for c in status.get("conditions", [])}
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        component=labels.get("app.kubernetes.io/component", ""),
        revision=labels.get("controller-revision-hash", ""),
        phase=status.get("phase", ""),
        ready=conditions.get("Ready", {}).get("status") == "True",
        leaving="deletionTimestamp" in metadata,
        restarts=sum(container["restartCount"] for container in containers),
        address=status.get("podIP", ""),
        node=found["spec"].get("nodeName", ""),
        image=found["spec"]["containers"][0]["image"],
        container=containers[0].get("containerID", "").rpartition("/")[2] if containers else "",
        conditions={name: condition.get("message", "") for name, condition in conditions.items()},
    )
