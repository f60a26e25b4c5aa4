"""The chart's objects for Prometheus, Grafana and endpoint pickers."""

import json
from typing import Any

import pytest
import yaml
from helm.chart import DEMO, FOLDER, OPTIONS, SERVICES, Object, component, main, merged, render, rendered

from orca_common.metrics import TABLE

PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def test_nothing_of_it_is_made_unless_it_is_asked_for() -> None:
    release = rendered("nothing but a model")
    assert not release.of_kind("PodMonitor", "PrometheusRule")
    assert not [thing for thing in release.objects if component(thing) == "metrics"]
    ports = [port for policy in release.of_kind("NetworkPolicy") for port in allowed(policy)]
    assert 9090 not in ports


def allowed(policy: Object) -> list[Any]:
    """The ports that a policy lets in."""
    return [port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])]


def test_a_pod_monitor_finds_the_services_at_their_status_ports() -> None:
    release = rendered("metrics")
    (monitor,) = release.of_kind("PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    spec = monitor["spec"]
    (scraped,) = spec["podMetricsEndpoints"]
    assert (scraped["port"], scraped["interval"]) == ("status", "1s")
    label = "__meta_kubernetes_pod_label_app_kubernetes_io_instance"
    assert scraped["relabelings"] == [{"sourceLabels": [label], "targetLabel": "release"}]
    (expression,) = spec["selector"]["matchExpressions"]
    found = {
        name
        for name, pod in release.pods.items()
        if spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        and pod["metadata"]["labels"][expression["key"]] in expression["values"]
    }
    assert found == set(SERVICES)
    for name in found:
        assert {"name": "status", "containerPort": 9090} in main(release.pods[name])["ports"]
        (policy,) = [p for p in release.of_kind("NetworkPolicy") if component(p) == name]
        assert [rule["from"] for rule in policy["spec"]["ingress"] if {"port": 9090} in rule.get("ports", [])] == [
            [PROMETHEUS]
        ]


def test_a_pod_monitor_as_a_platform_wants_it() -> None:
    more = {"targetLabel": "cluster", "replacement": "a"}
    wanted = {
        "enabled": True,
        "namespace": "monitoring",
        "scrapeTimeout": "5s",
        "podTargetLabels": ["team"],
        "relabelings": [more],
    }
    (monitor,) = render(merged(DEMO, {"metrics": {"podMonitor": wanted}})).of_kind("PodMonitor")
    assert monitor["metadata"]["namespace"] == "monitoring"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["serving"]}
    assert monitor["spec"]["podTargetLabels"] == ["team"]
    (scraped,) = monitor["spec"]["podMetricsEndpoints"]
    assert scraped["scrapeTimeout"] == "5s"
    assert scraped["relabelings"][1:] == [more]


@pytest.mark.parametrize("option", ["metrics", "Sentinels, Valkey, a password, certificates"])
def test_redis_has_an_exporter_where_it_is_asked_for(option: str) -> None:
    clients = {"networkPolicy": {"metricsClients": [PROMETHEUS]}, "metrics": {"podMonitor": {"enabled": True}}}
    release = render(merged(OPTIONS[option].values, clients, {"redis": {"exporter": {"enabled": True}}}))
    redis, exporter = release.pods["redis"]["spec"]["containers"]
    (port,) = exporter["ports"]
    environment = {entry["name"]: entry.get("value") or entry["valueFrom"] for entry in exporter["env"]}
    secured = "tls" in OPTIONS[option].values
    assert environment["REDIS_ADDR"] == ("rediss://localhost:6379" if secured else "redis://localhost:6379")
    asked = [entry["valueFrom"] for entry in redis.get("env", []) if entry["name"] == "REDISCLI_AUTH"]
    assert [environment.get("REDIS_PASSWORD")] == (asked or [None])
    files = {value for name, value in environment.items() if name.endswith("_FILE")}
    assert files == ({f"/etc/orca/tls/{name}" for name in ("ca.crt", "tls.crt", "tls.key")} if secured else set())
    mounts = {mount["mountPath"] for mount in exporter.get("volumeMounts", [])}
    assert mounts == ({"/etc/orca/tls"} if secured else set())
    assert exporter["securityContext"] == redis["securityContext"]
    (monitor,) = release.of_kind("PodMonitor")
    assert [scraped["port"] for scraped in monitor["spec"]["podMetricsEndpoints"]] == ["status", port["name"]]
    assert "redis" in monitor["spec"]["selector"]["matchExpressions"][0]["values"]
    (policy,) = [policy for policy in release.of_kind("NetworkPolicy") if component(policy) == "redis"]
    assert policy["spec"]["ingress"][-1] == {"ports": [{"port": port["containerPort"]}], "from": [PROMETHEUS]}


def test_rules_and_dashboard_are_those_of_the_files() -> None:
    release = rendered("metrics")
    (rule,) = release.of_kind("PrometheusRule")
    text = (FOLDER / "files/alerts.yaml").read_text()
    assert rule["spec"] == yaml.safe_load(text)
    runbook = "https://docs.example.com/orca/alerts.html"
    linked = {"metrics": {"rules": {"enabled": True, "runbook": runbook}}}
    (rule,) = render(merged(DEMO, linked)).of_kind("PrometheusRule")
    assert rule["spec"] == yaml.safe_load(text.replace("docs/alerts.md", runbook))
    data = release.one("ConfigMap", "orca-dashboard")
    assert data["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(data["data"]["orca.json"]) == json.loads((FOLDER / "files/dashboard.json").read_text())


def test_each_alert_links_to_its_section() -> None:
    page = (FOLDER.parent / "docs/alerts.md").read_text()
    groups = yaml.safe_load((FOLDER / "files/alerts.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")] == [
        rule["alert"] for rule in rules
    ]
    for rule in rules:
        assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{rule['alert'].lower()}"


def test_releases_of_a_namespace_are_told_apart() -> None:
    """One release's ready engine-0 hid the other's dead one."""
    texts = [(FOLDER / "files" / name).read_text() for name in ("alerts.yaml", "dashboard.json")]
    for text in texts:
        assert "(namespace, release" in text
        assert "(namespace)" not in text
        assert "(namespace, engine" not in text
    assert texts[1].count("release=~") == texts[1].count("namespace=~") - 2  # the list of releases has no release


def test_an_endpoint_picker_can_read_an_endpoint() -> None:
    release = rendered("metrics")
    plugin = yaml.safe_load(release.one("ConfigMap", "orca-router")["data"]["plugin.yaml"])
    (engine,) = plugin["parameters"]["engineConfigs"]
    labelled = {
        name: pod["metadata"]["labels"].get("inference.networking.k8s.io/engine-type")
        for name, pod in release.pods.items()
    }
    assert {name: label for name, label in labelled.items() if label is not None} == {"endpoint": engine["name"]}
    assert release.pods["endpoint"]["metadata"]["labels"]["llm-d.ai/engine-type"] == engine["name"]
    (calls,) = [row for row in TABLE if row.name == "orca_calls"]
    assert "endpoint" in calls.services
    specs = {engine["queuedRequestsSpec"], engine["runningRequestsSpec"]}
    assert specs == {f"orca_calls{{state={state}}}" for state in calls.labels["state"]}


def test_labels_of_a_pod_win_over_the_picker_s() -> None:
    values = {
        "metrics": {"router": {"enabled": True}},
        "endpoint": {"pod": {"labels": {"llm-d.ai/engine-type": "ours"}}},
    }
    labels = render(merged(DEMO, values)).pods["endpoint"]["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == "ours"
    assert labels["inference.networking.k8s.io/engine-type"] == "orca"
