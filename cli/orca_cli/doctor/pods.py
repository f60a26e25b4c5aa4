"""The pods: which are not Ready, and which were restarted, with the reason that Kubernetes knows."""

from collections.abc import Mapping, Sequence

from .finding import Finding, fault, listing, ok, warning
from .objects import (
    Object,
    at,
    by_component,
    component_of,
    condition,
    containers,
    is_ready,
    name_of,
    ordinal,
    pod_template,
    replicas,
)
from .snapshot import Snapshot, Unknown

LONGEST = 200  # characters of a message of Kubernetes
PULLS = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")


def known(snapshot: Snapshot) -> tuple[Object, ...]:
    assert not isinstance(snapshot.pods, Unknown)
    return snapshot.pods


def ready(snapshot: Snapshot) -> list[Finding]:
    """Every pod that is wanted is there and Ready; the others are grouped by their reason.

    Left out are workers that make no whole engine, which are not Ready by design: `engines.spare` names them.
    """
    assert not isinstance(snapshot.warnings, Unknown)
    findings, fine = [], []
    inside = () if isinstance(snapshot.inside, Unknown) else snapshot.inside
    told = {seen.pod: seen.unready for seen in inside}
    found = by_component(known(snapshot))
    release = snapshot.release
    for component, workload in release.workloads().items():
        wanted, pods = replicas(workload), found.get(component, [])
        if component == "worker":
            wanted -= wanted % release.pods_per_engine
            pods = [pod for pod in pods if ordinal(pod) < wanted]
        reasons: dict[str, list[Object]] = {}
        for pod in pods:
            if not is_ready(pod):
                why = reason(pod, snapshot.warnings, told.get(name_of(pod), ""), snapshot.last_words)
                reasons.setdefault(why, []).append(pod)
        for why, unready in reasons.items():
            names = [name_of(pod) for pod in unready]
            advice = f"look at `kubectl describe pod {names[0]}` and its logs"
            level = warning if at(unready[0], "metadata", "deletionTimestamp") else fault
            findings.append(level("pods", f"{listing(names)} not Ready: {why}", advice))
        if replicas(workload) == 0:
            said = f"{name_of(workload)} is scaled to 0 pods"
            findings.append(fault("pods", said, f"`kubectl scale` it to 1 or more: there is no {component}"))
        if len(pods) < wanted:
            why = absent(name_of(workload), snapshot.warnings)
            said = f"{name_of(workload)} has {len(pods)} of {wanted} pods{why}"
            kind = str(workload["kind"]).lower()
            findings.append(fault("pods", said, f"look at `kubectl describe {kind} {name_of(workload)}`"))
        fine.append(f"{component} {sum(map(is_ready, pods))}/{wanted}")
    return findings or [ok("pods", f"all Ready: {', '.join(fine)}")]


def reason(pod: Object, warnings: Sequence[Object], told: str, last_words: Mapping[str, str]) -> str:
    """Returns why a pod is not Ready: its containers' reasons, or else its service's, or else its last warning."""
    if at(pod, "metadata", "deletionTimestamp"):
        return "it is being deleted"
    for status in container_statuses(pod):
        waiting = at(status, "state", "waiting") or {}
        if waiting.get("reason") in PULLS:
            return f"an image cannot be fetched ({waiting['reason']}); see `pulls`"
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            before = ended(at(status, "lastState", "terminated"))
            said = last_words.get(f"{name_of(pod)} {status.get('name')}") or waiting.get("message", "")
            return shortened(f"{status.get('name')} is in {waiting['reason']}{before}: {said}")
        if (at(status, "state", "terminated", "exitCode") or 0) != 0:
            return f"{status.get('name')} ended{ended(at(status, 'state', 'terminated'))}"
    unplaced = condition(pod, "PodScheduled")
    if unplaced.get("status") == "False":
        return shortened(f"{unplaced.get('reason', 'not scheduled')}: {unplaced.get('message', '')}")
    if told:
        return shortened(told)
    begun = any(at(status, "state", "running") for status in container_statuses(pod))
    otherwise = condition(pod, "Ready").get("message", "") if begun else "its containers are being created"
    return shortened(last_warning(name_of(pod), warnings) or otherwise or f"it is {at(pod, 'status', 'phase')}")


