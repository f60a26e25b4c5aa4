"""Each check of `orca doctor` against an installation with that one fault, and against a healthy one."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
from cli.installation import GPUS, REDIS, edited, healthy

from orca_cli.doctor.engines import disruptions
from orca_cli.doctor.examine import CHECKS, examine
from orca_cli.doctor.finding import Finding, Level, as_json, counted, listing, report
from orca_cli.doctor.network import collector, is_named
from orca_cli.doctor.objects import Release, at, component_of, name_of, quantity
from orca_cli.doctor.snapshot import Attempt, Inside, Right, Snapshot, Unknown
from orca_cli.doctor.wiring import covers
from orca_common.errors import FailedPrecondition

Path = tuple[str | int, ...]


def found(snapshot: Snapshot, check: str) -> list[Finding]:
    return [finding for finding in examine(snapshot) if finding.check == check]


# -- the healthy installation


def test_a_healthy_installation_has_no_fault() -> None:
    findings = examine(healthy())
    assert {finding.check for finding in findings} == {check.name for check in CHECKS}
    bad = [finding for finding in findings if finding.level is not Level.OK]
    assert [finding.check for finding in bad] == ["outside"], bad
    assert bad[0].level is Level.UNCHECKED


def test_without_gpus() -> None:
    values = {"model": {"path": "/m"}, "engine": {"tp": 2, "pp": 2, "device": "cpu"}, "image": {"tag": "a"}}
    bad = [finding for finding in examine(healthy(values)) if finding.level is not Level.OK]
    assert [finding.check for finding in bad] == ["outside"], bad


def test_what_is_not_known_is_said_and_is_no_fault() -> None:
    snapshot = Snapshot(healthy().release)
    findings = examine(snapshot)
    assert {finding.check for finding in findings} == {check.name for check in CHECKS}
    assert not [finding for finding in findings if finding.level is Level.FAULT]
    unknown = [finding for finding in findings if finding.level is Level.UNCHECKED]
    assert {finding.found for finding in unknown} == {"no cluster was asked"}


def test_kinds_that_may_not_be_read() -> None:
    snapshot = healthy()
    unread = {"Role": "Role: 403, forbidden"}
    snapshot = replace(snapshot, release=replace(snapshot.release, unread=unread))
    assert found(snapshot, "granted") == [Finding("granted", Level.UNCHECKED, "Role: 403, forbidden")]


def test_no_release() -> None:
    snapshot = healthy()
    [finding] = examine(replace(snapshot, release=replace(snapshot.release, objects=())))
    assert finding.level is Level.FAULT
    assert "namespace serving holds no workload of a release orca" in finding.found
    unread = {"Service": "Service: 403", "StatefulSet": "StatefulSet: 403"}
    [finding] = examine(replace(snapshot, release=replace(snapshot.release, objects=(), unread=unread)))
    assert (finding.level, finding.found) == (Level.FAULT, "StatefulSet: 403")
    others = tuple(thing for thing in snapshot.release.objects if component_of(thing) != "worker")
    [finding] = found(replace(snapshot, release=replace(snapshot.release, objects=others)), "engines")
    assert (finding.level, finding.found) == (Level.FAULT, "the release has no workers")


# -- faults of the objects: one field of one object is other than the chart has it


@dataclass(frozen=True)
class Edit:
    """A change of a healthy installation, and what `orca doctor` is to say about it."""

    check: str
    says: str
    of: str  # kind and name, as in `StatefulSet orca-worker`
    path: Path
    value: Any = None  # None: the field is taken away
    level: Level = Level.FAULT

    def __str__(self) -> str:
        return f"{self.check}: {self.says}"


SPEC = ("spec", "template", "spec")
CONTAINER = (*SPEC, "containers", 0)
WORKER, SCHEDULER, ENDPOINT = "StatefulSet orca-worker", "Deployment orca-scheduler", "Deployment orca-endpoint"
REDIS_SET = "StatefulSet orca-redis"


def env(name: str) -> Path:
    return (*CONTAINER, "env", name)


EDITS = [
    Edit("engines", "3 pods, 2 for an engine: 1 make none", WORKER, ("spec", "replicas"), 3, Level.WARNING),
    Edit("engines", "1 pod, 2 for an engine: there is none", WORKER, ("spec", "replicas"), 1),
    Edit("engines", "Kubernetes begins with 1 pod, 2 for", WORKER, ("spec", "replicas"), None, Level.WARNING),
    Edit(
        "ranks", "the scheduler expects 2 ranks in a pod, ORCA_RANKS of the worker is 1", WORKER, env("ORCA_RANKS"), "1"
    ),
    Edit("ranks", "ORCA_GPUS_PER_POD is 3, which does not divide", SCHEDULER, env("ORCA_GPUS_PER_POD"), "3"),
    Edit(
        "ranks", "runs 2 ranks and asks for 1 GPUs", WORKER, (*CONTAINER, "resources", "requests", "nvidia.com/gpu"), 1
    ),
    Edit("ranks", "asks for 2 GPUs and computes on the CPU", WORKER, env("ORCA_DEVICE"), "cpu", Level.WARNING),
    Edit("shm", "has 64 MiB: NCCL fails", WORKER, (*CONTAINER, "volumeMounts"), []),
    Edit("discovery", "looks for StatefulSet other", SCHEDULER, env("ORCA_WORKER_STATEFULSET"), "other"),
    Edit("discovery", "on port 50050, they listen on 50051", WORKER, env("ORCA_PORT"), "50051"),
    Edit("discovery", "listen on 127.0.0.1 only", WORKER, env("ORCA_HOST")),
    Edit("discovery", "do not know their address", WORKER, env("ORCA_ADVERTISE_HOST")),
    Edit("discovery", "fixed list", SCHEDULER, env("ORCA_WORKERS"), "a:1", Level.WARNING),
    Edit("updates", "replaces the workers one by one", WORKER, ("spec", "updateStrategy", "type"), "RollingUpdate"),
    Edit("updates", "start one after the other", WORKER, ("spec", "podManagementPolicy")),
    Edit(
        "settings", "the scheduler does not start: ORCA_MAX_BATCH: there is no", SCHEDULER, env("ORCA_MAX_BATCH"), "3"
    ),
    Edit("settings", "ORCA_HOME of the worker: there is no", WORKER, env("ORCA_HOME"), "/opt", Level.WARNING),
    Edit("settings", "adds ORCA_* variables for Services to the worker", WORKER, (*SPEC, "enableServiceLinks")),
    Edit("same", "ORCA_REDIS_URL of endpoint and scheduler differ", SCHEDULER, env("ORCA_REDIS_URL"), "redis://b/0"),
    Edit("same", "ORCA_POOL of endpoint and scheduler differ", SCHEDULER, env("ORCA_POOL"), "other"),
    Edit("same", "ORCA_REDIS_REPLICAS of endpoint and", ENDPOINT, env("ORCA_REDIS_REPLICAS"), "1"),
    Edit("same", "looks for Redis in its own pod", ENDPOINT, env("ORCA_REDIS_URL")),
    Edit("grace", "worker: killed after 5 s", WORKER, (*SPEC, "terminationGracePeriodSeconds"), 5),
    Edit(
        "grace",
        "killed after 30 s, but an orderly end may take 35 s",
        ENDPOINT,
        (*SPEC, "terminationGracePeriodSeconds"),
    ),
    Edit("probes", "the endpoint has no readinessProbe", ENDPOINT, (*CONTAINER, "readinessProbe")),
    Edit("probes", "the worker has no livenessProbe", WORKER, (*CONTAINER, "livenessProbe"), None, Level.WARNING),
    Edit(
        "probes", "its livenessProbe asks /readyz", WORKER, (*CONTAINER, "livenessProbe", "httpGet", "path"), "/readyz"
    ),
    Edit("probes", "asks port 1, ORCA_STATUS_PORT is", WORKER, (*CONTAINER, "readinessProbe", "httpGet", "port"), 1),
    Edit(
        "probes",
        "not started after 10 s is killed",
        WORKER,
        (*CONTAINER, "startupProbe"),
        {"failureThreshold": 10, "periodSeconds": 1, "httpGet": {"path": "/livez"}},
        Level.WARNING,
    ),
    Edit("probes", "startup waits for /readyz", WORKER, (*CONTAINER, "startupProbe", "httpGet", "path"), "/readyz"),
    Edit("services", "orca-endpoint selects no pod", "Service orca-endpoint", ("spec", "selector", "a"), "b"),
    Edit(
        "services",
        "leads to port 1, which its pods do not have",
        "Service orca-endpoint",
        ("spec", "ports", 0, "targetPort"),
        1,
    ),
    Edit("services", "hides workers that are not Ready", "Service orca-worker", ("spec", "publishNotReadyAddresses")),
    Edit("services", "names Service nothing, which is not there", WORKER, ("spec", "serviceName"), "nothing"),
    Edit(
        "policies",
        "no NetworkPolicy covers redis",
        "NetworkPolicy orca-redis",
        ("spec", "podSelector", "matchLabels", "a"),
        "b",
        Level.WARNING,
    ),
    Edit("volume", "has no volume claim", REDIS_SET, ("spec", "volumeClaimTemplates")),
    Edit("volume", "started with appendonly no", REDIS_SET, (*CONTAINER, "args"), ["--appendonly", "no"]),
    Edit("volume", "started with appendfsync no", REDIS_SET, (*CONTAINER, "args"), ["--appendfsync", "no"]),
    Edit("tags", "endpoint 9", ENDPOINT, (*CONTAINER, "image"), "registry:5000/orca-endpoint:9", Level.WARNING),
    Edit(
        "granted",
        "lacks: create events, list statefulsets.apps",
        "Role orca-scheduler",
        ("rules",),
        [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "delete"]}],
    ),
    Edit(
        "granted",
        "also gives: get secrets",
        "Role orca-scheduler",
        ("rules", -1),
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]},
        Level.WARNING,
    ),
    Edit("granted", "lacks", "RoleBinding orca-scheduler", ("subjects",), []),
    Edit(
        "granted",
        "the worker's pods hold a token",
        WORKER,
        (*SPEC, "automountServiceAccountToken"),
        None,
        Level.WARNING,
    ),
    Edit("budgets", "allows no disruption of 4 pods", "PodDisruptionBudget orca-worker", ("spec", "maxUnavailable"), 0),
    Edit(
        "budgets",
        "allows 1 disruptions, an engine has 2",
        "PodDisruptionBudget orca-worker",
        ("spec", "maxUnavailable"),
        "25%",
        Level.WARNING,
    ),
    Edit(
        "budgets",
        "allows 4 disruptions, an engine has 2",
        "PodDisruptionBudget orca-worker",
        ("spec", "maxUnavailable"),
        None,
        Level.WARNING,
    ),
    Edit(
        "budgets",
        "keeps pods that are not Ready",
        "PodDisruptionBudget orca-worker",
        ("spec", "unhealthyPodEvictionPolicy"),
        None,
        Level.WARNING,
    ),
    Edit("pods", "orca-scheduler is scaled to 0 pods", SCHEDULER, ("spec", "replicas"), 0),
    Edit("pods", "orca-endpoint has 2 of 5 pods", ENDPOINT, ("spec", "replicas"), 5),
]


def put(thing: Any, path: Path, value: Any) -> None:
    """Sets what lies at a path, or takes it away. A name in a list of variables is looked up; -1 appends."""
    way: tuple[Any, ...] = path[:-1]
    last: Any = path[-1]
    for step in way:
        thing = thing.setdefault(step, {}) if isinstance(thing, dict) else thing[step]
    if isinstance(thing, list) and isinstance(last, str):
        thing[:] = [entry for entry in thing if entry["name"] != last]
        thing += [] if value is None else [{"name": last, "value": value}]
    elif isinstance(thing, list) and last == -1:
        thing.append(value)
    elif value is None and isinstance(thing, dict):
        thing.pop(last, None)
    else:
        thing[last] = value


@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_an_object_is_wrong(edit: Edit) -> None:
    kind, name = edit.of.split()
    wrong = edited(
        healthy(),
        lambda thing: put(thing, edit.path, edit.value),
        lambda thing: thing["kind"] == kind and name_of(thing) == name,
    )
    said = found(wrong, edit.check)
    assert any(finding.level is edit.level and edit.says in finding.found for finding in said), said
    assert all(finding.advice for finding in said if finding.level in (Level.FAULT, Level.WARNING))


def test_percentages_of_a_budget_are_rounded_up() -> None:
    """As Kubernetes does it: 30 % of four pods are the two of an engine."""
    rounded = edited(
        healthy(),
        lambda thing: put(thing, ("spec", "maxUnavailable"), "30%"),
        lambda thing: thing["kind"] == "PodDisruptionBudget" and name_of(thing) == "orca-worker",
    )
    assert {finding.level for finding in found(rounded, "budgets")} == {Level.OK}


def test_what_a_budget_of_least_pods_lets_go() -> None:
    given = [{"minAvailable": 1}, {"minAvailable": "50%"}, {"minAvailable": "40%"}, {}, {"maxUnavailable": "20%"}]
    assert [disruptions({"spec": spec}, 6) for spec in given] == [5, 3, 3, 6, 2]


@pytest.mark.parametrize(
    ("size", "limit", "level", "says"),
    [
        (None, None, Level.WARNING, "/dev/shm of the workers has no bound"),
        ("512Mi", None, Level.WARNING, "/dev/shm of the workers has 512 MiB"),
        ("1Gi", None, Level.OK, "/dev/shm of the workers has 1024 MiB"),
        ("2Gi", "2Gi", Level.FAULT, "/dev/shm of the workers has 2048 MiB, not less than the limit of memory"),
        ("2Gi", "3Gi", Level.OK, "/dev/shm of the workers has 2048 MiB"),
    ],
)
def test_the_memory_that_ranks_of_a_pod_share(size: str | None, limit: str | None, level: Level, says: str) -> None:
    def share(workers: dict[str, Any]) -> None:
        spec = workers["spec"]["template"]["spec"]
        (volume,) = [one["emptyDir"] for one in spec["volumes"] if one.get("emptyDir", {}).get("medium") == "Memory"]
        volume.pop("sizeLimit", None)
        volume |= {} if size is None else {"sizeLimit": size}
        limits = spec["containers"][0].setdefault("resources", {}).setdefault("limits", {})
        limits.pop("memory", None)
        limits |= {} if limit is None else {"memory": limit}

    snapshot = edited(healthy(), share, lambda thing: f"{thing['kind']} {name_of(thing)}" == WORKER)
    [finding] = found(snapshot, "shm")
    assert (finding.level, finding.found) == (level, says)


def test_which_pods_a_policy_covers() -> None:
    def of(operator: str, *values: str) -> dict[str, Any]:
        return {"matchExpressions": [{"key": "a", "operator": operator, "values": [*values]}]}

    labels: list[dict[str, str]] = [{"a": "b"}, {"a": "c"}, {}]
    covered = {
        "In": [True, False, False],
        "NotIn": [False, True, True],
        "Exists": [True, True, False],
        "DoesNotExist": [False, False, True],
    }
    for operator, wanted in covered.items():
        assert [covers(of(operator, "b"), one) for one in labels] == wanted, operator
    assert [covers({"matchLabels": {"a": "b"}}, one) for one in labels] == [True, False, False]
    assert [covers({}, one) for one in labels] == [True] * 3


def test_settings_come_from_a_config_map_too() -> None:
    """A container's own variables go before them; where a number is wrong the default counts."""
    source = [{"configMapRef": {"name": "shared"}}, {"secretRef": {"name": "hidden"}}]
    variables = [{"name": "ORCA_TP", "value": "4"}, {"name": "ORCA_KEY", "valueFrom": {}}]
    container = {"name": "scheduler", "envFrom": source, "env": variables}
    labels = {"labels": {"app.kubernetes.io/component": "scheduler"}}
    spec = {"template": {"metadata": labels, "spec": {"containers": [{"name": "proxy"}, container]}}}
    workload = {"kind": "Deployment", "metadata": labels, "spec": spec}
    data = {"ORCA_TP": "2", "ORCA_PP": "3", "ORCA_GPUS_PER_POD": "many"}
    release = Release("orca", "a", (workload, {"kind": "ConfigMap", "metadata": {"name": "shared"}, "data": data}))
    assert release.settings("scheduler") == data | {"ORCA_TP": "4", "ORCA_KEY": None}
    assert (release.number("scheduler", "ORCA_GPUS_PER_POD", 7), release.ranks_per_pod) == (7, 4)
    assert release.pods_per_engine == 3
    assert release.settings("worker") == {}


