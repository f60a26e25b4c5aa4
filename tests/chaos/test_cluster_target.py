"""A release in Kubernetes under chaos: which of its pods are hit and how, by an API server of some pods over HTTP."""

import gc
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web
from kubernetes import client
from kubernetes.config import kube_config
from scheduler.discovery.api_server import ApiServer, api_server, refuses

from orca.v1 import orca_pb2 as pb
from orca_chaos import cluster_target as module
from orca_chaos.cluster_target import SIGNAL, ClusterTarget, cluster_target
from orca_chaos.faults import Fault, Kind, Victim

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
KILL, BOTH = (Kind.KILL,), (Kind.KILL, Kind.STOP)


def pod(component: str, name: str, *, release: str = "rel", ready: str = "True", **metadata: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/instance": release, "app.kubernetes.io/component": component}
    return {
        "metadata": {"name": name, "namespace": "orca", "uid": f"uid-{name}", "labels": labels, **metadata},
        "status": {"conditions": [{"type": "Scheduled", "status": "True"}, {"type": "Ready", "status": ready}]},
    }


PODS = (
    *(pod("endpoint", "endpoint-b"), pod("worker", "worker-1"), pod("redis", "redis-0"), pod("scheduler", "sched-a")),
    *(pod("worker", "worker-0"), pod("endpoint", "endpoint-a"), pod("jaeger", "jaeger-0")),
    pod("worker", "other-worker-0", release="other"),
)


class Endpoint:
    """Stands for the client of the release's endpoints, which says how many engines there are."""

    made: "Endpoint"

    def __init__(self, addresses: list[str]) -> None:
        self.addresses, self.closed = addresses, False
        Endpoint.made = self

    async def model(self) -> pb.GetModelResponse:
        return pb.GetModelResponse(engines=[pb.Engine(id=f"engine-{n}") for n in range(3)])

    async def close(self) -> None:
        self.closed = True


class Released(NamedTuple):
    server: ApiServer
    target: ClusterTarget
    signals: list[tuple[str, list[str]]]  # the pod of each signal, with its number and that of the process


@asynccontextmanager
async def released(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, answers: str = "41\n", named: str | None = None
) -> AsyncIterator[Released]:
    """A release in the namespace that the command names, or in the context's."""
    signals: list[tuple[str, list[str]]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        shell = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await shell.prepare(request)
        *program, number, pid = request.query.getall("command")
        assert program == ["python", "-c", SIGNAL]
        signals.append((request.match_info["path"].split("/")[1], [number, pid]))
        await shell.send_bytes(b"\x01" + answers.encode())
        await shell.close()
        return shell

    monkeypatch.setattr(client.Configuration, "_default", None)
    monkeypatch.setattr(module, "Caller", Endpoint)
    async with api_server(folder) as (server, path):
        config = json.loads(Path(path).read_text())
        config["contexts"][0]["context"]["namespace"] = "elsewhere" if named else "orca"
        Path(path).write_text(json.dumps(config))
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", path)
        server.put("pods", *PODS)
        server.faults["list pods/exec"] = answer
        async with cluster_target("rel", named, ["a:1", "b:2"], "redis://c:3/0") as target:
            yield Released(server, target, signals)
            target._api.api_client.rest_client.pool_manager.clear()
            del target
            gc.collect()  # Kubernetes' client leaves the sockets of shells to the collector


def fault(kind: Kind, name: str) -> Fault:
    return Fault(0.5, kind, Victim(name.partition("-")[0], name, BOTH), 1.0)


@pytest.mark.parametrize("named", [None, "orca"])
async def test_what_a_target_knows_of_its_release(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with released(tmp_path, monkeypatch, named=named) as (_, target, _):
        assert (target.addresses, target.redis_url, target.pool) == (["a:1", "b:2"], "redis://c:3/0", "orca.rel")
        assert (target.engines, target.endpoints) == (3, 2)
        assert (Endpoint.made.addresses, Endpoint.made.closed) == (["a:1", "b:2"], True)
        assert list(target.victims()) == [
            *(Victim("endpoint", f"endpoint-{n}", KILL) for n in range(2)),
            Victim("scheduler", "scheduler-0", KILL),
            *(Victim("worker", f"worker-{n}", KILL) for n in range(2)),
            Victim("redis", "redis-0", KILL),
            *(Victim("rank", f"rank-{n}", BOTH) for n in range(2)),
        ]
        assert await target.leftovers() == []


async def test_a_pod_is_deleted_without_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with released(tmp_path, monkeypatch) as (server, target, signals):

        async def delete(request: web.Request) -> web.StreamResponse:
            server.remove("pods", request.match_info["path"].split("/")[1])
            server.put("pods", pod("endpoint", "endpoint-c"))
            return web.json_response(pod("endpoint", "endpoint-b"))

        server.faults["delete pods"] = delete
        assert await target.begin(fault(Kind.KILL, "endpoint-1"))
        [asked] = server.asked("delete pods")
        assert (asked.name, asked.query) == ("endpoint-b", {"gracePeriodSeconds": "0"})
        assert {name for name in server.objects["pods"] if "end" in name} == {"endpoint-a", "endpoint-c"}
        assert not await target.begin(fault(Kind.KILL, "endpoint-2")), "there are two"
        server.faults["delete pods"] = refuses(404)
        assert not await target.begin(fault(Kind.KILL, "scheduler-0")), "it has gone meanwhile"
        assert [one.name for one in server.asked("delete pods")] == ["endpoint-b", "sched-a"]
        await target.end(fault(Kind.KILL, "endpoint-1"))
        assert signals == []


async def test_a_rank_is_killed_or_frozen_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with released(tmp_path, monkeypatch) as (server, target, signals):
        killed, frozen, again = fault(Kind.KILL, "rank-0"), fault(Kind.STOP, "rank-1"), fault(Kind.STOP, "rank-0")
        assert await target.begin(killed)
        assert await target.begin(frozen)
        await target.end(killed)
        await target.end(frozen)
        await target.end(frozen)
        assert signals == [("worker-0", ["9", "0"]), ("worker-1", ["19", "0"]), ("worker-1", ["18", "41"])]
        assert not await target.begin(fault(Kind.STOP, "rank-2"))
        assert await target.begin(again)
        server.faults["list pods/exec"] = refuses(404)
        await target.end(again)  # with its pod, what was frozen has ended
        assert not await target.begin(frozen)
        await target.end(frozen)
        assert len(signals) == 4
        assert not server.asked("delete pods")


async def test_a_pod_without_a_rank_is_not_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with released(tmp_path, monkeypatch, answers="\n") as (_, target, signals):
        frozen = fault(Kind.STOP, "rank-1")
        assert await target.begin(frozen) is False
        await target.end(frozen)
        assert signals == [("worker-1", ["19", "0"])]


async def test_why_a_release_is_not_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with released(tmp_path, monkeypatch) as (server, target, _):
        assert await target.ailing() is None
        server.put("pods", pod("worker", "other-worker-0", release="other", ready="False"))
        server.put("pods", pod("jaeger", "jaeger-0", ready="False"))
        assert await target.ailing() is None
        server.put("pods", pod("worker", "worker-1", ready="False"))
        assert await target.ailing() == "worker-1 is not Ready"
        server.put("pods", pod("worker", "worker-1", deletionTimestamp="2026-01-01T00:00:00Z"))
        assert await target.ailing() == "worker-1 is not Ready"
        server.put("pods", pod("worker", "worker-1") | {"status": {}})
        assert await target.ailing() == "worker-1 is not Ready"
        server.remove("pods", "worker-1")
        assert await target.ailing() == (
            "there are {'endpoint': 2, 'redis': 1, 'scheduler': 1, 'worker': 1} pods "
            "instead of {'endpoint': 2, 'redis': 1, 'scheduler': 1, 'worker': 2}"
        )
        await target.look()
        assert await target.ailing() is None


@contextmanager
def supervisor() -> Iterator[tuple[int, list[int]]]:
    """A process with two children. Gives their numbers."""
    forks = (
        "import os, time\nfor _ in range(2):\n pid = os.fork()\n if not pid: time.sleep(600)\n print(pid, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", forks + "\ntime.sleep(600)"], stdout=subprocess.PIPE, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        children = [int(parent.stdout.readline()) for _ in range(2)]
        try:
            yield parent.pid, sorted(children)
        finally:
            subprocess.run(["kill", "-9", *map(str, children)], check=False, stderr=subprocess.DEVNULL)
            parent.kill()


def await_state(pid: int, states: str) -> None:
    """Waits until a process is in one of these states: a signal acts when its process runs next."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in states:
        time.sleep(0.002)


def test_a_signal_goes_to_a_child_of_the_first_process() -> None:
    """Here of another process: children of this machine's first one are not ours."""
    assert SIGNAL.count("== 1)") == 1
    with supervisor() as (parent, [first, second]):
        program = SIGNAL.replace("== 1)", f"== {parent})")

        def signal(number: int, pid: int) -> str:
            command = [sys.executable, "-c", program, str(number), str(pid)]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        assert signal(19, 0) == f"{first}\n"
        await_state(first, "T")
        assert signal(18, first) == f"{first}\n"
        await_state(first, "RS")
        assert signal(9, parent) == "", "it is no rank"
        assert signal(9, second) == f"{second}\n"
        await_state(second, "Z")
        await_state(parent, "RS")
