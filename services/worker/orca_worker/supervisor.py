"""Process 1 of a worker's pod: the parent of its ranks.

    ORCA_MODEL=FOLDER ORCA_RANKS=1 python -m orca_worker.supervisor

It starts the ranks, starts a dead one again at the same address, and kills one that a master has condemned. It imports
no torch. Prints `{"address": "host:port", "status": "host:port"}` on standard output when it listens.
"""

import asyncio
import http.client
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import grpc

from orca.v1 import worker_pb2, worker_pb2_grpc
from orca_common import logs, service
from orca_common.checkpoint import read_checkpoint, resolve_model
from orca_common.errors import FailedPrecondition, InvalidArgument, abort
from orca_common.settings import child_environment

from .models import check_model_type
from .process import RESOLVER, join_address, reserve_port
from .server import listen, new_server
from .settings import RankSettings, SupervisorSettings

log = logging.getLogger(__name__)

SERVICE = "orca.v1.Supervisor"
FIRST_BACKOFF, LAST_BACKOFF = 0.2, 5.0  # seconds before a dead rank starts again; doubles
STABLE = 60.0  # seconds after which a rank's death is a new story
SLACK = 1.0  # seconds that a rank gets beyond its own drain bound


class Rank:
    """One rank's place: its number and address stay, its processes come and go."""

    def __init__(self, number: int, settings: SupervisorSettings) -> None:
        self.number = number
        wanted = settings.rank_port + number if settings.rank_port else 0
        self._reserved = reserve_port(settings.host, wanted)
        self._port: int = self._reserved.getsockname()[1]
        self.address = join_address(settings.reachable_host, self._port)
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self.restarts = 0
        self.status: tuple[str, int] | None = None  # where its status port is, once it listens

    @property
    def pid(self) -> int:
        """0 while it is not running."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        rank = RankSettings.load(
            **self._settings.model_dump(exclude={"ranks", "rank_port", "port", "status_port"}),
            port=self._port,
            status_port=0,
            local_rank=self.number,
            supervisor_pid=os.getpid(),
        )
        command = [sys.executable, "-m", "orca_worker.rank"]
        self._process = subprocess.Popen(
            command,
            env=RESOLVER | child_environment(rank.environment()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        self._pidfd = os.pidfd_open(self._process.pid)

    async def ended(self) -> int:
        """Waits until the process has ended; its exit status, negative for a signal's number."""
        assert self._process is not None
        assert self._process.stdout is not None
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        output = self._process.stdout.fileno()
        loop.add_reader(output, self._read_lines, output)
        loop.add_reader(self._pidfd, lambda: over.done() or over.set_result(None))
        try:
            await over
        finally:
            loop.remove_reader(output)
            loop.remove_reader(self._pidfd)
        code = self._process.wait()
        self._process.stdout.close()
        os.close(self._pidfd)
        self._process, self._pidfd, self.status = None, -1, None
        return code

    def _read_lines(self, output: int) -> None:
        """The rank says where it listens in one line, written at once; what else it may print goes to the log."""
        printed = os.read(output, 65536)
        if not printed:
            asyncio.get_running_loop().remove_reader(output)
        for line in printed.decode(errors="replace").splitlines():
            if line.startswith('{"address"'):
                host, port = json.loads(line)["status"].rsplit(":", 1)
                self.status = (host.strip("[]"), int(port))
            else:
                log.info("rank printed", extra={"rank": self.number, "line": line})

    def kill(self, number: signal.Signals) -> None:
        """Sends a signal to the running process; by its descriptor, so that no other process can be hit."""
        if self._process is not None:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                log.info("rank has ended already", extra={"rank": self.number})

    def ready(self) -> str | None:
        """Why it is not ready, asked at its status port; called in the status port's thread."""
        status = self.status
        if status is None:
            return f"rank {self.number} has not started yet"
        connection = http.client.HTTPConnection(*status, timeout=2)
        try:
            connection.request("GET", "/readyz")
            reason = json.loads(connection.getresponse().read())["reason"]
        except OSError as error:
            reason = str(error)
        finally:
            connection.close()
        return None if reason is None else f"rank {self.number}: {reason}"

    def close(self) -> None:
        self._reserved.close()


