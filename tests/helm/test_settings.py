"""What the pods are told is what the services read: the environment loads, and the schema knows the same settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helm.chart import DEMO, FOLDER, OPTIONS, containers, merged, render, rendered

from orca_common import fetch_model
from orca_common.settings import KNOWN, PREFIX, Settings, variable
from orca_endpoint.settings import EndpointSettings
from orca_scheduler.scaling import Bounds
from orca_scheduler.settings import SchedulerSettings
from orca_ui.settings import UiSettings
from orca_worker.settings import SupervisorSettings

SETTINGS: dict[str, type[Settings]] = {
    "endpoint": EndpointSettings,
    "scheduler": SchedulerSettings,
    "worker": SupervisorSettings,
}
DECIDED = {  # by values of their own, or by the chart
    *(
        "config",
        "host",
        "port",
        "http_port",
        "ports_kept",
        "status_port",
        "drain_seconds",
        "run_dir",
        "redis_url",
        "redis_password",
        "pool",
        "model",
        "other_models",
    ),
    *("tp", "pp", "gpus_per_pod", "slots", "workers", "worker_statefulset", "worker_namespace", "worker_port"),
    *("dtype", "quantize", "kv_dtype", "adapters", "device", "ranks", "rank_port", "advertise_host", "first_gpu"),
    *("api_keys", "api_keys_file", "tls_dir"),
    *("ui_port", "scheduler_status", "endpoint_url"),
    *("min_engines", "max_engines", "scale_queue_seconds", "scale_up_seconds", "scale_down_seconds"),
}


def loaded(option: str, service: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The service's settings in its pod."""
    for name in KNOWN:
        monkeypatch.delenv(variable(name), raising=False)
    for name, value in rendered(option).environment(service).items():
        monkeypatch.setenv(name, value)
    return SETTINGS[service].load([])


@pytest.mark.parametrize("service", SETTINGS)
@pytest.mark.parametrize("option", OPTIONS)
def test_the_environment_is_of_known_settings(option: str, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in rendered(option).environment(service) if name.startswith(PREFIX)]
    assert set(names) <= {variable(name) for name in SETTINGS[service].model_fields}
    settings = loaded(option, service, monkeypatch)
    assert settings.host == "0.0.0.0"
    for container in containers(rendered(option).pods[service]):
        entries = [entry["name"] for entry in container.get("env", [])]
        assert len(entries) == len(set(entries))


def test_values_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    option = "settings, journals"
    endpoint = loaded(option, "endpoint", monkeypatch)
    assert (endpoint.max_waiting, endpoint.pool_patience) == (1000000, 2.5)
    scheduler = loaded(option, "scheduler", monkeypatch)
    assert (scheduler.max_batch_size, scheduler.run_ahead, scheduler.slots) == (30, 0, 1048576)
    assert scheduler.run_dir == "/journals"
    worker = loaded(option, "worker", monkeypatch)
    assert (worker.threads, worker.log_level, worker.slots) == (4, "DEBUG", 1048576)


