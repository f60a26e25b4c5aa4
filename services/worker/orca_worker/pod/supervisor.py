"""Process 1 of a worker's pod: the parent of its ranks.

    ORCA_MODEL=FOLDER ORCA_RANKS=1 python -m orca_worker

It starts the ranks, replaces a rank's process that has died, and kills one that a master fences. Ranks are forked by
a fork server, a process that has imported torch once for all of them. The supervisor itself imports no torch.
Prints `{"address": "host:port", "status": "host:port"}` on standard output when it listens.
"""

import asyncio
import http.client
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import grpc

from orca.v1 import worker_pb2, worker_pb2_grpc
from orca_common import service
from orca_common.adapters import read_adapters
from orca_common.address import join_address, split_address
from orca_common.backoff import Backoff
from orca_common.checkpoint import read_checkpoint, resolve_model
from orca_common.errors import FailedPrecondition, InvalidArgument, OrcaError, Unavailable
from orca_common.grpc_server import GrpcServer
from orca_common.listening import reserve_port
from orca_common.metrics import Metrics, Reading
from orca_common.roles import Role
from orca_common.tls import transport_of

from .. import machine
from ..machine import check_gpus, compile_kernels, kernels_needed
from ..models.families import check_partition, check_type, family_of, modules_of
from ..processes.beginning import Begun, begin
from ..processes.forks import Forked, ForkedProcess, Forks
from ..processes.process import why_ended
from ..settings import RankSettings, SupervisorSettings

log = logging.getLogger(__name__)

SERVICE = "orca.v1.Supervisor"
ALLOWED = {f"/{SERVICE}/": frozenset({Role.SCHEDULER})}  # who may call, where certificates tell
OPTIONS = [("grpc.max_receive_message_length", 1 << 16), ("grpc.max_concurrent_streams", 100)]
ASK, ASK_ALL = 1.5, 2.0  # seconds for a rank's status port, and for those of all ranks: a probe may take 3 s
SLACK = 1.0  # seconds that a rank gets beyond its own drain bound


class RankProcess(ForkedProcess):
    """A process of the fork server's, which becomes a rank with these settings."""

    def __init__(self, forked: Forked, settings: RankSettings) -> None:
        super().__init__(forked, settings.model_dump(mode="json"))
        self.status: tuple[str, int] | None = None  # where its status port is, once it listens
        self.refusal = ""  # why it cannot work with its settings

    def _printed(self, line: str) -> None:
        if line.startswith('{"address"'):
            self.status = split_address(json.loads(line)["status"])
        elif line.startswith('{"refused"'):
            self.refusal = json.loads(line)["refused"]
        else:
            super()._printed(line)


class Rank:
    """A rank of the pod. Its number and address stay the same while its processes come and go."""

    def __init__(self, number: int, settings: SupervisorSettings) -> None:
        self.number = number
        wanted = settings.rank_port + number if settings.rank_port else 0
        self._reserved = reserve_port("rank_port", settings.host, wanted)
        self.port: int = self._reserved.getsockname()[1]
        self.address = join_address(settings.reachable_host, self.port)
        self.process: RankProcess | None = None
        self.restarts = 0
        self.last_end = ""  # why its last process ended, or why there is none
        self.refusal = ""  # why that one could not work with its settings
        self.loading: str | None = None  # how far it had read its weights when it was last asked
        self.unready: str | None = None  # why it was not ready then
        self.loaded = False  # whether it had its weights then

    @property
    def pid(self) -> int:
        """The pid of its process; 0 while none runs."""
        return self.process.pid if self.process is not None else 0

    @property
    def status(self) -> tuple[str, int] | None:
        """The address of its status port; None while it does not listen."""
        process = self.process
        return process.status if process is not None else None

    def ended(self, why: str) -> None:
        """Notes that its process has ended."""
        assert self.process is not None
        self.refusal, self.process = self.process.refusal, None
        self.last_end = self.refusal or why

    def not_started(self, why: str) -> None:
        """Notes that its process cannot be made yet."""
        self.last_end = why

    @property
    def starting(self) -> str | None:
        """Says what it must still do before it can be a member of an epoch."""
        if self.status is None:
            return f"rank {self.number} starts"
        return f"rank {self.number}: {self.loading}" if self.loading is not None else None

    @property
    def refused(self) -> str | None:
        """Why it does not listen, when that is in its settings: None while it listens, or when it may start yet."""
        return f"rank {self.number}: {self.refusal}" if self.refusal and self.status is None else None

    def kill(self, number: signal.Signals) -> None:
        """Sends a signal to its process, if one runs."""
        if self.process is not None:
            self.process.send_signal(number)

    def ready(self) -> str | None:
        """Why it is not ready, as its status port says. Blocks: called in the thread of the pod's status port."""
        status = self.status
        if status is None:
            self.loaded = False
            return f"rank {self.number} has not started yet" + (f": {self.last_end}" if self.last_end else "")
        connection = http.client.HTTPConnection(*status, timeout=ASK)
        try:
            connection.request("GET", "/readyz")
            answer = json.loads(connection.getresponse().read())
            reason, self.loading, self.loaded = answer["reason"], answer["loading"], answer["loaded"]
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason, self.loaded = str(error), False
        finally:
            connection.close()
        return None if reason is None else f"rank {self.number}: {reason}"

    def close(self) -> None:
        self._reserved.close()


