"""The questions of `orca doctor` to a cluster: a server here plays its API, and the pods in which programs run."""

import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest
from aiohttp import web
from cli.installation import REDIS, edited, healthy
from kubernetes.aio.client import Configuration

from orca_cli.doctor.access import needed
from orca_cli.doctor.cluster import Cluster
from orca_cli.doctor.gather import gather
from orca_cli.doctor.network import questions
from orca_cli.doctor.objects import Object, name_of
from orca_cli.doctor.snapshot import Snapshot
from orca_common.errors import Unavailable

LISTS = {  # as Kubernetes has them
    "/apis/apps/v1/namespaces/serving/deployments": "Deployment",
    "/apis/apps/v1/namespaces/serving/statefulsets": "StatefulSet",
    "/api/v1/namespaces/serving/services": "Service",
    "/api/v1/namespaces/serving/configmaps": "ConfigMap",
    "/api/v1/namespaces/serving/pods": "Pod",
    "/apis/rbac.authorization.k8s.io/v1/namespaces/serving/rolebindings": "RoleBinding",
    "/apis/policy/v1/namespaces/serving/poddisruptionbudgets": "PodDisruptionBudget",
    "/apis/networking.k8s.io/v1/namespaces/serving/networkpolicies": "NetworkPolicy",
}
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
AHEAD = 100.0  # seconds: the clocks of pods


def of_lists(snapshot: Snapshot) -> list[Object]:
    """The objects of a release without the pod of `helm test`, which is there while that runs alone."""
    return [thing for thing in snapshot.release.objects if thing["kind"] in {*LISTS.values(), "Role"} - {"Pod"}]


class Api:
    """Has the objects and pods of an installation, and keeps what it was asked."""

    def __init__(self, snapshot: Snapshot) -> None:
        assert isinstance(snapshot.pods, tuple)
        self.things = [*of_lists(snapshot), *snapshot.pods]
        self.selectors = list[str]()
        self.reviews = list[dict[str, Any]]()
        self.lines = dict[str, Any]()  # by pod: the line that its program has read
        self.commands = dict[str, list[str]]()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/version":
            return web.json_response({})
        if request.path == REVIEWS:
            self.reviews.append(spec := (await request.json())["spec"])
            return web.json_response({"status": {"allowed": spec["resourceAttributes"]["verb"] != "watch"}})
        if request.path.endswith("/exec"):
            return await self._run(request)
        kind = LISTS.get(request.path)
        if kind is None:
            message = 'roles is forbidden: User "me" cannot list resource'
            return web.json_response({"message": message}, status=403)
        self.selectors.append(request.query["labelSelector"])
        items = [{name: value for name, value in one.items() if name != "kind"} for one in self._of(kind)]
        return web.json_response({"items": items})

    def _of(self, kind: str) -> list[Any]:
        return [thing for thing in self.things if thing["kind"] == kind]

    async def _run(self, request: web.Request) -> web.StreamResponse:
        """A program in a pod: one of reach.py, or of ask_redis.py. In the last worker it fails."""
        pod = request.path.split("/")[-2]
        self.commands[pod] = request.query.getall("command")
        assert [request.query[name] for name in ("stdin", "stdout", "stderr")] == ["true"] * 3
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await socket.prepare(request)
        source = await socket.receive_bytes()
        assert (source[0], len(source[1:].decode())) == (0, int(self.commands[pod][-1]))
        ended = b'{"status": "Success"}'
        if b"CONFIG GET" in source:
            facts = asdict(REDIS)
            del facts["asked_from"]
            await socket.send_bytes(b"\x01" + json.dumps(facts).encode())
        elif pod == "orca-worker-3":
            await socket.send_bytes(b"\x02Traceback:\nKeyError: 'x'\n")
            ended = b'{"status": "Failure", "message": "exit code 1"}'
        else:
            await socket.send_bytes(b"\x01{}\n")
            told = await socket.receive_bytes()
            assert told[0] == 0
            self.lines[pod] = line = json.loads(told[1:])
            await socket.send_bytes(b"\x01" + json.dumps({"now": time.time() + AHEAD}).encode() + b"\n")
            answers = [["open", n / 10] for n, _ in enumerate(line["targets"])]
            said = {"answers": answers, "unready": f"why {pod}", "weights": line["model"] and "GGUF"}
            await socket.send_bytes(b"\x01" + json.dumps(said).encode())
        await socket.send_bytes(b"\x03" + ended)
        await socket.close()
        return socket