@pytest.mark.parametrize(
    ("option", "run_ahead"), [("values-cpu.yaml", 0), ("nothing but a model", 1), ("settings, journals", 0)]
)
def test_a_scheduler_of_gpus_runs_ahead(option: str, run_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its settings say otherwise."""
    assert loaded(option, "scheduler", monkeypatch).run_ahead == run_ahead


def test_the_bounds_of_engines_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = loaded("engines and endpoints by load", "scheduler", monkeypatch)
    assert scheduler.bounds == Bounds(
        least=2, most=5, queue_age=2.5, up_seconds=60, down_seconds=300, finish_seconds=scheduler.finish_seconds
    )
    assert loaded("nothing but a model", "scheduler", monkeypatch).bounds is None


def test_services_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, scheduler, worker = (loaded("values-cpu.yaml", service, monkeypatch) for service in SETTINGS)
    assert endpoint.redis_url == scheduler.redis_url == "redis://orca-redis:6379/0"
    assert endpoint.pool == scheduler.pool == "serving.orca"
    assert endpoint.model == worker.model == "/opt/orca/demo_model"
    assert scheduler.worker_statefulset == "orca-worker"
    assert scheduler.worker_port == worker.port
    assert scheduler.ranks_per_pod == worker.ranks == 2
    annotations = rendered("values-cpu.yaml").workloads["worker"]["metadata"]["annotations"]
    assert annotations["orca.serving/shape"] == scheduler.shape.name
    assert annotations["orca.serving/pods-per-engine"] == str(scheduler.shape.pods)
    assert (worker.dtype, worker.device, worker.threads) == ("float32", "cpu", 1)
    assert worker.quantize is None
    assert worker.kv_dtype is None
    coded = loaded("a claim, float32, spread", "worker", monkeypatch)
    assert (coded.quantize, coded.kv_dtype) == ("int8", "int8")
    for service in ("worker", "endpoint"):
        adapters = loaded("a claim, float32, spread", service, monkeypatch).adapters
        assert adapters == "a/b=/models/b,legal=/models/legal"


@pytest.mark.parametrize(
    ("option", "folder"),
    [
        ("a claim, float32, spread", "/models/gpt2"),
        ("a claim of one node, the tokenizer from the hub", "/models/gpt2"),
        ("a download with a header and a kept copy", "/models/gpt2"),
        ("an image volume", "/models/gpt2"),
        ("a hub with a token", "/models/gpt2"),
    ],
)
def test_the_model_is_where_the_services_look(option: str, folder: str) -> None:
    """Mounted there, or fetched to there. The folder's name is the name that clients see."""
    for service in ("endpoint", "worker"):
        pod = rendered(option).pods[service]
        assert rendered(option).environment(service)["ORCA_MODEL"] == folder
        (container,) = pod["spec"]["containers"]
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "models"]
        assert mount["readOnly"] is True
        fetches = [step["args"] for step in pod["spec"].get("initContainers", [])]
        if fetches:
            assert mount["mountPath"] == str(Path(folder).parent)
            assert f"--to={folder}" in fetches[0]
            assert ("--tokenizer-only" in fetches[0]) == (service == "endpoint")
        else:
            model = OPTIONS[option].values["model"]
            within = "path" in (model.get("claim") or model["image"])
            assert mount["mountPath"] == (str(Path(folder).parent) if within else folder)
            assert "subPath" not in mount, "kubelet makes a folder that is not there"


def test_a_folder_of_a_volume_may_have_another_name_than_the_model() -> None:
    """The volume is mounted whole, so the folder has the name that it has there."""
    claim = {"path": None, "claim": {"name": "weights", "path": "team/7"}}
    release = render(merged(DEMO, {"model": {**claim, "name": "gpt2"}}))
    for service in ("endpoint", "worker"):
        assert release.environment(service)["ORCA_MODEL"] == "/models/team/7"
    assert release.environment("endpoint")["ORCA_SERVED_MODEL_NAME"] == "gpt2"
    assert "Orca serves gpt2 with" in release.notes
    assert "ORCA_SERVED_MODEL_NAME" not in render(merged(DEMO, {"model": claim})).environment("endpoint")


def test_somebody_s_own_entry_replaces_the_chart_s() -> None:
    """Kubernetes takes no two of one name from Helm 4, and of Helm 3 the last: variables, volumes and mounts."""
    mine = {
        "env": [{"name": "ORCA_HOST", "value": "::"}, {"name": "A", "value": "1"}],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}],
    }
    own = {"worker": {"pod": {"env": [{"name": "A", "value": "2"}], "volumes": [{"name": "shm", "emptyDir": {}}]}}}
    release = render(merged(DEMO, {"pod": mine}, own))
    for service in SETTINGS:
        assert release.environment(service)["ORCA_HOST"] == "::"
        assert release.environment(service)["A"] == ("2" if service == "worker" else "1")
        volumes = {volume["name"]: volume for volume in release.pods[service]["spec"]["volumes"]}
        assert volumes["tmp"]["emptyDir"] == {"sizeLimit": "1Gi"}
    assert {"name": "shm", "emptyDir": {}} in release.pods["worker"]["spec"]["volumes"]
    for pod in release.pods.values():
        for container in containers(pod):
            names = [entry["name"] for entry in container.get("env", [])]
            assert len(names) == len(set(names))


