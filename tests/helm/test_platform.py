"""What platform teams set: names, labels, users, accounts, probes, numbers of pods, and containers of their own."""

import pytest
from helm.chart import DEMO, OPTIONS, PROXY, SERVICES, component, containers, main, merged, render, rendered

PLATFORM = "a platform of its own rules"
OWN_STEPS = {"endpoint": ["model"], "worker": ["model"], "check": ["model"], "test": ["wait"]}
UIDS = ("runAsUser", "runAsGroup", "fsGroup")


def test_replicas_that_are_null_are_left_to_the_cluster() -> None:
    """Helm sets what it renders at each upgrade, and so undid `kubectl scale`."""
    values = {"engine": {"count": None}, "endpoint": {"replicas": None}, "scheduler": {"replicas": None}}
    release = render(merged(DEMO, values))
    for name in SERVICES:
        assert "replicas" not in release.workloads[name]["spec"]
    assert "kubectl -n serving scale statefulset orca-worker" in release.notes
    assert "--reset-then-reuse-values --set engine.count=2" in render(DEMO).notes
    none = render(merged(DEMO, {"engine": {"count": 0}, "endpoint": {"replicas": 0}}))
    assert none.workloads["worker"]["spec"]["replicas"] == none.workloads["endpoint"]["spec"]["replicas"] == 0


@pytest.mark.parametrize(
    ("values", "name", "begin"),
    [
        ({}, "orca", "orca-"),
        ({}, "chat", "chat-"),
        ({"nameOverride": "orca"}, "chat", "chat-orca-"),
        ({"fullnameOverride": "ours"}, "chat", "ours-"),
        ({"fullnameOverride": 39 * "f" + "-g"}, "chat", 33 * "f" + "-"),
    ],
)
def test_names_begin_with_the_release(values: dict[str, str], name: str, begin: str) -> None:
    names = [thing["metadata"]["name"] for thing in render(merged(DEMO, values), name).objects]
    assert all(found.startswith(begin) for found in names)


def test_labels_and_annotations_of_all_objects() -> None:
    for option, commonly in ((PLATFORM, {"cost-center": "7"}), ("nothing but a model", {})):
        things = [*rendered(option).objects, *rendered(option).pods.values()]
        for thing in things:
            if thing.get("kind") != "ConfigMap":  # those are extraObjects
                labels = thing["metadata"]["labels"]
                assert labels.items() >= commonly.items()
                assert component(thing) != "stolen"
                annotations = thing["metadata"].get("annotations", {})
                assert annotations.get("team") == ("ours" if commonly else None)
    (claim,) = rendered(PLATFORM).workloads["redis"]["spec"]["volumeClaimTemplates"]
    assert "cost-center" not in claim["metadata"]["labels"], "a StatefulSet's claims cannot be changed"


def test_uids_can_be_removed() -> None:
    """OpenShift's restricted-v2 refuses a user that it did not choose."""
    for pod in rendered("nothing but a model").pods.values():
        assert [pod["spec"]["securityContext"][name] for name in UIDS] == [10001, 10001, 10001]
    for pod in rendered(PLATFORM).pods.values():
        assert not set(UIDS) & pod["spec"]["securityContext"].keys()
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    bare = render(merged(DEMO, {"pod": {"securityContext": None, "containerSecurityContext": None}}))
    for pod in bare.pods.values():
        assert "securityContext" not in pod["spec"]
        assert all("securityContext" not in container for container in containers(pod))


def test_a_workload_has_a_security_context_of_its_own() -> None:
    """False and null count, and the rest stays."""
    own = {"containerSecurityContext": {"readOnlyRootFilesystem": False}, "securityContext": {"fsGroup": None}}
    release = render(merged(DEMO, {"redis": {"pod": own}}))
    redis, worker = release.pods["redis"], release.pods["worker"]
    assert main(redis)["securityContext"] == {**main(worker)["securityContext"], "readOnlyRootFilesystem": False}
    assert worker["spec"]["securityContext"] == {**redis["spec"]["securityContext"], "fsGroup": 10001}


