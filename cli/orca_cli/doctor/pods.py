"""The pods: why a service says that it is not ready, and limits of CPU that the namespace has added."""

from .finding import Finding, fault, listing, ok, warning
from .objects import (
    Object,
    at,
    by_component,
    component_of,
    containers,
    is_ready,
    name_of,
    ordinal,
    pod_template,
    replicas,
)
from .snapshot import Snapshot, Unknown


def known(snapshot: Snapshot) -> tuple[Object, ...]:
    assert not isinstance(snapshot.pods, Unknown)
    return snapshot.pods


def ready(snapshot: Snapshot) -> list[Finding]:
    """Every pod is there and ready; the others are grouped by the words of their own /readyz.

    Left out are workers that make no whole engine, which are not ready by design: the check `engines` counts them.
    """
    release, found = snapshot.release, by_component(known(snapshot))
    inside = () if isinstance(snapshot.inside, Unknown) else snapshot.inside
    told = {seen.pod: seen.unready for seen in inside}
    findings, fine = [], []
    for component, workload in release.workloads().items():
        wanted, pods, name = replicas(workload), found.get(component, []), name_of(workload)
        if component == "worker":
            wanted -= wanted % release.pods_per_engine
            pods = [pod for pod in pods if ordinal(pod) < wanted]
        reasons: dict[str, list[str]] = {}
        leaving = list[str]()
        for pod in pods:
            if is_ready(pod):
                continue
            if at(pod, "metadata", "deletionTimestamp"):
                leaving.append(name_of(pod))
            else:
                reasons.setdefault(told.get(name_of(pod), ""), []).append(name_of(pod))
        if leaving:
            advice = "look again when the rollout is over"
            findings.append(warning("pods", f"{listing(leaving)} not Ready: it is being deleted", advice))
        for why, unready in reasons.items():
            said = f"{listing(unready)} not Ready: {why or 'no service in it says why'}"
            findings.append(fault("pods", said, f"look at `kubectl describe pod {unready[0]}` and its logs"))
        if replicas(workload) == 0:
            said = f"{name} is scaled to 0 pods"
            findings.append(fault("pods", said, f"`kubectl scale` it to 1 or more: there is no {component}"))
        if len(pods) < wanted:
            advice = f"look at `kubectl describe {str(workload['kind']).lower()} {name}`"
            findings.append(fault("pods", f"{name} has {len(pods)} of {wanted} pods", advice))
        fine.append(f"{component} {len(pods)}/{wanted}")
    return findings or [ok("pods", f"all Ready: {', '.join(fine)}")]


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
