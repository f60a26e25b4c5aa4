"""Services and NetworkPolicies lead to the pods that they mean."""

from .finding import Finding, fault, ok, warning
from .objects import Object, Release, at, component_of, containers, matches, name_of, pod_template
from .snapshot import Snapshot

POD_NAME = "statefulset.kubernetes.io/pod-name"


def services(snapshot: Snapshot) -> list[Finding]:
    """Every Service selects pods of the release and names ports that they have; the workers' tells all addresses."""
    findings = []
    release = snapshot.release
    found = {name_of(service): service for service in release.of_kind("Service")}
    for name, service in found.items():
        chosen = selected(release, at(service, "spec", "selector"))
        if not chosen:
            findings.append(fault("services", f"{name} selects no pod", "compare its selector with the pods' labels"))
        named = {
            key
            for workload in chosen
            for container in containers(pod_template(workload))
            for entry in container.get("ports") or []
            for key in (str(entry.get("name")), str(entry.get("containerPort")))
        }
        for port in at(service, "spec", "ports") or []:
            target = str(port.get("targetPort", port.get("port")))
            if chosen and target not in named:
                said = f"{name} leads to port {target}, which its pods do not have"
                findings.append(fault("services", said, "compare targetPort with the container's ports"))
    for workload in release.of_kind("StatefulSet"):
        service = found.get(str(at(workload, "spec", "serviceName")))
        if service is None:
            said = f"{name_of(workload)} names Service {at(workload, 'spec', 'serviceName')}, which is not there"
            findings.append(fault("services", said, "its pods have no names in DNS without it"))
        elif component_of(workload) == "worker" and not at(service, "spec", "publishNotReadyAddresses"):
            said = f"{name_of(service)} hides workers that are not Ready, and they must form to become Ready"
            findings.append(fault("services", said, "set publishNotReadyAddresses: true"))
    return findings or [ok("services", f"{len(found)} Services lead to their pods")]


def selected(release: Release, selector: Object | None) -> list[Object]:
    """The workloads of which a selector chooses pods, or one pod: each pod of a StatefulSet has its name as a label."""
    found = []
    for workload in release.workloads().values():
        labels = dict(at(pod_template(workload), "metadata", "labels") or {})
        pod = str((selector or {}).get(POD_NAME, ""))
        if workload.get("kind") == "StatefulSet" and pod.rpartition("-")[0] == name_of(workload):
            labels[POD_NAME] = pod
        if matches(selector, labels):
            found.append(workload)
    return found


def policies(snapshot: Snapshot) -> list[Finding]:
    """There is a NetworkPolicy for every workload: what is on the wire is not encrypted and asks for no key."""
    release = snapshot.release
    found = release.of_kind("NetworkPolicy")
    covered = {
        component_of(workload)
        for policy in found
        for workload in release.workloads().values()
        if covers(at(policy, "spec", "podSelector") or {}, at(pod_template(workload), "metadata", "labels") or {})
    }
    open_to_all = sorted(set(release.workloads()) - covered)
    if open_to_all:
        said = f"no NetworkPolicy covers {', '.join(open_to_all)}: every pod of the cluster reaches them"
        return [warning("policies", said, "set networkPolicy.enabled, and use a CNI that enforces policies")]
    return [
        ok("policies", f"{len(found)} policies cover all workloads; whether the CNI enforces them is not seen here")
    ]


def covers(selector: Object, labels: Object) -> bool:
    """Whether a policy's selector fits these labels. An empty selector fits every pod."""
    if any(not fits(expression, labels) for expression in selector.get("matchExpressions") or []):
        return False
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())


def fits(expression: Object, labels: Object) -> bool:
    value, values = labels.get(str(expression.get("key"))), expression.get("values") or []
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case _:
            return value is None
