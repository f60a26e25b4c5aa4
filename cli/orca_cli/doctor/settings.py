"""The services in their pods: known settings, the same pool and build, probes and grace periods that fit."""

from orca_common.settings import unknown_variables

from .finding import Finding, fault, listing, ok, warning
from .objects import Object, at, image_tag, pod_template, service_container
from .snapshot import Snapshot

OURS = ("endpoint", "scheduler", "worker")
DRAIN = 30.0  # default of drain_seconds
GRACE = 30  # default of terminationGracePeriodSeconds
SHORTEST = 120  # seconds for a start below which weights may not be loaded


def names(snapshot: Snapshot) -> list[Finding]:
    """Every ORCA_* variable of a pod is a setting. A misspelt one stops the start, any other has no effect."""
    findings = []
    for component in OURS:
        strangers, misspelt = unknown_variables(snapshot.release.settings(component))
        if misspelt:
            said = f"the {component} does not start: {listing(misspelt)}"
            findings.append(fault("settings", said, "correct the name; `orca config` lists all"))
        if strangers:
            said = f"{listing(strangers)} of the {component}: there is no such setting"
            findings.append(warning("settings", said, "remove it; `orca config` lists all"))
        workload = snapshot.release.workload(component) or {}
        if at(pod_template(workload), "spec", "enableServiceLinks") is not False:
            said = f"Kubernetes adds ORCA_* variables for Services to the {component}'s pods, and they may not start"
            findings.append(fault("settings", said, "set enableServiceLinks: false"))
    return findings or [ok("settings", "all names are known")]


def agree(snapshot: Snapshot) -> list[Finding]:
    """Endpoint and scheduler use the same pool."""
    findings = []
    release = snapshot.release
    for name in ("ORCA_REDIS_URL", "ORCA_REDIS_REPLICAS", "ORCA_POOL"):
        values = {component: release.settings(component).get(name) for component in ("endpoint", "scheduler")}
        if values["endpoint"] != values["scheduler"]:
            said = f"{name} of endpoint and scheduler differ: no request would be served"
            findings.append(fault("same", said, "give both the same"))
    if "ORCA_REDIS_URL" not in release.settings("endpoint"):
        said = "ORCA_REDIS_URL is not set: the endpoint looks for Redis in its own pod"
        findings.append(fault("same", said, "set it for endpoint and scheduler"))
    return findings or [ok("same", "endpoint and scheduler use the same pool")]


def tags(snapshot: Snapshot) -> list[Finding]:
    """Endpoint, scheduler and worker come from one build: their images have the same tag."""
    found = {}
    for component in OURS:
        if workload := snapshot.release.workload(component):
            found[component] = image_tag(str(service_container(pod_template(workload)).get("image", "")))
    if len(set(found.values())) > 1:
        said = ", ".join(f"{component} {tag}" for component, tag in found.items())
        advice = "give all the tag of one build, by image.tag; a mixture is for the time of an upgrade"
        return [warning("tags", f"the images differ: {said}", advice)]
    tag = next(iter(found.values()), "")
    if tag == "latest":
        advice = "give image.tag, so that an upgrade is a change and a rollback leads back"
        return [warning("tags", "the images have the tag latest, or none", advice)]
    return [ok("tags", f"all images are {tag}")]


def grace(snapshot: Snapshot) -> list[Finding]:
    """Kubernetes waits longer than a service drains."""
    findings, fine = [], []
    for component in OURS:
        workload = snapshot.release.workload(component)
        if workload is None:
            continue
        template = pod_template(workload)
        given = at(template, "spec", "terminationGracePeriodSeconds")
        patience = GRACE if given is None else int(given)
        drain = snapshot.release.real(component, "ORCA_DRAIN_SECONDS", DRAIN)
        sleep = float(at(service_container(template), "lifecycle", "preStop", "sleep", "seconds") or 0)
        if patience < drain + sleep:
            said = f"{component}: killed after {patience} s, but an orderly end may take {drain + sleep:g} s"
            advice = f"set terminationGracePeriodSeconds above {drain + sleep:g}, or a shorter drain"
            findings.append(fault("grace", said, advice))
        fine.append(f"{component} {drain + sleep:g}/{patience} s")
    return findings or [ok("grace", f"drain within the grace period: {', '.join(fine)}")]


def probes(snapshot: Snapshot) -> list[Finding]:
    """Each service is probed on its status port, and a worker has the time to load weights."""
    findings = []
    for component in OURS:
        workload = snapshot.release.workload(component)
        if workload is None:
            continue
        container = service_container(pod_template(workload))
        port = snapshot.release.settings(component).get("ORCA_STATUS_PORT")
        for kind, path in (("readinessProbe", "/readyz"), ("livenessProbe", "/livez")):
            findings += of_probe(component, container, kind, path, port)
        startup = container.get("startupProbe")
        if component == "worker":
            given = seconds(startup) if startup else seconds(container.get("livenessProbe") or {})
            if given < SHORTEST:
                said = f"a worker that has not started after {given:g} s is killed"
                advice = f"give it a startupProbe of {SHORTEST} s or more, as long as the weights load"
                findings.append(warning("probes", said, advice))
        if at(startup, "httpGet", "path") == "/readyz":
            said = f"the {component}'s startup waits for /readyz, so pods that wait for others are killed"
            findings.append(fault("probes", said, "let it ask /livez"))
    return findings or [ok("probes", "all services are probed on their status ports")]


def of_probe(component: str, container: Object, kind: str, path: str, port: str | None) -> list[Finding]:
    probe = container.get(kind)
    if not probe:
        level = fault if kind == "readinessProbe" else warning
        return [level("probes", f"the {component} has no {kind}", f"let it ask {path} of the status port")]
    asked = at(probe, "httpGet", "path")
    if asked != path:
        advice = f"let it ask {path} of the status port"
        if kind == "livenessProbe" and asked == "/readyz":
            said = f"the {component} is killed when others are away: its livenessProbe asks /readyz"
            return [fault("probes", said, advice)]
        return [warning("probes", f"the {component}'s {kind} does not ask {path}", advice)]
    target = at(probe, "httpGet", "port")
    ports = {str(entry.get("name")): str(entry.get("containerPort")) for entry in container.get("ports") or []}
    if port is not None and ports.get(str(target), str(target)) != port:
        said = f"the {component}'s {kind} asks port {target}, ORCA_STATUS_PORT is {port}"
        return [fault("probes", said, "give both the same port")]
    return []


def seconds(probe: Object) -> float:
    """Returns the seconds for which a probe may fail before the container is killed."""
    failures, period = probe.get("failureThreshold", 3), probe.get("periodSeconds", 10)
    return float(probe.get("initialDelaySeconds", 0) + failures * period)
