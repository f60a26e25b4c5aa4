"""A Kubernetes API server of a few objects: list, watch, delete, patch and create over real HTTP, with faults."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web
from scheduler.discovery.manifests import GOING

KINDS = {"pods": "/api/v1", "events": "/api/v1", "statefulsets": "/apis/apps/v1"}
ENDED = web.AppKey("ended", asyncio.Event)  # the test is over
Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


class Request(NamedTuple):
    """What a client has asked for: "list pods", "watch pods", "delete pods", "patch pods/status"."""

    what: str
    name: str
    query: dict[str, str]
    body: Any


class ApiServer:
    """`objects` is what it holds, `requests` what it was asked, `faults` what it does before an answer or instead."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in KINDS}
        self.requests: list[Request] = []
        self.faults: dict[str, Fault] = {}  # by what is asked
        self.tokens: set[str] | None = None  # that are accepted; None: all
        self._version = 100
        self._oldest = 0  # changes before this version are forgotten
        self._changes: list[tuple[int, str, str, dict[str, Any]]] = []
        self._watches: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    # -- what happens in the cluster

    def put(self, kind: str, *manifests: dict[str, Any]) -> None:
        """Objects come, or change."""
        for manifest in manifests:
            name = manifest["metadata"]["name"]
            before = self.objects[kind].get(name)
            if before is not None and before["metadata"]["uid"] != manifest["metadata"]["uid"]:
                self.remove(kind, name)
                before = None
            self.objects[kind][name] = copy.deepcopy(manifest)
            self._happened("ADDED" if before is None else "MODIFIED", kind, self.objects[kind][name])

    def remove(self, kind: str, name: str) -> None:
        self._happened("DELETED", kind, self.objects[kind].pop(name))

    def forget(self) -> None:
        """What has happened can be watched no more: 410."""
        self._version += 1
        self._oldest = self._version
        self._changes.clear()

    def break_watches(self) -> None:
        """The connections of all watches end in the middle."""
        for watch in self._watches:
            watch.cancel()

    def asked(self, what: str) -> list[Request]:
        return [request for request in self.requests if request.what == what]

    def _happened(self, change: str, kind: str, manifest: dict[str, Any]) -> None:
        self._version += 1
        manifest["metadata"]["resourceVersion"] = str(self._version)
        self._changes.append((self._version, change, kind, copy.deepcopy(manifest)))
        self._changed.set()
        self._changed = asyncio.Event()

    # -- HTTP

    async def answer(self, request: web.Request) -> web.StreamResponse:
        kind, _, rest = request.match_info["path"].partition("/")
        name, _, part = rest.partition("/")
        verb = {"GET": "list", "POST": "create"}.get(request.method, request.method.lower())
        if request.query.get("watch") == "true":
            verb = "watch"
        what = f"{verb} {kind}/{part}" if part else f"{verb} {kind}"
        body: Any = await request.json() if request.can_read_body else None
        self.requests.append(Request(what, name, dict(request.query), body))
        if self.tokens is not None and request.headers.get("Authorization") not in self.tokens:
            return refusal(401, "Unauthorized")
        if what in self.faults and (fault := await self.faults[what](request)) is not None:
            return fault
        match verb:
            case "list":
                return self._list(kind, request.query)
            case "watch":
                return await self._watch(kind, request)
            case "create":
                return self._create(kind, body)
            case "delete":
                return self._delete(kind, name, body)
            case _ if part == "scale":
                return self._scale(kind, name, body)
            case _:
                return self._patch(kind, name, body)

    def _list(self, kind: str, query: Any) -> web.Response:
        found = [manifest for manifest in self.objects[kind].values() if _selected(manifest, query)]
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": found})

    async def _watch(self, kind: str, request: web.Request) -> web.StreamResponse:
        since, response = int(request.query["resourceVersion"]), web.StreamResponse()
        await response.prepare(request)
        if since < self._oldest:
            gone = {
                "type": "ERROR",
                "object": {"code": 410, "reason": "Expired", "message": "too old resource version"},
            }
            await response.write(json.dumps(gone).encode() + b"\n")
            return response
        task = asyncio.ensure_future(self._stream(kind, since, request, response))
        self._watches.add(task)
        await asyncio.wait([task], timeout=float(request.query["timeoutSeconds"]))
        self._watches.discard(task)
        if task.cancelled() and request.transport is not None:
            request.transport.abort()
        task.cancel()
        return response

    async def _stream(self, kind: str, since: int, request: web.Request, response: web.StreamResponse) -> None:
        while True:
            changed = self._changed
            for version, change, of, manifest in list(self._changes):
                if version > since and of == kind and _selected(manifest, request.query):
                    since = version
                    await response.write(json.dumps({"type": change, "object": manifest}).encode() + b"\n")
            bookmark = {"kind": "Bookmark", "metadata": {"resourceVersion": str(self._version)}}
            await response.write(json.dumps({"type": "BOOKMARK", "object": bookmark}).encode() + b"\n")
            await changed.wait()

    def _create(self, kind: str, body: dict[str, Any]) -> web.Response:
        name = body["metadata"]["name"]
        if name in self.objects[kind]:
            return refusal(409, f"{kind} {name} already exists")
        self.put(kind, {**body, "metadata": {**body["metadata"], "uid": f"uid-of-{name}"}})
        return web.json_response(self.objects[kind][name], status=201)

    def _delete(self, kind: str, name: str, body: dict[str, Any]) -> web.Response:
        manifest = self.objects[kind].get(name)
        if manifest is None:
            return refusal(404, f"{kind} {name} not found")
        if body["preconditions"]["uid"] != manifest["metadata"]["uid"]:
            return refusal(409, "the UID in the precondition does not match")
        manifest["metadata"]["deletionTimestamp"] = GOING
        self.put(kind, manifest)
        return web.json_response(self.objects[kind][name])

    def _patch(self, kind: str, name: str, body: dict[str, Any]) -> web.Response:
        manifest = self.objects[kind].get(name)
        if manifest is None:
            return refusal(404, f"{kind} {name} not found")
        if body.get("metadata", {}).get("uid", manifest["metadata"]["uid"]) != manifest["metadata"]["uid"]:
            return refusal(409, "the uid is another one")
        body = copy.deepcopy(body)
        status = body.pop("status", {})
        for condition in status.pop("conditions", []):
            conditions = {known["type"]: known for known in manifest["status"].get("conditions", [])}
            conditions[condition["type"]] = conditions.get(condition["type"], {}) | condition
            manifest["status"]["conditions"] = list(conditions.values())
        manifest["status"] |= status
        annotations = body.pop("metadata", {}).get("annotations", {})
        if annotations:
            manifest["metadata"]["annotations"] = manifest["metadata"].get("annotations", {}) | annotations
        self.put(kind, manifest | body)
        return web.json_response(self.objects[kind][name])

    def _scale(self, kind: str, name: str, operations: list[dict[str, Any]]) -> web.Response:
        """A JSON patch of the scale: tests of numbers, and one that is set."""
        if name not in self.objects[kind]:
            return refusal(404, f"{kind} {name} not found")
        manifest = copy.deepcopy(self.objects[kind][name])
        for operation in operations:
            *way, last = operation["path"].removeprefix("/").split("/")
            place = manifest
            for step in way:
                place = place[step]
            if operation["op"] == "test" and place[last] != operation["value"]:
                return refusal(422, f"testing {operation['path']}: the value is another one")
            place[last] = operation["value"]
        manifest["metadata"]["generation"] += 1
        manifest["status"]["observedGeneration"] = manifest["metadata"]["generation"]
        self.put(kind, manifest)
        return web.json_response({"spec": manifest["spec"]})