class Supervisor(worker_pb2_grpc.SupervisorServicer):
    """Keeps the ranks running, and tells masters of them."""

    def __init__(self, settings: SupervisorSettings) -> None:
        self._drain = settings.drain_seconds
        self._ranks = [Rank(number, settings) for number in range(settings.ranks)]
        self._changed = asyncio.Event()  # a fresh one after every change
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Runs the ranks until `stop`."""
        async with asyncio.TaskGroup() as group:
            for rank in self._ranks:
                group.create_task(self._keep(rank))

    async def _keep(self, rank: Rank) -> None:
        backoff = FIRST_BACKOFF
        while not self._stopping.is_set():
            rank.start()
            started = time.monotonic()
            log.info("rank started", extra={"rank": rank.number, "address": rank.address, "rank_pid": rank.pid})
            self._publish()
            code = await rank.ended()
            if self._stopping.is_set():
                break
            lived = time.monotonic() - started
            backoff = FIRST_BACKOFF if lived > STABLE else backoff
            log.error("rank ended", extra={"rank": rank.number, "status": code, "lived": lived, "again_in": backoff})
            rank.restarts += 1
            self._publish()
            try:
                async with asyncio.timeout(backoff):
                    await self._stopping.wait()
            except TimeoutError:
                backoff = min(2 * backoff, LAST_BACKOFF)

    async def stop(self, running: asyncio.Task[None]) -> None:
        """Lets the ranks leave, and kills those that have not left within the bound."""
        self._stopping.set()
        self._publish()
        for rank in self._ranks:
            rank.kill(signal.SIGTERM)
        done, _ = await asyncio.wait([running], timeout=self._drain + SLACK)
        if not done:
            for rank in self._ranks:
                log.error("rank did not leave: killed", extra={"rank": rank.number, "rank_pid": rank.pid})
                rank.kill(signal.SIGKILL)
        await running
        for rank in self._ranks:
            rank.close()

    def ready(self) -> str | None:
        """Why the pod is not ready; None: all of its ranks are members of an epoch."""
        if self._stopping.is_set():
            return "leaving"
        return next((reason for rank in self._ranks if (reason := rank.ready()) is not None), None)

    async def Watch(  # noqa: N802 the proto's name
        self, request: worker_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.RankTable]:
        while not self._stopping.is_set():
            changed = self._changed
            yield self._table()
            await changed.wait()

    async def Condemn(  # noqa: N802 the proto's name
        self, request: worker_pb2.CondemnRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.CondemnResponse:
        if request.local_rank >= len(self._ranks):
            await abort(context, InvalidArgument("local_rank", f"is {request.local_rank} of {len(self._ranks)} ranks"))
        rank = self._ranks[request.local_rank]
        if request.pid == 0 or rank.pid != request.pid:
            return worker_pb2.CondemnResponse(killed=False)
        log.error("rank condemned: %s", request.verdict, extra={"rank": rank.number, "rank_pid": rank.pid})
        rank.kill(signal.SIGKILL)
        return worker_pb2.CondemnResponse(killed=True)

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


async def serve(settings: SupervisorSettings) -> None:
    """Serves until SIGTERM or SIGINT."""
    stop = service.stop_event()
    try:
        folder = await asyncio.to_thread(resolve_model, settings.model)  # downloaded once, not by each rank
        check_model_type(read_checkpoint(folder))
    except FailedPrecondition as error:
        raise SystemExit(f"ORCA_MODEL: {error}") from None
    settings = settings.model_copy(update={"model": str(folder)})

    pulse = service.LoopPulse()
    supervisor = Supervisor(settings)
    server, health = await new_server(SERVICE)
    worker_pb2_grpc.add_SupervisorServicer_to_server(supervisor, server)
    port = listen(server, settings.host, settings.port)
    running = asyncio.create_task(supervisor.run(), name="ranks")
    await server.start()
    status = service.StatusPort(settings.host, settings.status_port, supervisor.ready, pulse.alive)
    address = join_address(settings.reachable_host, port)
    print(json.dumps({"address": address, "status": join_address(settings.host, status.port)}), flush=True)
    log.info("listening", extra={"address": address, "ranks": settings.ranks, "model": str(folder)})
    try:
        await service.until(stop, running)
    finally:
        log.info("leaving")
        await health.enter_graceful_shutdown()
        await supervisor.stop(running)
        await server.stop(grace=1.0)
        status.close()
        pulse.close()


def main(settings: SupervisorSettings | None = None) -> None:
    """`python -m orca_worker.supervisor`: settings from the environment, unless given."""
    settings = settings or SupervisorSettings.load()
    logs.configure("supervisor", settings.log_level)
    service.run(lambda: serve(settings))


if __name__ == "__main__":
    main()
