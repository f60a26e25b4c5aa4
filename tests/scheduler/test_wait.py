"""Waiting for a rollout: the rule, and `python -m orca_scheduler.discovery.wait` against an API server."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from scheduler.discovery.api_server import ApiServer, api_server, refuses
from scheduler.discovery.manifests import NEW, pod, statefulset

from orca_common.errors import DeadlineExceeded, FailedPrecondition, OrcaError
from orca_scheduler.discovery.kubernetes import Collection, Kubernetes
from orca_scheduler.discovery.pods import Manifest
from orca_scheduler.discovery.rollout import Standing, State
from orca_scheduler.discovery.wait import BOUNDS, RULES, Waiting, wait

PROGRESSING = Standing(State.PROGRESSING, "1 of 2 engines ready")
STOPPED = Standing(State.STOPPED, "engine-0 is not up", "engine-0")
FINISHED = Standing(State.FINISHED, "2 of 2 engines ready")


def test_it_waits_until_the_rollout_has_finished() -> None:
    waiting = Waiting(100.0, timeout=50.0, patience=10.0)
    assert not waiting.over(PROGRESSING, 100.0)
    assert not waiting.over(PROGRESSING, 149.0)
    assert waiting.over(FINISHED, 151.0)  # late, but seen


def test_a_stop_ends_it_when_it_has_lasted() -> None:
    waiting = Waiting(0.0, timeout=50.0, patience=10.0)
    assert not waiting.over(STOPPED, 1.0)
    assert not waiting.over(STOPPED, 10.9)
    with pytest.raises(FailedPrecondition, match=r"^the rollout has stopped: engine-0 is not up$"):
        waiting.over(STOPPED, 11.0)


def test_a_stop_that_ends_is_forgotten() -> None:
    waiting = Waiting(0.0, timeout=50.0, patience=10.0)
    assert not waiting.over(STOPPED, 1.0)
    assert not waiting.over(PROGRESSING, 9.0)
    assert not waiting.over(STOPPED, 12.0)
    assert not waiting.over(STOPPED, 21.0)


@pytest.mark.parametrize("stands", [PROGRESSING, STOPPED])
def test_it_ends_at_its_bound(stands: Standing) -> None:
    with pytest.raises(DeadlineExceeded, match=f"^the rollout has not finished after 50 s: {stands.message}$"):
        Waiting(0.0, timeout=50.0, patience=100.0).over(stands, 50.0)


# -- against an API server


def workers(replicas: int, revision: str = NEW, size: str = "2") -> dict[str, Any]:
    """The StatefulSet as the chart makes it."""
    manifest = statefulset(replicas, revision)
    labels = {"app.kubernetes.io/instance": "orca", "app.kubernetes.io/component": "worker"}
    return manifest | {
        "metadata": manifest["metadata"] | {"labels": labels, "annotations": {"orca.serving/pods-per-engine": size}}
    }


class World:
    def __init__(self, server: ApiServer, kubeconfig: str) -> None:
        self.server, self._kubeconfig = server, kubeconfig

    async def begin(self, *arguments: str, **environment: str) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "orca_scheduler.discovery.wait", "orca", "--namespace=orca", *arguments)
        return await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"KUBECONFIG": self._kubeconfig} | environment,
        )

    async def looked(self) -> None:
        """Returns when the command has asked for the pods."""
        async with asyncio.timeout(60):
            while not any(request.what == "list pods" for request in self.server.requests):
                await asyncio.sleep(0.01)

    async def wait(self, timeout: float, patience: float) -> None:
        """Does the work of the command in this process: starting Python takes longer than all the rest."""
        kubernetes = Kubernetes("orca", kubeconfig=self._kubeconfig)

        async def list_of(collection: Collection) -> Iterable[Manifest]:
            return (await kubernetes.list(collection)).objects.values()

        try:
            await wait(list_of, "orca", timeout, patience)
        finally:
            await kubernetes.close()

    async def ended(self, process: asyncio.subprocess.Process) -> tuple[int | None, list[str], str]:
        """Its exit code, the lines that it printed, and its errors."""
        output, problems = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, output.decode().splitlines(), problems.decode()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A server with two engines of two pods; the second engine is not ready."""
    async with api_server(tmp_path) as (server, kubeconfig):
        server.put("statefulsets", workers(4))
        server.put("pods", *(pod(ordinal, NEW, ready=ordinal < 2) for ordinal in range(4)))
        yield World(server, kubeconfig)


ASKED = {f"{verb} {kind}" for _, kind, [verb] in RULES}
WHOLE = "orca-worker-new: 2 of 2 engines ready"
HALF = "orca-worker-new: 1 of 2 engines ready; engine-1: orca-worker-2 is not ready; orca-worker-3 too"


async def test_it_ends_when_all_engines_are_ready(world: World) -> None:
    process = await world.begin()
    await world.looked()
    assert process.returncode is None
    world.server.put("pods", pod(2, NEW), pod(3, NEW))
    assert await world.ended(process) == (0, [], "")
    assert {request.what for request in world.server.requests} <= ASKED


