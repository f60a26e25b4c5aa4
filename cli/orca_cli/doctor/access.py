"""Checks the scheduler's rights in the cluster: all that its discovery needs, and nothing else."""

from collections.abc import Iterable, Mapping

from orca_scheduler.discovery.kubernetes import RULES

from .finding import Finding, fault, listing, ok, warning
from .objects import Object, Release, at, name_of, pod_template
from .snapshot import Right, Snapshot, Unknown


def rights(rules: Iterable[Mapping[str, object]]) -> set[Right]:
    """The rights that rules of RBAC give."""
    found = set()
    for rule in rules:
        for verb in at(rule, "verbs") or []:
            for group in at(rule, "apiGroups") or [""]:
                for resource in at(rule, "resources") or []:
                    found.add(Right(verb, group, resource))
    return found


def needed() -> set[Right]:
    """The rights that the scheduler's discovery needs at the API server."""
    return {Right(verb, group, resource) for group, resource, verbs in RULES for verb in verbs}


def account(release: Release) -> str:
    """The name of the scheduler's ServiceAccount."""
    return str(at(pod_template(release.workload("scheduler") or {}), "spec", "serviceAccountName") or "default")


def bound(release: Release) -> set[Right]:
    """The rights that the release's RoleBindings give the scheduler's ServiceAccount."""
    roles = {name_of(role): role for role in release.of_kind("Role", "ClusterRole")}
    found: set[Right] = set()
    for binding in release.of_kind("RoleBinding", "ClusterRoleBinding"):
        names = [subject.get("name") for subject in at(binding, "subjects") or []]
        if account(release) in names:
            found |= rights(at(roles.get(str(at(binding, "roleRef", "name")), {}), "rules") or [])
    return found


def granted(snapshot: Snapshot) -> list[Finding]:
    """The release's Role gives exactly what discovery uses, and only the scheduler gets a token."""
    release = snapshot.release
    findings = []
    missing, more = sorted(needed() - bound(release)), sorted(bound(release) - needed())
    if missing:
        said = f"the scheduler's Role lacks: {listing([str(right) for right in missing], 8)}"
        findings.append(fault("granted", said, "install the chart's Role and RoleBinding"))
    if more:
        said = f"the scheduler's Role also gives: {listing([str(right) for right in more], 8)}"
        findings.append(warning("granted", said, "take away what discovery does not use"))
    for component in ("endpoint", "worker", "redis"):
        workload: Object | None = release.workload(component)
        if workload and at(pod_template(workload), "spec", "automountServiceAccountToken") is not False:
            said = f"the {component}'s pods hold a token of the API server that they do not need"
            findings.append(warning("granted", said, "set automountServiceAccountToken: false"))
    return findings or [ok("granted", "the scheduler gets what discovery uses, the others get no token")]


def allowed(snapshot: Snapshot) -> list[Finding]:
    """The API server would let the scheduler do what its discovery does."""
    assert not isinstance(snapshot.allowed, Unknown)
    refused = sorted(right for right, may in snapshot.allowed.items() if not may)
    who = account(snapshot.release)
    if refused:
        said = f"ServiceAccount {who} may not: {listing([str(right) for right in refused], 8)}"
        return [fault("allowed", said, "bind the chart's Role to it; the scheduler finds no workers without it")]
    return [ok("allowed", f"ServiceAccount {who} may do all {len(snapshot.allowed)} things that discovery does")]