# -- faults of the pods


def test_a_pod_says_itself_why_it_is_not_ready() -> None:
    def unready(pod: dict[str, Any]) -> None:
        pod["status"]["conditions"] = [{"type": "Ready", "status": "False", "message": "not yet"}]

    snapshot = edited(healthy(), unready, lambda thing: thing["kind"] == "Pod" and name_of(thing) == "orca-worker-1")
    [finding] = found(snapshot, "pods")
    assert (finding.level, finding.found) == (Level.FAULT, "orca-worker-1 not Ready: no service in it says why")
    assert "kubectl describe pod orca-worker-1" in finding.advice
    seen = Inside("orca-worker-1", "worker", 0, 0, (), unready="rank 0: not a member yet")
    [finding] = found(replace(snapshot, inside=(seen,)), "pods")
    assert finding.found == "orca-worker-1 not Ready: rank 0: not a member yet"


def test_a_pod_that_is_being_deleted_is_a_warning() -> None:
    """An ordinary rollout has some."""

    def leave(pod: dict[str, Any]) -> None:
        pod["metadata"]["deletionTimestamp"] = "2026-11-28T00:00:00Z"
        pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]

    snapshot = edited(healthy(), leave, lambda thing: thing["kind"] == "Pod" and name_of(thing) == "orca-worker-1")
    [finding] = found(snapshot, "pods")
    assert (finding.level, finding.found) == (Level.WARNING, "orca-worker-1 not Ready: it is being deleted")


