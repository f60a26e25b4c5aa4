"""The engines: pods, ranks, GPUs, weights and the workers' disruption budget fit together."""

from math import ceil

from .finding import Finding, counted, fault, ok, unchecked, warning
from .objects import (
    Object,
    Release,
    amounts,
    at,
    containers,
    matches,
    name_of,
    pod_template,
    quantity,
    replicas,
    service_container,
)
from .snapshot import Snapshot, Unknown

ENOUGH_SHM = 2**30  # bytes of /dev/shm that NCCL is commonly given; containers have 64 MiB by default


def worker(release: Release) -> Object:
    return release.workload("worker") or {}


def gpus(workload: Object) -> float:
    """GPUs that a pod of a workload asks for; a limit without a request counts as one."""
    asked = [
        amounts(at(container, "resources", "limits")) | amounts(at(container, "resources", "requests"))
        for container in containers(pod_template(workload))
    ]
    return sum(amount for resources in asked for name, amount in resources.items() if "/" in name)


def whole(snapshot: Snapshot) -> list[Finding]:
    """The worker's pods make whole engines."""
    release = snapshot.release
    if not worker(release):
        return [fault("engines", "the release has no workers", "install the chart whole")]
    engine, pods = release.pods_per_engine, replicas(worker(release))
    said = f"{counted(pods, 'pod')}, {engine} for an engine"
    if at(worker(release), "spec", "replicas") is None and engine > 1:  # as rendered with engines: null
        advice = f"scale {name_of(worker(release))} to {engine} pods after the installation"
        return [warning("engines", f"no number of pods is given: Kubernetes begins with {said}", advice)]
    if pods < engine:
        return [fault("engines", f"{said}: there is none", f"scale {name_of(worker(release))} to {engine} pods")]
    if pods % engine:
        more = pods - pods % engine + engine
        advice = f"scale {name_of(worker(release))} to {pods - pods % engine} or {more} pods"
        return [warning("engines", f"{said}: {pods % engine} make none", advice)]
    return [ok("engines", f"{said}: {counted(pods // engine, 'engine')}")]


def ranks(snapshot: Snapshot) -> list[Finding]:
    """The scheduler's tp, pp and gpus_per_pod, the worker's ranks and its GPUs say the same."""
    release = snapshot.release
    tp, pod = release.number("scheduler", "ORCA_TP", 1), release.ranks_per_pod
    started = release.number("worker", "ORCA_RANKS", 1)
    cpu = release.settings("worker").get("ORCA_DEVICE") == "cpu"
    asked = gpus(worker(release))
    findings = []
    if pod < 1 or tp % pod:
        said = f"the scheduler's ORCA_GPUS_PER_POD is {pod}, which does not divide ORCA_TP, {tp}"
        findings.append(fault("ranks", said, "choose a divisor of tp for engine.gpusPerPod"))
    if started != pod:
        said = f"the scheduler expects {pod} ranks in a pod, ORCA_RANKS of the worker is {started}"
        findings.append(fault("ranks", said, "set both by engine.gpusPerPod: no engine forms like this"))
    if not cpu and asked != started:
        said = f"a worker pod runs {started} ranks and asks for {asked:g} GPUs"
        findings.append(fault("ranks", said, "ask for one GPU for each rank, or set device: cpu"))
    if cpu and asked:
        said = f"a worker pod asks for {asked:g} GPUs and computes on the CPU"
        findings.append(warning("ranks", said, "set device: cuda, or ask for none"))
    return findings or [ok("ranks", f"{started} a pod, on {'the CPU' if cpu else f'{asked:g} GPUs'}")]


def shared_memory(snapshot: Snapshot) -> list[Finding]:
    """Ranks of one pod that use GPUs have enough of /dev/shm for NCCL."""
    release = snapshot.release
    template = pod_template(worker(release))
    container = service_container(template)
    mounts = {
        entry.get("name") for entry in container.get("volumeMounts") or [] if entry.get("mountPath") == "/dev/shm"
    }
    volumes = [volume for volume in at(template, "spec", "volumes") or [] if volume.get("name") in mounts]
    memory = [at(volume, "emptyDir") for volume in volumes if at(volume, "emptyDir", "medium") == "Memory"]
    together = release.number("worker", "ORCA_RANKS", 1) > 1 and gpus(worker(release)) > 0
    if not memory:
        if not together:
            return [ok("shm", "no two ranks of a pod use GPUs, so 64 MiB suffice")]
        advice = "mount an emptyDir with medium Memory there: worker.memory.shm"
        return [fault("shm", "/dev/shm of the workers has 64 MiB: NCCL fails with less than it asks for", advice)]
    limit = at(container, "resources", "limits", "memory")
    size = quantity(memory[0]["sizeLimit"]) if "sizeLimit" in memory[0] else None
    if size is None:
        return [warning("shm", "/dev/shm of the workers has no bound", "give it a sizeLimit: it counts as memory")]
    said = f"/dev/shm of the workers has {size / 2**20:.0f} MiB"
    if limit is not None and size >= quantity(limit):
        advice = "raise the limit: what lies in /dev/shm counts as memory of the pod"
        return [fault("shm", f"{said}, not less than the limit of memory", advice)]
    if together and size < ENOUGH_SHM:
        return [warning("shm", said, "give NCCL 1 GiB or more: worker.memory.shm")]
    return [ok("shm", said)]