def refusal(code: int, message: str) -> web.Response:
    """A failure, as an API server tells it."""
    return web.json_response({"kind": "Status", "status": "Failure", "message": message, "code": code}, status=code)


def refuses(code: int, message: str = "refused by the test") -> Fault:
    async def fault(request: web.Request) -> web.StreamResponse:
        return refusal(code, message)

    return fault


def says(*lines: bytes) -> Fault:
    """Answers with these lines, whatever they are."""

    async def fault(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for line in lines:
            await response.write(line + b"\n")
        return response

    return fault


async def silence(request: web.Request) -> web.StreamResponse:
    """Does not answer, like a frozen process whose connections are open, until the test is over."""
    await request.app[ENDED].wait()
    return refusal(503, "the test is over")


def _selected(manifest: dict[str, Any], query: Any) -> bool:
    """By the selectors that discovery uses: of fields in blocks and at the top, and LABEL=VALUE."""
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        path, _, wanted = term.partition("=")
        block, _, name = path.rpartition(".")
        if (manifest.get(block, {}) if block else manifest).get(name) != wanted:
            return False
    labels = [f"{key}={value}" for key, value in manifest["metadata"].get("labels", {}).items()]
    return all(term in labels for term in query.get("labelSelector", "").split(",") if term)


@asynccontextmanager
async def api_server(folder: Path) -> AsyncIterator[tuple[ApiServer, str]]:
    """A server, and the kubeconfig that leads to it. The token is what the file `token` in the folder says."""
    server, application = ApiServer(), web.Application()
    for prefix in sorted(set(KINDS.values())):
        application.router.add_route("*", prefix + "/namespaces/orca/{path:.*}", server.answer)
    application[ENDED] = asyncio.Event()
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = "http://{}:{}".format(*runner.addresses[0])
    (folder / "token").write_text("first")
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": address}}],
        "users": [{"name": "test", "user": {"tokenFile": str(folder / "token")}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    try:
        yield server, str(folder / "kubeconfig")
    finally:
        application[ENDED].set()
        server.break_watches()
        await runner.cleanup()
