"""Orca on this machine: the same processes that a cluster runs, started, watched, restarted and ended.

    Redis <- endpoint(s), scheduler(s) -> supervisor(s), one a stage -> tp ranks each

Every process is a child of this one or of a supervisor, and ends with its parent, however that ends.
"""

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from orca.v1 import worker_pb2 as pb
from orca.v1.worker_pb2_grpc import SupervisorStub
from orca_cli import embedded_pool
from orca_common.checkpoint import read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_common.settings import child_environment
from orca_worker.models.families import check_partition

LOOPBACK = "127.0.0.1"
DEMO_MODEL = Path(__file__).parent / "demo_model"
START_SECONDS = 120.0  # bound of a process's first line; importing torch on a cold disk takes its time
END_SECONDS = 45.0  # bound of a process's drain; then it is killed
BACKOFF = (0.2, 5.0)  # seconds before a dead process is started again: first, longest


@dataclass(frozen=True)
class Plan:
    """What to start. `settings` are `ORCA_*` values common to all services."""

    model: Path
    tp: int = 1
    pp: int = 1
    engines: int = 1
    schedulers: int = 1
    endpoints: int = 1
    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int = 8000
    redis_url: str | None = None  # None: an embedded server
    settings: dict[str, str] = field(default_factory=dict)


@dataclass
class Service:
    """One process of the stack: how it is started, and as what it runs now."""

    role: str
    name: str
    command: list[str]
    environment: dict[str, str]
    process: asyncio.subprocess.Process | None = None
    address: str = ""
    hello: dict[str, Any] = field(default_factory=dict)  # the line that it printed when it was listening
    restarts: int = 0


