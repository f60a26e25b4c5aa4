"""The calls to Kubernetes's API server; the only module that imports its client.

RULES are all rights that the scheduler's role needs, in the namespace of the workers, and SCALING_RULES those that it
needs besides to scale them. Lists and watches of StatefulSets name one of them by a field selector, so a role may also
be limited to that name.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.config.incluster_config import InClusterConfigLoader
from kubernetes.aio.config.kube_config import load_kube_config

from orca_common.errors import FailedPrecondition, Unavailable

from .pods import Manifest

RULES = (  # (API group, resource, verbs)
    ("apps", "statefulsets", ("list", "watch")),
    ("apps", "statefulsets/status", ("patch",)),  # for annotations: a patch of the status changes no specification
    ("", "pods", ("list", "watch", "delete")),
    ("", "pods/status", ("patch",)),
    ("", "events", ("create", "patch")),
)
SCALING_RULES = (("apps", "statefulsets/scale", ("patch",)),)  # where it scales the engines: of the workers' set alone
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
AUTH = ["BearerToken"]  # the name that the client gives to what the configuration has
JSON = "application/json"
MERGE, OPERATIONS = "application/strategic-merge-patch+json", "application/json-patch+json"


class Trouble(Unavailable):
    """A call to Kubernetes failed. `status` is the HTTP status; 0: there was no answer."""

    def __init__(self, problem: str, status: int = 0) -> None:
        super().__init__(problem)
        self.status = status


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bound of a call, in seconds."""

    answer: float = 10.0
    watch: int = 30  # after which the server ends a watch: a connection that died in silence is noticed soon after


class Collection(NamedTuple):
    """The objects of one kind that a list or a watch is about."""

    kind: str  # "pods", "statefulsets" or "events"
    labels: str | None = None
    fields: str | None = None


class Listing(NamedTuple):
    objects: dict[str, Manifest]  # by uid
    version: str  # where a watch goes on from


class Change(NamedTuple):
    kind: str  # ADDED, MODIFIED, DELETED; BOOKMARK, which brings a version and nothing else
    object: Manifest
    version: str
    uid: str


def path_of(namespace: str, kind: str, *below: str) -> str:
    """The path of a collection, or of an object of it, or of a part of the object such as its status."""
    group = "/apis/apps/v1" if kind == "statefulsets" else "/api/v1"
    return "/".join((group, "namespaces", namespace, kind, *below))


def own_namespace(account: Path = SERVICE_ACCOUNT) -> str:
    """The namespace of the pod that this process runs in. Raises FailedPrecondition outside of a cluster."""
    try:
        return (account / "namespace").read_text().strip()
    except OSError:
        raise FailedPrecondition("worker_namespace: is required outside of a Kubernetes cluster") from None


