"""Random values files, drawn from the chart's own schema: mostly allowed, with zeros, nulls and odd texts among them.

Fields that go into pods as they are get pieces of valid manifests: what stands in them is Kubernetes's to judge.
"""

import json
import random
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from helm.chart import FOLDER, OPTIONS, PROXY, Object, merged

SCHEMA: Object = json.loads((FOLDER / "values.schema.json").read_text())
ODD: tuple[Any, ...] = (None, 0, -1, 1.5, 2**40, "", "7", "0", "1e3", "true", "null", "~", " ", "a: b", "# a", "- a")
ODD += ("{{ .Release.Name }}", '"', "é", "a,b", "x" * 300, True, False, [], {}, [None], ["7"], {"a": None}, {"a": "7"})
TEXTS = ("7", "0", "true", "null", "1e3", "ours", "a-b", "a.b", "x" * 63, "registry.example.com:5000/team", "10Gi")
PATHS = ("/opt/orca/demo_model", "/7", "/a b", "/a: b", "/x/7/", "/opt/orca/true", "/été")
URLS = ("http://7", "https://models.example.com:8443/a/7.tar.gz", "redis://a:7000/0", "rediss://u:p@b/1")
URLS += ("redis+sentinel://a,b:26380/pool", "http://[::1]:4317", "http://a/b?c=d")
NAMES = ("orca", "chat", "7b-chat", "a.b", "1", "1e3", "true", "null", "y", "x" * 53, "a-" + "7" * 40)  # of releases

MOUNT = {"mountPath": "/scratch", "name": "scratch"}
PIECES: dict[str, list[Any]] = {  # by the field's name
    "tolerations": [[], [{"key": "ours", "operator": "Exists"}]],
    "affinity": [{}, {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}],
    "topologySpreadConstraints": [
        [],
        [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}],
    ],
    "env": [[], [{"name": "OTEL_SERVICE_NAME", "value": "7"}], [{"name": "ORCA_MODEL", "value": "/mine"}]],
    "envFrom": [[], [{"secretRef": {"name": "ours"}}]],
    "volumes": [[], [{"name": "scratch", "emptyDir": {}}]],
    "volumeMounts": [[]],
    "initContainers": [[], [{**PROXY, "restartPolicy": "Always"}]],
    "containers": [[], [{**PROXY, "name": "beside"}]],
    "securityContext": [None, {}, {"runAsUser": 7}, {"runAsUser": None}],
    "containerSecurityContext": [None, {}, {"runAsUser": 7}],
    "extraObjects": [[], [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "ours"}}]],
    "spec": [{}, {"externalTrafficPolicy": "Cluster"}],
    "clients": [[], [{"podSelector": {}}]],
    "egress": [[], [{"ports": [{"port": 3128}]}]],
    "parentRefs": [[], [{"name": "gate"}]],
    "cidrs": [[], ["10.96.0.1/32"]],
    "claims": [[], [{"name": "gpus"}]],
    "resourceClaims": [[], [{"name": "gpus", "resourceClaimTemplateName": "gpus"}]],
    "dnsConfig": [{}, {"options": [{"name": "ndots", "value": "2"}]}],
    "strategy": [{}, {"type": "Recreate", "rollingUpdate": None}, {"rollingUpdate": {"maxSurge": 2}}],
    "relabelings": [[], [{"targetLabel": "team", "replacement": "7"}]],
    "resources": [{}, {"limits": {"cpu": 2}}, {"requests": {"memory": "1Gi"}, "limits": {"memory": "1Gi"}}],
}
PIECES |= dict.fromkeys(("jaegerClients", "uiClients", "metricsClients"), PIECES["clients"])
MOVED = {"$ref": "#/definitions/moved"}
AS_IT_IS = ("securityContext", "containerSecurityContext")
ODDITY = 0.12  # share of the drawn values that need not be allowed


def resolved(node: Any) -> Object:
    """A schema without $ref; {} for one that only says true."""
    while isinstance(node, dict) and "$ref" in node:
        node = SCHEMA["definitions"][node["$ref"].rpartition("/")[2]]
    if isinstance(node, dict) and "anyOf" in node:
        return resolved(node["anyOf"][0])
    return node if isinstance(node, dict) else {}