class Stack:
    """Starts a plan's processes and keeps them running until `stop`. `say` hears of each step."""

    def __init__(self, plan: Plan, run_dir: Path, say: Callable[[str], None]) -> None:
        self._plan, self._run_dir, self._say = plan, run_dir, say
        self._services: list[Service] = []
        self._ranks: dict[int, list[pb.RankEntry]] = {}  # by the ordinal of the pod
        self._tasks: list[asyncio.Task[None]] = []
        self._redis_url = plan.redis_url or ""
        self._stopping = False

    @property
    def grpc_addresses(self) -> list[str]:
        return [s.hello["grpc"] for s in self._services if s.role == "endpoint"]

    @property
    def http_addresses(self) -> list[str]:
        return [s.hello["http"] for s in self._services if s.role == "endpoint"]

    async def start(self) -> None:
        """Returns when a request would be answered. Raises FailedPrecondition with a sentence when it cannot be."""
        plan = self._plan
        check_partition(read_checkpoint(plan.model), plan.tp, plan.pp)
        (self._run_dir / "logs").mkdir(parents=True, exist_ok=True)
        if plan.redis_url is None:
            await self._start_redis()
        supervisors = [
            self._service(
                "supervisor",
                f"supervisor-{n}",
                "orca_worker.supervisor",
                {"ORCA_PORT": "0", "ORCA_RANKS": str(plan.tp), "ORCA_FIRST_GPU": str(n * plan.tp)},
            )
            for n in range(plan.engines * plan.pp)
        ]
        endpoints = [
            self._service(
                "endpoint",
                f"endpoint-{n}",
                "orca_endpoint",
                {"ORCA_PORT": str(0 if n else plan.port), "ORCA_HTTP_PORT": str(0 if n else plan.http_port)},
            )
            for n in range(plan.endpoints)
        ]
        await asyncio.gather(*(self._launch(service) for service in [*supervisors, *endpoints]))
        workers = ",".join(supervisor.address for supervisor in supervisors)
        engine = {"ORCA_WORKERS": workers, "ORCA_TP": str(plan.tp), "ORCA_PP": str(plan.pp)}
        schedulers = [
            self._service("scheduler", f"scheduler-{n}", "orca_scheduler", engine) for n in range(plan.schedulers)
        ]
        await asyncio.gather(*(self._launch(service) for service in schedulers))
        self._tasks += [asyncio.create_task(self._watch_ranks(n, s)) for n, s in enumerate(supervisors)]
        for service in [*schedulers, *endpoints]:
            await self._until_ready(service)
        self._say("ready")

    async def stop(self) -> None:
        """Drains and ends everything, doors first, the pool last."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for role in ("endpoint", "scheduler", "supervisor", "redis"):
            await asyncio.gather(*(self._end(service) for service in self._services if service.role == role))
        self._services.clear()
        self._ranks.clear()
        self._write_processes()

    # -- starting

    def _service(self, role: str, name: str, module: str, settings: dict[str, str]) -> Service:
        environment = {
            "ORCA_HOST": self._plan.host if role == "endpoint" else LOOPBACK,  # only the doors are for others
            "ORCA_MODEL": str(self._plan.model),
            "ORCA_REDIS_URL": self._redis_url,
            "ORCA_RUN_DIR": str(self._run_dir),
            "GRPC_ENABLE_FORK_SUPPORT": "0",  # no service forks: a message on a stream costs 17 us instead of 19
            **self._plan.settings,
            **settings,
        }
        service = Service(role, name, [sys.executable, "-m", module], environment)
        self._services.append(service)
        return service

    async def _start_redis(self) -> None:
        port = embedded_pool.free_port()
        service = Service("redis", "redis", embedded_pool.command(self._run_dir / "redis", port), {})
        service.address = f"127.0.0.1:{port}"
        self._redis_url = f"redis://{service.address}/0"
        self._services.append(service)
        await self._spawn(service)
        try:
            async with asyncio.timeout(embedded_pool.START_SECONDS):
                while not await asyncio.to_thread(embedded_pool.answers, port):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise FailedPrecondition(f"redis did not start: {self._last_words(service)}") from None
        self._up(service)

    async def _spawn(self, service: Service) -> None:
        with (self._run_dir / "logs" / f"{service.name}.log").open("ab") as log:
            service.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "orca_cli.tether", str(os.getpid()), *service.command),
                env=child_environment(service.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log if service.role == "redis" else asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at the terminal is ours to pass on, in order
            )

    async def _launch(self, service: Service) -> None:
        """Starts a service and waits for the line in which it says where it listens."""
        await self._spawn(service)
        assert service.process is not None
        assert service.process.stdout is not None
        try:
            line = await asyncio.wait_for(service.process.stdout.readline(), START_SECONDS)
        except TimeoutError:
            line = b""
        if not line:
            raise FailedPrecondition(f"{service.name} did not start: {self._last_words(service)}")
        service.hello = json.loads(line)
        service.address = service.hello.get("grpc") or service.hello.get("address") or service.hello["status"]
        for name, variable in (("grpc", "ORCA_PORT"), ("http", "ORCA_HTTP_PORT"), ("address", "ORCA_PORT")):
            if name in service.hello:  # after a restart it listens where it did
                service.environment[variable] = service.hello[name].rpartition(":")[2]
        self._up(service)

    def _up(self, service: Service) -> None:
        assert service.process is not None
        self._say(f"{service.name} at {service.address} (pid {service.process.pid})")
        self._write_processes()
        self._tasks.append(asyncio.create_task(self._revive(service)))

    def _last_words(self, service: Service) -> str:
        """The end of a service's log: the reason why it did not start."""
        lines = (self._run_dir / "logs" / f"{service.name}.log").read_text(errors="replace").splitlines()
        return " ".join(lines[-3:]) or "it said nothing"

    async def _until_ready(self, service: Service) -> None:
        """Waits until the service's status port says that it is ready; shows what it waits for meanwhile."""
        said = ""
        while True:
            assert service.process is not None
            reason = await asyncio.to_thread(_unready, service.hello["status"])
            if reason is None:
                return
            if service.process.returncode is not None:
                raise FailedPrecondition(f"{service.name} ended: {self._last_words(service)}")
            if reason != said:
                said = reason
                self._say(f"waiting: {reason}")
            await asyncio.sleep(0.1)

    # -- keeping it running

    async def _revive(self, service: Service) -> None:
        """Starts a service again when it has died, as a cluster would."""
        assert service.process is not None
        await service.process.wait()
        self._say(
            f"{service.name} (pid {service.process.pid}) ended with {service.process.returncode}, starting it again"
        )
        self._write_processes()
        await asyncio.sleep(min(BACKOFF[1], BACKOFF[0] * 2**service.restarts))
        service.restarts += 1
        if service.role == "redis":
            await self._spawn(service)
            self._up(service)
        else:
            try:
                await self._launch(service)
            except FailedPrecondition as error:
                self._say(str(error))
                self._tasks.append(asyncio.create_task(self._revive(service)))

    async def _watch_ranks(self, ordinal: int, supervisor: Service) -> None:
        """Keeps the ranks of `processes.json` current."""
        async with grpc.aio.insecure_channel(supervisor.address) as channel:
            while True:
                try:
                    async for table in SupervisorStub(channel).Watch(pb.WatchRequest(), wait_for_ready=True):
                        self._ranks[ordinal] = list(table.ranks)
                        self._write_processes()
                except grpc.aio.AioRpcError:
                    self._ranks.pop(ordinal, None)
                    self._write_processes()
                    await asyncio.sleep(BACKOFF[0])

    def _write_processes(self) -> None:
        """`processes.json`: what runs now, by role, pid and address.

        A rank's `rank` is its number in its engine: stage-major, then by tensor rank.
        """
        rows: list[dict[str, Any]] = [
            {"role": s.role, "pid": s.process.pid, "address": s.address}
            for s in self._services
            if s.process is not None and s.process.returncode is None
        ]
        for ordinal, ranks in sorted(self._ranks.items()):
            engine, stage = divmod(ordinal, self._plan.pp)
            rows += [
                {
                    "role": "rank",
                    "pid": r.pid,
                    "address": r.address,
                    "engine": f"engine-{engine}",
                    "stage": stage,
                    "tensor_rank": r.local_rank,
                    "rank": stage * self._plan.tp + r.local_rank,
                }
                for r in ranks
                if r.pid
            ]
        path = self._run_dir / "processes.json"
        path.with_suffix(".tmp").write_text(json.dumps(rows, indent=1))
        path.with_suffix(".tmp").replace(path)

    async def _end(self, service: Service) -> None:
        if service.process is None or service.process.returncode is not None:
            return
        service.process.terminate()
        try:
            await asyncio.wait_for(service.process.wait(), END_SECONDS)
        except TimeoutError:
            self._say(f"{service.name} (pid {service.process.pid}) does not drain, killing it")
            service.process.kill()
            await service.process.wait()


def _unready(address: str) -> str | None:
    """Why the service at this status port is not ready; None when it is."""
    try:
        with urllib.request.urlopen(f"http://{address}/readyz", timeout=5):
            return None
    except urllib.error.HTTPError as error:
        return str(json.loads(error.read())["reason"])
    except OSError as error:
        return str(error)
