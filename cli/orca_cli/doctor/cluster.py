"""The API of one cluster, read only: lists, questions about rights, and programs that run inside pods."""

import asyncio
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.config.incluster_config import InClusterConfigLoader
from kubernetes.aio.config.kube_config import load_kube_config
from kubernetes.aio.stream import WsApiClient

from orca_common.errors import FailedPrecondition, Unavailable

from .objects import Object

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
AUTH = ["BearerToken"]
ANSWER = 10.0  # seconds for a call
RUN = 30.0  # seconds for a program in a pod, which may wait in its turn for what does not answer
TOGETHER = 8  # calls at a time
STDIN, STDOUT, STDERR, STATUS = range(4)  # channels of an exec
# Reads the program from stdin: as an argument it would make the URL longer than what some proxies let through.
STARTER = ("python", "-c", "import sys; exec(sys.stdin.read(int(sys.argv[1])))")


def understood(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        shown = " ".join(text.decode(errors="replace").split())[:200]
        raise Unavailable(f"the API server's answer cannot be read: {shown}") from None


@dataclass(frozen=True)
class Printed:
    """The output of a program in a pod. The times are of the clock of this machine, in seconds since 1970."""

    text: str
    asked: float  # when its line was sent
    answered: float  # when it printed something after that


class Cluster:
    """Asks a cluster's API server. Each call is bounded, and raises Unavailable with a reason when it fails."""

    def __init__(self, configuration: Configuration, namespace: str) -> None:
        self.namespace = namespace
        self._client = ApiClient(configuration)
        self._streams = WsApiClient(configuration)
        self._turns = asyncio.Semaphore(TOGETHER)

    @classmethod
    @asynccontextmanager
    async def connected(cls, namespace: str | None, context: str | None) -> AsyncIterator[Self]:
        """The cluster of KUBECONFIG, or the one around this pod. Raises FailedPrecondition when there is neither."""
        configuration = Configuration()
        token = SERVICE_ACCOUNT / "token"
        logging.getLogger("kubernetes").setLevel(logging.ERROR)  # it would warn of what the sentence below says
        try:
            if token.exists() and context is None:
                InClusterConfigLoader(str(token), str(SERVICE_ACCOUNT / "ca.crt")).load_and_set(configuration)
                own = (SERVICE_ACCOUNT / "namespace").read_text().strip()
            else:
                loader = await load_kube_config(
                    context=context, client_configuration=configuration, persist_config=False
                )
                own = loader.current_context["context"].get("namespace", "default")
        except (ConfigException, OSError) as error:
            missing = "current-context" in str(error)  # of no file, or of an empty one
            why = "there is no kubeconfig with a current context" if missing else " ".join(str(error).split())
            raise FailedPrecondition(
                f"no cluster is known ({why}); set KUBECONFIG; for `orca serve` on this machine: orca status"
            ) from None
        cluster = cls(configuration, namespace or own)
        try:
            yield cluster
        finally:
            await cluster._client.close()
            await cluster._streams.close()

    async def get(self, path: str, **query: str) -> Any:
        """A resource."""
        return await self._call("GET", path, query)

    async def list(self, path: str, kind: str, **query: str) -> tuple[Object, ...]:
        """The objects of a list. `kind`: theirs, which the server leaves out of a list's items."""
        found = await self.get(path, **query)
        return tuple({"kind": kind, **thing} for thing in found["items"])

    async def may(self, user: str, verb: str, group: str, resource: str) -> bool:
        """Whether a user may do something in the namespace. Nothing is stored by the question."""
        main, _, sub = resource.partition("/")
        wanted = {"namespace": self.namespace, "verb": verb, "group": group, "resource": main, "subresource": sub}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "groups": groups(user), "resourceAttributes": wanted},
        }
        answer = await self._call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {}, review)
        return bool(answer["status"]["allowed"])

    async def run(self, pod: str, container: str, program: str, line: str = "") -> Printed:
        """Runs a program of the package `inside` in a container. `line` is sent when it has first printed something."""
        source = files("orca_cli.doctor.inside").joinpath(program).read_text()
        async with self._turns, bounded(RUN):
            path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/exec"
            words = [("command", word) for word in (*STARTER, str(len(source)))]
            streams = [(name, "true") for name in ("stdin", "stdout", "stderr")]
            query = [("container", container), *streams, *words]
            method, url, headers, *_ = await self._streams.param_serialize(
                "GET", path, query_params=query, auth_settings=AUTH
            )
            dialled: Any = await self._streams.request(method, url, headers=headers, _preload_content=False)
            async with dialled as socket:
                await socket.send_bytes(bytes([STDIN]) + source.encode())
                return await printed(socket, line)

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None = None,
    ) -> Any:
        async with self._turns, bounded(ANSWER):
            call = await self._client.param_serialize(
                method, path, query_params=list(query.items()), body=body, auth_settings=AUTH
            )
            response = await self._client.call_api(*call)
            text = await response.read()
        if response.status >= 300:
            told = understood(text)
            said = str(told.get("message") if isinstance(told, dict) else response.reason)
            raise Unavailable(f"{response.status}, {said.partition(': User')[0]}")  # who asks is known to the reader
        return understood(text)


def groups(user: str) -> Sequence[str]:
    """The groups of a ServiceAccount, which an access review does not find by itself."""
    account = user.split(":")  # system:serviceaccount:NAMESPACE:NAME
    return ["system:serviceaccounts", f"system:serviceaccounts:{account[2]}", "system:authenticated"]


async def printed(socket: aiohttp.ClientWebSocketResponse, line: str) -> Printed:
    """Returns what a program writes to stdout until it ends. Raises Unavailable if it fails."""
    said: dict[int, bytes] = {STDOUT: b"", STDERR: b"", STATUS: b""}
    moments: list[float] = []
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel == STDOUT and data:
            moments.append(time.time())
            if line and len(moments) == 1:
                await socket.send_bytes(bytes([STDIN]) + f"{line}\n".encode())
        said[channel] = said.get(channel, b"") + data
        if channel == STATUS:
            break
    status = understood(said[STATUS]) if said[STATUS] else {"message": "the connection ended"}
    if status.get("status") != "Success":
        lines = said[STDERR].decode(errors="replace").strip().splitlines()
        raise Unavailable(lines[-1] if lines else str(status.get("message")))
    asked, answered = (moments * 2)[:2] if moments else (0.0, 0.0)
    return Printed(said[STDOUT].decode(errors="replace"), asked, answered)


@asynccontextmanager
async def bounded(seconds: float) -> AsyncIterator[None]:
    """Turns every failure of a call, and one that takes too long, into Unavailable."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Unavailable(f"no answer within {seconds:g} s") from None
    except aiohttp.WSServerHandshakeError as error:
        why = "create on pods/exec is forbidden" if error.status == 403 else "the container takes no program"
        raise Unavailable(f"{error.status}, {why}") from None
    except (ssl.SSLError, aiohttp.ClientError, OSError) as error:
        raise Unavailable(str(error) or type(error).__name__) from None
