"""A cluster as platform teams hand it out: tainted nodes, a namespace with a quota, a LimitRange, the restricted Pod
Security Standard and any user, and other releases beside ours.
"""

import json
import sys
from contextlib import suppress

from cluster import Failed, call
from pauses import Pauses
from traffic import Under

from release import LABELS, TWO_PODS, Release, Releases

QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "quota"},
    "spec": {"hard": {"requests.cpu": "4", "requests.memory": "16Gi", "limits.memory": "24Gi", "pods": "40"}},
}
LIMITS = {
    "apiVersion": "v1",
    "kind": "LimitRange",
    "metadata": {"name": "limits"},
    "spec": {"limits": [{"type": "Container", "default": {"cpu": "1900m", "memory": "256Mi"}}]},
}
TAINT = "orca.test/team"
TOLERATED = {"pod.tolerations[0].key": TAINT, "pod.tolerations[0].operator": "Exists"}
USER = 1_000_750_000  # as OpenShift's restricted-v2 chooses one; the image names another


async def test_a_namespace_with_rules(releases: Releases, traffic: Under, pauses: Pauses) -> None:
    """All pods are admitted, serve under a user of the platform's, and doctor sees the CPU limit that was put in.

    The pod of `helm test` tolerates the taint and fits the quota, too.
    """
    cluster = releases.cluster
    await releases.remove()
    rules = json.dumps({"apiVersion": "v1", "kind": "List", "items": [QUOTA, LIMITS]})
    await cluster.kubectl("apply", "--filename", "-", given=rules)
    await cluster.kubectl("taint", "nodes", "--all", f"{TAINT}=ours:NoSchedule", "--overwrite")
    user = {f"pod.securityContext.{name}": USER for name in ("runAsUser", "fsGroup")}
    try:
        orca = await releases.get(TWO_PODS | TOLERATED | user | {"pod.securityContext.runAsGroup": "null"})
        assert "Succeeded" in await cluster.helm("test", orca.name, "--timeout", "200s")
        uids = await cluster.execute(orca.worker(0), "id", "-u")
        assert int(uids) == USER
        async with traffic(orca) as load:
            async with load.disturbed("a worker pod deleted in a namespace with a quota and a LimitRange") as seen:
                await cluster.kubectl("delete", "pod", orca.worker(0), "--grace-period=0", "--force")
                await orca.healed()
                await load.flows()
            pauses(seen)
        doctor = [sys.executable, "-m", "orca_cli", "doctor", "--release", orca.name]
        try:
            said = await call(*doctor, "--namespace", cluster.namespace)
        except Failed as failed:  # its status says that there are findings; the report is the same
            said = str(failed)
        assert "cpu" in said.lower()
        assert "LimitRange" in said
        # The next pod with this volume runs under another user.
        await cluster.execute(f"{orca.name}-redis-0", "rm", "-r", "/data/appendonlydir")
    finally:
        await releases.remove()
        await cluster.delete_claims("--all")
        await cluster.kubectl("delete", "resourcequota/quota", "limitrange/limits")
        await cluster.kubectl("taint", "nodes", "--all", f"{TAINT}-")


LONG = "a-name-that-two-teams-of-one-platform-share"  # in more characters than a name may have


async def test_releases_of_one_namespace_share_no_object(releases: Releases) -> None:
    """Helm refuses to install an object that another release has: `chat` and `chat-orca` had all of them in common."""
    empty = {
        "engine.count": 0,
        "endpoint.replicas": 0,
        "scheduler.replicas": 0,
        "redis.externalUrl": "redis://elsewhere",
    }
    await releases.remove()
    names = ("chat", "chat-orca", f"{LONG}-1", f"{LONG}-2")
    beside = [Release(releases.cluster, empty, name) for name in names]
    try:
        for release in beside:
            await release.install(wait=False)
        for release in beside:
            found = await releases.cluster.get(
                "deployments,services,statefulsets", "--selector", f"{LABELS}={release.name}"
            )
            assert len(found) == 6  # of endpoint, scheduler and worker
    finally:
        for release in beside:
            with suppress(Failed):
                await release.uninstall()
