"""The objects of an install fit together: selectors, ports, volumes, accounts, rights, probes, and who may end when."""

from itertools import combinations
from typing import Any

import pytest
from helm.chart import (
    DEMO,
    OPTIONS,
    PROXY,
    SERVICES,
    Object,
    Rendered,
    component,
    containers,
    main,
    merged,
    render,
    rendered,
)

from orca_scheduler.discovery import kubernetes as discovery
from orca_scheduler.discovery import wait

POD = "statefulset.kubernetes.io/pod-name"  # a label that Kubernetes gives

every_option = pytest.mark.parametrize("option", OPTIONS)


def selects(selector: Object, labels: Object) -> bool:
    return selector.items() <= labels.items()


def is_of(thing: Object, name: str) -> bool:
    return "labels" in thing["metadata"] and component(thing) == name  # extraObjects have none


def labels_of(release: Rendered) -> dict[str, Object]:
    return {name: pod["metadata"]["labels"] for name, pod in release.pods.items()}


@every_option
def test_selectors_find_their_own_pods_alone(option: str) -> None:
    release = rendered(option)
    labels = labels_of(release)
    for name, workload in release.workloads.items():
        selector = workload["spec"]["selector"]["matchLabels"]
        assert [other for other in labels if selects(selector, labels[other])] == [name]
    for kind, at in (("Service", "selector"), ("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        for thing in release.of_kind(kind):
            selector = thing["spec"][at]
            selector = selector.get("matchLabels", selector)
            selector = {label: value for label, value in selector.items() if label != POD}
            assert [other for other in labels if selects(selector, labels[other])] == [component(thing)]


@every_option
def test_names_are_told_apart(option: str) -> None:
    names = [(thing["kind"], thing["metadata"]["name"]) for thing in rendered(option).objects]
    assert len(names) == len(set(names))


@every_option
def test_services_lead_to_ports(option: str) -> None:
    release = rendered(option)
    for service in release.of_kind("Service"):
        ports = {port["name"]: port["containerPort"] for port in main(release.pods[component(service)])["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"], service["metadata"]["name"]
    for workload in release.of_kind("StatefulSet"):
        assert release.one("Service", workload["spec"]["serviceName"])
    for ingress in release.of_kind("Ingress"):
        backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
        ports = release.one("Service", backend["name"])["spec"]["ports"]
        assert backend["port"]["name"] in [port["name"] for port in ports]
    for route in release.of_kind("HTTPRoute", "GRPCRoute"):
        for rule in route["spec"]["rules"]:
            (backend,) = rule["backendRefs"]
            ports = release.one("Service", backend["name"])["spec"]["ports"]
            assert backend["port"] in [port["port"] for port in ports]


def test_routes_send_a_release_what_names_its_model() -> None:
    """The rules are those of examples/proxy/models-envoy.yaml, which tests/e2e/test_several_models.py tries."""
    release = rendered("two models at one Gateway")
    header = [{"name": "x-gateway-model-name", "value": "demo_model"}]
    (http,), (grpc,) = release.of_kind("HTTPRoute"), release.of_kind("GRPCRoute")
    assert http["spec"]["rules"][0]["matches"] == [
        {"headers": header},
        {"queryParams": [{"name": "model", "value": "demo_model"}]},
        {"path": {"type": "Exact", "value": "/v1/models/demo_model"}},
    ]
    assert grpc["spec"]["rules"][0]["matches"] == [{"headers": header}]
    assert ["matches" in rule for route in (http, grpc) for rule in route["spec"]["rules"]] == [True, False] * 2
    assert release.environment("endpoint")["ORCA_OTHER_MODELS"] == "gpt2,owner/other"


def test_the_workers_find_each_other_before_they_are_ready() -> None:
    service = rendered("nothing but a model").one("Service", "orca-worker")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True


def needs(pod: Object) -> set[str]:
    """What must exist before the pod can start, as KIND/NAME."""
    found = set()
    spec = pod["spec"]
    for volume in spec.get("volumes", []):
        if "secret" in volume:
            found.add(f"Secret/{volume['secret']['secretName']}")
        if "configMap" in volume:
            found.add(f"ConfigMap/{volume['configMap']['name']}")
        if "persistentVolumeClaim" in volume:
            found.add(f"PersistentVolumeClaim/{volume['persistentVolumeClaim']['claimName']}")
    for container in containers(pod):
        for entry in container.get("env", []):
            if "secretKeyRef" in entry.get("valueFrom", {}):
                found.add(f"Secret/{entry['valueFrom']['secretKeyRef']['name']}")
        found |= {f"Secret/{source['secretRef']['name']}" for source in container.get("envFrom", [])}
    found |= {f"Secret/{secret['name']}" for secret in spec.get("imagePullSecrets", [])}
    found.add(f"ServiceAccount/{spec['serviceAccountName']}")
    return found


@every_option
def test_what_is_mounted_is_there(option: str) -> None:
    release = rendered(option)
    needed = {f"Secret/{ingress['spec']['tls'][0]['secretName']}" for ingress in release.of_kind("Ingress")}
    for name, pod in release.pods.items():
        volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
        claims = release.workloads.get(name, {}).get("spec", {}).get("volumeClaimTemplates", [])
        volumes += [claim["metadata"]["name"] for claim in claims]
        mounted = [mount["name"] for container in containers(pod) for mount in container["volumeMounts"]]
        assert len(volumes) == len(set(volumes))
        assert set(volumes) == set(mounted), f"{name}: volumes and mounts differ"
        for container in containers(pod):
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(paths) == len(set(paths))
        needed |= needs(pod)
    made = {f"Secret/{thing['spec']['secretName']}" for thing in release.of_kind("Certificate")}
    made |= {f"{kind}/{t['metadata']['name']}" for kind in ("ServiceAccount", "Secret") for t in release.of_kind(kind)}
    # Those of the test are extraObjects; Grafana and endpoint pickers read those of the metrics.
    maps = [t for t in release.of_kind("ConfigMap") if "labels" in t["metadata"] and component(t) != "metrics"]
    made |= {f"ConfigMap/{t['metadata']['name']}" for t in maps}
    assert needed - made == OPTIONS[option].external
    assert made <= needed


@every_option
def test_containers_have_no_more_than_they_need(option: str) -> None:
    release = rendered(option)
    for name, pod in release.pods.items():
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert spec["automountServiceAccountToken"] is (name in ("scheduler", "wait", "test"))
        if f"ServiceAccount/{spec['serviceAccountName']}" not in OPTIONS[option].external:
            account = release.one("ServiceAccount", spec["serviceAccountName"])
            assert account["automountServiceAccountToken"] is spec["automountServiceAccountToken"]
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
            assert not container["image"].endswith(":latest")


@every_option
def test_probes_ask_the_status_port(option: str) -> None:
    release = rendered(option)
    for name in SERVICES:
        container = main(release.pods[name])
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert str(ports["status"]) == release.environment(name)["ORCA_STATUS_PORT"]
        assert len(set(ports.values())) == len(container["ports"])
        for probe, path in (("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
            assert container[probe]["httpGet"] == {"path": path, "port": "status"}
            assert container[probe]["timeoutSeconds"] >= 3
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 300


def test_an_orderly_end_fits_the_grace_period() -> None:
    """Also where the load balancers forget an endpoint much more slowly than by default."""
    drains = {name: {"drainSeconds": 60 + n} for n, name in enumerate(SERVICES)}
    release = render(merged(DEMO, drains, {"endpoint": {"forgetSeconds": 45}}))
    for name in SERVICES:
        spec = release.pods[name]["spec"]
        before = main(release.pods[name]).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drain = int(release.environment(name)["ORCA_DRAIN_SECONDS"])
        assert drain == drains[name]["drainSeconds"]
        assert spec["terminationGracePeriodSeconds"] >= before + drain + 10
        assert before == (45 if name == "endpoint" else 0)


def test_no_drain_is_a_drain_of_no_seconds() -> None:
    """A template takes 0 for nothing, and the services' own 30 s would outlast the grace period."""
    release = render(merged(DEMO, {name: {"drainSeconds": 0} for name in SERVICES}))
    for name in SERVICES:
        assert release.environment(name)["ORCA_DRAIN_SECONDS"] == "0"


def test_who_asks_the_api_server_may_do_that_and_no_more() -> None:
    release = rendered("a gate of a quarter of an hour")
    needed = {"scheduler": discovery.RULES, "wait": wait.RULES + wait.OWN_RULES, "test": wait.RULES + wait.OWN_RULES}
    given: dict[str, set[tuple[str, str, str]]] = {}
    for binding in release.of_kind("RoleBinding"):
        (subject,) = binding["subjects"]
        given[subject["name"]] = {
            (group, resource, verb)
            for rule in release.one("Role", binding["roleRef"]["name"])["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
    for name, rules in needed.items():
        account = release.pods[name]["spec"]["serviceAccountName"]
        assert given[account] == {(group, resource, verb) for group, resource, verbs in rules for verb in verbs}
    assert len(given) == 2
    (own,) = [rule for rule in release.one("Role", "orca-wait")["rules"] if rule["resources"] == ["pods/status"]]
    assert own["resourceNames"] == ["orca-wait"]
    assert not release.of_kind("ClusterRole", "ClusterRoleBinding")


def test_schedulers_that_scale_the_engines_may_scale_the_workers_and_nothing_else() -> None:
    release = rendered("engines and endpoints by load")
    plain = rendered("nothing but a model").one("Role", "orca-scheduler")["rules"]
    (more,) = [rule for rule in release.one("Role", "orca-scheduler")["rules"] if rule not in plain]
    ((group, resource, verbs),) = discovery.SCALING_RULES
    assert more == {
        "apiGroups": [group],
        "resources": [resource],
        "resourceNames": [release.workloads["worker"]["metadata"]["name"]],
        "verbs": list(verbs),
    }


def test_what_is_scaled_by_load_has_no_number() -> None:
    release = rendered("engines and endpoints by load")
    assert "replicas" not in release.workloads["worker"]["spec"]
    assert "replicas" not in release.workloads["endpoint"]["spec"]
    assert "2 to 5 engine(s) by load" in release.notes
    (autoscaler,) = release.of_kind("HorizontalPodAutoscaler")
    spec = autoscaler["spec"]
    target = release.one(spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
    assert component(target) == "endpoint"
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 20)
    (metric,) = spec["metrics"]
    container = main(release.pods["endpoint"])
    assert metric["containerResource"]["container"] == container["name"]
    assert metric["containerResource"]["name"] in container["resources"]["requests"]  # its use is a part of that
    assert not rendered("nothing but a model").of_kind("HorizontalPodAutoscaler")


def test_the_hook_and_the_test_wait_for_the_rollout() -> None:
    release = rendered("a gate of a quarter of an hour")
    hook = release.one("Pod", "orca-wait")
    assert hook["metadata"]["annotations"]["helm.sh/hook"] == "post-install,post-upgrade,post-rollback"
    assert hook["spec"]["activeDeadlineSeconds"] > 900
    assert "wait" in rendered("nothing but a model").pods, "the gate is on unless somebody turns it off"
    assert "wait" not in render(merged(DEMO, {"wait": {"enabled": False}})).pods
    # Helm ends a hook at its --timeout, 300 s if not given, and then has no reason to show.
    assert render(DEMO).one("Pod", "orca-wait")["spec"]["activeDeadlineSeconds"] <= 300
    (first,) = release.pods["test"]["spec"]["initContainers"]
    own = [{"name": "ORCA_OWN_POD", "value": "orca-wait"}]  # that the hook may end
    for container, seconds, variables in ((main(release.pods["wait"]), 900, own), (first, 300, [])):
        assert container["command"] == ["python", "-m", "orca_scheduler.discovery.wait"]
        assert container["args"] == ["orca", f"--timeout={seconds}", "--patience=30"], "as an older image takes them"
        assert container.get("env", []) == variables
        assert container["image"] == main(release.pods["scheduler"])["image"]
    labels = release.workloads["worker"]["metadata"]["labels"]
    assert (labels["app.kubernetes.io/instance"], labels["app.kubernetes.io/component"]) == ("orca", "worker")


@every_option
def test_the_check_sees_what_a_worker_sees(option: str) -> None:
    """Before anything is changed: with the worker's image, where a worker goes, at the worker's model."""
    release = rendered(option)
    worker, pod = release.pods["worker"], release.pods["check"]
    given = main(pod)
    assert given["image"] == main(worker)["image"]
    for name in ("nodeSelector", "tolerations", "priorityClassName", "runtimeClassName", "imagePullSecrets"):
        assert pod["spec"].get(name) == worker["spec"].get(name)
    engine = release.environment("scheduler")
    folder, *flags = given["args"]
    assert folder == release.environment("worker")["ORCA_MODEL"]
    assert flags[:2] == [f"--tp={engine['ORCA_TP']}", f"--pp={engine['ORCA_PP']}"]
    flags, adapters = flags[2:], release.environment("worker").get("ORCA_ADAPTERS")
    if adapters:
        assert flags.pop(0) == f"--adapters={adapters}"
    kept = [[m for m in main(p)["volumeMounts"] if m["name"] == "models"] for p in (pod, worker)]
    assert kept[0] == kept[1]
    steps = [step["args"] for step in pod["spec"].get("initContainers", []) if step["name"] == "model"]
    assert ["--config-only"] * len(steps) == flags == [args[-1] for args in steps]
    assert "persistentVolumeClaim" not in str(pod) or not steps, "a cache of weights is a worker's"


@every_option
def test_what_the_check_needs_is_there_before_it(option: str) -> None:
    """The release's own objects change only after the hook: what it needs of them is a hook of a lower weight."""
    release = rendered(option)
    hooks = {thing["kind"]: thing["metadata"]["annotations"] for thing in release.objects if is_of(thing, "check")}
    for kind, annotations in hooks.items():
        assert annotations["helm.sh/hook"] == "pre-install,pre-upgrade"
        assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
        assert int(annotations["helm.sh/hook-weight"]) == (0 if kind == "Job" else -1)
    account = release.pods["check"]["spec"]["serviceAccountName"]
    given = f"ServiceAccount/{account}" in OPTIONS[option].external
    policies = {"NetworkPolicy"} if release.of_kind("NetworkPolicy") else set()
    assert set(hooks) == {"Job"} | policies | (set() if given else {"ServiceAccount"})
    job = release.one("Job", "orca-check")["spec"]
    assert job["activeDeadlineSeconds"] > job["template"]["spec"]["activeDeadlineSeconds"] == 600
    assert job["backoffLimit"] == 0


def test_the_check_can_be_switched_off() -> None:
    release = render(merged(DEMO, {"check": {"enabled": False}}))
    assert not [thing for thing in release.objects if is_of(thing, "check")]


def test_the_workers_say_how_many_pods_make_an_engine() -> None:
    release = render(merged(DEMO, {"engine": {"tp": 4, "pp": 2, "gpusPerPod": 2}}))
    annotations = {
        "orca.serving/pods-per-engine": "4",
        "orca.serving/replicas": "4",
        "orca.serving/shape": "tp4-pp2-gpus2",
    }
    assert release.workloads["worker"]["metadata"]["annotations"] == annotations


@every_option
def test_a_worker_that_ends_says_why_to_kubernetes(option: str) -> None:
    for container in containers(rendered(option).pods["worker"]):
        if container["name"] == PROXY["name"]:
            continue
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_budgets_never_block_a_drain() -> None:
    release = render(merged(DEMO, {"engine": {"tp": 4, "pp": 2, "gpusPerPod": 2, "count": 3}}))
    budgets = {component(budget): budget["spec"] for budget in release.of_kind("PodDisruptionBudget")}
    assert {name: budget["maxUnavailable"] for name, budget in budgets.items()} == {
        "endpoint": 1,
        "scheduler": 1,
        "worker": 4,  # one engine
    }
    assert {budget["unhealthyPodEvictionPolicy"] for budget in budgets.values()} == {"AlwaysAllow"}


def test_the_single_redis_may_be_kept_from_evictions() -> None:
    budget = render(merged(DEMO, {"redis": {"evictable": False}})).one("PodDisruptionBudget", "orca-redis")["spec"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (0, "AlwaysAllow")


def test_doors_stay_open_during_an_update() -> None:
    release = rendered("nothing but a model")
    for name in ("endpoint", "scheduler"):
        assert release.workloads[name]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    worker = release.workloads["worker"]["spec"]
    assert worker["updateStrategy"] == {"type": "OnDelete"}
    assert worker["podManagementPolicy"] == "Parallel"


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint": {"image": "other:2", "replicas": 5, "settings": {"max_waiting": 7}, "drainSeconds": 99}},
        {"scheduler": {"image": "other:2", "settings": {"max_batch_size": 7}, "journals": {"enabled": True}}},
        {"engine": {"count": 2}},
        {"redis": {"image": "redis:8"}, "networkPolicy": {"enabled": False}, "ingress": {"enabled": True}},
    ],
    ids=["endpoint", "scheduler", "engines", "others"],
)
def test_workers_do_not_roll_for_what_is_not_theirs(change: dict[str, Any]) -> None:
    before, after = render(DEMO), render(merged(DEMO, change))
    assert before.objects != after.objects
    assert before.pods["worker"] == after.pods["worker"]


def test_nothing_in_a_pod_or_a_claim_names_the_version_of_the_chart() -> None:
    """Otherwise each version would roll all workers, and could not change the StatefulSets at all."""
    release = rendered("Jaeger")
    for thing in (*release.pods.values(), *release.workloads["redis"]["spec"]["volumeClaimTemplates"]):
        if component(thing) not in ("test", "wait"):  # hooks, made anew each time
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & thing["metadata"]["labels"].keys()


def test_values_of_all_pods_and_of_one() -> None:
    release = rendered("everything of pods")
    worker, endpoint, redis = (release.pods[name] for name in ("worker", "endpoint", "redis"))
    assert worker["metadata"]["labels"].items() >= {"team": "ours", "gpu": "big"}.items()
    assert worker["spec"]["nodeSelector"] == {"pool": "gpu"}
    assert endpoint["spec"]["nodeSelector"] == redis["spec"]["nodeSelector"] == {"pool": "small"}
    assert [toleration["key"] for toleration in worker["spec"]["tolerations"]] == ["ours", "nvidia.com/gpu"]
    assert [toleration["key"] for toleration in redis["spec"]["tolerations"]] == ["ours"]
    assert list(worker["spec"]["affinity"]) == ["nodeAffinity"]
    assert {"OTEL_TRACES_SAMPLER", "NCCL_DEBUG"} <= release.environment("worker").keys()
    assert main(endpoint)["image"] == "images.example.com/team/orca-endpoint:7"
    for pod in release.pods.values():
        assert pod["spec"]["priorityClassName"] == "high"
        assert pod["metadata"]["annotations"].items() >= {"a/b": "c"}.items()


def test_devices_by_claims() -> None:
    """Instead of a device plugin's. The check before an upgrade needs no GPU, and would wait for one."""
    claims = [{"name": "gpus", "resourceClaimTemplateName": "two"}]
    worker = {"resources": {"claims": [{"name": "gpus"}]}, "pod": {"resourceClaims": claims}}
    release = render(merged(DEMO, {"engine": {"gpuResource": ""}, "worker": worker}))
    assert release.pods["worker"]["spec"]["resourceClaims"] == claims
    resources = main(release.pods["worker"])["resources"]
    assert resources["claims"] == [{"name": "gpus"}]
    assert set(resources["limits"]) == {"memory"}
    assert "resourceClaims" not in release.pods["check"]["spec"]


def test_what_a_platform_sets() -> None:
    pod = {"schedulerName": "ours", "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]}}
    values = {"pod": pod, "revisionHistoryLimit": 0, "host": "::", "jaeger": {"enabled": True}, "ui": {"enabled": True}}
    release = render(merged(DEMO, values, {"endpoint": {"strategy": {"rollingUpdate": {"maxSurge": 3}}}}))
    for name, template in release.pods.items():
        assert pod.items() <= template["spec"].items()
        if name in SERVICES:
            assert release.environment(name)["ORCA_HOST"] == "::"
    assert {workload["spec"]["revisionHistoryLimit"] for workload in release.workloads.values()} == {0}
    assert release.workloads["endpoint"]["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 3, "maxUnavailable": 0}


@pytest.mark.parametrize(("placement", "kind"), [("pack", "podAffinity"), ("spread", "podAntiAffinity")])
def test_placement(placement: str, kind: str) -> None:
    release = render(merged(DEMO, {"engine": {"placement": placement}}))
    ((found, wishes),) = release.pods["worker"]["spec"]["affinity"].items()
    (wish,) = wishes["preferredDuringSchedulingIgnoredDuringExecution"]
    assert found == kind
    assert selects(
        wish["podAffinityTerm"]["labelSelector"]["matchLabels"], release.pods["worker"]["metadata"]["labels"]
    )


def test_memory_is_counted() -> None:
    memory = {"rank": 1000, "forkServer": 300, "shm": 200}
    shape = merged(DEMO, {"engine": {"tp": 4}, "worker": {"memory": memory}})
    resources = main(render(shape).pods["worker"])["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == f"{4 * 1000 + 300 + 200 + 256}Mi"
    assert resources["requests"]["cpu"] == "8"
    assert resources["limits"]["nvidia.com/gpu"] == 4
    other = merged(shape, {"engine": {"device": "cpu"}, "worker": {"resources": {"limits": {"memory": "9Gi"}}}})
    assert main(render(other).pods["worker"])["resources"]["limits"] == {"memory": "9Gi"}


def started(option: str, program: str = "redis") -> tuple[list[str], dict[str, str]]:
    """The beginning of a server's command, and its settings."""
    command = main(rendered(option).pods["redis"])["command"]
    at = command.index(f"{program}-server") + 1
    return command[:at], dict(zip(command[at::2], command[at + 1 :: 2], strict=True))


@every_option
def test_redis_keeps_what_it_acknowledges(option: str) -> None:
    release = rendered(option)
    if "redis" not in release.pods:
        return
    _, settings = started(option, "valkey" if "Valkey" in option else "redis")
    assert settings["--appendonly"] == "yes"
    assert settings["--appendfsync"] == "always"
    assert settings["--maxmemory-policy"] == "noeviction"
    (mount,) = [m for m in main(release.pods["redis"])["volumeMounts"] if m["mountPath"] == settings["--dir"]]
    (claim,) = release.workloads["redis"]["spec"]["volumeClaimTemplates"]
    assert mount["name"] == claim["metadata"]["name"]


def test_releases_beside_each_other_share_nothing() -> None:
    longest = 53 * "r"  # Helm's bound
    releases = ("orca", "blue", "chat", "chat-orca", longest, longest[:-1] + "s")
    names = [{(thing["kind"], thing["metadata"]["name"]) for thing in render(DEMO, name).objects} for name in releases]
    assert all(not one & other for one, other in combinations(names, 2))
    pools = [render(DEMO, name).environment("endpoint")["ORCA_POOL"] for name in ("orca", "blue")]
    assert len(set(pools)) == 2
    for thing in render(DEMO, longest).objects:
        assert len(thing["metadata"]["name"]) <= (52 if thing["kind"] == "StatefulSet" else 63)


@pytest.mark.parametrize("option", ["certificates from Secrets, API keys", "certificates from an issuer"])
def test_with_certificates_every_connection_is_mtls(option: str) -> None:
    release = rendered(option)
    for name in SERVICES:
        environment = release.environment(name)
        assert environment["ORCA_TLS_DIR"] == "/etc/orca/tls"
        if name != "worker":
            assert environment["ORCA_REDIS_URL"] == "rediss://orca-redis:6379/0"
    (redis,) = containers(release.pods["redis"])
    _, settings = started(option)
    assert settings["--port"] == "0", "no plaintext port"
    assert settings["--tls-auth-clients"] == "yes"
    assert "--cacert /etc/orca/tls/ca.crt" in redis["readinessProbe"]["exec"]["command"][-1]
    test = main(release.pods["test"])
    assert "--tls-dir=/etc/orca/tls" in test["args"]
    for certificate in release.of_kind("Certificate"):
        holder = certificate["metadata"]["labels"]["app.kubernetes.io/component"]
        roles = [name for name in certificate["spec"]["dnsNames"] if name.endswith(".orca.internal")]
        assert roles == [f"{holder}.orca.internal"]
        assert certificate["spec"]["usages"] == ["server auth", "client auth"], "each of ours calls others, too"


@pytest.mark.parametrize(
    ("option", "grpc", "http"),
    [
        ("ways in", "kubernetes.io/h2c", "http"),
        ("certificates from an issuer", "https", "https"),
        ("certificates from Secrets, API keys", "https", "https"),
    ],
)
def test_a_service_says_what_its_doors_speak(option: str, grpc: str, http: str) -> None:
    """A Gateway or a mesh believes it: plaintext to a port of TLS would be refused."""
    for name in ("orca-endpoint", "orca-endpoint-headless"):
        ports = rendered(option).one("Service", name)["spec"]["ports"]
        assert {port["name"]: port["appProtocol"] for port in ports} == {"grpc": grpc, "http": http}


def test_api_keys_are_read_from_the_secret() -> None:
    release = rendered("certificates from Secrets, API keys")
    assert release.environment("endpoint")["ORCA_API_KEYS_FILE"] == "/etc/orca/api-keys/keys"
    test = main(release.pods["test"])
    assert "--api-key-file=/etc/orca/api-key/key" in test["args"]
