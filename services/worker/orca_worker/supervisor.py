"""Process 1 of a worker's pod: the parent of its ranks.

    ORCA_MODEL=FOLDER ORCA_RANKS=1 python -m orca_worker.supervisor

It starts the ranks, gives a dead one's place to another process, and kills one that a master has fenced. In a pod
that has been quiet for a while it keeps a spare: a process that was started like any other and has not been told yet
which rank it is, so that the next death costs no start of Python and no import of torch. This process imports no torch.
Prints `{"address": "host:port", "status": "host:port"}` on standard output when it listens.
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
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial

import grpc

from orca.v1 import worker_pb2, worker_pb2_grpc
from orca_common import logs, service
from orca_common.checkpoint import read_checkpoint, resolve_model
from orca_common.errors import FailedPrecondition, InvalidArgument, abort
from orca_common.settings import child_environment

from .models import check_model_type
from .process import TORCH_DISTRIBUTED, join_address, reserve_port
from .server import listen, new_server
from .settings import RankSettings, SupervisorSettings

log = logging.getLogger(__name__)

SERVICE = "orca.v1.Supervisor"
FIRST_BACKOFF, LAST_BACKOFF = 0.2, 5.0  # seconds before a dead rank starts again; doubles
STABLE = 60.0  # seconds after which a rank's death is a new story
QUIET = 5.0  # seconds without a change before a spare starts: it competes with no rank, and dies no oftener than one
SLACK = 1.0  # seconds that a rank gets beyond its own drain bound


class Process:
    """A rank's process: started, told which rank it is, ended. `on_listening` is called when it listens."""

    def __init__(self, environment: Mapping[str, str], on_listening: Callable[[], None]) -> None:
        self._on_listening = on_listening
        self._loop = asyncio.get_running_loop()
        command = [sys.executable, "-m", "orca_worker.rank"]
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, bufsize=0)
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._input, self._output = self._popen.stdin, self._popen.stdout
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._output.fileno(), self._read_lines)
        self._loop.add_reader(self._pidfd, self._reap)
        self.pid = self._popen.pid
        self.status: tuple[str, int] | None = None  # where its status port is, once it listens
        self.ended: asyncio.Future[int] = self._loop.create_future()  # its exit status, or minus a signal's number

    def tell(self, number: int, port: int) -> None:
        """Tells it, once, which rank it is. Never blocks, whatever the process does: an empty pipe takes the line."""
        if self.ended.done():
            return  # its end is still to be heard of
        line = json.dumps({"local_rank": number, "port": port}) + "\n"
        with suppress(BrokenPipeError):  # it has died, and `ended` is about to say so
            self._input.write(line.encode())
        self._input.close()

    def kill(self, number: signal.Signals) -> None:
        """Sends it a signal; by its descriptor, so that no other process can be hit."""
        if not self.ended.done():
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                log.info("process has ended already", extra={"rank_pid": self.pid})

    def _read_lines(self) -> None:
        """It says where it listens in one line, written at once; what else it may print goes to the log."""
        printed = os.read(self._output.fileno(), 65536)
        if not printed:
            self._loop.remove_reader(self._output.fileno())
        for line in printed.decode(errors="replace").splitlines():
            if line.startswith('{"address"'):
                host, port = json.loads(line)["status"].rsplit(":", 1)
                self.status = (host.strip("[]"), int(port))
                self._on_listening()
            else:
                log.info("rank printed", extra={"rank_pid": self.pid, "line": line})

    def _reap(self) -> None:
        self._loop.remove_reader(self._output.fileno())
        self._loop.remove_reader(self._pidfd)
        code = self._popen.wait()
        self._input.close()
        self._output.close()
        os.close(self._pidfd)
        self.ended.set_result(code)