async def test_a_pod_that_kubernetes_does_not_make_has_its_reason(world: World) -> None:
    """A quota above all: there is no pod that could say it."""
    world.server.remove("pods", "orca-worker-3")
    times = ("2026-01-01T00:00:00Z", "2026-01-01T00:00:10Z")
    for number, (time, message) in enumerate(zip(times, ("no account", "exceeded quota: pods=3"), strict=True)):
        metadata = {"name": f"e{number}", "uid": f"e{number}"}
        event = {"metadata": metadata, "lastTimestamp": time, "message": message, "reason": "FailedCreate"}
        world.server.put("events", event | {"involvedObject": {"name": "orca-worker"}})
    sentence = "^the rollout has stopped: orca-worker-new: exceeded quota: pods=3$"
    with pytest.raises(FailedPrecondition, match=sentence):
        await world.wait(timeout=60.0, patience=0.0)
    assert {request.what for request in world.server.requests} == ASKED
    fields = [request.query["fieldSelector"] for request in world.server.requests if request.what == "list events"]
    assert set(fields) == {"involvedObject.name=orca-worker,reason=FailedCreate"}


IMAGE = {"reason": "ErrImagePull", "message": "orca-worker:none: not found"}
FAILING = {
    "a wrong image": (
        {"containerStatuses": [{"name": "worker", "ready": False, "state": {"waiting": IMAGE}}]},
        "cannot start: its container worker waits: ErrImagePull: orca-worker:none: not found",
    ),
    "a wrong model path": (
        {
            "containerStatuses": [
                {
                    "name": "worker",
                    "ready": False,
                    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                    "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "/none: is not there\n"}},
                }
            ]
        },
        "cannot start: its container worker ended with 1: Error: /none: is not there",
    ),
    "too little memory for a node": (
        {
            "phase": "Pending",
            "podIP": "",
            "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes: Insufficient memory."}],
        },
        "is not scheduled: 0/1 nodes: Insufficient memory.",
    ),
}


@pytest.mark.parametrize(("status", "trouble"), FAILING.values(), ids=FAILING.keys())
async def test_it_fails_with_the_reason_of_a_stop(
    world: World, capsys: pytest.CaptureFixture[str], status: dict[str, Any], trouble: str
) -> None:
    world.server.put("pods", pod(2, NEW, ready=False, **status), pod(3, NEW))
    with pytest.raises(FailedPrecondition) as stopped:
        await world.wait(timeout=60, patience=0)
    sentence = f"engine-1 of orca-worker-new is not up: orca-worker-2 {trouble}"
    assert str(stopped.value) == f"the rollout has stopped: {sentence}"
    assert capsys.readouterr().out == f"{sentence}\n"


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (workers(4), f"the rollout has not finished after 0 s: {HALF}"),
        (
            workers(4, "orca-worker-third"),
            "the rollout has not finished after 0 s: orca-worker-third: 0 of 2 engines ready",
        ),
        (workers(4, size=""), "orca-worker: the annotation orca.serving/pods-per-engine is missing; upgrade the chart"),
        (statefulset(4), "release orca: it has no workers in this namespace"),
    ],
    ids=["not ready", "older pods", "another chart", "no such release"],
)
async def test_it_says_what_it_waits_for(world: World, manifest: dict[str, Any], problem: str) -> None:
    world.server.put("statefulsets", manifest)
    with pytest.raises(OrcaError) as ended:
        await world.wait(timeout=0, patience=30)
    assert str(ended.value) == problem


async def test_the_command_fails_with_the_sentence(world: World) -> None:
    """In a line: Helm shows the log of its hook, and Helm 4 as one line."""
    ended = await world.ended(await world.begin("--timeout=0"))
    assert ended == (1, [], f"the rollout has not finished after 0 s: {HALF} ({BOUNDS})\n")


@pytest.mark.parametrize(
    ("ready", "refused", "code", "phase"),
    [(True, False, 0, "Succeeded"), (True, True, 0, "Running"), (False, False, 1, "Running")],
    ids=["ready", "may not say it", "not ready"],
)
async def test_its_own_pod_has_succeeded(world: World, ready: bool, refused: bool, code: int, phase: str) -> None:
    """Kubelet says so a second or two after the process's end, and Helm waits for it."""
    own = {"metadata": {"name": "orca-wait", "uid": "own", "labels": {}}, "status": {"phase": "Running"}}
    world.server.put("pods", own, pod(2, NEW, ready=ready), pod(3, NEW, ready=ready))
    world.server.faults = {"patch pods/status": refuses(403, "pods is forbidden")} if refused else {}
    ended, _, _ = await world.ended(await world.begin("--timeout=0", ORCA_OWN_POD="orca-wait"))
    assert (ended, world.server.objects["pods"]["orca-wait"]["status"]["phase"]) == (code, phase)


async def test_the_command_begins_without_the_classes_of_the_api() -> None:
    """They are 8 MB of code: where nothing had to come up, Helm waited for their import."""
    program = "import sys, orca_scheduler.discovery.wait; print(*sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    modules = output.decode().split()
    assert "kubernetes.aio.client.api_client" in modules
    assert not [name for name in modules if name.startswith("kubernetes.aio.client.api.")]


async def test_a_server_that_refuses_is_asked_again(world: World) -> None:
    world.server.faults = {"list pods": refuses(403, "pods is forbidden")}
    process = await world.begin()
    await world.looked()
    world.server.faults = {}
    world.server.put("pods", pod(2, NEW), pod(3, NEW))
    assert await world.ended(process) == (0, [], "")
