"""A StatefulSet and its pods, as far as discovery cares: read from their manifests, without I/O."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Manifest = Mapping[str, Any]  # a Kubernetes object as its JSON

IN_ENGINE = "orca.serving/InEngine"  # type of the pod condition that says whether a pod belongs to an engine
MODEL = "orca.serving/model"  # annotation of a pod: another value is another model
REFUSED = "orca.serving/Refused"  # type of the one that says that its engine's ranks refuse to form, and why
PODS_PER_ENGINE = "orca.serving/pods-per-engine"  # annotation of the StatefulSet, made by the chart
SHAPE = "orca.serving/shape"  # the same: tp, pp and gpus_per_pod of the schedulers that belong to it
ROLLOUT = "orca.serving/rollout"  # annotation of the StatefulSet, as the schedulers write it; others begin with it
BEGINNING = "orca.serving/engines-beginning"  # the same: how many engines begin requests; see `Size`
STARTING = {"ContainerCreating", "PodInitializing"}  # reasons of a container that waits for nothing unusual
NOT_READY = "is not ready"
LONGEST_TELLING = 300  # characters of what a container or the cluster says: more would bury the sentence


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """The StatefulSet of the workers."""

    name: str
    uid: str
    replicas: int
    revision: str  # that pods should have; "" while the controller has not seen the newest specification
    selector: str  # of its pods' labels, as the API's list takes it
    generation: int  # of its specification
    annotations: Manifest
    model: str = ""  # that its newest pods have; "" where nobody tells


@dataclass(frozen=True, slots=True)
class Condition:
    """A pod condition without its times."""

    status: str  # "True" or "False"
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class WorkerPod:
    """One pod of the StatefulSet."""

    name: str
    ordinal: int
    uid: str
    ip: str  # "" as long as it has none, and as soon as it is no use any more
    leaving: bool  # it is being deleted
    revision: str
    ready: bool
    trouble: str = ""  # why it is not ready, to follow its name; "" when it is
    failing: bool = False  # the trouble does not end by mere waiting
    since: float | None = None  # when it came, became ready or unready, or has to go, in seconds since 1970
    in_engine: Condition | None = None  # the condition IN_ENGINE, as somebody has set it
    model: str = ""  # "" where nobody tells
    refused: Condition | None = None  # the condition REFUSED, the same


def worker_set(manifest: Manifest) -> WorkerSet:
    """Reads the manifest of a StatefulSet."""
    metadata, spec, status = manifest["metadata"], manifest["spec"], manifest.get("status", {})
    current = status.get("observedGeneration", 0) >= metadata.get("generation", 0)
    return WorkerSet(
        name=metadata["name"],
        uid=metadata["uid"],
        replicas=spec.get("replicas", 1),
        revision=status.get("updateRevision", "") if current else "",
        selector=_selector(spec["selector"]),
        model=_model(spec.get("template", {}).get("metadata", {})),
        generation=metadata.get("generation", 0),
        annotations=metadata.get("annotations", {}),
    )


def worker_pod(manifest: Manifest, owner: WorkerSet) -> WorkerPod | None:
    """Reads the manifest of a pod; None when it is no pod of this StatefulSet."""
    metadata, status = manifest["metadata"], manifest.get("status", {})
    stem, _, number = metadata["name"].rpartition("-")
    owned = any(reference["uid"] == owner.uid for reference in metadata.get("ownerReferences", ()))
    if not owned or stem != owner.name or not number.isdecimal():
        return None
    leaving = "deletionTimestamp" in metadata
    lives = not leaving and status.get("phase") in ("Pending", "Running")
    conditions: dict[str, Manifest] = {condition["type"]: condition for condition in status.get("conditions", ())}
    turned = conditions.get("Ready", {}).get("lastTransitionTime")
    moments = (metadata.get("creationTimestamp"), turned, metadata.get("deletionTimestamp"))
    ip = status.get("podIP", "") if lives else ""
    ready = ip != "" and conditions.get("Ready", {}).get("status") == "True"
    refused = _condition(conditions.get(REFUSED))
    trouble, failing = ("", False) if ready else _trouble(status, conditions, leaving)
    if trouble == NOT_READY and refused is not None and refused.status == "True":
        trouble, failing = f"cannot form: {refused.message}", True
    return WorkerPod(
        name=metadata["name"],
        ordinal=int(number),
        uid=metadata["uid"],
        ip=ip,
        leaving=leaving,
        revision=metadata.get("labels", {}).get("controller-revision-hash", ""),
        ready=ready,
        trouble=trouble,
        failing=failing,
        since=max((datetime.fromisoformat(moment).timestamp() for moment in moments if moment), default=None),
        in_engine=_condition(conditions.get(IN_ENGINE)),
        model=_model(metadata),
        refused=refused,
    )


def _model(metadata: Manifest) -> str:
    return (metadata.get("annotations") or {}).get(MODEL, "")


def _condition(told: Manifest | None) -> Condition | None:
    return None if told is None else Condition(told["status"], told.get("reason", ""), told.get("message", ""))


def _selector(selector: Manifest) -> str:
    terms = [f"{key}={value}" for key, value in selector.get("matchLabels", {}).items()]
    for expression in selector.get("matchExpressions", ()):
        key, values = expression["key"], f"({','.join(expression.get('values', ()))})"
        match expression["operator"]:
            case "In":
                terms.append(f"{key} in {values}")
            case "NotIn":
                terms.append(f"{key} notin {values}")
            case "Exists":
                terms.append(key)
            case _:  # DoesNotExist
                terms.append(f"!{key}")
    return ",".join(sorted(terms))


def _trouble(status: Manifest, conditions: Mapping[str, Manifest], leaving: bool) -> tuple[str, bool]:
    """Why a pod is not ready, and whether waiting alone will not help."""
    if leaving:
        return "is being deleted", False
    if status.get("phase") in ("Failed", "Succeeded"):
        return f"has ended{_because(status)}", True
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"is not scheduled{_because(scheduled, said='message')}", True
    init: Sequence[Manifest] = status.get("initContainerStatuses", ())
    for container in (*init, *status.get("containerStatuses", ())):
        told = _container(container, "init container" if container in init else "container")
        if told is not None:
            return told
    if not status.get("podIP"):
        return "has no address yet", False
    return NOT_READY, False


def _container(container: Manifest, kind: str) -> tuple[str, bool] | None:
    """Says what keeps a container from being ready, and whether waiting will not help; None: it is ready."""
    if container.get("ready"):
        return None
    name, state = container["name"], container.get("state", {})
    waiting, running = state.get("waiting"), state.get("running")
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated")
    if ended is not None and ended.get("exitCode") != 0:
        # A container that crashes again and again is by turns ended, waiting and running: one sentence for all of it.
        return f"cannot start: its {kind} {name} ended with {ended.get('exitCode')}{_because(ended)}", True
    if waiting is not None and waiting.get("reason", "") not in ("", *STARTING):
        return f"cannot start: its {kind} {name} waits{_because(waiting)}", True
    if waiting is not None:
        return f"waits for its {kind} {name} to start", False
    if running is not None and kind == "init container":
        return f"waits for its {kind} {name} to end", False
    return None


def _plain(log: str) -> str:
    """A message without lines of JSON, as in the end of a log. Where it has no other, the event of the last one."""
    lines = log.splitlines()
    plain = [line for line in lines if not line.lstrip().startswith("{")]
    if any(line.strip() for line in plain):
        return "\n".join(plain)
    told = ""
    for line in lines:
        with suppress(ValueError):
            said = json.loads(line)
            told = ": ".join(str(said[name]) for name in ("event", "why") if said.get(name))
    return told or log


def _because(state: Manifest, said: str = "reason") -> str:
    """The reason and the message of a state, for the end of a sentence. `said` "message": without the reason."""
    reason = state.get("reason", "") if said == "reason" else ""
    message = " ".join(_plain(state.get("message", "")).split())
    if len(message) > LONGEST_TELLING:
        message = f"..{message[-LONGEST_TELLING:]}"  # of a log the end says why
    told = ": ".join(part for part in (reason, message) if part)
    return f": {told}" if told else ""
