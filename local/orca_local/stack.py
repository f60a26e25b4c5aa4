"""Orca on this machine: the same processes that a cluster runs, started, watched, restarted and ended.

    Redis <- endpoint(s), scheduler(s) -> supervisor(s), one a stage -> tp ranks each

Every process is a child of this one or of a supervisor, and ends with its parent, however the parent ends.
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from orca.v1 import worker_pb2 as pb
from orca.v1.worker_pb2_grpc import SupervisorStub
from orca_common.checkpoint import read_checkpoint, resolve_model
from orca_common.errors import FailedPrecondition
from orca_common.settings import variable
from orca_worker.models.families import check_partition

from .child import Child, RedisChild
from .settings import StackSettings

LOOPBACK = "127.0.0.1"
DEMO_MODEL = Path(__file__).parent / "demo_model"
KILL_AFTER = 15.0  # seconds beyond a process's own bound for its drain
BACKOFF = (0.2, 5.0)  # seconds before a dead process is started again: first, longest

# (source, destination, address) -> where `source` reaches `destination`, which listens at `address`. Both are names of
# children. Chaos puts proxies between the processes with it.
Route = Callable[[str, str, str], Awaitable[str]]


async def direct(source: str, destination: str, address: str) -> str:
    """The `Route` of a stack without anything between its processes."""
    return address


class Stack:
    """Starts the processes of one machine and keeps them running until `stop`.

    `run_dir` gets their logs, the pool's file, the journals, and `processes.json`. `say` is called with each step, in a
    sentence. `environment`: variables of all processes besides the settings. `route`: how schedulers reach supervisors,
    and schedulers and endpoints the embedded Redis.
    """

    def __init__(
        self,
        settings: StackSettings,
        run_dir: Path,
        say: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        route: Route = direct,
    ) -> None:
        self._settings, self._run_dir, self._say = settings, run_dir, say
        self._more, self._route = environment or {}, route
        self._model = settings.model or str(DEMO_MODEL)
        self._redis: RedisChild | None = None  # None: it is the user's
        self._children: list[Child] = []
        self._ranks: dict[int, list[pb.RankEntry]] = {}  # by the ordinal of the pod
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def model_name(self) -> str:
        return read_checkpoint(self._model).name

    @property
    def computed_by(self) -> str:
        """What computes the model: its type, instruction set and threads, as the first rank's log has it."""
        log = self._log("supervisor-0")
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        loaded = next((line for line in lines if '"event": "model loaded"' in line), None)
        if loaded is None:
            return "unknown"
        said = json.loads(loaded)
        return f"{said['dtype']}, kernels {said['kernels']}"

    @property
    def children(self) -> Sequence[Child]:
        """The processes that the stack itself starts: Redis, supervisors, endpoints, schedulers."""
        return tuple(self._children)

    def rank_pid(self, pod: int, local_rank: int) -> int | None:
        """The process of a rank, by the ordinal of its pod and its number there; None: none runs."""
        return next((r.pid or None for r in self._ranks.get(pod, ()) if r.local_rank == local_rank), None)

    @property
    def grpc_addresses(self) -> list[str]:
        return [child.addresses["grpc"] for child in self._children if child.role == "endpoint"]

    @property
    def http_addresses(self) -> list[str]:
        return [child.addresses["http"] for child in self._children if child.role == "endpoint"]

    async def start(self) -> None:
        """Returns when a request would be answered. Raises FailedPrecondition with a sentence when it cannot be."""
        settings = self._settings
        self._model = str(resolve_model(self._model))
        check_partition(read_checkpoint(self._model), settings.tp, settings.pp)
        (self._run_dir / "logs").mkdir(parents=True, exist_ok=True)
        if settings.redis_url is None:
            self._redis = RedisChild(self._run_dir / "redis", self._log("redis"))
            await self._start(self._redis)
        supervisors = [
            await self._child("supervisor", n, "orca_worker.supervisor", ranks=settings.tp, first_gpu=n * settings.tp)
            for n in range(settings.engines * settings.pp)
        ]
        ports = {"port": settings.port, "http_port": settings.http_port}
        endpoints = [
            await self._child("endpoint", n, "orca_endpoint", host=settings.host, **({} if n else ports))
            for n in range(settings.endpoints)
        ]
        await asyncio.gather(*(self._start(child) for child in (*supervisors, *endpoints)))
        schedulers = [
            await self._child("scheduler", n, "orca_scheduler", workers=await self._workers(n, supervisors))
            for n in range(settings.schedulers)
        ]
        await asyncio.gather(*(self._start(child) for child in schedulers))
        self._tasks += [asyncio.create_task(self._watch_ranks(n, s)) for n, s in enumerate(supervisors)]
        for scheduler in schedulers:
            await self._until(scheduler, scheduler.unready)
        await self._until(schedulers[0], lambda: self._idle_engine(schedulers))
        for endpoint in endpoints:
            await self._until(endpoint, endpoint.unready)
        self._say("ready")

    async def stop(self) -> None:
        """Drains and ends everything, the doors first, the pool last."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for role in ("endpoint", "scheduler", "supervisor", "redis"):
            await asyncio.gather(*(self._end(child) for child in self._children if child.role == role))
        self._children.clear()
        self._ranks.clear()
        self._write_processes()

    # -- starting

    async def _child(self, role: str, number: int, module: str, **decided: object) -> Child:
        """A service with the stack's settings, and with those that are `decided` for this process."""
        name = f"{role}-{number}"
        own = {"host": LOOPBACK, "port": 0, "http_port": 0, "model": self._model}
        if role != "supervisor":
            own["redis_url"] = await self._redis_url(name)
        own |= {"run_dir": self._run_dir, "threads": self._threads(), **decided}
        environment = {
            **self._settings.environment(),
            **{variable(name): str(value) for name, value in own.items()},
            "GRPC_ENABLE_FORK_SUPPORT": "0",  # no service forks: a message on a stream costs 17 us instead of 19
            **self._more,
        }
        return Child(role, name, [sys.executable, "-m", module], environment, self._log(name))

    async def _redis_url(self, source: str) -> str:
        """Where a service reaches the request pool."""
        if self._redis is None:
            return str(self._settings.redis_url)
        return f"redis://{await self._route(source, self._redis.name, self._redis.address)}/0"

    async def _workers(self, number: int, supervisors: Sequence[Child]) -> str:
        """Where a scheduler reaches the supervisors, as its setting `workers`."""
        return ",".join([await self._route(f"scheduler-{number}", s.name, s.address) for s in supervisors])

    def _threads(self) -> int:
        """Threads of each rank's operations: by default its share of the cores.

        Four ranks on two cores took 8.4 s for two requests of 60 tokens with two threads each, 2.9 s with one.
        """
        settings = self._settings
        if settings.threads is not None:
            return settings.threads
        return max(1, (os.cpu_count() or 1) // (settings.tp * settings.pp * settings.engines))

    def _log(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"

    async def _start(self, child: Child) -> None:
        self._children.append(child)
        await child.start()
        self._show(child)
        self._tasks.append(asyncio.create_task(self._keep(child)))

    def _show(self, child: Child) -> None:
        self._say(f"{child.name} at {child.address} (pid {child.pid})")
        self._write_processes()

    async def _until(self, child: Child, unready: Callable[[], str | None]) -> None:
        """Waits until there is no reason left, and says each. `child` has to run meanwhile."""
        said = None
        while (reason := await asyncio.to_thread(unready)) is not None:
            if child.pid is None:
                raise FailedPrecondition(f"{child.name} ended: {child.last_words()}")
            if reason != said:
                said = reason
                self._say(f"waiting: {reason}")
            await asyncio.sleep(0.1)

    def _idle_engine(self, schedulers: Sequence[Child]) -> str | None:
        """Why one of the engines serves nothing; None: all run."""
        told = {engine: why for scheduler in schedulers for engine, why in scheduler.engines().items()}
        engines = (f"engine-{n}" for n in range(self._settings.engines))
        return next(filter(None, (told.get(engine, f"no scheduler has {engine} yet") for engine in engines)), None)

    # -- keeping it running

    async def _keep(self, child: Child) -> None:
        """Starts a process again whenever it has died, as a cluster would."""
        wait, longest = BACKOFF
        while True:
            self._say(f"{await child.ended()}, starting it again")
            self._write_processes()
            await asyncio.sleep(wait)
            wait = min(longest, 2 * wait)
            try:
                await child.start()
            except FailedPrecondition as error:
                self._say(str(error))
            else:
                self._show(child)

    async def _watch_ranks(self, ordinal: int, supervisor: Child) -> None:
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
            {"role": child.role, "pid": child.pid, "address": child.address}
            for child in self._children
            if child.pid is not None and child.addresses
        ]
        for ordinal, ranks in sorted(self._ranks.items()):
            engine, stage = divmod(ordinal, self._settings.pp)
            rows += [
                {
                    "role": "rank",
                    "pid": r.pid,
                    "address": r.address,
                    "engine": f"engine-{engine}",
                    "stage": stage,
                    "tensor_rank": r.local_rank,
                    "rank": stage * self._settings.tp + r.local_rank,
                }
                for r in ranks
                if r.pid
            ]
        path = self._run_dir / "processes.json"
        path.with_suffix(".tmp").write_text(json.dumps(rows, indent=1))
        path.with_suffix(".tmp").replace(path)

    async def _end(self, child: Child) -> None:
        pid = child.pid
        if not await child.end(self._settings.drain_seconds + KILL_AFTER):
            self._say(f"{child.name} (pid {pid}) did not drain and was killed")