class Kubernetes:
    """One namespace of a cluster. Each call raises Trouble when it fails, within the bounds."""

    def __init__(
        self,
        namespace: str,
        bounds: Bounds | None = None,
        account: Path = SERVICE_ACCOUNT,
        kubeconfig: str | None = None,
    ) -> None:
        """The cluster is that of the pod whose service account is in this folder.

        Outside of a pod it is that of the kubeconfig, by default the one that KUBECONFIG names.
        """
        self.namespace = namespace
        self._bounds, self._account, self._kubeconfig = bounds or Bounds(), account, kubeconfig
        self._client: ApiClient | None = None
        self._expired = False  # the token, as the API server says
        self._connecting = asyncio.Lock()

    async def list(self, collection: Collection) -> Listing:
        """All objects, as the cluster has them now."""
        async with self._answer(f"list {collection.kind}", self._bounds.answer):
            response = await self._read(collection)
            await _raise_for(response)
            with _understood():
                found = json.loads(await response.read())
                objects = {manifest["metadata"]["uid"]: manifest for manifest in found["items"]}
                return Listing(objects, found["metadata"]["resourceVersion"])

    @asynccontextmanager
    async def watch(self, collection: Collection, version: str) -> AsyncIterator[AsyncIterator[Change]]:
        """The changes since a version, until the server ends the watch, which it does now and then.

        Entered when the server has agreed. Trouble with status 410: that version is too old, list again.
        """
        async with self._answer(f"watch {collection.kind}", self._bounds.answer + self._bounds.watch):
            async with asyncio.timeout(self._bounds.answer):
                response = await self._read(
                    collection,
                    watch="true",
                    resourceVersion=version,
                    allowWatchBookmarks="true",
                    timeoutSeconds=str(self._bounds.watch),
                )
                await _raise_for(response)
            try:
                yield _changes(response)
            finally:
                response.close()

    async def delete_pod(self, name: str, uid: str) -> None:
        """Deletes this very pod. That it is gone already is fine."""
        await self._write(
            f"delete pod {name}",
            ("DELETE", path_of(self.namespace, "pods", name)),
            {"preconditions": {"uid": uid}},
            fine=(404, 409),  # 409: another pod has the name now
        )

    async def patch_pod_status(self, name: str, patch: Manifest) -> None:
        """Changes the status of a pod. A pod that is gone, or another one by now, is left alone."""
        where = "PATCH", path_of(self.namespace, "pods", name, "status")
        await self._write(f"patch the status of pod {name}", where, patch, MERGE, fine=(404, 409))

    async def annotate_set(self, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        """Sets annotations of a StatefulSet. One that is gone, or another one by now, is left alone."""
        where = "PATCH", path_of(self.namespace, "statefulsets", name, "status")
        patch = {"metadata": {"uid": uid, "annotations": annotations}}
        await self._write(f"annotate the StatefulSet {name}", where, patch, MERGE, fine=(404, 409))

    async def scale_set(self, name: str, uid: str, before: int, pods: int) -> bool:
        """Gives a StatefulSet this number of pods if it has `before`. Returns whether it had, and was that very one."""
        operations = [
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "test", "path": "/spec/replicas", "value": before},
            {"op": "replace", "path": "/spec/replicas", "value": pods},
        ]
        return await self._write(
            f"scale the StatefulSet {name}",
            ("PATCH", path_of(self.namespace, "statefulsets", name, "scale")),
            operations,
            OPERATIONS,
            fine=(404, 409, 422),  # 422: a test has failed
        )

    async def put_event(self, event: Manifest) -> None:
        """Writes an Event. If there is one of that name, only its message and its last time become these."""
        events = self.namespace, "events"
        if not await self._write("create an event", ("POST", path_of(*events)), event, fine=(409,)):
            where = "PATCH", path_of(*events, event["metadata"]["name"])
            patch = {key: event[key] for key in ("message", "lastTimestamp")}
            await self._write("patch an event", where, patch, MERGE, fine=(404,))  # it expired in between

    async def close(self) -> None:
        """Closes the connections. A later call opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _connected(self) -> ApiClient:
        async with self._connecting:
            if self._client is None or self._expired:
                configuration = self._client.configuration if self._client else Configuration()
                await self._read_account(configuration)
                self._client, self._expired = self._client or ApiClient(configuration), False
            return self._client

    async def _read_account(self, configuration: Configuration) -> None:
        if (self._account / "token").exists():
            token, authority = str(self._account / "token"), str(self._account / "ca.crt")
            InClusterConfigLoader(token, authority).load_and_set(configuration)
        else:
            await load_kube_config(self._kubeconfig, client_configuration=configuration, persist_config=False)

    async def _read(self, collection: Collection, **how: str) -> aiohttp.ClientResponse:
        selectors = {"labelSelector": collection.labels, "fieldSelector": collection.fields}
        query = [*how.items(), *((name, given) for name, given in selectors.items() if given is not None)]
        return await self._call("GET", path_of(self.namespace, collection.kind), query=query)

    async def _write(
        self, what: str, where: tuple[str, str], body: object, form: str = JSON, *, fine: tuple[int, ...]
    ) -> bool:
        """Whether it was done; False when it was answered with a status that is fine too. `where`: method and path."""
        async with self._answer(what, self._bounds.answer):
            response = await self._call(*where, body=body, form=form)
            if response.status in fine:
                response.release()
                return False
            await _raise_for(response)
            response.release()
            return True

    async def _call(
        self, method: str, path: str, *, query: Iterable[tuple[str, str]] = (), body: object = None, form: str = JSON
    ) -> aiohttp.ClientResponse:
        # By path: the classes of the client's API are 8 MB of code, read for a second as a process starts.
        client = await self._connected()
        headers = {"Accept": JSON, "Content-Type": form}
        call = await client.param_serialize(
            method, path, query_params=list(query), header_params=headers, body=body, auth_settings=AUTH
        )
        return (await client.call_api(*call)).response

    @asynccontextmanager
    async def _answer(self, what: str, seconds: float) -> AsyncIterator[None]:
        """Every failure of a call is Trouble, and so is one that takes too long."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except Trouble as trouble:
            self._expired = self._expired or trouble.status == 401  # the next call reads the token's file again
            raise Trouble(f"Kubernetes does not {what}: {trouble}", trouble.status) from None
        except TimeoutError:
            raise Trouble(f"Kubernetes does not answer when asked to {what}") from None
        except (ssl.SSLError, aiohttp.ClientSSLError) as error:
            await self.close()  # the authority may have changed: the next call reads its file again
            raise Trouble(f"Kubernetes cannot be trusted: {error}") from None
        except (OSError, aiohttp.ClientError) as error:
            raise Trouble(f"Kubernetes cannot be reached: {error}") from None
        except ConfigException as error:
            raise Trouble(f"it is not known where Kubernetes is: {error}") from None


@contextmanager
def _understood() -> Iterator[None]:
    """An answer that is not what an API server says is Trouble: something else may stand in its place."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Trouble(f"its answer cannot be read, {error!r}") from None


async def _raise_for(response: aiohttp.ClientResponse) -> None:
    """Raises Trouble for a status that is no success, with the message that the server gives."""
    if response.status < 300:
        return
    text = await response.text(errors="replace")
    try:
        message = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        message = text.strip()[:200] or response.reason
    raise Trouble(f"{response.status}, {message}", response.status)


async def _changes(response: aiohttp.ClientResponse) -> AsyncIterator[Change]:
    while True:
        with _understood():
            line = await response.content.readline()
            if not line:
                return
            told = json.loads(line)
            manifest = told["object"]
            if told["type"] == "ERROR":
                raise Trouble(f"{manifest['code']}, {manifest.get('message')}", manifest["code"])
            metadata = manifest["metadata"]
            change = Change(told["type"], manifest, metadata["resourceVersion"], metadata.get("uid", ""))
        yield change
