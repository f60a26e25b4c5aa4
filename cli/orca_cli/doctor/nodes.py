"""The nodes: whether they are ready, have room, have drivers that fit, and agree about the time."""

from collections.abc import Mapping, Sequence

from .finding import Finding, counted, fault, listing, ok, unchecked, warning
from .objects import (
    Object,
    Resources,
    amounts,
    at,
    component_of,
    condition,
    is_ready,
    name_of,
    pod_template,
    replicas,
    requests,
)
from .snapshot import Inside, Snapshot, Unknown

PRESSURES = ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")
SKEW = 1.0  # seconds that two clocks may differ
DELAY = 3.0  # seconds that the call may have been under way, which makes the node look behind
STALE = 40.0  # seconds after which a node whose lease was not renewed is taken for dead: Kubernetes' own default
ENOUGH = 1e-6  # requests are sums of floats


def known(snapshot: Snapshot) -> tuple[Object, ...]:
    assert not isinstance(snapshot.nodes, Unknown)
    return snapshot.nodes


def ready(snapshot: Snapshot) -> list[Finding]:
    """Nodes are Ready, not cordoned, and not short of memory, disk or processes."""
    nodes = known(snapshot)
    away = [name_of(node) for node in nodes if not is_ready(node)]
    cordoned = [name_of(node) for node in nodes if at(node, "spec", "unschedulable")]
    short = [
        f"{name_of(node)} ({kind})"
        for node in nodes
        for kind in PRESSURES
        if condition(node, kind).get("status") == "True"
    ]
    findings = []
    if len(away) == len(nodes):
        return [fault("nodes", "no node is Ready", "look at `kubectl describe nodes`")]
    if away:
        findings.append(warning("nodes", f"not Ready: {listing(away)}", "look at `kubectl describe node NAME`"))
    if cordoned:
        findings.append(
            warning("nodes", f"cordoned: {listing(cordoned)}", "`kubectl uncordon NAME` when it may be used")
        )
    if short:
        advice = "free some; Kubernetes evicts pods from such a node"
        findings.append(warning("nodes", f"under pressure: {listing(short)}", advice))
    return findings or [ok("nodes", f"{len(nodes)} Ready")]


def room(snapshot: Snapshot) -> list[Finding]:
    """Each pod that has no node yet finds one: GPUs, CPU and memory that are asked for against what is free.

    Node selectors and taints are looked at, affinity and spread are not.
    """
    assert not isinstance(snapshot.pods, Unknown)
    assert not isinstance(snapshot.placed, Unknown)
    findings = []
    nodes = [node for node in known(snapshot) if usable(node)]
    free = {name_of(node): unused(node, snapshot.placed) for node in nodes}
    workloads = snapshot.release.workloads()
    for component, workload in sorted(workloads.items(), key=lambda item: -sum(devices(item[1]).values())):
        template = pod_template(workload)
        wanted = requests(template)
        fitting = [node for node in nodes if welcomes(node, template)]
        if not any(holds(allocatable(node), wanted) for node in fitting):
            said = f"no node can hold a pod of {name_of(workload)}, which asks for {spelled(wanted)}"
            findings.append(fault("room", f"{said}; the largest node has {largest_node(fitting, wanted)}", ADVICE))
            continue
        standing = [pod for pod in snapshot.pods if component_of(pod) == component and at(pod, "spec", "nodeName")]
        waiting = max(0, replicas(workload) - len(standing))
        homeless = waiting - place(waiting, wanted, [name_of(node) for node in fitting], free)
        if homeless:
            said = f"{homeless} of {replicas(workload)} pods of {name_of(workload)} find no node"
            most = largest_block(fitting, free, wanted)
            findings.append(
                fault("room", f"{said}: each asks for {spelled(wanted)}, most free on a node: {most}", ADVICE)
            )
    return findings or [ok("room", summary(snapshot, nodes, free))]


ADVICE = "add nodes, free some, or change engine.gpusPerPod, resources, nodeSelector or tolerations"


def summary(snapshot: Snapshot, nodes: Sequence[Object], free: Mapping[str, Resources]) -> str:
    worker = snapshot.release.workload("worker")
    for device, count in devices(worker or {}).items():
        total = sum(allocatable(node).get(device, 0.0) for node in nodes)
        left = sum(node.get(device, 0.0) for node in free.values())
        block = max((node.get(device, 0.0) for node in free.values()), default=0.0)
        return (
            f"every pod has a node or finds one; workers ask for {count:g} {device} each, "
            f"{left:g} of {total:g} are free, at most {block:g} on one node"
        )
    return "every pod has a node or finds one; the workers ask for no GPU"


def devices(workload: Object) -> Resources:
    """The GPUs that a pod asks for, by their resource's name, as in nvidia.com/gpu."""
    wanted = requests(pod_template(workload))
    return {name: amount for name, amount in wanted.items() if "/" in name and amount}


def usable(node: Object) -> bool:
    return is_ready(node) and not at(node, "spec", "unschedulable")


def allocatable(node: Object) -> Resources:
    return amounts(at(node, "status", "allocatable"))


def unused(node: Object, placed: Sequence[Object]) -> Resources:
    """Returns what a node has left for more pods."""
    left = allocatable(node)
    for pod in placed:
        if at(pod, "spec", "nodeName") == name_of(node):
            left = {name: amount - requests(pod).get(name, 0.0) for name, amount in left.items()}
    return left


def holds(left: Resources, wanted: Resources) -> bool:
    return all(left.get(name, 0.0) + ENOUGH >= amount for name, amount in wanted.items())