def test_the_live_page_is_told_where_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Service that stands for every scheduler, ready or not, and the endpoints' own; with mTLS as a client."""
    monkeypatch.setitem(SETTINGS, "ui", UiSettings)
    option = "the live page, with keys"
    page, release = loaded(option, "ui", monkeypatch), rendered(option)
    assert (page.host, page.ui_port, page.max_viewers, page.status_port) == ("0.0.0.0", 8001, 32, 9090)
    assert page.endpoint_url == "http://orca-endpoint:8000"
    assert page.api_keys_file == loaded(option, "endpoint", monkeypatch).api_keys_file
    services = {service["metadata"]["name"]: service["spec"] for service in release.of_kind("Service")}
    name, _, port = page.scheduler_status.partition(":")
    assert services[name]["clusterIP"] == "None"
    assert services[name]["publishNotReadyAddresses"]
    assert [str(one["port"]) for one in services[name]["ports"]] == [port]
    labels = release.pods["scheduler"]["metadata"]["labels"]
    assert services[name]["selector"].items() <= labels.items()
    (endpoint,), (ui,) = containers(release.pods["endpoint"]), containers(release.pods["ui"])
    assert (ui["image"], ui["command"]) == (endpoint["image"], ["python", "-m", "orca_ui"])
    secret = {
        "secrets": dict.fromkeys(("endpoint", "scheduler", "worker", "client", "redis"), "s") | {"client": "mine"}
    }
    secured = render(merged(DEMO, {"ui": {"enabled": True}, "tls": secret}))
    assert secured.environment("ui")["ORCA_ENDPOINT_URL"] == "https://orca-endpoint:8000"
    volumes = {volume["name"]: volume for volume in secured.pods["ui"]["spec"]["volumes"]}
    assert volumes["tls"]["secret"]["secretName"] == "mine"


def test_the_schema_knows_the_settings() -> None:
    schema = json.loads((FOLDER / "values.schema.json").read_text())["properties"]
    for service, kind in (SETTINGS | {"ui": UiSettings}).items():
        known = schema[service]["properties"]["settings"]["properties"]
        assert set(known) == kind.model_fields.keys() - DECIDED
        fields = kind.model_json_schema()["properties"]
        for name, given in known.items():
            field = fields[name]
            bounds = {
                key: field[key] for key in ("type", "enum", "minimum", "maximum", "exclusiveMinimum") if key in field
            }
            assert given == bounds, f"{service}.settings.{name}"


@pytest.mark.parametrize("option", OPTIONS)
def test_the_init_step_understands_its_arguments(option: str) -> None:
    for service in ("endpoint", "worker", "check"):
        steps = rendered(option).pods[service]["spec"].get("initContainers", [])
        for step in (step for step in steps if step["name"] == "model"):
            assert step["command"] == ["python", "-m", "orca_common.fetch_model"]
            given = fetch_model._arguments(step["args"])
            assert (given.tokenizer_only, given.config_only) == (service == "endpoint", service == "check")
            names = [entry["name"] for entry in step.get("env", [])]
            secrets = OPTIONS[option].external & {"Secret/hub", "Secret/download"}
            assert names == (["HF_TOKEN" if given.hub else "FETCH_HEADER"] if secrets else [])


def test_another_source_of_the_model_is_another_model() -> None:
    """The workers' pods tell it to the schedulers. What only checks the model changes nothing."""

    def told(model: Mapping[str, object]) -> str:
        pod = render(merged(DEMO, {"model": model})).pods["worker"]
        return pod["metadata"]["annotations"]["orca.serving/model"]

    assert told({}) == told({"numHeads": 6, "numLayers": 4})
    hubs = [{"path": None, "hub": {"name": name}} for name in ("a/b", "a/c")]
    assert len({told(model) for model in ({}, {"path": "/opt/orca/other"}, *hubs)}) == 4