def test_workers_that_make_no_whole_engine_need_not_be_ready() -> None:
    """The last of three, where two make an engine."""

    def three(workers: dict[str, Any]) -> None:
        workers["spec"]["replicas"] = 3

    snapshot = edited(healthy(), three, lambda thing: f"{thing['kind']} {name_of(thing)}" == WORKER)
    assert isinstance(snapshot.pods, tuple)
    third = copy.deepcopy(next(pod for pod in snapshot.pods if name_of(pod) == "orca-worker-1"))
    third["metadata"]["name"] = "orca-worker-2"
    third["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    [finding] = found(replace(snapshot, pods=(*snapshot.pods, third)), "pods")
    assert finding.level is Level.OK
    assert "worker 2/2" in finding.found


def test_pods_are_counted_without_the_right_to_run_something_in_them() -> None:
    snapshot = healthy()
    assert isinstance(snapshot.pods, tuple)
    [finding] = found(replace(snapshot, inside=Unknown("forbidden"), pods=snapshot.pods[:-1]), "pods")
    assert finding.level is Level.FAULT
    assert " pods" in finding.found


def test_the_format_of_the_weights_is_named() -> None:
    def level_and_words(snapshot: Snapshot) -> tuple[Level, str]:
        [finding] = found(snapshot, "weights")
        return finding.level, finding.found

    quantized = healthy(GPUS | {"engine": {"tp": 2, "pp": 2, "device": "cpu", "quantize": "int8"}})
    said = "in the files: GGUF, F32 and Q8_0; ranks keep the matrices in int8, the rest in types by dtype auto"
    assert level_and_words(quantized) == (Level.OK, said)
    with_codes = healthy(GPUS | {"engine": {"tp": 2, "pp": 2, "device": "cpu", "kvDtype": "int8"}})
    assert level_and_words(with_codes)[1].endswith("by dtype auto, keys and values in int8")
    assert level_and_words(healthy())[1].endswith("ranks keep them in types by dtype auto")
    one, other = (Inside(f"orca-worker-{n}", "worker", 0, 0, (), weights=text) for n, text in enumerate("ab"))
    assert level_and_words(replace(healthy(), inside=(one, other))) == (
        Level.FAULT, "the workers have different files: a, b"
    )  # fmt: skip
    assert level_and_words(replace(healthy(), inside=()))[0] is Level.UNCHECKED


def test_a_limit_that_somebody_else_put_into_pods() -> None:
    """A LimitRange's default stands in the pod, not in the template. Containers that were added are somebody else's."""

    def limit(pod: dict[str, Any]) -> None:
        pod["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "500m"
        pod["spec"]["containers"].append({"name": "proxy", "resources": {"limits": {"cpu": "1"}}})

    wrong = edited(healthy(), limit, lambda thing: thing["kind"] == "Pod" and component_of(thing) == "worker")
    [finding] = found(wrong, "limits")
    assert finding.level is Level.WARNING
    assert finding.found == (
        "a limit of 500m CPU was put into worker of orca-worker-0, orca-worker-1, orca-worker-2, orca-worker-3: "
        "a throttled process misses heartbeats"
    )
    assert "LimitRange" in finding.advice
    declared = healthy(GPUS | {"worker": {"resources": {"limits": {"cpu": "4"}}}})
    assert [one.level for one in found(declared, "limits")] == [Level.OK]


def test_images_of_one_build_have_digests_of_their_own() -> None:
    digests = {
        name: f"sha256:{64 * digit}" for digit, name in zip("123", ("endpoint", "scheduler", "worker"), strict=True)
    }
    [finding] = found(healthy(GPUS | {"image": {"tag": "7", "digests": digests}}), "tags")
    assert (finding.level, finding.found) == (Level.OK, "all images are 7")


# -- faults of the cluster


def test_rights() -> None:
    allowed = {Right("list", "", "pods"): True, Right("delete", "", "pods"): False}
    [finding] = found(replace(healthy(), allowed=allowed), "allowed")
    assert (finding.level, finding.found) == (Level.FAULT, "ServiceAccount orca-scheduler may not: delete pods")


# -- what pods reach


def inside(*attempts: Attempt, ahead: float = 0.0, pod: str = "orca-endpoint-0") -> Inside:
    return Inside(pod, "endpoint", ahead, 0.01, attempts)


def test_arrows() -> None:
    tries = [
        Attempt("endpoint -> redis", "orca-endpoint-0", "redis", "open", 0.002),
        Attempt("scheduler -> rank", "orca-scheduler-0", "orca-worker-0:50100", "silent"),
        Attempt("scheduler -> rank", "orca-scheduler-0", "orca-worker-1:50100", "refused"),
        Attempt("endpoint -> OTLP", "orca-endpoint-0", "collector:4317", "Name or service not known"),
    ]
    snapshot = replace(healthy(), inside=(inside(*tries),), unseen={"orca-worker-1": "its container does not run"})
    said = [(finding.level, finding.found) for finding in found(snapshot, "arrows")]
    assert said == [
        (Level.OK, "endpoint -> redis: 1 open, in 2.0 ms"),
        (Level.FAULT, "scheduler -> rank: no answer, 1 of 2 tries: orca-scheduler-0 to orca-worker-0:50100"),
        (Level.FAULT, "scheduler -> rank: refused, 1 of 2 tries: orca-scheduler-0 to orca-worker-1:50100"),
        (
            Level.FAULT,
            "endpoint -> OTLP: Name or service not known, 1 of 1 tries: orca-endpoint-0 to collector:4317",
        ),
        (Level.UNCHECKED, "from orca-worker-1: its container does not run"),
    ]


def test_names() -> None:
    tries = [
        Attempt("dns", "orca-endpoint-0", "orca-worker", "resolved", 0.02),
        Attempt("dns", "orca-endpoint-0", "orca-redis", "Name or service not known"),
    ]
    [finding] = found(replace(healthy(), inside=(inside(*tries),)), "dns")
    assert (finding.level, finding.found) == (Level.FAULT, "orca-redis: Name or service not known")


def test_clocks_of_pods() -> None:
    seen = (inside(ahead=0.1), inside(ahead=2.3, pod="orca-endpoint-1"))
    [finding] = found(replace(healthy(), inside=seen), "pod-clocks")
    assert finding.level is Level.WARNING
    assert finding.found == "the clock in orca-endpoint-1 is 2.2 s ahead of that in orca-endpoint-0"
    [finding] = found(replace(healthy(), inside=(inside(ahead=0.1), inside(ahead=1.1))), "pod-clocks")
    assert (finding.level, finding.found) == (Level.OK, "2 pods agree to 1.0 s")
    [finding] = found(replace(healthy(), inside=seen[:1]), "pod-clocks")
    assert finding.level is Level.UNCHECKED


def test_which_services_have_a_name_now() -> None:
    """One without an address of its own has those of its Ready pods, or of all where it says so."""
    labels = {"a": "b"}
    pod: dict[str, Any] = {"metadata": {"labels": labels}, "status": {"podIP": "10.0.0.1"}}
    headless: dict[str, Any] = {"spec": {"clusterIP": "None", "selector": labels}}
    assert is_named({"spec": {"clusterIP": "10.0.0.9"}}, ())
    assert [is_named(headless, pods) for pods in ((), (pod,))] == [False, False]
    ready = pod | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    assert is_named(headless, (ready,))
    headless["spec"]["publishNotReadyAddresses"] = True
    assert is_named(headless, (pod,))
    assert not is_named(headless, (pod | {"metadata": {"labels": {"a": "c"}}},))


def test_the_collector_has_a_port() -> None:
    assert [question.port for question in collector("worker", "http://c.x:9") + collector("worker", "http://c.x")] == [
        *(9, 4317),
    ]
    assert collector("worker", None) == []


def test_everything_is_asked() -> None:
    """Each arrow of the design has its tries in a healthy installation, with tracing too."""
    values = {
        "model": {"path": "/m"}, "engine": {"tp": 2, "pp": 2, "device": "cpu"}, "image": {"tag": "a"},
        "tracing": {"otlpEndpoint": "http://collector.monitoring:4317"},
    }  # fmt: skip
    snapshot = healthy(values)
    assert isinstance(snapshot.inside, tuple)
    tried = {(attempt.arrow, attempt.target) for seen in snapshot.inside for attempt in seen.attempts}
    assert {arrow for arrow, _ in tried} == {
        "dns", "endpoint -> redis", "scheduler -> redis", "scheduler -> API server", "scheduler -> supervisor",
        "scheduler -> rank", "worker -> worker", "endpoint -> OTLP", "scheduler -> OTLP", "worker -> OTLP",
    }  # fmt: skip
    assert ("scheduler -> rank", "orca-worker-1:50101") in tried
    assert ("endpoint -> OTLP", "collector.monitoring:4317") in tried


# -- Redis


@pytest.mark.parametrize(
    ("fields", "check", "level", "says"),
    [
        ({"version": "6.2.14"}, "redis", Level.FAULT, "redis 6.2.14 is too old"),
        ({"role": "slave"}, "redis", Level.FAULT, "it is a slave"),
        ({"loading": True}, "redis", Level.WARNING, "still loads"),
        ({"seconds": 0.05}, "redis", Level.WARNING, "answers orca-endpoint-0 in 50.0 ms"),
        ({"appendonly": "no"}, "durable", Level.FAULT, "appendonly is no"),
        ({"appendonly": "no", "loading": True}, "durable", Level.UNCHECKED, "still loads"),
        ({"last_append": "err"}, "durable", Level.FAULT, "the last write"),
        ({"appendfsync": "everysec"}, "durable", Level.WARNING, "DATA_LOSS"),
        ({"appendfsync": "no"}, "durable", Level.FAULT, "appendfsync is no"),
        ({"appendfsync": ""}, "durable", Level.UNCHECKED, "does not tell"),
        ({"policy": "allkeys-lru"}, "memory", Level.FAULT, "maxmemory-policy is allkeys-lru"),
        ({"maxmemory": 2**21, "used": 2**21 - 1}, "memory", Level.WARNING, "2 MiB of 2 MiB are used"),
        ({"ahead": -4.0}, "redis-clock", Level.WARNING, "4.0 s behind that of orca-endpoint-0"),
    ],
)
def test_redis(fields: dict[str, Any], check: str, level: Level, says: str) -> None:
    said = found(replace(healthy(), redis=replace(REDIS, **fields)), check)
    assert [finding.level for finding in said] == [level]
    assert says in said[0].found


SENTINELS = {**GPUS, "redis": {"mode": "sentinel"}}


@pytest.mark.parametrize(
    ("fields", "level", "says"),
    [
        ({"version": "7.4.2", "replicas": 2}, Level.OK, "2 of 2 replicas follow; clients wait for 1"),
        ({"version": "7.4.2", "replicas": 1}, Level.WARNING, "1 of 2 replicas follow"),
        ({"version": "7.4.2"}, Level.FAULT, "0 of 2 replicas follow; clients wait for 1: all streams stand"),
        ({"version": "7.0.15", "replicas": 2}, Level.FAULT, "redis 7.0.15 cannot say what is on the disk of a replica"),
    ],
)
def test_replicas(fields: dict[str, Any], level: Level, says: str) -> None:
    (said,) = found(replace(healthy(SENTINELS), redis=replace(REDIS, **fields)), "replicas")
    assert said.level == level
    assert says in said.found


def test_servers_on_one_node() -> None:
    (said,) = found(healthy(), "apart")
    assert said.level == Level.OK
    snapshot = healthy(SENTINELS)
    assert isinstance(snapshot.pods, tuple)
    pods = copy.deepcopy(snapshot.pods)
    for one in pods:
        one["spec"]["nodeName"] = "alone"
    findings = found(replace(snapshot, pods=pods), "apart")
    assert [finding.level for finding in findings] == [Level.WARNING, Level.WARNING]
    assert "orca-redis-0, orca-redis-1, orca-redis-2 stand on alone" in findings[0].found
    for number, one in enumerate(pods):
        one["spec"]["nodeName"] = f"node-{number}"
    assert [finding.level for finding in found(replace(snapshot, pods=pods), "apart")] == [Level.OK]


# -- reading and showing


def test_quantities() -> None:
    texts = ["2", "500m", "1.5Gi", "64Mi", "3k", "1e3", "100n", 7]
    assert [quantity(text) for text in texts] == [2, 0.5, 1.5 * 2**30, 2**26, 3000, 1000, pytest.approx(1e-7), 7]


def test_what_is_no_quantity() -> None:
    with pytest.raises(FailedPrecondition, match="2GB is no quantity"):
        quantity("2GB")


def test_a_report_as_a_whole() -> None:
    findings = [
        Finding("pods", Level.OK, f"all Ready: {listing('abcdef')}"),
        Finding("redis", Level.FAULT, "the pool's Redis is away", "start it"),
        Finding("dns", Level.UNCHECKED, f"{counted(1, 'pod')} of {counted(2, 'pod')}"),
    ]
    assert report(findings, 40).splitlines() == [
        "ok           pods   all Ready: a, b, c,",
        "                    d and 2 more",
        "fault        redis  the pool's Redis is",
        "                    away; start it",
        "not checked  dns    1 pod of 2 pods",
        "1 ok, 1 fault, 1 not checked",
    ]


def test_the_report_fits_80_columns() -> None:
    findings = examine(replace(healthy(), allowed=Unknown("a" * 70)))
    text = report(findings, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert [line.split()[0] for line in text.splitlines() if line.startswith("ok")]
    assert text.splitlines()[-1].endswith("2 not checked")
    assert at(healthy().release.objects[0], "metadata", "nothing") is None
    assert '"level": "not checked"' in as_json(findings)
