"""Discovery on the cluster that KUBECONFIG names, with a service account that has exactly RULES and SCALING_RULES."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from scheduler.discovery.test_statefulset import until

from orca_common.service import cancel
from orca_scheduler.discovery.candidates import Candidate
from orca_scheduler.discovery.kubernetes import RULES, SCALING_RULES, Kubernetes, Trouble
from orca_scheduler.discovery.size import Size
from orca_scheduler.discovery.statefulset import StatefulSetDiscovery

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="KUBECONFIG names no cluster"),
]
NAMESPACE = "orca-discovery-test"
IMAGE = os.environ.get("ORCA_TEST_IMAGE", "localhost:5000/python:3.11-slim")  # any that has `sleep`


async def kubectl(*arguments: str, given: object = None) -> str:
    process = await asyncio.create_subprocess_exec(
        "kubectl", *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    told, _ = await process.communicate(json.dumps(given).encode())
    assert process.returncode == 0, arguments
    return told.decode()


def workers(replicas: int, generation: str) -> dict[str, object]:
    container = {"name": "worker", "image": IMAGE, "command": ["sleep", "3600"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "orca-worker", "namespace": NAMESPACE},
        "spec": {
            "replicas": replicas,
            "serviceName": "orca-worker",
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": {"app": "orca"}},
            "template": {
                "metadata": {"labels": {"app": "orca"}, "annotations": {"generation": generation}},
                "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]},
            },
        },
    }


@pytest.fixture
async def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    """A folder like the one that a pod finds its service account in."""
    await kubectl("create", "namespace", NAMESPACE)
    try:
        rules = [{"apiGroups": [group], "resources": [kind], "verbs": verbs} for group, kind, verbs in RULES]
        rules += [
            {"apiGroups": [group], "resources": [kind], "verbs": verbs, "resourceNames": ["orca-worker"]}
            for group, kind, verbs in SCALING_RULES
        ]
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "rules": rules}
        await kubectl("create", "serviceaccount", "scheduler", "-n", NAMESPACE)
        named = role | {"metadata": {"name": "scheduler", "namespace": NAMESPACE}}
        await kubectl("create", "-f", "-", given=named)
        subject = f"--serviceaccount={NAMESPACE}:scheduler"
        await kubectl("create", "rolebinding", "scheduler", "--role=scheduler", subject, "-n", NAMESPACE)
        (tmp_path / "token").write_text(await kubectl("create", "token", "scheduler", "-n", NAMESPACE))
        authority = await kubectl("get", "configmap", "kube-root-ca.crt", "-n", NAMESPACE, "-o", "json")
        (tmp_path / "ca.crt").write_text(json.loads(authority)["data"]["ca.crt"])
        server = urlsplit(await kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}"))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", server.hostname or "")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port or 443))
        yield tmp_path
    finally:
        await kubectl("delete", "namespace", NAMESPACE, "--wait=false")


async def test_engines_spare_pods_and_an_update(account: Path) -> None:
    discovery = StatefulSetDiscovery(Kubernetes(NAMESPACE, account=account), "orca-worker", 2, 50050)
    found: dict[str, tuple[str, ...]] = {}
    turns: list[str] = []

    async def events() -> list[str]:
        told = json.loads(await kubectl("get", "events", "-n", NAMESPACE, "-o", "json"))
        ours = [event for event in told["items"] if event.get("source", {}).get("component") == "orca-scheduler"]
        return sorted(event["reason"] for event in ours)

    async def told(*reasons: str) -> None:
        async with asyncio.timeout(60):
            while await events() != sorted(reasons):
                await asyncio.sleep(1)

    def discovered(candidates: object) -> None:
        assert isinstance(candidates, list)
        found.clear()
        found.update({candidate.engine: candidate.pods for candidate in candidates})
        turns[:] = [candidate.engine for candidate in candidates if candidate.replace]

    running = asyncio.create_task(discovery.run(discovered))
    try:
        await until(lambda: "is not there" in (discovery.unready or ""))
        await kubectl("apply", "-f", "-", given=workers(3, "1"))
        await until(lambda: list(found) == ["engine-0"] and all(found["engine-0"]))
        await told("SparePod")
        pod = json.loads(await kubectl("get", "pod", "orca-worker-2", "-n", NAMESPACE, "-o", "json"))
        [condition] = [c for c in pod["status"]["conditions"] if c["type"] == "orca.serving/InEngine"]
        assert condition["message"] == discovery.notices[0]
        await kubectl("apply", "-f", "-", given=workers(4, "1"))
        await until(lambda: len(found) == 2 and all(found["engine-1"]))
        await kubectl("wait", "pod", "-l", "app=orca", "--for=condition=Ready", "-n", NAMESPACE, "--timeout=60s")
        await kubectl("apply", "-f", "-", given=workers(4, "2"))
        for engine in ("engine-0", "engine-1"):
            await until(lambda engine=engine: turns == [engine])
            before = found[engine]
            await discovery.replace(engine)
            assert found[engine] == ("", "")
            await until(lambda engine=engine, before=before: all(found[engine]) and found[engine] != before)
        reasons = ("SparePod", "RolloutStarted", "EngineReplaced", "EngineReplaced", "RolloutFinished")
        await told(*reasons)
        assert discovery.notices == ()
    finally:
        await cancel(running)
        await discovery.close()


async def test_engines_come_finish_and_go(account: Path) -> None:
    """Only by whole engines of what was seen; and no other StatefulSet may be scaled."""
    kubernetes = Kubernetes(NAMESPACE, account=account)
    discovery = StatefulSetDiscovery(kubernetes, "orca-worker", 2, 50050, scales=True)
    ending: list[str] = []

    def discovered(candidates: Sequence[Candidate]) -> None:
        ending[:] = [candidate.engine for candidate in candidates if candidate.ending]

    running = asyncio.create_task(discovery.run(discovered))
    try:
        await kubectl("apply", "-f", "-", given=workers(1, "1"))
        await until(lambda: discovery.size == Size(1, 0, 0, 1))
        first = Size(1, 0, 0, 1)
        await discovery.resize(first, 2, 2, "the test wants two")
        await until(lambda: discovery.size == Size(4, 2, 2, 2))
        await discovery.resize(first, 1, 1, "this was decided too late")
        await discovery.resize(Size(4, 2, 2, 2), 2, 1, "the test wants one")
        await until(lambda: discovery.size == Size(4, 2, 1, 2) and ending == ["engine-1"])
        await discovery.resize(Size(4, 2, 1, 2), 1, 1, "the test wants one")
        await until(lambda: discovery.size == Size(2, 1, 1, 3) and not ending)
        with pytest.raises(Trouble, match="403"):
            await kubernetes.scale_set("another", "uid", 1, 2)
    finally:
        await cancel(running)
        await discovery.close()