class Rank:
    """One rank's place: its number and address stay, its processes come and go."""

    def __init__(self, number: int, settings: SupervisorSettings) -> None:
        self.number = number
        wanted = settings.rank_port + number if settings.rank_port else 0
        self._reserved = reserve_port(settings.host, wanted)
        self._port: int = self._reserved.getsockname()[1]
        self.address = join_address(settings.reachable_host, self._port)
        self.process: Process | None = None
        self.restarts = 0

    @property
    def pid(self) -> int:
        """0 while it is not running."""
        return self.process.pid if self.process is not None else 0

    @property
    def status(self) -> tuple[str, int] | None:
        """Where its status port is; None while it does not listen."""
        process = self.process
        return process.status if process is not None else None

    def take(self, process: Process) -> None:
        """Makes a process this rank."""
        self.process = process
        process.tell(self.number, self._port)

    def kill(self, number: signal.Signals) -> None:
        """Sends a signal to the running process."""
        if self.process is not None:
            self.process.kill(number)

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
        self._drain, self._keeps_spare = settings.drain_seconds, settings.spare
        self._loop = asyncio.get_running_loop()
        self._ranks = [Rank(number, settings) for number in range(settings.ranks)]
        of_ranks = RankSettings.load(
            **settings.model_dump(exclude={"ranks", "rank_port", "spare", "port", "status_port"}),
            port=0,
            status_port=0,
            local_rank=0,
            supervisor_pid=os.getpid(),
        )
        self._environment = TORCH_DISTRIBUTED | child_environment(of_ranks.environment())
        self._spare: Process | None = None
        self._quiet = self._loop.call_later(QUIET, self._start_spare)  # anew after every change
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
            spare, self._spare = self._spare, None
            process = spare or self._start()
            rank.take(process)
            started = time.monotonic()
            about = {"rank": rank.number, "address": rank.address, "rank_pid": process.pid}
            log.info("rank started", extra=about | {"was_spare": spare is not None})
            self._publish()
            code = await asyncio.shield(process.ended)
            rank.process = None
            if self._stopping.is_set():
                break
            lived = time.monotonic() - started
            backoff = FIRST_BACKOFF if lived > STABLE else backoff
            # A spare takes over at once. That is no loop without a wait: it was not there before the pod was quiet.
            pause = 0.0 if self._spare is not None else backoff
            log.error("rank ended", extra={"rank": rank.number, "status": code, "lived": lived, "again_in": pause})
            rank.restarts += 1
            self._publish()
            try:
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            except TimeoutError:
                backoff = min(2 * backoff, LAST_BACKOFF)

    def _start(self) -> Process:
        return Process(self._environment, self._await_quiet)

    def _await_quiet(self) -> None:
        """Something has changed in the pod: the time until a spare starts begins anew."""
        self._quiet.cancel()
        self._quiet = self._loop.call_later(QUIET, self._start_spare)

    def _start_spare(self) -> None:
        """The pod has been quiet. Where a rank does not listen yet it is none the less no time for a spare; when the
        rank does, that is a change, and this comes again."""
        steady = all(rank.status is not None for rank in self._ranks)
        if self._keeps_spare and self._spare is None and steady and not self._stopping.is_set():
            self._spare = self._start()
            self._spare.ended.add_done_callback(partial(self._spare_ended, self._spare))
            log.info("spare started", extra={"rank_pid": self._spare.pid})

    def _spare_ended(self, process: Process, ended: asyncio.Future[int]) -> None:
        """A process that was a spare has ended; as one, or as the rank that it became."""
        if process is self._spare:
            log.error("spare ended", extra={"rank_pid": process.pid, "status": ended.result()})
            self._spare = None
            self._await_quiet()

    async def stop(self, running: asyncio.Task[None]) -> None:
        """Lets the ranks leave, and kills those that have not left within the bound."""
        self._stopping.set()
        self._publish()
        for rank in self._ranks:
            rank.kill(signal.SIGTERM)
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.kill(signal.SIGKILL)  # it has nothing to leave in order, and may be frozen
        done, _ = await asyncio.wait([running], timeout=self._drain + SLACK)
        if not done:
            for rank in self._ranks:
                log.error("rank did not leave: killed", extra={"rank": rank.number, "rank_pid": rank.pid})
                rank.kill(signal.SIGKILL)
        await running
        if spare is not None:
            await spare.ended
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

    async def Fence(  # noqa: N802 the proto's name
        self, request: worker_pb2.FenceRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.FenceResponse:
        if request.local_rank >= len(self._ranks):
            await abort(context, InvalidArgument("local_rank", f"is {request.local_rank} of {len(self._ranks)} ranks"))
        rank = self._ranks[request.local_rank]
        process = rank.process
        if process is None or process.pid != request.pid:
            return worker_pb2.FenceResponse(killed=False)
        log.error("rank fenced: %s", request.verdict, extra={"rank": rank.number, "rank_pid": process.pid})
        process.kill(signal.SIGKILL)
        await asyncio.shield(process.ended)  # until then its port takes connections, and the table names it
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
