"""A namespace as platform teams hand it out: a quota, a LimitRange, the restricted Pod Security Standard, any user."""

import json
import sys

from cluster import Failed, call
from pauses import Pauses
from traffic import Under

from release import TWO_PODS, Releases

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
USER = 1_000_750_000  # as OpenShift's restricted-v2 chooses one; the image names another


async def test_a_namespace_with_rules(releases: Releases, traffic: Under, pauses: Pauses) -> None:
    """All pods are admitted, serve under a user of the platform's, and doctor sees the CPU limit that was put in."""
    cluster = releases.cluster
    await releases.remove()
    rules = json.dumps({"apiVersion": "v1", "kind": "List", "items": [QUOTA, LIMITS]})
    await cluster.kubectl("apply", "--filename", "-", given=rules)
    user = {f"pod.securityContext.{name}": USER for name in ("runAsUser", "fsGroup")}
    try:
        orca = await releases.get(TWO_PODS | user | {"pod.securityContext.runAsGroup": "null"})
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
        await cluster.kubectl("delete", "pvc", "--all")
        await cluster.kubectl("delete", "resourcequota/quota", "limitrange/limits")