def discovery(snapshot: Snapshot) -> list[Finding]:
    """The scheduler looks for its workers where they are."""
    release = snapshot.release
    settings = release.settings("scheduler")
    named, static = settings.get("ORCA_WORKER_STATEFULSET"), settings.get("ORCA_WORKERS")
    if static is not None:
        return [warning("discovery", "the scheduler has a fixed list, ORCA_WORKERS", "name the StatefulSet instead")]
    findings = []
    if named != name_of(worker(release)):
        said = f"the scheduler looks for StatefulSet {named}, the workers are {name_of(worker(release))}"
        findings.append(fault("discovery", said, "set ORCA_WORKER_STATEFULSET to the name of the workers"))
    expected, port = release.number("scheduler", "ORCA_WORKER_PORT", 50050), release.number("worker", "ORCA_PORT", 0)
    if port != expected:
        said = f"the scheduler calls supervisors on port {expected}, they listen on {port or 'a free one'}"
        findings.append(fault("discovery", said, "set ORCA_PORT of the worker and ORCA_WORKER_PORT to the same"))
    host = release.settings("worker").get("ORCA_HOST", "127.0.0.1")
    if host == "127.0.0.1":
        findings.append(fault("discovery", "the workers listen on 127.0.0.1 only", "set their ORCA_HOST to 0.0.0.0"))
    if "ORCA_ADVERTISE_HOST" not in release.settings("worker"):
        said = "the workers do not know their address"
        findings.append(fault("discovery", said, "set their ORCA_ADVERTISE_HOST to status.podIP"))
    return findings or [ok("discovery", f"the scheduler follows StatefulSet {named}")]


def updates(snapshot: Snapshot) -> list[Finding]:
    """The workers' StatefulSet leaves updates to the scheduler, and starts all pods at once."""
    spec = at(worker(snapshot.release), "spec") or {}
    findings = []
    if at(spec, "updateStrategy", "type") != "OnDelete":
        said = "Kubernetes itself replaces the workers one by one at an upgrade"
        findings.append(fault("updates", said, "set updateStrategy OnDelete: the scheduler replaces engine by engine"))
    if spec.get("podManagementPolicy") != "Parallel":
        said = "the workers start one after the other, each when the one before is Ready"
        advice = "set podManagementPolicy Parallel: a pod is Ready only when its engine has formed"
        findings.append(fault("updates", said, advice))
    return findings or [ok("updates", "the scheduler replaces engine by engine; pods start together")]


def weights(snapshot: Snapshot) -> list[Finding]:
    """Names the format of the weights in the files, as a worker's pod reads it, and how ranks keep them."""
    assert not isinstance(snapshot.inside, Unknown)
    settings = snapshot.release.settings("worker")
    kept = settings.get("ORCA_QUANTIZE")
    types = f"types by dtype {settings.get('ORCA_DTYPE') or 'auto'}"
    said = f"ranks keep {f'the matrices in {kept}, the rest in' if kept else 'them in'} {types}"
    if (kv := settings.get("ORCA_KV_DTYPE")) is not None:
        said += f", keys and values in {kv}"
    layouts = {seen.weights for seen in snapshot.inside if seen.weights}
    if not layouts:
        return [unchecked("weights", f"{said}; no worker's pod could say how the files have them")]
    if len(layouts) > 1:
        advice = "give all workers one checkpoint: ranks of different weights form no engine"
        return [fault("weights", f"the workers have different files: {', '.join(sorted(layouts))}", advice)]
    return [ok("weights", f"in the files: {layouts.pop()}; {said}")]


def budgets(snapshot: Snapshot) -> list[Finding]:
    """The workers' PodDisruptionBudget lets the pods of one engine leave: without one of them the others serve nothing,
    and where none may leave `kubectl drain` waits for ever."""
    release = snapshot.release
    engine, pods = release.pods_per_engine, replicas(worker(release))
    labels = at(pod_template(worker(release)), "metadata", "labels")
    found = release.of_kind("PodDisruptionBudget")
    findings = []
    for budget in (one for one in found if matches(at(one, "spec", "selector", "matchLabels"), labels)):
        allowed = disruptions(budget, pods)
        if pods and allowed < 1:
            said = f"{name_of(budget)} allows no disruption of {pods} pods"
            findings.append(fault("budgets", said, "allow at least one: `kubectl drain` would wait for ever"))
        elif allowed != engine:
            said = f"{name_of(budget)} allows {allowed} disruptions, an engine has {engine} pods"
            findings.append(warning("budgets", said, "set maxUnavailable to the pods of one engine"))
        if at(budget, "spec", "unhealthyPodEvictionPolicy") != "AlwaysAllow":
            said = f"{name_of(budget)} keeps pods that are not Ready from leaving"
            findings.append(warning("budgets", said, "set unhealthyPodEvictionPolicy to AlwaysAllow"))
    return findings or [ok("budgets", "the pods of one engine may leave together")]


def disruptions(budget: Object, pods: int) -> int:
    """Returns how many of `pods` healthy pods a budget lets go. Percentages are rounded up, as Kubernetes does."""
    most, least = at(budget, "spec", "maxUnavailable"), at(budget, "spec", "minAvailable")
    return share(most, pods) if most is not None else pods - share(least or 0, pods)


def share(amount: int | str, pods: int) -> int:
    text = str(amount)
    return ceil(int(text.removesuffix("%")) * pods / 100) if text.endswith("%") else int(text)