class Supervisor(worker_pb2_grpc.SupervisorServicer):
    """Keeps the ranks running and shows them to masters."""

    def __init__(self, settings: SupervisorSettings, forks: Forks) -> None:
        self._drain, self._forks = settings.drain_seconds, forks
        self._ranks = [Rank(number, settings) for number in range(settings.ranks)]
        of_pod = settings.model_dump(exclude={"ranks", "rank_port"})
        self._of_ranks = RankSettings(**of_pod | {"config": None, "port": 0, "status_port": 0, "local_rank": 0})
        self._oom_kills = machine.kills()  # before it began
        self._was_ready = False  # all of its ranks, at some time
        self._changed = asyncio.Event()  # replaced after every change
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Keeps the ranks running until it is cancelled.

        Raises FailedPrecondition when the kernel kills one for want of memory before the pod was ever ready: the next
        one would need as much, and Kubernetes sees and tells a container that ends again and again.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forks.run(self._fork_server_ended))
                for rank in self._ranks:
                    group.create_task(self._keep(rank))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _keep(self, rank: Rank) -> None:
        backoff = Backoff()
        settings = self._of_ranks.model_copy(update={"local_rank": rank.number, "port": rank.port})
        while True:
            rank.process = process = RankProcess(await self._forks.fork(rank.not_started), settings)
            started, oom_kills = time.monotonic(), machine.kills()
            about = {"rank": rank.number, "address": rank.address, "rank_pid": process.pid}
            log.info("rank started", extra=about)
            self._publish()
            code = await asyncio.shield(process.ended)
            rank.ended(why_ended(code, out_of_memory=machine.kills() > oom_kills))
            lived = time.monotonic() - started
            pause = backoff.after(lived)
            what = {"rank": rank.number, "status": code, "lived": lived, "again_in": pause, "why": rank.last_end}
            log.error("rank ended", extra=what)
            self._may_begin_again(f"rank {rank.number}: {rank.last_end}")
            rank.restarts += 1
            self._publish()
            await asyncio.sleep(pause)

    def _fork_server_ended(self, why: str, lived: float, again_in: float) -> None:
        log.error("fork server ended", extra={"why": why, "lived": lived, "again_in": again_in})
        self._may_begin_again(f"the fork server: {why}")

    def _may_begin_again(self, why: str) -> None:
        """Raises FailedPrecondition when memory was too little from the beginning."""
        if not self._was_ready and machine.kills() > self._oom_kills:
            raise FailedPrecondition(f"{why}; it was never ready, so the limit is too low")

    async def stop(self) -> None:
        """Lets the ranks leave, and kills those that have not left within the drain bound. Follows `run`."""
        self._stopping.set()
        self._publish()
        for rank in self._ranks:
            rank.kill(signal.SIGTERM)
        running = [(rank, rank.process) for rank in self._ranks if rank.process is not None]
        ends = [process.ended for _, process in running]
        if not ends:
            return
        await asyncio.wait(ends, timeout=self._drain + SLACK)
        for rank, process in running:
            if not process.ended.done():
                log.error("rank did not leave: killed", extra={"rank": rank.number, "rank_pid": process.pid})
                process.send_signal(signal.SIGKILL)
        await asyncio.wait(ends)

    def close(self) -> None:
        """Frees the ranks' ports."""
        for rank in self._ranks:
            rank.close()

    def ready(self) -> str | None:
        """Why the pod is not ready; None: all of its ranks are ready. Asks them at the same time, for at most ASK_ALL.

        Called in the thread of the status port.
        """
        if self._stopping.is_set():
            return "leaving"
        answers: dict[int, str | None] = {}

        def ask(rank: Rank) -> None:
            answers[rank.number] = rank.unready = rank.ready()

        asking = [threading.Thread(target=ask, args=(rank,), name="ask", daemon=True) for rank in self._ranks]
        for thread in asking:
            thread.start()
        until = time.monotonic() + ASK_ALL
        for thread in asking:
            thread.join(max(0.0, until - time.monotonic()))
        reasons = (answers.get(rank.number, f"rank {rank.number}: does not answer") for rank in self._ranks)
        reason = next((reason for reason in reasons if reason is not None), None)
        self._was_ready |= reason is None
        return reason

    def report(self, metrics: Metrics) -> None:
        """Has the ranks asked at each scrape."""

        def ready() -> Reading:
            self.ready()
            return [((str(rank.number),), rank.unready is None and not self._stopping.is_set()) for rank in self._ranks]

        metrics.read("orca_rank_ready", ready)
        metrics.read("orca_rank_weights_loaded", lambda: [((str(rank.number),), rank.loaded) for rank in self._ranks])
        metrics.read("orca_rank_restarts_total", lambda: [((str(rank.number),), rank.restarts) for rank in self._ranks])

    def refused(self) -> str | None:
        """Why a rank cannot work with its settings. May be called in any thread."""
        return next(filter(None, (rank.refused for rank in self._ranks)), None)

    def unready(self) -> dict[int, str | None]:
        """Why each rank was not ready when `ready` last asked; None: it was. May be called in any thread."""
        return {rank.number: rank.unready for rank in self._ranks}

    def restarts(self) -> dict[int, int]:
        """Counts, for each rank, how often its process was replaced. May be called in any thread."""
        return {rank.number: rank.restarts for rank in self._ranks}

    def fork_server(self) -> int | None:
        """The pid of the fork server; None while none runs. May be called in any thread."""
        return self._forks.pid

    def starting(self) -> str | None:
        """Says what a rank must still do before it can be a member of an epoch, as of the last `ready`."""
        return next(filter(None, (rank.starting for rank in self._ranks)), None)

    async def Watch(  # noqa: N802 the proto's name
        self, request: worker_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.RankTable]:
        while not self._stopping.is_set():
            changed = self._changed
            yield self._table()
            await changed.wait()

    async def Fence(  # noqa: N802 the proto's name
        self, request: worker_pb2.FenceRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.FenceResponse:
        if request.local_rank >= len(self._ranks):
            raise InvalidArgument("local_rank", f"is {request.local_rank} of {len(self._ranks)} ranks")
        rank = self._ranks[request.local_rank]
        process = rank.process
        if process is None or process.pid != request.pid:
            return worker_pb2.FenceResponse(killed=False)
        log.error("rank fenced: %s", request.verdict, extra={"rank": rank.number, "rank_pid": process.pid})
        process.send_signal(signal.SIGKILL)
        await asyncio.shield(process.ended)  # until then its port takes connections, and the table shows it
        return worker_pb2.FenceResponse(killed=True)

    def _table(self) -> worker_pb2.RankTable:
        return worker_pb2.RankTable(
            ranks=[
                worker_pb2.RankEntry(local_rank=r.number, address=r.address, pid=r.pid, restarts=r.restarts)
                for r in self._ranks
            ]
        )

    def _publish(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class SupervisorApp:
    """A supervisor as a service: its ranks, its gRPC server, and its status port."""

    def __init__(self, settings: SupervisorSettings, first: Begun | None) -> None:
        self._settings, self._first = settings, first
        self._open = AsyncExitStack()
        self._supervisor: Supervisor | None = None  # None: the model is being found
        self._compiling: str | None = None  # what is done before the ranks start

    async def start(self) -> dict[str, str]:
        """Finds the model, which may be a download, and listens. Probes are answered meanwhile.

        Raises FailedPrecondition when there is no such model or GPU, SystemExit when the port is taken, Unavailable
        when the status port is.
        """
        settings = self._settings
        transport = transport_of(settings.tls_dir)
        pulse = service.LoopPulse(service.ALIVE_SECONDS)
        metrics = Metrics("worker")
        status = service.StatusPort(
            settings.host, settings.status_port, self._not_ready, pulse.alive, self._status_fields, metrics
        )
        self._open.callback(status.close)
        check_gpus(settings.device, settings.first_gpu, settings.ranks)
        folder = await service.in_thread(partial(resolve_model, settings.model, check_type))  # once, not by each rank
        checkpoint = read_checkpoint(folder, adapters=read_adapters(settings.adapters))
        if checkpoint.adapters:
            await service.in_thread(partial(check_partition, checkpoint, 1, 1))
        self._needs_kernels = family_of(checkpoint).needs_torch and kernels_needed(settings.device, settings.kernels)
        forks = Forks(begin, modules_of(checkpoint), settings.log_level, self._first)
        self._open.push_async_callback(forks.stop)
        self._supervisor = supervisor = Supervisor(settings.model_copy(update={"model": str(folder)}), forks)
        self._open.callback(supervisor.close)
        supervisor.report(metrics)
        self._server = server = GrpcServer(
            (SERVICE,), transport, ALLOWED, Unavailable("this pod is leaving"), options=OPTIONS, port_kept=True
        )
        self._open.push_async_callback(server.stop, 1.0)
        worker_pb2_grpc.add_SupervisorServicer_to_server(supervisor, server.server)
        address = join_address(settings.reachable_host, await server.start(settings.host, settings.port))
        server.serving(True)
        log.info("listening", extra={"address": address, "ranks": settings.ranks, "model": str(folder)})
        return {"address": address, "status": join_address(settings.host, status.port)}

    def _not_ready(self) -> str | None:
        if self._compiling:
            return self._compiling
        return self._supervisor.ready() if self._supervisor is not None else "the model is being found"

    def _status_fields(self) -> dict[str, Any]:
        """The other fields of the status port's answer."""
        supervisor = self._supervisor
        if supervisor is None:
            return {"refused": None, "starting": None, "ranks": {}, "restarts": {}, "fork_server": None}
        return {
            "refused": supervisor.refused(),
            "starting": self._compiling or supervisor.starting(),
            "ranks": supervisor.unready(),
            "restarts": supervisor.restarts(),
            "fork_server": supervisor.fork_server(),
        }

    async def run(self) -> None:
        assert self._supervisor is not None
        if self._needs_kernels:  # once, not by each rank
            await service.in_thread(partial(compile_kernels, self._settings.kernels, self._tell))
            self._compiling = None
        await self._supervisor.run()

    def _tell(self, state: str) -> None:
        self._compiling = state
        log.info(state)

    async def drain(self) -> None:
        assert self._supervisor is not None
        log.info("leaving")
        self._server.serving(False)
        await self._supervisor.stop()

    async def close(self) -> None:
        await self._open.aclose()


def main(settings: SupervisorSettings | None = None, first: Begun | None = None) -> None:
    """`python -m orca_worker`: settings from flags, environment and file, unless given.

    first: a fork server that has been begun. Without it, one begins when the model is found.
    """
    settings = settings or SupervisorSettings.load(sys.argv[1:])
    settings.open_log("orca-worker")
    try:
        service.run(lambda: service.serve(lambda: SupervisorApp(settings, first)))
    except OrcaError as error:
        raise SystemExit(f"orca-supervisor: {settings.said(str(error))}") from None
