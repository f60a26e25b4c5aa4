"""Process 1 of a worker's pod: the parent of its ranks.

    ORCA_MODEL=FOLDER ORCA_RANKS=1 python -m orca_worker

It starts the ranks, replaces a rank's process that has died, and kills one that a master fences. When the pod has been
quiet for a while, it starts a spare: a process like any other that has not been told yet which rank it is. The next
death then costs no start of Python and no import of torch. The supervisor itself imports no torch.
Prints `{"address": "host:port", "status": "host:port"}` on standard output when it listens.
"""

import asyncio
import http.client
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import grpc

from orca.v1 import worker_pb2, worker_pb2_grpc
from orca_common import logs, service
from orca_common.address import join_address
from orca_common.checkpoint import read_checkpoint, resolve_model
from orca_common.errors import InvalidArgument, OrcaError
from orca_common.listening import reserve_port
from orca_common.tls import transport_of

from . import memory_limit
from .beginning import begin
from .machine import check_gpus, compile_kernels, kernels_needed
from .models.families import check_type, family_of
from .rank_process import RankProcess
from .server import listen, new_server
from .settings import RankSettings, SupervisorSettings

log = logging.getLogger(__name__)

SERVICE = "orca.v1.Supervisor"
FIRST_BACKOFF, LAST_BACKOFF = 0.2, 5.0  # seconds before a dead rank starts again; doubles
STABLE = 60.0  # seconds that a rank must have lived for the backoff to begin again
QUIET = 5.0  # seconds without a change before a spare starts, so that it does not slow a starting rank down
ASK, ASK_ALL = 1.5, 2.0  # seconds for a rank's status port, and for those of all ranks: a probe may take 3 s
SLACK = 1.0  # seconds that a rank gets beyond its own drain bound


class Rank:
    """A rank of the pod. Its number and address stay the same while its processes come and go."""

    def __init__(self, number: int, settings: SupervisorSettings) -> None:
        self.number = number
        wanted = settings.rank_port + number if settings.rank_port else 0
        self._reserved = reserve_port("rank_port", settings.host, wanted)
        self._port: int = self._reserved.getsockname()[1]
        self.address = join_address(settings.reachable_host, self._port)
        self.process: RankProcess | None = None
        self.restarts = 0
        self.last_end = ""  # why its last process ended
        self.refusal = ""  # why that one could not work with its settings
        self.loading: str | None = None  # how far it had read its weights when it was last asked
        self.unready: str | None = None  # why it was not ready then

    @property
    def pid(self) -> int:
        """Of its process; 0 while none runs."""
        return self.process.pid if self.process is not None else 0

    @property
    def status(self) -> tuple[str, int] | None:
        """The address of its status port; None while it does not listen."""
        process = self.process
        return process.status if process is not None else None

    def take(self, process: RankProcess) -> None:
        """Makes a process this rank."""
        self.process = process
        process.tell(self.number, self._port)

    def ended(self, why: str) -> None:
        """Its process has ended."""
        assert self.process is not None
        self.refusal, self.process = self.process.refusal, None
        self.last_end = self.refusal or why

    @property
    def starting(self) -> str | None:
        """What it still does before it can be a member of an epoch."""
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
            self.process.kill(number)

    def ready(self) -> str | None:
        """Why it is not ready, as its status port says. Blocks: called in the thread of the pod's status port."""
        status = self.status
        if status is None:
            return f"rank {self.number} has not started yet" + (f": {self.last_end}" if self.last_end else "")
        connection = http.client.HTTPConnection(*status, timeout=ASK)
        try:
            connection.request("GET", "/readyz")
            answer = json.loads(connection.getresponse().read())
            reason, self.loading = answer["reason"], answer["loading"]
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(error)
        finally:
            connection.close()
        return None if reason is None else f"rank {self.number}: {reason}"

    def close(self) -> None:
        self._reserved.close()


def why_ended(code: int, out_of_memory: bool) -> str:
    """Why a rank's process ended, in words. `out_of_memory`: the kernel has killed one of the pod's meanwhile."""
    if code == -signal.SIGKILL and out_of_memory:
        return "its process was killed, because the pod has reached its memory limit"
    return f"its process ended with status {code}"


