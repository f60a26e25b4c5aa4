"""Reading Kubernetes objects. They are plain dictionaries, as the API sends them and as a chart renders them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orca_common.errors import FailedPrecondition

Object = Mapping[str, Any]
Resources = dict[str, float]  # resource -> amount: cores, bytes, or pieces

COMPONENT = "app.kubernetes.io/component"
INSTANCE = "app.kubernetes.io/instance"
SCALES = {
    **{"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18},
    **{f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", 1)},
}


def at(thing: Any, *path: str | int) -> Any:
    """Returns the value at a path of keys and positions, or None where the path ends early."""
    for step in path:
        if isinstance(step, int):
            thing = thing[step] if isinstance(thing, list) and step < len(thing) else None
        else:
            thing = thing.get(step) if isinstance(thing, Mapping) else None
    return thing


def name_of(thing: Object) -> str:
    return str(at(thing, "metadata", "name") or "")


def component_of(thing: Object) -> str:
    return str(at(thing, "metadata", "labels", COMPONENT) or "")


def pod_template(workload: Object) -> Object:
    """The pod that a Deployment or StatefulSet makes; a pod is its own template."""
    return workload if workload.get("kind") == "Pod" else at(workload, "spec", "template") or {}


def containers(pod: Object, kind: str = "containers") -> list[Object]:
    return at(pod, "spec", kind) or []


def service_container(pod: Object) -> Object:
    """The container of Orca's service: the one that carries its component's name, else the first."""
    found = containers(pod)
    named = [container for container in found if container.get("name") == component_of(pod)]
    return (named or found or [{}])[0]


def environment(container: Object) -> dict[str, str | None]:
    """The variables of a container. None: the value comes from elsewhere (a Secret, a field of the pod)."""
    return {
        str(entry.get("name")): None if entry.get("value") is None else str(entry["value"])
        for entry in container.get("env") or []
    }


def quantity(text: Any) -> float:
    """A Kubernetes quantity as a number: "500m" is 0.5, "2Gi" 2147483648.0. Raises FailedPrecondition."""
    written = str(text).strip()
    suffix = next((end for end in (written[-2:], written[-1:]) if end in SCALES), "")
    try:
        return float(written.removesuffix(suffix)) * SCALES.get(suffix, 1.0)
    except ValueError:
        raise FailedPrecondition(f"resources: {written} is no quantity of Kubernetes") from None


def amounts(resources: Any) -> Resources:
    return {str(name): quantity(value) for name, value in (resources or {}).items()}


def condition(thing: Object, kind: str) -> Object:
    """The condition of this type in an object's status, or an empty one."""
    found = [entry for entry in at(thing, "status", "conditions") or [] if entry.get("type") == kind]
    return found[0] if found else {}


def is_ready(thing: Object) -> bool:
    return condition(thing, "Ready").get("status") == "True"


def matches(selector: Any, labels: Any) -> bool:
    """Whether `matchLabels` of a selector fit these labels. An absent selector fits nothing."""
    return bool(selector) and all((labels or {}).get(key) == value for key, value in selector.items())


def image_tag(image: str) -> str:
    """The tag of an image, or the digest of one that has no tag: `a:5000/orca-worker:dev` has `dev`."""
    name, _, digest = image.partition("@")
    last = name.rpartition("/")[2]
    return last.partition(":")[2] or digest or "latest"


@dataclass(frozen=True)
class Release:
    """The objects that one `helm install` makes."""

    name: str
    namespace: str
    objects: tuple[Object, ...]
    unread: Mapping[str, str] = field(default_factory=dict)  # kind -> why its objects could not be read

    def of_kind(self, *kinds: str) -> list[Object]:
        return [thing for thing in self.objects if thing.get("kind") in kinds]

    def workload(self, component: str) -> Object | None:
        """The Deployment or StatefulSet of a component, if the release has it."""
        found = [thing for thing in self.of_kind("Deployment", "StatefulSet") if component_of(thing) == component]
        return found[0] if found else None

    def workloads(self) -> dict[str, Object]:
        return {component_of(thing): thing for thing in self.of_kind("Deployment", "StatefulSet")}

    def settings(self, component: str) -> dict[str, str | None]:
        """The environment of a component's service. What comes from a ConfigMap of the release is looked up there."""
        container = service_container(pod_template(self.workload(component) or {}))
        maps = {name_of(thing): at(thing, "data") or {} for thing in self.of_kind("ConfigMap")}
        found: dict[str, str | None] = {}
        for source in container.get("envFrom") or []:
            found |= maps.get(str(at(source, "configMapRef", "name")), {})
        return found | environment(container)

    def number(self, component: str, name: str, default: int) -> int:
        """A setting that is a whole number; the default when it is absent or no number."""
        return int(self.real(component, name, default))

    def real(self, component: str, name: str, default: float) -> float:
        """A setting that is a number; the default when it is absent or no number."""
        try:
            return float(self.settings(component).get(name) or default)
        except ValueError:
            return default

    @property
    def ranks_per_pod(self) -> int:
        return self.number("scheduler", "ORCA_GPUS_PER_POD", self.number("scheduler", "ORCA_TP", 1))

    @property
    def pods_per_engine(self) -> int:
        """P of docs/design.md: pp * tp / gpus_per_pod."""
        ranks = self.number("scheduler", "ORCA_TP", 1) * self.number("scheduler", "ORCA_PP", 1)
        return max(1, ranks // max(1, self.ranks_per_pod))


def replicas(workload: Object) -> int:
    given = at(workload, "spec", "replicas")
    return 1 if given is None else int(given)


def ordinal(pod: Object) -> int:
    """The number of a StatefulSet's pod: orca-worker-3 has 3. A pod that somebody else made has -1."""
    number = name_of(pod).rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def by_component(things: Iterable[Object]) -> dict[str, list[Object]]:
    found: dict[str, list[Object]] = {}
    for thing in things:
        found.setdefault(component_of(thing), []).append(thing)
    return found
