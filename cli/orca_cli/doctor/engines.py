"""The engines: pods, ranks and GPUs fit together, and a rollout goes on."""

from orca_scheduler.discovery.engines import engines, spares, why_spare
from orca_scheduler.discovery.pods import WorkerPod, WorkerSet, worker_pod, worker_set
from orca_scheduler.discovery.rollout import progress
from orca_scheduler.discovery.rollout import rollout as rolled

from .finding import Finding, counted, fault, ok, unchecked, warning
from .nodes import devices
from .objects import Object, Release, at, condition, name_of, pod_template, quantity, replicas, service_container
from .pods import known
from .snapshot import Snapshot

ENOUGH_SHM = 2**30  # bytes of /dev/shm that NCCL is commonly given; containers have 64 MiB by default


def worker(release: Release) -> Object:
    return release.workload("worker") or {}


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
    gpus = sum(devices(worker(release)).values())
    findings = []
    if pod < 1 or tp % pod:
        said = f"the scheduler's ORCA_GPUS_PER_POD is {pod}, which does not divide ORCA_TP, {tp}"
        findings.append(fault("ranks", said, "choose a divisor of tp for engine.gpusPerPod"))
    if started != pod:
        said = f"the scheduler expects {pod} ranks in a pod, ORCA_RANKS of the worker is {started}"
        findings.append(fault("ranks", said, "set both by engine.gpusPerPod: no engine forms like this"))
    if not cpu and gpus != started:
        said = f"a worker pod runs {started} ranks and asks for {gpus:g} GPUs"
        findings.append(fault("ranks", said, "ask for one GPU for each rank, or set device: cpu"))
    if cpu and gpus:
        said = f"a worker pod asks for {gpus:g} GPUs and computes on the CPU"
        findings.append(warning("ranks", said, "set device: cuda, or ask for none"))
    return findings or [ok("ranks", f"{started} a pod, on {'the CPU' if cpu else f'{gpus:g} GPUs'}")]


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
    together = release.number("worker", "ORCA_RANKS", 1) > 1 and bool(devices(worker(release)))
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


def formed(snapshot: Snapshot) -> tuple[WorkerSet, list[WorkerPod]] | None:
    """The workers as the scheduler's discovery sees them; None when there is no StatefulSet that the cluster knows."""
    workload = worker(snapshot.release)
    if not at(workload, "metadata", "uid"):
        return None
    workers = worker_set(workload)
    read = [worker_pod(pod, workers) for pod in known(snapshot)]
    return workers, [pod for pod in read if pod is not None]


def spare(snapshot: Snapshot) -> list[Finding]:
    """Worker pods that make no whole engine."""
    seen = formed(snapshot)
    if seen is None:
        return [unchecked("spare", "the cluster has no StatefulSet of the workers")]
    workers, pods = seen
    size = snapshot.release.pods_per_engine
    idle = spares(workers, pods, size)
    if idle:
        return [warning("spare", why_spare(pod, workers, size), "or scale down") for pod in idle]
    return [ok("spare", "every worker pod belongs to an engine")]


def rollout(snapshot: Snapshot) -> list[Finding]:
    """All pods are of the current revision, or a rollout is on its way to it."""
    release = snapshot.release
    findings = []
    for component in ("endpoint", "scheduler"):
        workload = release.workload(component) or {}
        progressing = condition(workload, "Progressing")
        if progressing.get("status") == "False":
            advice = f"look at its pods; `helm rollback {release.name}` leads back"
            findings.append(fault("rollout", f"{name_of(workload)}: {progressing.get('message')}", advice))
    seen = formed(snapshot)
    if seen is None:
        return findings
    workers, pods = seen
    if not workers.revision:
        findings.append(warning("rollout", "Kubernetes has not looked at the workers' last change", "look again soon"))
        return findings
    state = rolled(workers, engines(workers, pods, release.pods_per_engine))
    if said := progress(state):
        if state.awaited is not None and state.awaited.failing:
            advice = f"read the logs of its pods; `helm rollback {release.name}` leads back"
            findings.append(fault("rollout", said, advice))
        else:
            findings.append(warning("rollout", said, "wait: the scheduler replaces one engine after the other"))
    return findings or [ok("rollout", "all workers are of the current revision")]