class Supervisor(worker_pb2_grpc.SupervisorServicer):
    """Keeps the ranks running and shows them to masters."""

    def __init__(self, settings: SupervisorSettings, first: subprocess.Popen[bytes] | None) -> None:
        """first: a process that has been begun for a rank."""
        self._drain, self._keeps_spare = settings.drain_seconds, settings.spare
        self._loop = asyncio.get_running_loop()
        self._ranks = [Rank(number, settings) for number in range(settings.ranks)]
        of_pod = settings.model_dump(exclude={"ranks", "rank_port", "spare"})
        self._of_ranks = RankSettings(**of_pod | {"config": None, "port": 0, "status_port": 0, "local_rank": 0})
        self._begun = first  # None: no process waits for its settings
        self._spare: RankProcess | None = None
        self._quiet = self._loop.call_later(QUIET, self._start_spare)  # starts again after every change
        self._changed = asyncio.Event()  # replaced after every change
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Keeps the ranks running until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for rank in self._ranks:
                group.create_task(self._keep(rank))

    async def _keep(self, rank: Rank) -> None:
        backoff = FIRST_BACKOFF
        while True:
            spare, self._spare = self._spare, None
            process = spare or self._start()
            rank.take(process)
            started, oom_kills = time.monotonic(), memory_limit.kills()
            about = {"rank": rank.number, "address": rank.address, "rank_pid": process.pid}
            log.info("rank started", extra=about | {"was_spare": spare is not None})
            self._publish()
            code = await asyncio.shield(process.ended)
            rank.ended(why_ended(code, out_of_memory=memory_limit.kills() > oom_kills))
            lived = time.monotonic() - started
            backoff = FIRST_BACKOFF if lived > STABLE else backoff
            # A spare takes over at once. A spare starts only after QUIET seconds, so this cannot loop fast.
            pause = 0.0 if self._spare is not None else backoff
            what = {"rank": rank.number, "status": code, "lived": lived, "again_in": pause, "why": rank.last_end}
            log.error("rank ended", extra=what)
            rank.restarts += 1
            self._publish()
            await asyncio.sleep(pause)
            backoff = min(2 * backoff, LAST_BACKOFF)

    def _start(self) -> RankProcess:
        begun, self._begun = self._begun, None
        return RankProcess(begun or begin(), self._of_ranks, self._await_quiet)

    def _await_quiet(self) -> None:
        """The pod has changed: a spare starts after QUIET seconds without another change."""
        self._quiet.cancel()
        self._quiet = self._loop.call_later(QUIET, self._start_spare)

    def _start_spare(self) -> None:
        """Starts a spare, unless a rank is still starting. When it listens, `_await_quiet` runs again."""
        steady = all(rank.status is not None for rank in self._ranks)
        if self._keeps_spare and self._spare is None and steady and not self._stopping.is_set():
            self._spare = self._start()
            self._spare.ended.add_done_callback(partial(self._spare_ended, self._spare))
            log.info("spare started", extra={"rank_pid": self._spare.pid})

    def _spare_ended(self, process: RankProcess, ended: asyncio.Future[int]) -> None:
        """A process that started as a spare has ended. It may have become a rank meanwhile."""
        if process is self._spare:
            log.error("spare ended", extra={"rank_pid": process.pid, "status": ended.result()})
            self._spare = None
            self._await_quiet()

    async def stop(self) -> None:
        """Lets the ranks leave, and kills those that have not left within the drain bound. Follows `run`."""
        self._stopping.set()
        self._publish()
        self._quiet.cancel()
        for rank in self._ranks:
            rank.kill(signal.SIGTERM)
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.kill(signal.SIGKILL)  # it has nothing to leave in order, and may be frozen
        running = [(rank, rank.process) for rank in self._ranks if rank.process is not None]
        ends = [process.ended for _, process in running] + ([spare.ended] if spare is not None else [])
        if not ends:
            return
        await asyncio.wait(ends, timeout=self._drain + SLACK)
        for rank, process in running:
            if not process.ended.done():
                log.error("rank did not leave: killed", extra={"rank": rank.number, "rank_pid": process.pid})
                process.kill(signal.SIGKILL)
        await asyncio.wait(ends)

    def close(self) -> None:
        """Frees the ranks' ports."""
        self._quiet.cancel()
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
        return next((reason for reason in reasons if reason is not None), None)

    def refused(self) -> str | None:
        """Why a rank cannot work with its settings. May be called in any thread."""
        return next(filter(None, (rank.refused for rank in self._ranks)), None)

    def unready(self) -> dict[int, str | None]:
        """Why each rank was not ready when `ready` last asked; None: it was. May be called in any thread."""
        return {rank.number: rank.unready for rank in self._ranks}

    def starting(self) -> str | None:
        """What a rank still does before it can be a member of an epoch, as of the last `ready`."""
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
        process.kill(signal.SIGKILL)
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
        self._await_quiet()


