"""A misuse of the values stops the render with one sentence."""

from typing import Any

import helm_python
import pytest
from helm.chart import DEMO, FOLDER, merged, render
from helm_python import HelmRenderError, HelmValuesError

ONE_SOURCE = "model: exactly one of path, claim, download, image and hub says where the checkpoint is"
HUB = {"name": "openai-community/gpt2"}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"engine": {"tp": 4, "gpusPerPod": 3}}, "engine.gpusPerPod: 3 is no divisor of tp, 4"),
        (
            {"engine": {"autoscale": {"enabled": True, "min": 3, "max": 2}}},
            "engine.autoscale: max, 2, is less than min, 3",
        ),
        (
            {"endpoint": {"autoscale": {"enabled": True, "max": 1}}},
            "endpoint.autoscale: max, 1, is less than min, 2",
        ),
        (
            {"engine": {"tp": 8, "gpusPerNode": 4}},
            "engine.gpusPerPod: a pod of 8 ranks fits on no node, which has 4 GPUs (gpusPerNode)",
        ),
        (
            {"scheduler": {"settings": {"roles": "prefill=1"}}},
            "scheduler.settings.roles: prefill=1 is not mixed, nor like prefill=1,decode=1: each phase needs an engine",
        ),
        (
            {"scheduler": {"settings": {"roles": "prefill=1,decode=2"}}, "engine": {"count": 2}},
            "scheduler.settings.roles: prefill=1,decode=2 is 3 engines, and engine.count is 2",
        ),
        (
            {"scheduler": {"settings": {"roles": "prefill=1,decode=1"}}, "engine": {"autoscale": {"enabled": True}}},
            "scheduler.settings.roles: prefill=1,decode=1 is a fixed number of engines, and engine.autoscale changes "
            "it",
        ),
        (
            {"engine": {"device": "cuda", "kvDtype": "int8"}},
            "engine.kvDtype: int8 is read on a CPU alone, and engine.device is cuda",
        ),
        ({"engine": {"tp": 4}, "model": {"numHeads": 6}}, "tp 4: 6 heads cannot be shared evenly by 4 tensor ranks"),
        ({"engine": {"pp": 5}, "model": {"numLayers": 4}}, "pp 5: 4 layers are too few for 5 stages"),
        (
            {"model": {"path": None}},
            f"{ONE_SOURCE}; none is given",
        ),
        (
            {"model": {"hub": HUB}},
            f"{ONE_SOURCE}; path and hub are given",
        ),
        (
            {"model": {"tokenizer": {"hub": HUB, "claim": {"name": "c"}}}},
            "model.tokenizer: one of path, claim, download, image and hub; claim and hub are given",
        ),
        ({"model": {"name": "other"}}, "model.name: a folder inside an image has a name already, its own (path)"),
        (
            {"model": {"cache": {"claim": "models"}}},
            "model.cache: only what is fetched is kept (download, hub); model.path is read where it is",
        ),
        (
            {"redis": {"externalUrl": "redis://a", "externalUrlSecret": {"name": "a", "key": "b"}}},
            "redis: externalUrl or externalUrlSecret, not both",
        ),
        (
            {"redis": {"externalUrl": "redis://a", "mode": "sentinel"}},
            "redis.mode: sentinel installs servers and Sentinels; "
            "with externalUrl or externalUrlSecret there are others",
        ),
        (
            {"redis": {"externalUrl": "redis://a", "password": {"generate": True}}},
            "redis.password.generate: the password of a Redis that the release does not install is made there; "
            "give secret",
        ),
        (
            {"redis": {"password": {"generate": True, "secret": {"name": "a", "key": "b"}}}},
            "redis.password: generate or secret, not both",
        ),
        (
            {"redis": {"externalUrl": "redis://a", "exporter": {"enabled": True}}},
            "redis.exporter: it stands beside a Redis that the release installs; "
            "externalUrl or externalUrlSecret names another",
        ),
        (
            {"redis": {"mode": "sentinel", "evictable": False}},
            "redis.evictable: false is for the single Redis of the release; with Sentinels one server may be away",
        ),
        (
            {"jaeger": {"enabled": True}, "tracing": {"otlpEndpoint": "http://a:4317"}},
            "jaeger.enabled, tracing.otlpEndpoint: spans go to one of them, not both",
        ),
        (
            {"tls": {"issuer": {"name": "a"}, "secrets": {"worker": "b"}}},
            "tls: an issuer makes the certificates, or secrets hold them, not both",
        ),
        (
            {"tls": {"secrets": {"endpoint": "a", "worker": "b", "client": "c"}}},
            "tls.secrets: mTLS is for all of endpoint, scheduler, worker, client, redis or for none; "
            "scheduler, redis missing",
        ),
        (
            {"pod": {"serviceAccount": {"name": "shared"}}},
            "pod.serviceAccount: create makes an account for each workload; "
            "one name for all is for an account that is there (create: false)",
        ),
        (
            {"endpoint": {"service": {"nodePorts": {"grpc": 30051}}}},
            "endpoint.service.nodePorts: a Service of type ClusterIP has none; "
            "its type must be NodePort or LoadBalancer",
        ),
        (
            {"endpoint": {"otherModels": ["gpt2", "demo_model"]}},
            "endpoint.otherModels: demo_model is this release's own model; "
            "endpoint.settings.served_model_name gives it another name",
        ),
        (
            {"gateway": {"parentRefs": [{"name": "a"}], "httpHostnames": ["a"]}},
            "gateway: httpHostnames and grpcHostnames are both required; "
            "a Gateway does not share a hostname between the two",
        ),
        (
            {"gateway": {"parentRefs": [{"name": "a"}], "httpHostnames": ["a", "b"], "grpcHostnames": ["b"]}},
            "gateway: b stands in httpHostnames and grpcHostnames; a Gateway does not share a hostname between the two",
        ),
        (
            {"endpoint": {"resources": {"limits": {"cpu": "100m"}}}},
            "endpoint.resources: the container endpoint asks for 500m of cpu, and its limit is 100m",
        ),
        (
            {"redis": {"resources": {"requests": {"example.com/disk": 1}}}},
            "redis.resources: the container redis asks for example.com/disk and has no limit of it; "
            "give the limit alone",
        ),
        (
            {"worker": {"pod": {"containers": [{"name": "worker", "image": "mine:1"}]}}},
            "pod: worker has a container named worker already; containers and initContainers need other names",
        ),
        (
            {"worker": {"resources": {"claims": [{"name": "gpus"}]}}},
            "worker.resources.claims: worker.pod.resourceClaims has none of the name gpus",
        ),
    ],
)
def test_what_does_not_fit_together(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HelmRenderError) as refusal:
        render(merged(DEMO, values))
    assert str(refusal.value).endswith(f": {sentence}")


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"engine": {"tp": 0}}, "at '/engine/tp': minimum: got 0, want 1"),
        ({"engine": {"pp": "two"}}, "at '/engine/pp': got string, want integer"),
        (
            {"engine": {"dtype": "float8"}},
            "at '/engine/dtype': value must be one of 'auto', 'bfloat16', 'float16', 'float32'",
        ),
        ({"engine": {"device": "auto"}}, "at '/engine/device': value must be one of 'cuda', 'cpu'"),
        ({"enginess": 2}, "at '': additional properties 'enginess' not allowed"),
        (
            {"endpoint": {"settings": {"max_wait": 2}}},
            "at '/endpoint/settings': additional properties 'max_wait' not allowed",
        ),
        ({"extraObjects": None}, "missing property 'extraObjects'"),  # as after --reuse-values of an older chart
        ({"endpoint": {"service": {"spec": {"ports": []}}}}, "at '/endpoint/service/spec/ports': false schema"),
        (
            {"pod": {"probes": {"livenessProbe": {"httpGet": {}}}}},
            "at '/pod/probes/livenessProbe': additional properties 'httpGet' not allowed",
        ),
        ({"image": {"digests": {"worker": "7"}}}, "at '/image/digests/worker'"),
        ({"fullnameOverride": "Chat"}, "at '/fullnameOverride'"),
        ({"worker": {"memory": None}}, "at '/worker': missing property 'memory'"),
        ({"redis": {"mode": "cluster"}}, "at '/redis/mode': value must be one of 'single', 'sentinel'"),
        ({"redis": {"replicas": 0}}, "at '/redis/replicas': minimum: got 0, want 1"),
        ({"redis": {"password": "word"}}, "at '/redis/password': got string, want object"),
        ({"redis": {"externalUrl": "pool.example.com"}}, "at '/redis/externalUrl'"),
        ({"model": {"path": "demo_model"}}, "at '/model/path': 'demo_model' does not match pattern '^/'"),
    ],
)
def test_what_is_wrong_by_itself(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(HelmValuesError) as refusal:
        render(merged(DEMO, values))
    assert complaint in str(refusal.value)


NULL = ("check", "wait", "ui", "scheduler.settings", "image.digests", "engine.autoscale", "endpoint.autoscale")


@pytest.mark.parametrize("path", [*NULL, "redis.externalUrl", "endpoint.service.nodePorts"])
def test_a_block_that_is_null_is_named(path: str) -> None:
    """As with --reuse-values from a chart that did not have it: no template can look into it."""
    value: Any = None
    for name in reversed(path.split(".")):
        value = {name: value}
    with pytest.raises(HelmValuesError, match=f"missing property '{path.rpartition('.')[2]}'"):
        render(merged(DEMO, value))


@pytest.mark.parametrize(
    ("release", "other"),
    [("7b-chat", "orca-7b-chat"), ("chat.v2", "orca-chat-v2"), (f"7.{51 * 'b'}", f"orca-7-{51 * 'b'}")],
)
def test_a_name_that_no_service_can_have(release: str, other: str) -> None:
    with pytest.raises(HelmRenderError) as refusal:
        render(DEMO, release)
    sentence = (
        "Services have names of letters, digits and -, which begin with a letter; "
        f"give another to the release, or fullnameOverride={other}"
    )
    assert str(refusal.value).endswith(sentence)
    labels = render(merged(DEMO, {"fullnameOverride": other}), release).workloads["worker"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == release


def test_an_upgrade_that_kept_the_model_before() -> None:
    """Helm forgets a null beside --reuse-values, and cannot say so itself."""
    chart = helm_python.Chart.load(FOLDER)
    with pytest.raises(HelmRenderError) as refusal:
        chart.render(merged(DEMO, {"model": {"hub": HUB}}), name="orca", namespace="serving", is_upgrade=True)
    assert str(refusal.value).endswith(
        "; path and hub are given; --reuse-values keeps what a null removes, --reset-then-reuse-values does not"
    )


def test_image_volumes_need_a_new_cluster(capfd: pytest.CaptureFixture[str]) -> None:
    """The linter can pretend an old cluster; it only logs the sentence that stops a render."""
    helm_python.lint(FOLDER, {"model": {"image": {"reference": "gpt2:1"}}}, kube_version="v1.32.0")
    sentence = (
        "model.image: volumes of OCI images need Kubernetes 1.33 with the feature gate ImageVolume; this is v1.32.0"
    )
    assert sentence in capfd.readouterr().err
