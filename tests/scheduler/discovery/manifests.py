"""Manifests of StatefulSets and pods, as an API server gives them."""

from typing import Any

SET_UID = "uid-of-the-set"
CREATED, GOING = "2026-01-01T00:00:00Z", "2999-01-01T00:00:00Z"
OLD, NEW = "orca-worker-old", "orca-worker-new"


def statefulset(replicas: int, revision: str = OLD, uid: str = SET_UID) -> dict[str, Any]:
    return {
        "metadata": {"name": "orca-worker", "namespace": "orca", "uid": uid, "generation": 1},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "orca"}}},
        "status": {"observedGeneration": 1, "updateRevision": revision},
    }


def pod(ordinal: int, revision: str = OLD, *, ready: bool = True, life: int = 1, **status: Any) -> dict[str, Any]:
    """The pod of an ordinal in one of its lives; other parts of its status as they are given."""
    return {
        "metadata": {
            "name": f"orca-worker-{ordinal}",
            "namespace": "orca",
            "uid": f"uid-{ordinal}-{life}",
            "labels": {"app": "orca", "controller-revision-hash": revision},
            "ownerReferences": [{"uid": SET_UID, "kind": "StatefulSet", "name": "orca-worker"}],
        },
        "status": {
            "phase": "Running",
            "podIP": f"10.0.{life}.{ordinal}",
            "conditions": [{"type": "Ready", "status": str(ready)}],
            **status,
        },
    }


def leaving(manifest: dict[str, Any]) -> dict[str, Any]:
    """The same pod while it is being deleted."""
    return {**manifest, "metadata": {**manifest["metadata"], "deletionTimestamp": GOING}}
