"""Finds what an API server refuses and a schema of Kubernetes does not know: names, labels, named entries of lists."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import kubernetes_validate
from helm.chart import WORKLOADS, Object

FOREIGN = (
    "cert-manager.io/",
    "gateway.networking.k8s.io/",
    "monitoring.coreos.com/",
)  # whose schemas kubernetes-validate does not have
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_KEY = re.compile(r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"([0-9]+[.]?[0-9]*|[.][0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][-+]?[0-9]+)?")
FACTORS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
FACTORS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


def faults(thing: Object, version: str = "1.34") -> Iterator[str]:
    """Why an API server would refuse an object."""
    if not thing["apiVersion"].startswith(FOREIGN):
        try:
            kubernetes_validate.validate(thing, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield str(error.message)
            return
    name, kind = thing["metadata"]["name"], thing["kind"]
    pattern = SERVICE if kind == "Service" else LABEL if kind in (*WORKLOADS, "Job", "Pod") else SUBDOMAIN
    if not isinstance(name, str) or not pattern.fullmatch(name):
        yield f"the name {name!r}"
    if kind == "StatefulSet" and len(name) > 52:  # its pods have a label of NAME-REVISION
        yield f"the name {name!r} is too long for a StatefulSet"
    yield from _metadata(thing["metadata"])
    spec = thing.get("spec", {})
    for claim in spec.get("volumeClaimTemplates", []):
        yield from _resources(claim["spec"]["resources"])
    if kind in (*WORKLOADS, "Job"):
        yield from _metadata(spec["template"]["metadata"])
        claims = [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])]
        yield from _pod(spec["template"]["spec"], claims)
    elif kind == "Pod":
        yield from _pod(spec, [])


def _metadata(metadata: Object) -> Iterator[str]:
    for key, value in (metadata.get("labels") or {}).items():
        if not LABEL_KEY.fullmatch(key) or not isinstance(value, str) or not LABEL_VALUE.fullmatch(value):
            yield f"the label {key!r}: {value!r}"
    for key, value in (metadata.get("annotations") or {}).items():
        if not LABEL_KEY.fullmatch(key) or not isinstance(value, str):
            yield f"the annotation {key!r}: {value!r}"


def _pod(spec: Object, claims: Sequence[str]) -> Iterator[str]:
    inits, own = spec.get("initContainers") or [], spec["containers"]
    volumes = [volume["name"] for volume in spec.get("volumes") or []]
    yield from _named("containers", [container["name"] for container in (*inits, *own)])
    yield from _named("volumes", volumes)
    devices = [claim["name"] for claim in spec.get("resourceClaims") or []]
    for container in (*inits, *own):
        for claim in (container.get("resources") or {}).get("claims") or []:
            if claim["name"] not in devices:
                yield f"{container['name']} claims {claim['name']}, which is no resourceClaim"
    for key, value in (spec.get("nodeSelector") or {}).items():
        yield from _metadata({"labels": {key: value}})
    for volume in spec.get("volumes") or []:
        for source in ("emptyDir", "secret", "configMap", "persistentVolumeClaim", "image"):
            given = volume.get(source) or {}
            yield from _quantities({"sizeLimit": given["sizeLimit"]} if "sizeLimit" in given else {})
            name = given.get("secretName") or given.get("claimName")
            if name is not None and not SUBDOMAIN.fullmatch(name):
                yield f"the volume {volume['name']} of {name!r}"
    for field in ("serviceAccountName", "priorityClassName", "runtimeClassName"):
        if spec.get(field) and not SUBDOMAIN.fullmatch(spec[field]):
            yield f"{field} {spec[field]!r}"
    for container in (*inits, *own):
        entries = [entry["name"] for entry in container.get("env") or []]
        if len(entries) != len(set(entries)):
            yield f"env of {container['name']}: {entries}"
        if any(not name or "=" in name or not name.isascii() for name in entries):
            yield f"env of {container['name']}: {entries}"
        mounts = container.get("volumeMounts") or []
        paths = [mount["mountPath"] for mount in mounts]
        if len(paths) != len(set(paths)) or not all(paths):
            yield f"mounts of {container['name']}: {paths}"
        if any(":" in path for path in paths):
            yield f"mounts of {container['name']}: {paths}"
        for mount in mounts:
            if mount["name"] not in (*volumes, *claims):
                yield f"{container['name']} mounts {mount['name']}, which is no volume"
            if (inside := mount.get("subPath") or "").startswith("/") or ".." in inside.split("/"):
                yield f"{container['name']} mounts {inside!r} of a volume"
        if not container.get("image") or container["image"] != container["image"].strip():
            yield f"the image {container.get('image')!r}"
        yield from _resources(container.get("resources") or {})


def _named(what: str, names: list[Any]) -> Iterator[str]:
    if len(names) != len(set(names)) or not all(LABEL.fullmatch(name) for name in names):
        yield f"{what}: {names}"


def _resources(resources: Object) -> Iterator[str]:
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    for given in (requests, limits):
        yield from _quantities(given)
        for name in given:
            if not LABEL_KEY.fullmatch(name) or (
                name not in ("cpu", "memory", "storage", "ephemeral-storage") and "/" not in name
            ):
                yield f"the resource {name!r}"
    for name in requests.keys() - limits.keys():
        if "/" in name or name.startswith("hugepages-"):
            yield f"{name} is asked for without a limit"
    for name in requests.keys() & limits.keys():
        asked, limit = _number(requests[name]), _number(limits[name])
        if asked > limit or ("/" in name and asked != limit):
            yield f"{name}: {requests[name]!r} are asked for, and the limit is {limits[name]!r}"
    for name in limits:
        if "/" in name and _number(limits[name]) % 1:
            yield f"{name}: {limits[name]!r} is no whole number"


def _quantities(given: Object) -> Iterator[str]:
    for name, value in given.items():
        if not isinstance(value, str | int | float) or not QUANTITY.fullmatch(str(value)):
            yield f"{name}: {value!r} is no quantity"


def _number(quantity: Any) -> float:
    text = str(quantity)
    found = re.match(r"[0-9.]*", text)
    digits = found[0] if found else ""
    return float(digits or 0) * FACTORS.get(text[len(digits) :], 1)
