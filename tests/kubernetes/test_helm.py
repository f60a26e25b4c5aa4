"""Each Helm that is here (`helm`, and `helm3` or `helm4` beside it), against the API server: no pod has to run for it.

An API server and etcd alone suffice: `KUBECONFIG=FILE pytest tests/kubernetes/test_helm.py`.
"""

import json
import random
import shutil
from collections.abc import AsyncIterator

import pytest
from cluster import Cluster, Failed, call
from helm.chart import render
from helm.odd import a_values_file
from helm.strict import FOREIGN
from helm_python import HelmError

from release import CHART, LABELS

PROGRAMS = [name for name in ("helm", "helm3", "helm4") if shutil.which(name)]
FILES, BATCH = 2000, 100  # values files, and how many of them one kubectl checks
NO_PODS = {  # nothing is pulled, and no hook runs
    "model.path": "/opt/orca/demo_model",
    "image.pullPolicy": "Never",
    "check.enabled": "false",
    "wait.enabled": "false",
}


class Chart:
    """A release that is installed and upgraded by one of the programs, and never comes up."""

    def __init__(self, cluster: Cluster, helm: str) -> None:
        self.cluster, self._helm, self.name = cluster, helm, f"of-{helm}"
        self.worker = f"{self.name}-worker"

    async def run(self, verb: str, **values: str) -> str:
        given = NO_PODS | {path.replace("__", "."): value for path, value in values.items()}
        sets = [
            word
            for path, value in given.items()
            for word in ("--set-json" if value[:1] == "[" else "--set", f"{path}={value}")
        ]
        return await self.helm(verb, self.name, str(CHART), *sets)

    async def helm(self, *words: str) -> str:
        return await call(self._helm, "--namespace", self.cluster.namespace, *words)

    async def scale(self, replicas: int) -> None:
        await self.cluster.kubectl("scale", "statefulset", self.worker, f"--replicas={replicas}")

    async def replicas(self) -> int:
        return (await self.cluster.get("statefulset", self.worker))["spec"]["replicas"]


@pytest.fixture(params=PROGRAMS)
async def chart(request: pytest.FixtureRequest, cluster: Cluster) -> AsyncIterator[Chart]:
    chart = Chart(cluster, request.param)
    yield chart
    await chart.helm("uninstall", chart.name, "--ignore-not-found")
    await cluster.delete_claims("--selector", f"{LABELS}={chart.name}")


async def test_a_number_of_pods_belongs_to_who_scaled_last(chart: Chart) -> None:
    """Helm 3 undid a scale, and Helm 4 stopped in the middle of the upgrade, because of a conflict."""
    await chart.run("install", engine__count="1")
    await chart.scale(3)
    await chart.run("upgrade", engine__count="1", endpoint__settings__max_waiting="10")
    assert await chart.replicas() == 3
    for count in ("2", "4"):
        with pytest.raises(Failed, match=f"scale statefulset {chart.worker} --replicas={count}` do the same"):
            await chart.run("upgrade", engine__count=count)
        assert await chart.replicas() != int(count)
        await chart.scale(int(count))
        await chart.run("upgrade", engine__count=count)
        assert await chart.replicas() == int(count)


async def test_a_rollback_after_a_scale(chart: Chart) -> None:
    """Helm 3 sets the number of that revision. Helm 4 stops at the workers until it has `--force-conflicts`."""
    await chart.run("install", engine__count="1")
    await chart.run("upgrade", engine__count="1", endpoint__settings__max_waiting="10")
    await chart.scale(3)
    if (await chart.helm("version", "--short")).startswith("v3"):
        await chart.helm("rollback", chart.name)
    else:
        with pytest.raises(Failed, match=r"conflict with .*\.spec\.replicas"):
            await chart.helm("rollback", chart.name)
        assert await chart.replicas() == 3
        await chart.helm("rollback", chart.name, "1", "--force-conflicts")
    assert await chart.replicas() == 1
    await chart.run("upgrade", engine__count="1", endpoint__settings__max_waiting="10")
    assert await chart.replicas() == 1


async def test_an_upgrade_that_is_refused_makes_no_revision(chart: Chart) -> None:
    """So a rollback without a number leaves the revision that is deployed for the one before it."""

    async def now() -> tuple[int, object]:
        said = json.loads(await chart.helm("status", chart.name, "--output", "json"))
        return said["version"], said["config"].get("endpoint")

    await chart.run("install")
    await chart.run("upgrade", endpoint__settings__max_waiting="10")
    with pytest.raises(Failed, match="engine"):
        await chart.run("upgrade", engine__cuont="2")
    assert await now() == (2, {"settings": {"max_waiting": 10}})
    await chart.helm("rollback", chart.name)
    assert await now() == (3, None)
    await chart.helm("rollback", chart.name, "2")
    assert await now() == (4, {"settings": {"max_waiting": 10}})


async def test_the_number_of_an_autoscaler_stays(chart: Chart) -> None:
    await chart.run("install", engine__count="2")
    await chart.run("upgrade", engine__autoscale__enabled="true")
    assert await chart.replicas() == 2
    patch = json.dumps([{"op": "replace", "path": "/spec/replicas", "value": 3}])  # as the schedulers do it
    words = ("--subresource=scale", "--type=json", f"--patch={patch}")
    await chart.cluster.kubectl("patch", "statefulset", chart.worker, *words)
    await chart.run("upgrade", engine__count="null", endpoint__settings__max_waiting="10")
    assert await chart.replicas() == 3
    with pytest.raises(Failed, match="has scaled it to 3 pods; before the values ask for 2"):
        await chart.run("upgrade", engine__count="2")


async def test_a_variable_of_somebody_replaces_the_chart_s(chart: Chart) -> None:
    """Helm 4 said "duplicate entries for key"."""
    await chart.run("install", pod__env='[{"name":"ORCA_HOST","value":"::"}]')
    (container,) = (await chart.cluster.get("statefulset", chart.worker))["spec"]["template"]["spec"]["containers"]
    assert [entry["value"] for entry in container["env"] if entry["name"] == "ORCA_HOST"] == ["::"]


@pytest.mark.long
async def test_random_values_are_taken_or_refused(cluster: Cluster) -> None:
    """The values files of tests/helm/test_odd_values.py, by the API server itself."""
    seen: set[str] = set()
    for first in range(0, FILES, BATCH):
        objects = []
        for seed in range(first, first + BATCH):
            name, values = a_values_file(random.Random(seed))
            try:
                release = render(values, name)
            except HelmError:
                continue
            for thing in release.objects:
                text = json.dumps(thing, sort_keys=True)
                # A pod is admitted only with its account, and has what the templates of the others have.
                if text not in seen and thing["kind"] != "Pod" and not thing["apiVersion"].startswith(FOREIGN):
                    objects.append(thing)
                seen.add(text)
        given = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        await cluster.kubectl("create", "--dry-run=server", "--validate=strict", "--filename", "-", given=given)