def places(node: Object = SCHEMA, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all values that have a name, blocks too. The blocks `pod` are alike: two of them are enough."""
    for name, below in node.get("properties", {}).items():
        if below != MOVED and (name != "pod" or above in ((), ("worker",))):
            yield (*above, name)
            yield from places(resolved(below), (*above, name))


def a_file_with(path: tuple[str, ...], value: Any) -> Object:
    """A value in its place, on top of that of OPTIONS which sets most of the path already."""

    def known(values: Any) -> int:
        def below(name: str) -> bool:
            nonlocal values
            values = values.get(name) if isinstance(values, dict) else None
            return values is not None

        return len(list(takewhile(below, path)))

    base = max((option.values for option in OPTIONS.values()), key=known)
    return merged(base, nested(path, value))


def nested(path: tuple[str, ...], value: Any) -> Object:
    """The values file that sets this alone."""
    for name in reversed(path):
        value = {name: value}
    return value


def a_place(draw: random.Random) -> tuple[tuple[str, ...], Object]:
    """Some value that has a name, with its schema: blocks as well as what stands in them."""
    path: tuple[str, ...] = ()
    node = SCHEMA
    while known := [name for name, below in node.get("properties", {}).items() if below != MOVED]:
        path = (*path, draw.choice(known))
        node = resolved(node["properties"][path[-1]])
        if draw.random() < 0.1:
            break
    return path, node


def a_values_file(draw: random.Random) -> tuple[str, Object]:
    """A release's name, and one of OPTIONS with one to four values that differ."""
    values = OPTIONS[draw.choice(list(OPTIONS))].values
    for _ in range(draw.randint(1, 4)):
        path, schema = a_place(draw)
        free = path[-1] in PIECES or any(name in AS_IT_IS for name in path)
        value: Any = a_value(draw, path[-1], schema) if free or draw.random() > ODDITY else draw.choice(ODD)
        values = merged(values, nested(path, value))
    return draw.choice(NAMES) if draw.random() < ODDITY / 2 else "orca", values


def a_value(draw: random.Random, name: str, schema: Object) -> Any:
    """A value that the schema may well allow."""
    if name in PIECES and not ("properties" in schema and name != "resources"):
        return draw.choice(PIECES[name])
    if "enum" in schema:
        return draw.choice(schema["enum"])
    kinds = schema.get("type", ["string", "integer", "null"])
    kind = draw.choice(kinds) if isinstance(kinds, list) else kinds
    if kind == "object":
        return an_object(draw, schema)
    if kind == "array":
        return [a_value(draw, name, resolved(schema.get("items", {}))) for _ in range(draw.randint(0, 2))]
    if kind in ("integer", "number"):
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        return draw.choice([least, least + 1, 7, schema.get("maximum", 1000), *([0.5] if kind == "number" else [])])
    if kind == "boolean":
        return draw.random() < 0.5
    return a_text(draw, name, schema) if kind == "string" else None


def an_object(draw: random.Random, schema: Object) -> Object:
    known = schema.get("properties", {})
    names = [name for name in known if name in schema.get("required", ()) or draw.random() < 0.5]
    made = {name: a_value(draw, name, resolved(known[name])) for name in names}
    if isinstance(more := schema.get("additionalProperties"), dict) and not known:
        made[draw.choice(("ours", "example.com/ours", "7", "true"))] = a_value(draw, "", resolved(more))
    return made


def a_text(draw: random.Random, name: str, schema: Object) -> str:
    pattern = schema.get("pattern", "")
    if pattern == "^/":
        return draw.choice(PATHS)
    if "://" in pattern:
        return draw.choice(URLS)
    if "sha256" in pattern or "{64}" in pattern:
        return f"{'sha256:' if 'sha256:' in pattern else ''}{64 * '7'}"
    if name == "size":
        return draw.choice(("7", "1Gi", "1.5Gi", "0"))
    return draw.choice(TEXTS)