def container_statuses(pod: Object) -> list[Object]:
    status = at(pod, "status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def ended(state: Object | None) -> str:
    """Describes how a container's process ended, as in ` (OOMKilled, exit status 137)`."""
    return f" ({state.get('reason', 'ended')}, exit status {state.get('exitCode')})" if state else ""


def last_warning(name: str, warnings: Sequence[Object]) -> str:
    said = [event for event in warnings if at(event, "involvedObject", "name") == name]
    return f"{said[-1].get('reason')}: {said[-1].get('message', '')}" if said else ""


def absent(name: str, warnings: Sequence[Object]) -> str:
    """Returns why a workload makes no pods: quotas and admission say so at it or at its ReplicaSet."""
    said = [
        event
        for event in warnings
        if at(event, "involvedObject", "kind") in ("StatefulSet", "ReplicaSet", "Deployment")
        and str(at(event, "involvedObject", "name")).startswith(name)
    ]
    return shortened(f": {said[-1].get('message', '')}") if said else ""


def shortened(text: str, longest: int = LONGEST) -> str:
    line = " ".join(text.split()).removesuffix(":")
    return line if len(line) <= longest else f"{line[: longest - 2]}.."


def restarts(snapshot: Snapshot) -> list[Finding]:
    """No container was started again; a clean installation has none that was."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for pod in known(snapshot):
        for status in container_statuses(pod):
            if status.get("restartCount"):
                container = str(status.get("name"))
                said = snapshot.last_words.get(f"{name_of(pod)} {container}", "")
                why = shortened(f"{ended(at(status, 'lastState', 'terminated'))}: {said}")
                key = container, why, advice(status, component_of(pod))
                found.setdefault(key, []).append(f"{name_of(pod)} ({status['restartCount']})")
    return [
        warning("restarts", f"{container} was restarted in {listing(pods)}{' ' if why else ''}{why}", todo)
        for (container, why, todo), pods in found.items()
    ] or [ok("restarts", "none")]


def advice(status: Object, component: str) -> str:
    if at(status, "lastState", "terminated", "reason") == "OOMKilled":
        block = "worker.memory" if component == "worker" else f"{component}.resources.limits.memory"
        return f"give it more memory: {block}"
    return "look at `kubectl logs --previous POD`"


def limits(snapshot: Snapshot) -> list[Finding]:
    """No pod has a limit of CPU that its template does not have: a LimitRange's default is put into the pod alone."""
    templates = {name: cpu_limits(pod_template(thing)) for name, thing in snapshot.release.workloads().items()}
    found: dict[tuple[str, str], list[str]] = {}
    for pod in known(snapshot):
        declared = templates.get(component_of(pod), {})
        for container, limit in cpu_limits(pod).items():
            if container in declared and limit is not None and declared[container] is None:
                found.setdefault((container, limit), []).append(name_of(pod))
    advice = (
        "give the namespace's LimitRange no default of CPU, or set resources.limits.cpu yourself, and replace the pods"
    )
    return [
        warning(
            "limits",
            f"a limit of {limit} CPU was put into {container} of {listing(pods)}: "
            "a throttled process misses heartbeats",
            advice,
        )
        for (container, limit), pods in found.items()
    ] or [ok("limits", "no limit of CPU was put into a pod")]


def cpu_limits(pod: Object) -> dict[str, str | None]:
    """The limit of CPU of each container that stays; None: it has none."""
    return {
        str(container.get("name")): None if limit is None else str(limit)
        for container in containers(pod)
        for limit in [at(container, "resources", "limits", "cpu")]
    }