class SupervisorApp:
    """A supervisor as a service: its ranks, its gRPC server, and its status port."""

    def __init__(self, settings: SupervisorSettings, first: subprocess.Popen[bytes] | None) -> None:
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
        pulse = service.LoopPulse()
        self._open.callback(pulse.close)
        status = service.StatusPort(settings.host, settings.status_port, self._not_ready, pulse.alive, self._told)
        self._open.callback(status.close)
        check_gpus(settings.device, settings.first_gpu, settings.ranks)
        folder = await service.in_thread(partial(resolve_model, settings.model, check_type))  # once, not by each rank
        self._needs_kernels = family_of(read_checkpoint(folder)).needs_torch and kernels_needed(
            settings.device, settings.kernels
        )
        self._supervisor = supervisor = Supervisor(settings.model_copy(update={"model": str(folder)}), self._first)
        self._open.callback(supervisor.close)
        server, self._health = await new_server(SERVICE, transport)
        self._open.push_async_callback(server.stop, 1.0)
        worker_pb2_grpc.add_SupervisorServicer_to_server(supervisor, server)
        address = join_address(settings.reachable_host, listen(server, transport, settings.host, settings.port))
        await server.start()
        log.info("listening", extra={"address": address, "ranks": settings.ranks, "model": str(folder)})
        return {"address": address, "status": join_address(settings.host, status.port)}

    def _not_ready(self) -> str | None:
        if self._compiling:
            return self._compiling
        return self._supervisor.ready() if self._supervisor is not None else "the model is being found"

    def _told(self) -> dict[str, Any]:
        """What the status port tells besides."""
        supervisor = self._supervisor
        if supervisor is None:
            return {"refused": None, "starting": None, "ranks": {}}
        starting = self._compiling or supervisor.starting()
        return {"refused": supervisor.refused(), "starting": starting, "ranks": supervisor.unready()}

    async def run(self) -> None:
        assert self._supervisor is not None
        if self._needs_kernels:  # once, not by each rank
            await service.in_thread(partial(compile_kernels, self._tell))
            self._compiling = None
        await self._supervisor.run()

    def _tell(self, state: str) -> None:
        self._compiling = state
        log.info(state)

    async def drain(self) -> None:
        assert self._supervisor is not None
        log.info("leaving")
        await self._health.enter_graceful_shutdown()
        await self._supervisor.stop()

    async def close(self) -> None:
        await self._open.aclose()


def main(settings: SupervisorSettings | None = None, first: subprocess.Popen[bytes] | None = None) -> None:
    """`python -m orca_worker`: settings from flags, environment and file, unless given.

    first: a process that has been begun for a rank. Without it, ranks begin when the supervisor listens.
    """
    settings = settings or SupervisorSettings.load(sys.argv[1:])
    logs.configure("orca-worker", settings.log_level)
    try:
        service.run(lambda: service.serve(lambda: SupervisorApp(settings, first)))
    except OrcaError as error:
        raise SystemExit(f"orca-supervisor: {settings.said(str(error))}") from None
