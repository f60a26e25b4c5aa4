"""PodDisruptionBudgets: they protect pods, and never block the drain of a node."""

from math import ceil

from .finding import Finding, counted, fault, listing, ok, warning
from .objects import Object, at, matches, name_of, pod_template, replicas
from .snapshot import Snapshot

ADVICE = "allow at least one disruption: `kubectl drain` would wait for ever"


def declared(snapshot: Snapshot) -> list[Finding]:
    """Judges the budgets as they would be with all pods healthy."""
    findings = []
    budgets = snapshot.release.of_kind("PodDisruptionBudget")
    workloads = snapshot.release.workloads()
    for budget in budgets:
        selector = at(budget, "spec", "selector", "matchLabels")
        held = [
            component
            for component, workload in workloads.items()
            if matches(selector, at(pod_template(workload), "metadata", "labels"))
        ]
        pods = sum(replicas(workloads[component]) for component in held)
        allowed = disruptions(budget, pods)
        if not held:
            advice = "compare its selector with the pods' labels"
            findings.append(warning("budgets", f"{name_of(budget)} selects no pod", advice))
        elif pods and allowed < 1:
            findings.append(fault("budgets", f"{name_of(budget)} allows no disruption of {pods} pods", ADVICE))
        elif "worker" in held:
            findings += of_workers(budget, allowed, snapshot.release.pods_per_engine)
    return findings or [ok("budgets", f"{counted(len(budgets), 'budget')}, each lets pods leave")]


def of_workers(budget: Object, allowed: int, engine: int) -> list[Finding]:
    """An engine without one of its pods serves nothing, so its other pods may leave as well."""
    findings = []
    if allowed != engine:
        said = f"{name_of(budget)} allows {allowed} disruptions, an engine has {engine} pods"
        findings.append(warning("budgets", said, "set maxUnavailable to the pods of one engine"))
    if at(budget, "spec", "unhealthyPodEvictionPolicy") != "AlwaysAllow":
        said = f"{name_of(budget)} keeps pods that are not Ready from leaving"
        findings.append(warning("budgets", said, "set unhealthyPodEvictionPolicy to AlwaysAllow"))
    return findings


def disruptions(budget: Object, pods: int) -> int:
    """Returns how many of `pods` healthy pods a budget lets go. Percentages are rounded up, as Kubernetes does."""
    most, least = at(budget, "spec", "maxUnavailable"), at(budget, "spec", "minAvailable")
    return share(most, pods) if most is not None else pods - share(least or 0, pods)


def share(amount: int | str, pods: int) -> int:
    text = str(amount)
    return ceil(int(text.removesuffix("%")) * pods / 100) if text.endswith("%") else int(text)


def now(snapshot: Snapshot) -> list[Finding]:
    """Judges the budgets as they are at this moment."""
    budgets = [budget for budget in snapshot.release.of_kind("PodDisruptionBudget") if budget.get("status")]
    blocked, waiting = [], []
    for budget in budgets:
        status = budget["status"]
        if status.get("disruptionsAllowed", 0) == 0 and status.get("expectedPods", 0) > 0:
            healthy = status.get("currentHealthy", 0) >= status.get("expectedPods", 0)
            (blocked if healthy else waiting).append(name_of(budget))
    findings = []
    if blocked:
        said = f"no pod may leave, though all are healthy: {listing(blocked)}"
        findings.append(fault("drain", said, ADVICE))
    if waiting:
        said = f"no pod may leave until more are Ready: {listing(waiting)}"
        findings.append(warning("drain", said, "see `pods` for what they wait for"))
    return findings or [ok("drain", "a node can be drained now")]
