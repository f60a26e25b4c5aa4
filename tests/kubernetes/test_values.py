"""Wrong values: the render, the log of a pod or its status says in a sentence what is wrong, and nothing is silent."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from cluster import Cluster, Failed, until

from release import REGISTRY, Release, Releases, Values, run_pod


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"engine.tp": 4}, "tp 4: 6 heads cannot be shared evenly by 4 tensor ranks"),
        ({"engine.pp": 5}, "pp 5: 4 layers are too few for 5 stages"),
        ({"engine.gpusPerPod": 3}, "engine.gpusPerPod: 3 is no divisor of tp, 2"),
        ({"engine.dtype": "float23"}, "/engine/dtype"),
    ],
)
async def test_the_render_stops(cluster: Cluster, values: Values, sentence: str) -> None:
    with pytest.raises(Failed) as failed:
        await Release(cluster, values, "wrong").render()
    assert sentence in str(failed.value)


async def test_a_claim_without_the_model_s_folder(cluster: Cluster, releases: Releases) -> None:
    """The sentence names the folder, and the volume stays as it is: kubelet makes a folder that a subPath names."""
    await releases.remove()
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    given = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "weights"}, "spec": claim}
    await cluster.kubectl("apply", "--filename", "-", given=json.dumps(given))
    wrong = Release(cluster, {"model.path": "null", "model.claim.name": "weights", "model.claim.path": "nope"}, "wrong")
    try:
        with pytest.raises(Failed, match="/models/nope: there is no such folder; nothing was changed"):
            await wrong.install()
    finally:
        await wrong.purge()
    await run_pod(cluster, "look", f"{REGISTRY}/python:3.11-slim", "ls", "-A", "/data", claim="weights")
    await cluster.kubectl("wait", "pod/look", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=120s")
    assert "nope" not in (await cluster.kubectl("logs", "look")).split()
    await cluster.kubectl("delete", "pod", "look")
    await cluster.delete_claims("weights")


@asynccontextmanager
async def installed(releases: Releases, values: Values) -> AsyncIterator[Release]:
    """A release that will not come up, so nobody waits for it."""
    await releases.remove()
    release = Release(releases.cluster, values, "wrong")
    await release.install(wait=False)
    try:
        yield release
    finally:
        await release.purge()


@pytest.mark.parametrize(
    ("values", "component", "sentence"),
    [
        ({"model.path": "/opt/orca/no_model", "check.enabled": False}, "worker", "/opt/orca/no_model"),
        ({"redis.externalUrl": "redis://10.255.255.1:6379/0"}, "endpoint", "10.255.255.1:6379"),
        ({"redis.externalUrl": "redis://10.255.255.1:6379/0"}, "scheduler", "10.255.255.1:6379"),
        (
            {"worker.resources.requests.memory": "160Mi", "worker.resources.limits.memory": "160Mi"},
            "worker",
            "reached its memory limit",
        ),
        ({"engine.slots": 8}, "scheduler", "ORCA_SLOTS: 8 are less than a block"),
    ],
)
async def test_a_pod_says_what_is_wrong(releases: Releases, values: Values, component: str, sentence: str) -> None:
    """Its log, its status port or `kubectl describe` holds the sentence, and it is not Ready."""
    async with installed(releases, values) as wrong:

        async def silent() -> str | None:
            said = [await everything_said(wrong, pod.name) for pod in await wrong.pods(component)]
            return None if any(sentence in what for what in said) else f"{component}: {said}"

        await until(silent, 180)
        assert not any(pod.ready for pod in await wrong.pods("worker"))


async def everything_said(release: Release, name: str) -> str:
    pod = await release.pod(name)
    said = [await release.cluster.kubectl("describe", "pod", name), (await release.probe(pod, "/readyz"))[1]]
    for previous in (False, True):
        with suppress(Failed):  # there is no such container yet
            said.append(await release.log(name, previous=previous))
    return "\n".join(said)
