"""Gathers a snapshot of a release in a cluster. A failed read is noted with its reason, and raises no error."""

import asyncio
import json
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from orca_common.errors import OrcaError, Unavailable

from .access import account, needed
from .cluster import Cluster
from .inside.ask_redis import facts
from .network import Question, questions
from .objects import INSTANCE, Object, Release, at, by_component, component_of, name_of, service_container
from .snapshot import Asked, Attempt, Inside, Redis, Right, Snapshot, Unknown

T = TypeVar("T")

KINDS = {  # of the release's objects -> where they are listed
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "Service": "/api/v1/namespaces/{}/services",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
}
STATUS_PORT = 9090  # the chart's


async def gather(cluster: Cluster, name: str, redis_url: str | None) -> Snapshot:
    """Looks at the release `name` in the cluster's namespace.

    redis_url: the pool's Redis is asked from here; otherwise a pod of the release asks it. Raises Unavailable when the
    API server cannot be asked at all.
    """
    await reached(cluster)
    release, pods = await asyncio.gather(release_of(cluster, name), answer_or_reason("pods", pods_of(cluster, name)))
    running: tuple[Object, ...] = () if isinstance(pods, Unknown) else pods
    allowed, (inside, unseen), redis = await asyncio.gather(
        answer_or_reason("access reviews", rights_of(cluster, release)),
        look_inside(cluster, release, running),
        redis_of(cluster, running, redis_url),
    )
    return Snapshot(
        release=release,
        allowed=allowed,
        pods=pods,
        inside=pods if isinstance(pods, Unknown) else inside,
        unseen=unseen,
        redis=redis,
    )


async def answer_or_reason(what: str, answer: Awaitable[T]) -> Asked[T]:
    """Returns the answer, or why it is missing."""
    try:
        return await answer
    except Unavailable as error:
        return Unknown(f"{what}: {error}")


async def reached(cluster: Cluster) -> None:
    """Raises Unavailable when the API server cannot be asked at all."""
    try:
        await cluster.get("/version")
    except Unavailable as error:
        raise Unavailable(f"the API server cannot be asked: {error}") from None


async def release_of(cluster: Cluster, name: str) -> Release:
    """The objects with the release's label."""
    answers = await asyncio.gather(
        *(
            answer_or_reason(
                kind, cluster.list(path.format(cluster.namespace), kind, labelSelector=f"{INSTANCE}={name}")
            )
            for kind, path in KINDS.items()
        )
    )
    found = dict(zip(KINDS, answers, strict=True))
    objects = [thing for answer in answers if not isinstance(answer, Unknown) for thing in answer]
    unread = {kind: answer.why for kind, answer in found.items() if isinstance(answer, Unknown)}
    return Release(name, cluster.namespace, tuple(objects), unread)


async def pods_of(cluster: Cluster, name: str) -> tuple[Object, ...]:
    return await cluster.list(f"/api/v1/namespaces/{cluster.namespace}/pods", "Pod", labelSelector=f"{INSTANCE}={name}")


async def rights_of(cluster: Cluster, release: Release) -> Mapping[Right, bool]:
    user = f"system:serviceaccount:{cluster.namespace}:{account(release)}"
    rights = sorted(needed())
    answers = await asyncio.gather(*(cluster.may(user, r.verb, r.group, r.resource) for r in rights))
    return dict(zip(rights, answers, strict=True))


async def look_inside(
    cluster: Cluster, release: Release, pods: Sequence[Object]
) -> tuple[tuple[Inside, ...], Mapping[str, str]]:
    """Asks each running pod of ours what it reaches; for the others, says why it could not ask."""
    tried = questions(release, pods)
    asking = [pod for pod in pods if name_of(pod) in tried and runs(pod)]
    answers = await asyncio.gather(
        *(answer_or_reason("exec", one_inside(cluster, release, pod, tried[name_of(pod)])) for pod in asking)
    )
    pairs = list(zip(asking, answers, strict=True))
    unseen = {name_of(pod): answer.why for pod, answer in pairs if isinstance(answer, Unknown)}
    unseen |= {name: "its container does not run" for name in tried if name not in map(name_of, asking)}
    return tuple(answer for answer in answers if isinstance(answer, Inside)), unseen


async def one_inside(cluster: Cluster, release: Release, pod: Object, tried: Sequence[Question]) -> Inside:
    name, container = name_of(pod), str(service_container(pod).get("name"))
    targets = [[question.host, question.port] for question in tried]
    status_port = release.number(component_of(pod), "ORCA_STATUS_PORT", STATUS_PORT)
    model = release.settings("worker").get("ORCA_MODEL") if component_of(pod) == "worker" else None
    line = json.dumps({"targets": targets, "status_port": status_port, "model": model or ""})
    printed = await cluster.run(name, container, "reach.py", line)
    said = answer_of(printed.text)
    found = [
        Attempt(question.arrow, name, question.target, answer, seconds)
        for question, (answer, seconds) in zip(tried, said["answers"], strict=True)
    ]
    ahead = said["now"] - (printed.asked + printed.answered) / 2
    error = (printed.answered - printed.asked) / 2
    return Inside(name, component_of(pod), ahead, error, tuple(found), said["unready"], said["weights"])


def answer_of(printed: str) -> dict[str, Any]:
    """Merges the lines of JSON that a program of `inside` printed."""
    told: dict[str, Any] = {}
    try:
        for line in printed.splitlines():
            told |= json.loads(line)
    except (ValueError, TypeError):
        raise Unavailable(f"a pod printed what cannot be read: {printed[:200]}") from None
    if "error" in told:
        raise Unavailable(str(told["error"]))
    return told


async def redis_of(cluster: Cluster, pods: Sequence[Object], url: str | None) -> Asked[Redis]:
    """Asks the pool's Redis about itself: from here if its URL is given, else from a pod that knows it."""
    if url is not None:
        return await answer_or_reason("Redis", redis_from_here(url))
    groups = by_component(pod for pod in pods if runs(pod))
    able = [*groups.get("endpoint", []), *groups.get("scheduler", [])]
    if not able:
        return Unknown("no pod that knows Redis runs; give --redis-url")
    return await answer_or_reason("Redis", redis_from(cluster, able[0]))


async def redis_from_here(url: str) -> Redis:
    try:
        return Redis("this machine", **await facts(url))
    except OrcaError as error:
        raise Unavailable(str(error)) from None


async def redis_from(cluster: Cluster, pod: Object) -> Redis:
    printed = await cluster.run(name_of(pod), str(service_container(pod).get("name")), "ask_redis.py")
    return Redis(name_of(pod), **answer_of(printed.text))


def runs(pod: Object) -> bool:
    """Whether the container of a pod's service runs."""
    name = service_container(pod).get("name")
    statuses = at(pod, "status", "containerStatuses") or []
    return any(status.get("name") == name and at(status, "state", "running") for status in statuses)