def place(count: int, wanted: Resources, nodes: Sequence[str], free: dict[str, Resources]) -> int:
    """Puts up to `count` pods on nodes, each on the first that holds it, and takes their share from `free`."""
    placed = 0
    for name in nodes:
        while placed < count and holds(free[name], wanted):
            free[name] = {kind: amount - wanted.get(kind, 0.0) for kind, amount in free[name].items()}
            placed += 1
    return placed


def welcomes(node: Object, template: Object) -> bool:
    """Whether a pod's node selector and tolerations admit this node."""
    labels = at(node, "metadata", "labels") or {}
    selector = at(template, "spec", "nodeSelector") or {}
    if any(labels.get(key) != value for key, value in selector.items()):
        return False
    tolerations = at(template, "spec", "tolerations") or []
    taints = [taint for taint in at(node, "spec", "taints") or [] if taint.get("effect") != "PreferNoSchedule"]
    return all(any(tolerates(toleration, taint) for toleration in tolerations) for taint in taints)


def tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return toleration.get("key") == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or "")


def largest_node(nodes: Sequence[Object], wanted: Resources) -> str:
    whole = {name_of(node): allocatable(node) for node in nodes}
    return largest_block(nodes, whole, wanted)


def largest_block(nodes: Sequence[Object], free: Mapping[str, Resources], wanted: Resources) -> str:
    """For each resource that is asked for, the most that one node has."""
    if not nodes:
        return "nothing: no node has the labels or tolerated taints"
    names = [name_of(node) for node in nodes]
    return spelled({kind: max(0.0, *(free[name].get(kind, 0.0) for name in names)) for kind in wanted})


def spelled(resources: Resources) -> str:
    """Resources in a sentence: `2 nvidia.com/gpu, 0.5 cpu, 2.0 GiB memory`."""
    parts = []
    for name, amount in sorted(resources.items(), key=lambda item: ("/" not in item[0], item[0])):
        if name in ("memory", "ephemeral-storage"):
            parts.append(f"{amount / 2**30:.1f} GiB {name}")
        elif name != "pods":
            parts.append(f"{amount:g} {name}")
    return ", ".join(parts) or "nothing"


def drivers(snapshot: Snapshot) -> list[Finding]:
    """The nodes' drivers run the CUDA of the worker's image, and the GPUs are alike.

    Read from the labels of NVIDIA's GPU feature discovery, where that is installed.
    """
    wanted = devices(snapshot.release.workload("worker") or {})
    if not wanted:
        return [ok("drivers", "the workers ask for no GPU")]
    nodes = [node for node in known(snapshot) if any(allocatable(node).get(name) for name in wanted)]
    if not nodes:
        advice = "install the device plugin, and look at its logs"
        return [fault("drivers", f"no node offers {listing(list(wanted))}", advice)]
    labels = {name_of(node): at(node, "metadata", "labels") or {} for node in nodes}
    kinds = {found["nvidia.com/gpu.product"] for found in labels.values() if "nvidia.com/gpu.product" in found}
    limits = {name: supported(found) for name, found in labels.items()}
    told = {name: limit for name, limit in limits.items() if limit is not None}
    if not told:
        why = "no node has the labels of NVIDIA's GPU feature discovery"
        return [unchecked("drivers", why, "install it to have drivers checked")]
    findings = []
    cuda = built_for(snapshot)
    if cuda is not None:
        old = [f"{name} ({limit})" for name, limit in told.items() if limit < cuda]
        if old:
            said = f"the worker's image needs CUDA {cuda}, the driver of {listing(old)} supports less"
            findings.append(fault("drivers", said, "update the driver, or keep workers off by a nodeSelector"))
    if len(kinds) > 1:
        said = f"the GPUs differ: {listing(sorted(kinds))}"
        advice = "an engine is as fast as its slowest rank; choose one by worker.pod.nodeSelector"
        findings.append(warning("drivers", said, advice))
    image = f"the image needs {cuda}" if cuda is not None else "what the image needs is not known"
    return findings or [ok("drivers", f"drivers support CUDA {min(told.values())} or more, {image}")]


def supported(labels: Mapping[str, str]) -> int | None:
    """The major number of the newest CUDA that a node's driver supports. The labels have an old and a new name."""
    for name in ("nvidia.com/cuda.runtime-version.major", "nvidia.com/cuda.runtime.major"):
        if str(labels.get(name, "")).isdigit():
            return int(labels[name])
    return None


def built_for(snapshot: Snapshot) -> int | None:
    """The major number of the CUDA that the workers' torch is built for."""
    inside: tuple[Inside, ...] = () if isinstance(snapshot.inside, Unknown) else snapshot.inside
    majors = [seen.cuda.partition(".")[0] for seen in inside if seen.component == "worker"]
    return max((int(major) for major in majors if major.isdigit()), default=None)


def clocks(snapshot: Snapshot) -> list[Finding]:
    """The nodes' clocks agree with the API server's, and the nodes are alive.

    A node writes the moment of each renewal of its lease, the API server the second at which it came.
    """
    assert not isinstance(snapshot.renewals, Unknown)
    findings = []
    for renewal in snapshot.renewals:
        ahead = renewal.by_node - renewal.by_server  # within the second that the server cut off
        if ahead > 1 + SKEW or ahead < -SKEW - DELAY:
            apart = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the API server's"
            findings.append(
                warning("clocks", f"the clock of {renewal.node} is {apart}", "let all nodes keep time by NTP")
            )
        silent = renewal.now - renewal.by_server
        if silent > STALE:
            said = f"{renewal.node} has not renewed its lease for {silent:.0f} s"
            findings.append(warning("clocks", said, "look at the node: its kubelet may be down"))
    return findings or [ok("clocks", f"{counted(len(snapshot.renewals), 'node')}, in time with the API server")]
