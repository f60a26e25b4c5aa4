"""`check` and `wait.enabled`: Helm ends with the reason, before anything changes or when a rollout stops.

With one engine a rollout that stops is the end of serving until the rollback; with two, one serves on.
"""

import asyncio
import itertools
import os
import re
import time
from dataclasses import dataclass
from statistics import median

import pytest
from cluster import Failed
from pauses import Pauses
from traffic import Under

from release import REGISTRY, ROOT, TWO_PODS, Release, Releases

ROUNDS = int(os.environ.get("ROUNDS", "1"))  # of good installs: 5 for numbers to keep
COSTS = ROOT / "build/kubernetes/gate.md"

CHECKED = TWO_PODS | {"check.timeoutSeconds": 60}
GATED = CHECKED | {"check.enabled": False, "wait.enabled": True, "wait.patienceSeconds": 15}
BOUND = "the rollout has (stopped|not finished after 240 s)"  # the gate's own sentences, and not Helm's after 400 s
LITTLE = {f"worker.resources.{kind}.memory": "100Mi" for kind in ("requests", "limits")}
NO_IMAGE = {"worker.image": f"{REGISTRY}/orca-worker:none"}
NO_FOLDER = {"model.path": "/opt/orca/none"}
FEW = "orca-test-few"  # a priority of which a quota allows no pod
QUOTA = {  # for workers alone: one for all pods would refuse the gate's own
    "worker.pod.priorityClassName": FEW,
    "extraObjects[0].apiVersion": "scheduling.k8s.io/v1",
    "extraObjects[0].kind": "PriorityClass",
    "extraObjects[0].metadata.name": FEW,
    "extraObjects[0].value": 1,
    "extraObjects[1].apiVersion": "v1",
    "extraObjects[1].kind": "ResourceQuota",
    "extraObjects[1].metadata.name": FEW,
    "extraObjects[1].spec.hard.pods": 0,
    "extraObjects[1].spec.scopeSelector.matchExpressions[0].scopeName": "PriorityClass",
    "extraObjects[1].spec.scopeSelector.matchExpressions[0].operator": "In",
    "extraObjects[1].spec.scopeSelector.matchExpressions[0].values[0]": FEW,
}
REFUSED = {  # values, and what Helm says
    "heads that tp does not divide": (
        {"engine.tp": 4, "model.numHeads": 12},
        "tp 4: 6 heads cannot be shared evenly by 4 tensor ranks; nothing was changed",
    ),
    "more stages than layers": (
        {"engine.pp": 5, "model.numLayers": 12},
        "pp 5: 4 layers are too few for 5 stages; nothing was changed",
    ),
    "a wrong model path": (NO_FOLDER, "/opt/orca/none: there is no such folder; nothing was changed"),
    "a wrong image": (NO_IMAGE, "orca-check"),  # then Helm 3 and 4 differ
}
STOPPED = {  # values, and what Helm says, when one engine has been replaced
    "a wrong image": (NO_IMAGE, "not found"),
    "a wrong model path": (NO_FOLDER, "/opt/orca/none: there is no such folder"),
    "more memory than a node has": ({"worker.memory.rank": 900000}, "Insufficient memory"),
    "a quota for workers": (QUOTA, f"exceeded quota: {FEW}"),
    # The kernel ends the container (OOMKilled), or, where kubelet wants it, one process: then the worker ends itself.
    # Beside load neither may have come about at the gate's end, as the container reads its own program again and again.
    "too little memory for its ranks": (LITTLE, "engine-0"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("engines", [1, 2])
async def test_an_upgrade_that_cannot_form_changes_nothing(
    releases: Releases, traffic: Under, pauses: Pauses, name: str, engines: int
) -> None:
    """Under load: all pods stay, also over the rollback. An unformable tp x pp stopped both engines, for 28.6 s."""
    orca = await releases.get(CHECKED | {"engine.count": engines})
    values, reason = REFUSED[name]
    before = await uids(orca)
    async with traffic(orca) as load:
        title = f"helm upgrade --wait to {name}, {engines} engines, refused by the check, and helm rollback"
        async with load.disturbed(title) as seen:
            try:
                with pytest.raises(Failed, match=re.escape(reason)):
                    await orca.upgrade(values)
                await load.flows()
            finally:
                await orca.rollback()
            await orca.healed(600)
        pauses(seen)
    assert await uids(orca) == before


async def uids(orca: Release) -> set[str]:
    """The pods of workloads. That of a check that failed stays for its log."""
    return {pod.uid for pod in await orca.pods() if pod.component != "check"}


@pytest.mark.parametrize("name", STOPPED)
@pytest.mark.parametrize("engines", [1, 2])
async def test_an_upgrade_that_stops_is_an_error(
    releases: Releases, traffic: Under, pauses: Pauses, name: str, engines: int
) -> None:
    """Under load, without the check: one engine is replaced, and the other serves on."""
    orca = await releases.get(GATED | {"engine.count": engines})
    values, reason = STOPPED[name]
    async with traffic(orca) as load:
        title = f"helm upgrade --wait to {name}, {engines} engines, stopped, and helm rollback"
        async with load.disturbed(title) as seen:
            try:
                with pytest.raises(Failed, match=f"{BOUND}: .*{re.escape(reason)}"):
                    # Endpoints of the wrong model do not come up either, and --wait waits for them first.
                    await orca.upgrade(values, wait="model.path" not in values)
                assert len(await orca.ready_engines()) == engines - 1
                if engines > 1:
                    await load.flows()
            finally:
                await orca.rollback()
            await orca.healed(600)
            await load.flows()
        pauses(seen)


async def test_helm_test_fails_when_one_of_two_engines_is_dead(releases: Releases) -> None:
    gated = await releases.get(GATED | {"engine.count": 2})
    await gated.cluster.helm("test", gated.name)
    try:
        with pytest.raises(Failed, match="not found"):
            await gated.upgrade({**NO_IMAGE, "test.timeoutSeconds": 60}, wait=False)
        with pytest.raises(Failed, match="orca-test"):
            await gated.cluster.helm("test", gated.name)
        assert len(await gated.ready_engines()) == 1
    finally:
        await gated.rollback()
    await gated.healed(600)


@dataclass(frozen=True)
class Install:
    """A good installation without --wait: seconds from its beginning until each of these."""

    objects: float  # the StatefulSet of workers is there
    ready: float  # all workers are Ready
    returned: float  # Helm has returned


async def timed(orca: Release) -> Install:
    began = time.monotonic()

    async def when(condition: str) -> float:
        workers = f"statefulset/{orca.name}-worker"
        await orca.cluster.kubectl("wait", workers, f"--for={condition}", "--timeout=300s", seconds=330)
        return time.monotonic() - began

    async def workers() -> tuple[float, float]:
        return await when("create"), await when(f"jsonpath={{.status.readyReplicas}}={orca.pods_per_engine}")

    async with asyncio.TaskGroup() as group:
        watched = group.create_task(workers())
        await orca.install(wait=False)
        returned = time.monotonic() - began
    return Install(*watched.result(), returned)


@pytest.mark.timeout(300 * 4 * ROUNDS)  # four installations have what another test has
async def test_what_a_good_install_waits_for(releases: Releases) -> None:
    """With the gate Helm returns when the engine is ready, without it before. Writes build/kubernetes/gate.md."""
    await releases.remove()
    seen: dict[tuple[bool, bool], list[Install]] = {
        ways: [] for ways in itertools.product((False, True), (False, True))
    }
    for (check, wait), installs in ROUNDS * list(seen.items()):
        ways = {"check.enabled": check, "wait.enabled": wait, "image.pullPolicy": "IfNotPresent"}
        orca = Release(releases.cluster, TWO_PODS | ways, "timed")
        try:
            installs.append(await timed(orca))
        finally:
            await orca.purge()
        assert wait == (installs[-1].returned > installs[-1].ready)
    COSTS.parent.mkdir(parents=True, exist_ok=True)
    COSTS.write_text("\n".join(costs(seen)) + "\n")
    print(COSTS.read_text())


def costs(seen: dict[tuple[bool, bool], list[Install]]) -> list[str]:
    """The lines of a table, with medians, and the range of the time from the workers' readiness to Helm's return."""
    lines = [
        "| check | wait | installs | objects there, s | workers Ready, s | Helm returned, s | after the workers, s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (check, wait), installs in seen.items():
        after = sorted(install.returned - install.ready for install in installs)
        moments = zip(*((i.objects, i.ready, i.returned) for i in installs), strict=True)
        medians = " | ".join(f"{median(moment):.1f}" for moment in moments)
        ways = " | ".join("on" if way else "off" for way in (check, wait))
        spread = f"{median(after):.1f} ({after[0]:.1f} to {after[-1]:.1f})"
        lines.append(f"| {ways} | {len(installs)} | {medians} | {spread if wait else 'before them'} |")
    return lines