@asynccontextmanager
async def cluster_of(api: Api) -> AsyncIterator[Cluster]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    cluster = Cluster(Configuration(host=f"http://{host}:{port}"), "serving")
    try:
        yield cluster
    finally:
        await cluster._client.close()
        await cluster._streams.close()
        await runner.cleanup()


def running() -> Snapshot:
    """The healthy installation, whose containers run; that of the first worker does not."""

    def start(pod: dict[str, Any]) -> None:
        for status in pod["status"]["containerStatuses"]:
            status["state"] = {} if name_of(pod) == "orca-worker-0" else {"running": {"startedAt": "2026-11-29"}}

    return edited(healthy(), start, lambda thing: thing["kind"] == "Pod" and "status" in thing)


async def test_all_that_is_gathered() -> None:
    wanted = running()
    api = Api(wanted)
    async with cluster_of(api) as cluster:
        found = await gather(cluster, "orca", None)
    objects = [thing for thing in of_lists(wanted) if thing["kind"] != "Role"]
    assert (found.release.name, found.release.namespace) == ("orca", "serving")
    assert named(found.release.objects) == named(objects)
    assert found.release.unread == {"Role": "Role: 403, roles is forbidden"}
    assert set(api.selectors) == {"app.kubernetes.io/instance=orca"}
    assert found.pods == wanted.pods
    assert found.redis == replace(REDIS, asked_from="orca-endpoint-0")
    assert found.allowed == {right: right.verb != "watch" for right in needed()}
    review = next(one for one in api.reviews if one["resourceAttributes"]["subresource"] == "status")
    group = {"system:serviceaccounts", "system:serviceaccounts:serving", "system:authenticated"}
    assert (review["user"], {*review["groups"]}) == ("system:serviceaccount:serving:orca-scheduler", group)
    assert review["resourceAttributes"]["namespace"] == "serving"
    assert {(one["verb"], one["group"], one["resource"], one["subresource"]) for one in attributes_of(api)} == {
        (right.verb, right.group, *[*right.resource.split("/"), ""][:2]) for right in needed()
    }


def attributes_of(api: Api) -> list[dict[str, str]]:
    return [one["resourceAttributes"] for one in api.reviews]


def named(things: Iterable[Object]) -> dict[tuple[str, str], Object]:
    return {(thing["kind"], name_of(thing)): thing for thing in things}


async def test_what_pods_say() -> None:
    snapshot = running()
    assert isinstance(snapshot.pods, tuple)
    api = Api(snapshot)
    async with cluster_of(api) as cluster:
        found = await gather(cluster, "orca", None)
    assert found.unseen == {"orca-worker-0": "its container does not run", "orca-worker-3": "exec: KeyError: 'x'"}
    assert isinstance(found.inside, tuple)
    tried = questions(snapshot.release, snapshot.pods)
    assert {seen.pod for seen in found.inside} == tried.keys() - found.unseen.keys()
    for seen in found.inside:
        line = api.lines[seen.pod]
        assert line["targets"] == [[one.host, one.port] for one in tried[seen.pod]]
        assert (line["status_port"], bool(line["model"])) == (9090, seen.component == "worker")
        assert [(one.arrow, one.source, one.target, one.answer, one.seconds) for one in seen.attempts] == [
            (one.arrow, seen.pod, one.target, "open", n / 10) for n, one in enumerate(tried[seen.pod])
        ]
        assert (seen.unready, seen.weights) == (f"why {seen.pod}", "GGUF" if seen.component == "worker" else "")
        assert abs(seen.ahead - AHEAD) <= seen.error + 1e-6
    starter = ["python", "-c", "import sys; exec(sys.stdin.read(int(sys.argv[1])))"]
    assert all(command[:3] == starter for command in api.commands.values())


async def test_what_is_refused_has_its_reason() -> None:
    """Without who has asked."""
    async with cluster_of(Api(running())) as cluster:
        with pytest.raises(Unavailable, match=r"^403, roles is forbidden$"):
            await cluster.get("/apis/rbac.authorization.k8s.io/v1/namespaces/serving/roles")
