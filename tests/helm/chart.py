"""The chart as a test sees it: rendered by the Helm engine, without a cluster."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import helm_python
import yaml
from properties import covering

FOLDER = Path(__file__).parents[2] / "helm"
NAME, NAMESPACE = "orca", "serving"
DEMO = {"model": {"path": "/opt/orca/demo_model"}}
SERVICES = ("endpoint", "scheduler", "worker")
TLS_HOLDERS = (*SERVICES, "client", "redis")
WORKLOADS = ("Deployment", "StatefulSet")

Object = dict[str, Any]

_chart = helm_python.Chart.load(FOLDER)


@dataclass(frozen=True)
class Options:
    """Values beside the defaults, and what must exist before such an install: `KIND/NAME`."""

    values: Object
    external: frozenset[str] = field(default_factory=frozenset)


def merged(*values: Mapping[str, Any]) -> Object:
    """Values on top of each other, as several -f of Helm."""
    result: Object = {}
    for layer in values:
        for name, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
            result[name] = merged(result[name], value) if both else value
    return result


def values_file(name: str) -> Object:
    return yaml.safe_load((FOLDER / name).read_text())


# A container that somebody adds to our pods.
PROXY = {
    "name": "proxy",
    "image": "proxy:1",
    "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "16Mi"}},
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    },
    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
}


# One set of values for each thing that can be switched: together they make every line of the templates appear.
OPTIONS = {
    "nothing but a model": Options(DEMO),
    "values-cpu.yaml": Options(values_file("values-cpu.yaml")),
    "a claim, float32, spread": Options(
        {
            "model": {"claim": {"name": "weights", "path": "gpt2"}},
            "engine": {
                "dtype": "float32",
                "quantize": "int8",
                "device": "cpu",
                "kvDtype": "int8",
                "placement": "spread",
                "adapters": {"legal": "/models/legal", "a/b": "/models/b"},
            },
        },
        frozenset({"PersistentVolumeClaim/weights"}),
    ),
    "a claim of one node, the tokenizer from the hub": Options(
        {
            "model": {
                "claim": {"name": "weights"},
                "name": "gpt2",
                "tokenizer": {"hub": {"name": "openai-community/gpt2"}},
            }
        },
        frozenset({"PersistentVolumeClaim/weights"}),
    ),
    "a download with a header and a kept copy": Options(
        {
            "model": {
                "download": {
                    "url": "https://models.example.com:8443/team/gpt2.tar.gz",
                    "sha256": 64 * "0",
                    "headerSecret": {"name": "download", "key": "header"},
                },
                "cache": {"claim": "models"},
            }
        },
        frozenset({"Secret/download", "PersistentVolumeClaim/models"}),
    ),
    "an image volume": Options({"model": {"image": {"reference": "models.example.com/gpt2:1", "path": "gpt2"}}}),
    "a hub with a token": Options(
        {
            "model": {
                "hub": {"name": "openai-community/gpt2", "tokenSecret": {"name": "hub", "key": "token"}},
                "cache": {"size": "20Gi"},
            }
        },
        frozenset({"Secret/hub"}),
    ),
    "settings, journals": Options(
        merged(
            DEMO,
            {
                "engine": {"slots": 1048576},
                "endpoint": {"settings": {"max_waiting": 1000000, "pool_patience": 2.5}, "replicas": 3},
                "scheduler": {"settings": {"max_batch_size": 30, "run_ahead": 0}, "journals": {"enabled": True}},
                "worker": {"settings": {"threads": 4, "log_level": "DEBUG"}},
            },
        )
    ),
    "a Redis of ours": Options(merged(DEMO, {"redis": {"externalUrl": "rediss://pool.example.com:6380/2"}})),
    "a Redis whose URL is a Secret": Options(
        merged(DEMO, {"redis": {"externalUrlSecret": {"name": "pool", "key": "url"}, "externalPort": 7000}}),
        frozenset({"Secret/pool"}),
    ),
    "Sentinels of ours": Options(
        merged(
            DEMO,
            {
                "redis": {
                    "externalUrl": "redis+sentinel://:secret@a.example.com,b.example.com:26380,c.example.com:26379/pool",
                    "externalPort": 6381,
                }
            },
        )
    ),
    "Sentinels": Options(merged(DEMO, {"redis": {"mode": "sentinel"}})),
    "Sentinels, Valkey, a password, certificates": Options(
        merged(
            DEMO,
            {
                "redis": {
                    "mode": "sentinel",
                    "image": "valkey:8.1",
                    "program": "valkey",
                    "replicas": 1,
                    "storage": {"className": "fast"},
                    "password": {"generate": True},
                },
                "sentinel": {"downAfterSeconds": 1.5},
                "tls": {"issuer": {"name": "ours"}},
            },
        )
    ),
    "a password of a Secret": Options(
        merged(DEMO, {"redis": {"password": {"secret": {"name": "pool", "key": "word"}}}}), frozenset({"Secret/pool"})
    ),
    "a collector": Options(merged(DEMO, {"tracing": {"otlpEndpoint": "http://collector.monitoring:4319"}})),
    "metrics": Options(
        merged(
            DEMO,
            {
                "metrics": {
                    "podMonitor": {"enabled": True, "interval": "1s", "labels": {"release": "prometheus"}},
                    "rules": {"enabled": True, "labels": {"release": "prometheus"}},
                    "dashboard": {"enabled": True},
                    "router": {"enabled": True},
                },
                "networkPolicy": {
                    "metricsClients": [
                        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
                    ]
                },
            },
        )
    ),
    "engines and endpoints by load": Options(
        merged(
            DEMO,
            {
                "engine": {"tp": 2, "pp": 2, "autoscale": {"enabled": True, "min": 2, "max": 5, "queueSeconds": 2.5}},
                "endpoint": {"autoscale": {"enabled": True, "max": 20}},
            },
        )
    ),
    "a gate of a quarter of an hour": Options(merged(DEMO, {"wait": {"timeoutSeconds": 900}})),
    "no gate": Options(merged(DEMO, {"wait": {"enabled": False}})),
    "Jaeger": Options(
        merged(
            DEMO,
            {
                "jaeger": {"enabled": True},
                "networkPolicy": {"jaegerClients": [{"podSelector": {"matchLabels": {"team": "ours"}}}]},
            },
        )
    ),
    "the live page, with keys": Options(
        merged(
            DEMO,
            {
                "ui": {"enabled": True, "settings": {"max_viewers": 32}},
                "apiKeys": {"secret": "keys"},
                "networkPolicy": {"uiClients": [{"podSelector": {"matchLabels": {"team": "ours"}}}]},
            },
        ),
        frozenset({"Secret/keys"}),
    ),
    "policies off": Options(merged(DEMO, {"networkPolicy": {"enabled": False}})),
    "policies with all options": Options(
        merged(
            DEMO,
            {
                "networkPolicy": {
                    "clients": [{"namespaceSelector": {"matchLabels": {"team": "ours"}}}],
                    "apiServer": {"cidrs": ["10.96.0.1/32"], "ports": [6443]},
                    "egress": [{"ports": [{"port": 3128}], "to": [{"ipBlock": {"cidr": "192.0.2.1/32"}}]}],
                }
            },
        )
    ),
    "certificates from Secrets, API keys": Options(
        merged(
            DEMO,
            {
                "tls": {"secrets": {name: f"{name}-tls" for name in TLS_HOLDERS}},
                "apiKeys": {"secret": "keys"},
                "test": {"apiKeySecret": "key"},
            },
        ),
        frozenset({*(f"Secret/{name}-tls" for name in TLS_HOLDERS), "Secret/keys", "Secret/key"}),
    ),
    "certificates from an issuer": Options(
        merged(DEMO, {"tls": {"issuer": {"name": "ours", "kind": "ClusterIssuer"}}})
    ),
    "ways in": Options(
        merged(
            DEMO,
            {
                "endpoint": {
                    "service": {"type": "LoadBalancer", "annotations": {"cloud.example.com/internal": "true"}}
                },
                "ingress": {
                    "enabled": True,
                    "className": "ours",
                    "host": "orca.example.com",
                    "annotations": {"a/b": "c"},
                    "tlsSecret": "host-tls",
                },
                "gateway": {
                    "parentRefs": [{"name": "gate", "namespace": "ways-in"}],
                    "httpHostnames": ["orca.example.com"],
                    "grpcHostnames": ["grpc.example.com"],
                },
            },
        ),
        frozenset({"Secret/host-tls"}),
    ),
    "two models at one Gateway": Options(
        merged(
            DEMO,
            {
                "endpoint": {"otherModels": ["gpt2", "owner/other"]},
                "gateway": {
                    "parentRefs": [{"name": "gate"}],
                    "httpHostnames": ["orca.example.com"],
                    "grpcHostnames": ["grpc.example.com"],
                },
            },
        ),
    ),
    "everything of pods": Options(
        merged(
            DEMO,
            {
                "image": {"registry": "images.example.com/team/", "tag": "7", "pullSecrets": ["pull"]},
                "jaeger": {"enabled": True},
                "pod": {
                    "labels": {"team": "ours"},
                    "annotations": {"a/b": "c"},
                    "nodeSelector": {"pool": "small"},
                    "tolerations": [{"key": "ours", "operator": "Exists"}],
                    "priorityClassName": "high",
                    "env": [{"name": "OTEL_TRACES_SAMPLER", "value": "always_on"}],
                    "serviceAccountAnnotations": {"cloud.example.com/role": "orca"},
                },
                "worker": {
                    "pod": {
                        "labels": {"gpu": "big"},
                        "nodeSelector": {"pool": "gpu"},
                        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                        "affinity": {
                            "nodeAffinity": {
                                "requiredDuringSchedulingIgnoredDuringExecution": {
                                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]
                                }
                            }
                        },
                        "topologySpreadConstraints": [
                            {
                                "maxSkew": 1,
                                "topologyKey": "topology.kubernetes.io/zone",
                                "whenUnsatisfiable": "ScheduleAnyway",
                                "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "worker"}},
                            }
                        ],
                        "runtimeClassName": "nvidia",
                        "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
                        "envFrom": [{"secretRef": {"name": "nccl"}}],
                        "volumes": [{"name": "scratch", "emptyDir": {}}],
                        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                    }
                },
            },
        ),
        frozenset({"Secret/pull", "Secret/nccl"}),
    ),
    "a platform of its own rules": Options(
        merged(
            DEMO,
            {
                "engine": {"count": None},
                "commonLabels": {"cost-center": "7", "app.kubernetes.io/component": "stolen"},
                "commonAnnotations": {"team": "ours"},
                "extraObjects": [
                    {
                        "apiVersion": "v1",
                        "kind": "ConfigMap",
                        "metadata": {"name": '{{ include "orca.fullname" . }}-dashboard'},
                    },
                    "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ .Release.Name }}-text}",
                ],
                "image": {"tag": "7", "digests": {"worker": f"sha256:{64 * 'a'}"}},
                "jaeger": {"enabled": True},
                "pod": {
                    "securityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
                    "serviceAccount": {"create": False, "name": "shared"},
                    "probes": {"readinessProbe": {"periodSeconds": 4}},
                    "initContainers": [{**PROXY, "restartPolicy": "Always"}],
                },
                "endpoint": {
                    "replicas": None,
                    "pod": {"containers": [{**PROXY, "name": "logs"}]},
                    "service": {
                        "type": "LoadBalancer",
                        "nodePorts": {"grpc": 30051},
                        "spec": {"loadBalancerClass": "example.com/inner", "loadBalancerSourceRanges": ["10.0.0.0/8"]},
                    },
                },
                "scheduler": {
                    "replicas": None,
                    "pod": {"serviceAccount": {"create": True, "name": "watcher"}},
                },
                "worker": {"pod": {"probes": {"startupProbe": {"failureThreshold": 600}}}},
            },
        ),
        frozenset({"ServiceAccount/shared"}),
    ),
}


# How engines may be formed: the block `engine` of the values, which all else follows from.
SHAPES = [
    *({"tp": tp, "pp": pp, "count": count} for tp, pp, count in covering((1, 2, 4, 8), (1, 2, 4), (1, 2, 3))),
    *({"tp": tp, "pp": 2, "count": 2, "gpusPerPod": per_pod} for tp, per_pod in ((2, 1), (4, 1), (4, 2), (8, 4))),
]


@dataclass(frozen=True)
class Rendered:
    """The objects of one install, and what NOTES.txt says."""

    objects: tuple[Object, ...]
    notes: str

    def of_kind(self, *kinds: str) -> list[Object]:
        return [thing for thing in self.objects if thing["kind"] in kinds]

    def one(self, kind: str, name: str) -> Object:
        found = [thing for thing in self.of_kind(kind) if thing["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} objects {kind}/{name}"
        return found[0]

    @cached_property
    def workloads(self) -> dict[str, Object]:
        """Deployments and StatefulSets by component."""
        return {component(thing): thing for thing in self.of_kind(*WORKLOADS)}

    @cached_property
    def pods(self) -> dict[str, Object]:
        """What becomes a pod, by component: the templates, also of the hook's Job, and the pod of `helm test`."""
        templates = {component(owner): owner["spec"]["template"] for owner in self.of_kind(*WORKLOADS, "Job")}
        return templates | {component(pod): pod for pod in self.of_kind("Pod")}

    def environment(self, name: str) -> dict[str, str]:
        """The variables of a component's own container. What the cluster fills in is named by where it comes from."""
        return {entry["name"]: entry.get("value", "from the cluster") for entry in main(self.pods[name]).get("env", [])}


def component(thing: Object) -> str:
    return thing["metadata"]["labels"]["app.kubernetes.io/component"]


def main(pod: Object) -> Object:
    """The container that a pod is for. Those that somebody adds stand behind it."""
    return pod["spec"]["containers"][0]


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def render(values: Mapping[str, Any], name: str = NAME) -> Rendered:
    """Raises HelmRenderError with the sentence of a check, and HelmValuesError with that of the schema."""
    return _render(json.dumps(values), name)


@cache
def _render(values: str, name: str) -> Rendered:
    files = _chart.render(json.loads(values), name=name, namespace=NAMESPACE, is_install=True)
    notes = next(text for path, text in files.items() if path.endswith("NOTES.txt"))
    return Rendered(tuple(documents(text for path, text in files.items() if path.endswith(".yaml"))), notes)


def rendered(option: str) -> Rendered:
    """What OPTIONS[option] renders."""
    return render(OPTIONS[option].values)


def documents(texts: Iterator[str] | Sequence[str]) -> Iterator[Object]:
    for text in texts:
        yield from filter(None, yaml.load_all(text, Loader=yaml.CSafeLoader))
