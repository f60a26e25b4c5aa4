"""A healthy installation as `orca doctor` sees it: the rendered chart, and what a cluster would tell about it."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

from orca_cli.doctor.access import needed
from orca_cli.doctor.network import DNS, questions
from orca_cli.doctor.objects import Release, at, component_of, name_of, pod_template, replicas
from orca_cli.doctor.snapshot import Attempt, Inside, Redis, Snapshot

CHART = Path(__file__).parents[2] / "helm"
GPUS = {"model": {"path": "/models/m"}, "engine": {"tp": 2, "pp": 2, "count": 2}, "image": {"tag": "1.2.3"}}
REVISION = "orca-worker-7d4f"
REDIS = Redis(
    "orca-endpoint-0", "redis", "7.0.15", "master", 0, "yes", "always", "ok", 0, "noeviction", 2**20, False, 1e-4, 0
)


def chart_text(values: dict[str, Any], name: str = "orca") -> str:
    """What `helm template` prints, without the pods of `helm test`."""
    found = Chart.load(str(CHART)).render(values, name=name, namespace="serving")
    return "\n---\n".join(text for path, text in found.items() if path.endswith(".yaml"))


def pod(workload: Any, number: int) -> dict[str, Any]:
    """A pod of a workload that runs and is Ready."""
    template = copy.deepcopy(dict(pod_template(workload)))
    name = f"{name_of(workload)}-{number}"
    owner = {"uid": f"uid of {name_of(workload)}", "kind": workload["kind"], "name": name_of(workload)}
    labels = at(template, "metadata", "labels") | {"controller-revision-hash": REVISION}
    started = [
        {
            "name": container["name"],
            "ready": True,
            "restartCount": 0,
            "state": {"running": {}},
            "image": container["image"],
        }
        for container in at(template, "spec", "containers")
    ]
    return {
        "kind": "Pod",
        "metadata": {"name": name, "uid": f"uid of {name}", "labels": labels, "ownerReferences": [owner]},
        "spec": template["spec"] | {"nodeName": "node-a"},
        "status": {
            "phase": "Running",
            "podIP": f"10.0.0.{number + 1}",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": started,
        },
    }


def settle(objects: list[dict[str, Any]]) -> None:
    """Adds to rendered objects what Kubernetes adds."""
    for thing in objects:
        thing["metadata"] |= {"uid": f"uid of {name_of(thing)}", "generation": 1}
        if thing["kind"] == "StatefulSet":
            thing["status"] = {"observedGeneration": 1, "updateRevision": REVISION}


def healthy(values: dict[str, Any] | None = None) -> Snapshot:
    """An installation in which nothing is wrong. It is shared: `edited` changes a copy."""
    return observed(json.dumps(values or GPUS))


@cache
def observed(values: str) -> Snapshot:
    documents = [document for document in yaml.safe_load_all(chart_text(json.loads(values))) if document]
    settle(documents)
    found = Release("orca", "serving", tuple(documents))
    pods = tuple(pod(thing, number) for thing in found.workloads().values() for number in range(replicas(thing)))
    tried = questions(found, pods)
    inside = [
        Inside(
            name_of(one),
            component_of(one),
            0.01,
            0.02,
            tuple(
                Attempt(
                    question.arrow,
                    name_of(one),
                    question.target,
                    "resolved" if question.arrow == DNS else "open",
                    0.001,
                )
                for question in tried[name_of(one)]
            ),
            "",
            "GGUF, F32 and Q8_0" if component_of(one) == "worker" else "",
        )
        for one in pods
        if name_of(one) in tried
    ]
    return Snapshot(
        release=found,
        allowed=dict.fromkeys(needed(), True),
        pods=pods,
        inside=tuple(inside),
        redis=REDIS,
    )


def edited(snapshot: Snapshot, edit: Callable[[dict[str, Any]], None], of: Callable[[Any], bool]) -> Snapshot:
    """The snapshot with `edit` made on a copy of each object and pod that `of` chooses."""
    release = replace(snapshot.release, objects=tuple(copy.deepcopy(snapshot.release.objects)))
    pods = copy.deepcopy(snapshot.pods)
    assert isinstance(pods, tuple)
    chosen = [thing for thing in (*release.objects, *pods) if of(thing)]
    assert chosen, "nothing was chosen to be edited"
    for thing in chosen:
        assert isinstance(thing, dict)
        edit(thing)
    return replace(snapshot, release=release, pods=pods)