def test_accounts_are_made_or_given() -> None:
    release = rendered(PLATFORM)
    (account,) = release.of_kind("ServiceAccount")
    assert account["metadata"]["name"] == "watcher" == release.pods["scheduler"]["spec"]["serviceAccountName"]
    bound = {thing["metadata"]["name"]: thing["subjects"][0]["name"] for thing in release.of_kind("RoleBinding")}
    assert bound == {"orca-scheduler": "watcher", "orca-wait": "shared"}
    others = [
        pod["spec"]["serviceAccountName"] for name, pod in release.pods.items() if name not in ("scheduler", "test")
    ]
    assert set(others) == {"shared"}


def test_probes_are_tuned() -> None:
    release = rendered(PLATFORM)
    for name in (*SERVICES, "redis", "jaeger"):
        usual, tuned = main(rendered("Jaeger").pods[name]), main(release.pods[name])
        assert tuned["readinessProbe"] == {**usual["readinessProbe"], "periodSeconds": 4}
        assert tuned["livenessProbe"] == usual["livenessProbe"]
    assert main(release.pods["worker"])["startupProbe"]["failureThreshold"] == 600


def test_a_restart_waits_for_no_probe() -> None:
    """A pod is sent traffic after its startup probe: a period of 5 and 10 s was a part of each pause."""
    release = rendered("nothing but a model")
    for name in (*SERVICES, "redis"):
        container = main(release.pods[name])
        assert container["startupProbe"]["periodSeconds"] == 1
        assert container["readinessProbe"]["periodSeconds"] <= 2
    redis = main(release.pods["redis"])
    assert redis["startupProbe"]["failureThreshold"] >= 600, "a long file is read for minutes"
    assert redis["readinessProbe"]["periodSeconds"] * redis["readinessProbe"]["failureThreshold"] >= 30


def test_the_pod_of_helm_test_goes_where_pods_may_go() -> None:
    """It was Pending on nodes with taints, and refused under a quota."""
    own = {"resources": {"limits": {"cpu": 1}}, "pod": {"nodeSelector": {"pool": "tests"}}}
    pod = render(merged(OPTIONS["everything of pods"].values, {"test": own})).pods["test"]
    spec, metadata = pod["spec"], pod["metadata"]
    assert [toleration["key"] for toleration in spec["tolerations"]] == ["ours"]
    assert spec["nodeSelector"] == {"pool": "tests"}
    assert spec["priorityClassName"] == "high"
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert metadata["labels"]["team"] == "ours"
    assert metadata["annotations"]["helm.sh/hook"] == "test"
    resources = main(pod)["resources"]
    assert resources["limits"] == {"cpu": 1, "memory": "256Mi"}
    assert resources["requests"].keys() == {"cpu", "memory"}


def test_containers_of_others() -> None:
    """They begin before our steps, a proxy perhaps. Nothing runs beside in pods that must end."""
    values = {"model": {"path": None, "hub": {"name": "openai-community/gpt2"}}}
    release = render(merged(OPTIONS[PLATFORM].values, values, {"pod": {"containers": [{**PROXY, "name": "meter"}]}}))
    for name, pod in release.pods.items():
        steps = [step["name"] for step in pod["spec"]["initContainers"]]
        assert steps == ["proxy", *OWN_STEPS.get(name, [])]
    beside = {name: [one["name"] for one in pod["spec"]["containers"]] for name, pod in release.pods.items()}
    assert beside["endpoint"] == ["endpoint", "meter", "logs"]
    assert beside["redis"] == ["redis", "meter"]
    assert (beside["test"], beside["check"]) == (["test"], ["check"])


def test_images_are_pinned() -> None:
    release = rendered(PLATFORM)
    assert main(release.pods["worker"])["image"] == f"orca-worker:7@sha256:{64 * 'a'}"
    assert main(release.pods["endpoint"])["image"] == "orca-endpoint:7"


def test_a_service_of_a_cloud() -> None:
    spec = rendered(PLATFORM).one("Service", "orca-endpoint")["spec"]
    assert spec["loadBalancerClass"] == "example.com/inner"
    assert spec["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    assert [port.get("nodePort") for port in spec["ports"]] == [30051, None]
    headless = rendered(PLATFORM).one("Service", "orca-endpoint-headless")["spec"]
    assert not any("nodePort" in port for port in headless["ports"])


def test_objects_of_others() -> None:
    names = {thing["metadata"]["name"] for thing in rendered(PLATFORM).of_kind("ConfigMap")}
    assert names == {"orca-dashboard", "orca-text"}
