"""Orca on this machine: the same processes that a cluster runs, started, watched, restarted and ended.

    Redis <- endpoint(s), scheduler(s) -> supervisor(s), one a stage -> tp ranks each

Every process is a child of this one or of a supervisor, and ends with its parent, however the parent ends.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import combinations
from pathlib import Path

import grpc

from orca.v1 import worker_pb2 as pb
from orca.v1.worker_pb2_grpc import SupervisorStub
from orca_common.adapters import check_names, read_adapters
from orca_common.address import join_address
from orca_common.api_keys import ApiKeys
from orca_common.checkpoint import read_checkpoint, resolve_model
from orca_common.errors import FailedPrecondition, Unavailable
from orca_common.listening import check_port, reserve_port
from orca_common.roles import Role
from orca_common.service import in_thread
from orca_common.settings import variable
from orca_common.tls import Certificates, transport_of
from orca_worker.machine import check_gpus, compile_kernels, kernels_needed, multiplies_bfloat16, on_gpu
from orca_worker.models.families import check_partition, check_type, check_weights, family_of, modules_of
from orca_worker.processes.beginning import POD, SERVICE, Begun, begin
from orca_worker.processes.forks import Forks

from . import serve_log
from .child import Child, RedisChild
from .forked import app_of
from .keeping import keep
from .log_rotation import keep_small
from .pod import ForkedChild, Pod, Program
from .process_table import ProcessTable
from .rank_ends import RankEnds
from .run_folder import RunFolder, open_log
from .settings import SERVICES, StackSettings
from .waiting import Waiting

LOOPBACK = "127.0.0.1"
# The folder of a process's certificate, where it is not named as the process. The page calls as a client does.
TLS_ROLES = {"supervisor": "worker", "ui": "client"}
UI_PORT = 8001  # of the live page, where that port is free
DEMO_MODEL = Path(__file__).parent / "demo_model"
REDIS_SECONDS = 3.0  # for a Redis of the user's to answer
LATE_SECONDS = 10.0  # beyond `drain_seconds`, until the last process is killed
# Seconds of them that are left when a role's processes are killed: the roles after it must still end.
LEFT_SECONDS = {"ui": 5.0, "endpoint": 5.0, "scheduler": 3.0, "supervisor": 1.5, "redis": 0.0}
REDIS_END = 3.0  # seconds for the embedded Redis to end; what it acknowledged is on disk already
COUNT_SECONDS = 1.0  # for the endpoints to tell how many streams they have, before they are ended
CUT = "drain_seconds have passed: streams end UNAVAILABLE"  # an endpoint's word in its log
REDIAL = 0.2  # seconds between attempts to watch a supervisor

# (source, destination, address) -> where `source` reaches `destination`, which listens at `address`. Both are names of
# children. Chaos puts proxies between the processes with it.
Route = Callable[[str, str, str], Awaitable[str]]


async def direct(source: str, destination: str, address: str) -> str:
    """The `Route` of a stack without anything between its processes."""
    return address


class Stack:
    """Starts the processes of one machine and keeps them running until `stop`.

    `run_dir` gets their logs, the pool's file, the journals, and `processes.json`. `say` is called with each step, in a
    sentence, and `show` with what is waited for, again and again. `environment`: variables of all processes besides the
    settings. `route`: how schedulers reach supervisors, and schedulers and endpoints the embedded Redis. `forks`: the
    fork server of the pods, if it has been begun. `ui`: serve the live page, too. `scheduler`: another program that
    schedules, such as the lab's baselines.
    """

    def __init__(
        self,
        settings: StackSettings,
        run_dir: Path,
        say: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        show: Callable[[str], None] = lambda reason: None,
        route: Route = direct,
        forks: Begun | None = None,
        ui: bool = False,
        scheduler: Program | None = None,
    ) -> None:
        self._settings, self._run_dir, self._tell, self._show = settings, run_dir, say, show
        self._more, self._route, self._ui = environment or {}, route, ui
        self.ui_address: str | None = None  # of the live page; None: it is not served
        self._scheduler = scheduler or Program(app_of("scheduler"))
        self._model = settings.model or str(DEMO_MODEL)
        self._kernels = False  # the compiled kernels compute, on the cores that all processes share
        self._redis: RedisChild | None = None  # None: it is the user's
        self._tls_dir = Path(settings.tls_dir).absolute() if settings.tls_dir is not None else None
        self._folder: RunFolder | None = None
        self._first_forks = forks
        self._forks: Forks | None = None  # of the pods
        self._services: Forks | None = None
        self._children: list[Child] = []
        self._table = ProcessTable(run_dir / "processes.json", settings, self._children, self._say)
        self._rank_ends = RankEnds(settings.tp, settings.pp, self._warn)
        self._waiting = Waiting(self._children, self._say, show)
        self._tasks: list[asyncio.Task[None]] = []
        self._kept = ExitStack()  # ports of children that others know, while these start again, and a log

    def _say(self, sentence: str, level: int = logging.INFO) -> None:
        """Tells it, and leaves it in the run folder, where `orca logs` finds it among the lines of the processes."""
        self._tell(sentence)
        if self._folder is not None:
            serve_log.write(self._folder.log("serve"), sentence, level)

    def _warn(self, sentence: str) -> None:
        self._say(sentence, logging.WARNING)

    @property
    def model_name(self) -> str:
        return self._settings.served_model_name or read_checkpoint(self._model).name

    @property
    def reads_text(self) -> bool:
        """Whether prompts may be text; else they are token ids."""
        return read_checkpoint(self._model).tokenizer_file is not None

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template, which the endpoints read."""
        folder = read_checkpoint(self._model).folder
        config = folder / "tokenizer_config.json"
        return (folder / "chat_template.jinja").exists() or (
            config.exists() and b'"chat_template"' in config.read_bytes()
        )

    @property
    def computed_by(self) -> str:
        """Names what computes the model: its type, instruction set and threads, as the first rank's log has it."""
        supervisor = next(child for child in self._children if child.role == "supervisor")
        loaded = supervisor.logged("model loaded")
        if not loaded:
            return "unknown"
        types, kv = filter(None, (loaded["quantize"], loaded["dtype"])), loaded["kv_dtype"]
        of_kv = "" if kv == loaded["dtype"] else f", keys and values in {kv}"
        return f"{' and '.join(types)}{of_kv}, kernels {loaded['kernels']}"

    @property
    def children(self) -> Sequence[Child]:
        """The processes that the stack itself starts: Redis, supervisors, endpoints, schedulers."""
        return tuple(self._children)

    def rank_pid(self, pod: int, local_rank: int) -> int | None:
        """The process of a rank, by the ordinal of its pod and its number there; None: none runs."""
        return next((r.pid or None for r in self._table.ranks.get(pod, ()) if r.local_rank == local_rank), None)

    @property
    def fork_server(self) -> int | None:
        """The process that forks the pods; None while none runs."""
        return self._forks.pid if self._forks is not None else None

    @property
    def began(self) -> bool:
        """Whether it has started a process."""
        return bool(self._children)

    @property
    def longest_end(self) -> float:
        """Seconds that `stop` takes at most."""
        return self._settings.drain_seconds + LATE_SECONDS

    @property
    def grpc_addresses(self) -> list[str]:
        return [child.addresses["grpc"] for child in self._children if child.role == "endpoint"]

    @property
    def http_addresses(self) -> list[str]:
        return [child.addresses["http"] for child in self._children if child.role == "endpoint"]

    @property
    def _own_certificate(self) -> str | None:
        """The certificate that the stack itself shows to supervisors and Redis: it asks them as a scheduler does."""
        return str(self._tls_dir / Role.SCHEDULER) if self._tls_dir is not None else None

    async def start(self) -> None:
        """Returns when a request would be answered. Raises FailedPrecondition with a sentence when it cannot be."""
        settings = self._settings
        for warning in settings.warnings:
            self._warn(warning)
        self._model = str(await in_thread(partial(resolve_model, self._model, check_type)))
        checkpoint = read_checkpoint(self._model, adapters=read_adapters(settings.adapters))
        check_names(checkpoint.adapters, self.model_name)
        check_partition(checkpoint, settings.tp, settings.pp)
        await in_thread(partial(check_weights, checkpoint))
        check_gpus(settings.device, 0, settings.tp * settings.pp * settings.engines)
        self._check_secrets()
        check_ports(settings)
        self._folder = RunFolder(self._run_dir)
        if settings.redis_url is not None:
            from orca_pool.reach import check_reachable  # half a second that an embedded Redis does without

            password = settings.redis_password
            await check_reachable(settings.redis_url, REDIS_SECONDS, password=password, tls_dir=self._own_certificate)
        self._kernels = family_of(checkpoint).needs_torch and kernels_needed(settings.device, settings.kernels)
        if self._kernels:
            await in_thread(partial(compile_kernels, settings.kernels, self._tell_compiling))
        try:
            async with asyncio.timeout(settings.start_timeout):
                await self._start_all(modules_of(checkpoint))
        except TimeoutError:
            why = f": {self._waiting.reason}" if self._waiting.reason else ""
            limit = f"{settings.start_timeout:g} s (start_timeout)"
            raise FailedPrecondition(f"not ready within {limit}{why}") from None
        self._say("ready")

    def _check_secrets(self) -> None:
        """Raises FailedPrecondition when a certificate or the list of keys cannot be used."""
        ApiKeys(self._settings.api_keys, self._settings.api_keys_file)
        if self._tls_dir is not None:
            for role in (Role.ENDPOINT, Role.SCHEDULER, Role.WORKER):
                Certificates(str(self._tls_dir / role))

    def _tell_compiling(self, state: str) -> None:
        """Called in a thread."""
        self._say(state)
        self._show(state)

    async def wait(self) -> None:
        """Never returns. Raises the error that ended this class's own work: its processes are not kept any more."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Drains and ends everything, the doors first, the pool last, within `drain_seconds` and LATE_SECONDS."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.longest_end
        if self.began:
            self._say(f"draining{await self._open_calls()}, {self.longest_end:g} s at most")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for role, left in LEFT_SECONDS.items():
            children = (child for child in self._children if child.role == role)
            seconds = until - left - loop.time()
            seconds = min(seconds, REDIS_END) if role == "redis" else seconds
            await asyncio.gather(*(self._end(child, seconds) for child in children))
            if role == "endpoint":
                self._tell_cut()
        for forks in filter(None, (self._forks, self._services)):
            await forks.stop()
        self._ended()

    def _tell_cut(self) -> None:
        """Tells how many streams the endpoints have ended before their time."""
        told = [child.logged(CUT) for child in self._children if child.role == "endpoint"]
        if count := sum(line["calls"] for line in told if line):
            were = "1 stream was" if count == 1 else f"{count} streams were"
            self._warn(f"{were} cut off: they did not end within {self._settings.drain_seconds:g} s (drain_seconds)")

    async def _open_calls(self) -> str:
        """Counts the streams that the endpoints still have, for the line of the drain; "" without any."""
        endpoints = (child for child in self._children if child.role == "endpoint" and child.pid and child.status)
        try:
            async with asyncio.timeout(COUNT_SECONDS):
                count = sum(await asyncio.gather(*(asyncio.to_thread(endpoint.calls) for endpoint in endpoints)))
        except TimeoutError:  # one is frozen
            return ""
        return f" {count} stream{'s' if count > 1 else ''}" if count else ""

    async def kill(self) -> None:
        """Ends everything at once. Returns when every process of its own has ended."""
        self._warn("killed before all was drained")
        for task in self._tasks:  # `stop` may not have come so far: what ends would be started again
            task.cancel()
        running = [child for child in self._children if child.pid is not None]
        for child in running:
            child.kill()
        forks = filter(None, (self._forks, self._services))
        ends = [*(child.ended() for child in running), *(one.stop() for one in forks)]
        await asyncio.gather(*self._tasks, *ends, return_exceptions=True)
        self._ended()

    def _ended(self) -> None:
        self._children.clear()
        self._tasks.clear()
        self._table.ranks.clear()
        self._kept.close()
        if self._folder is not None:
            self._table.write()
            self._folder.close()
            self._folder = None

    # -- starting

    async def _start_all(self, modules: Sequence[str]) -> None:
        """modules: what a rank imports for the model."""
        settings = self._settings
        self._forks = self._begin_forks("pods", POD, modules, self._first_forks)  # first: it imports for the longest
        roles = ["endpoint", "scheduler", "ui"] if self._ui else ["endpoint", "scheduler"]
        self._services = self._begin_forks("services", SERVICE, [self._program(role).app for role in roles])
        self._tasks.append(asyncio.create_task(keep_small(self._run_dir / "logs")))
        if settings.redis_url is None:
            assert self._folder is not None
            log, folder = self._folder.log("redis"), self._folder.descriptor
            self._redis = RedisChild(self._run_dir / "redis", log, folder, batch=self._yields("redis"))
            await self._start(self._redis)
        pods = [await self._pod(n) for n in range(settings.engines * settings.pp)]
        endpoints = [
            await self._child(
                "endpoint",
                n,
                host=settings.host,
                served_model_name=self.model_name,
                port=self._keep("port", settings.host, 0 if n else settings.port),
                http_port=self._keep("http_port", settings.host, 0 if n else settings.http_port),
                ports_kept=True,
            )
            for n in range(settings.endpoints)
        ]
        schedulers = [
            await self._child(
                "scheduler",
                n,
                workers=await self._workers(n, pods),
                max_batch_size=self._max_batch_size(),
                run_ahead=self._run_ahead(),
                status_port=self._keep("status_port", LOOPBACK, 0),
                ports_kept=True,
            )
            for n in range(settings.schedulers)
        ]
        await self._start(*endpoints, *schedulers, *pods)
        self._transport = transport_of(self._own_certificate)
        self._tasks += [asyncio.create_task(self._watch_ranks(n, s)) for n, s in enumerate(pods)]
        for scheduler in schedulers:
            await self._waiting.until(scheduler.unready)
        await self._waiting.until(lambda: self._idle_engine(schedulers, pods))
        await self._waiting.until(lambda: self._untold(pods))
        for endpoint in endpoints:
            await self._waiting.until(endpoint.unready)
        if self._ui:
            self._tasks.append(asyncio.create_task(self._serve_ui(await self._page(endpoints, schedulers))))

    async def _page(self, endpoints: Sequence[Child], schedulers: Sequence[Child]) -> Child:
        """The process of the live page. Its port is kept from now on."""
        settings = self._settings
        try:
            port = self._keep("ui_port", settings.host, UI_PORT if settings.ui_port is None else settings.ui_port)
        except FailedPrecondition:
            if settings.ui_port is not None:
                raise
            port = self._keep("ui_port", settings.host, 0)
        self.ui_address = join_address(settings.host, port)
        scheme = "http" if self._tls_dir is None else "https"
        return await self._child(
            "ui",
            0,
            host=settings.host,
            ui_port=port,
            ports_kept=True,
            scheduler_status=",".join(str(scheduler.status) for scheduler in schedulers),
            endpoint_url=f"{scheme}://{endpoints[0].addresses['http']}",
        )

    async def _serve_ui(self, page: Child) -> None:
        """Starts the live page when all else is ready, and keeps it running. Without it Orca serves on."""
        try:
            await self._start(page)
        except FailedPrecondition as error:
            self._warn(f"the live page: {error}")
        await asyncio.Event().wait()

    def _begin_forks(self, whose: str, becomes: str, modules: Sequence[str], begun: Begun | None = None) -> Forks:
        """Begins a fork server, and keeps it running. Raises FailedPrecondition."""
        assert self._folder is not None
        path = self._folder.log("forks")
        try:
            log = open_log(path)
        except OSError as error:
            raise FailedPrecondition(f"run_dir: {path} cannot be made ({error.strerror})") from None
        self._kept.callback(os.close, log)
        forks = Forks(partial(begin, becomes, self._more), modules, "INFO", begun, log)
        self._tasks.append(asyncio.create_task(forks.run(partial(self._tell_forks_end, whose))))
        return forks

    def _tell_forks_end(self, whose: str, why: str, lived: float, again_in: float) -> None:
        self._warn(f"the {whose}' fork server: {why} (logs/forks.log), starting it again")

    def _keep(self, name: str, host: str, port: int) -> int:
        """A port that no other program gets until the stack has ended; 0 takes a free one. Raises FailedPrecondition.

        A process that is started again would else find the port of its callers taken: a program listens there, or has
        connected from it, for it may be one of those that the system gives to connections.
        """
        try:
            check_port(name, host, port)
            kept = self._kept.enter_context(reserve_port(name, host, port))
        except Unavailable as error:
            raise FailedPrecondition(str(error)) from None
        return kept.getsockname()[1]

    async def _child(self, role: str, number: int, **decided: object) -> Child:
        """A service with the stack's settings, and with those that are `decided` for this process."""
        assert self._folder is not None
        name = f"{role}-{number}"
        assert self._services is not None
        environment, log = await self._environment(role, name, **decided), self._folder.log(name)
        return ForkedChild(role, name, self._services, environment, log, self._program(role), self._yields(role))

    def _program(self, role: str) -> Program:
        return self._scheduler if role == "scheduler" else Program(app_of(role))

    async def _pod(self, number: int) -> Pod:
        """A worker's pod, which holds one stage of an engine."""
        assert self._folder is not None
        assert self._forks is not None
        name, port = f"supervisor-{number}", self._keep("port", LOOPBACK, 0)
        first_gpu = number * self._settings.tp
        environment = await self._environment(
            "supervisor", name, ranks=self._settings.tp, first_gpu=first_gpu, port=port
        )
        return Pod(name, join_address(LOOPBACK, port), self._forks, environment, self._folder.log(name))

    async def _environment(self, role: str, name: str, **decided: object) -> dict[str, str]:
        """The variables of a service: the stack's settings, and those that are `decided` for this process.

        It gets only variables that it has a setting for: a supervisor learns neither Redis's password nor a key.
        """
        own = {"host": LOOPBACK, "port": 0, "http_port": 0, "model": self._model}
        known = SERVICES[role].model_fields
        if "redis_url" in known:
            own["redis_url"] = await self._redis_url(name)
        own |= {"run_dir": self._run_dir, "threads": self._threads(), **decided}
        if self._tls_dir is not None:
            own["tls_dir"] = self._tls_dir / TLS_ROLES.get(role, role)
        told = self._settings.environment() | {variable(name): str(value) for name, value in own.items()}
        return {
            **{variable(name): told[variable(name)] for name in known if variable(name) in told},
            "GRPC_ENABLE_FORK_SUPPORT": "0",  # no service forks: a message on a stream costs 17 us instead of 19
            **self._more,
        }

    def _yields(self, role: str) -> bool:
        """Whether the processes of a role take no core from the kernels, but wait for one that is free or for the end
        of a time slice.

        A kernel thread that stops for a moment makes all others wait for its part. No iteration waits for an endpoint
        or for Redis. Each waits for the scheduler and the rank's own loop, so these stay as they are.
        """
        return self._kernels and role in ("endpoint", "redis", "ui")

    async def _redis_url(self, source: str) -> str:
        """Where a service reaches the request pool."""
        if self._redis is None:
            return str(self._settings.redis_url)
        address = self._redis.address
        reached = await self._route(source, self._redis.name, address)
        return self._redis.url if reached == address else f"redis://{reached}/0"

    async def _workers(self, number: int, supervisors: Sequence[Child]) -> str:
        """Where a scheduler reaches the supervisors, as its setting `workers`."""
        return ",".join([await self._route(f"scheduler-{number}", s.name, s.address) for s in supervisors])

    def _run_ahead(self) -> int:
        """A GPU would wait for the host between two iterations of a batch. On a CPU the host is what computes."""
        settings = self._settings
        if settings.run_ahead is not None:
            return settings.run_ahead
        if settings.roles not in ("", "mixed"):
            return 0  # requests change engines with all their tokens known
        return int(on_gpu(settings.device) or settings.kernels == "device-loop")

    def _max_batch_size(self) -> int:
        """The largest batch, of those measured, with which requests that come together end soonest on average.

        Where an instruction multiplies bfloat16, more rows take little longer: 32 answers took 0.53 s in one batch and
        0.33 to 1.30 s in four of 8 (AMX; docs/results/2026-11.md). With AVX2 they took 3.45 s, and 1.13 to 4.50 s.
        """
        asked = self._settings.max_batch_size
        if asked is not None:
            return asked
        return 32 if on_gpu(self._settings.device) or multiplies_bfloat16() else 8

    def _threads(self) -> int:
        """Threads of each rank's operations: by default its share of the cores.

        Four ranks on two cores took 8.4 s for two requests of 60 tokens with two threads each, 2.9 s with one.
        """
        settings = self._settings
        if settings.threads is not None:
            return settings.threads
        return max(1, (os.cpu_count() or 1) // (settings.tp * settings.pp * settings.engines))

    async def _start(self, *children: Child) -> None:
        """Starts processes side by side. Raises the first one's FailedPrecondition."""
        self._children += children
        self._table.write()  # a run with a process that does not listen yet is not ready
        starting = [asyncio.create_task(child.start()) for child in children]
        try:
            for child, start in zip(children, starting, strict=True):
                await start
                self._say(child.where)
                self._table.write()
                self._tasks.append(asyncio.create_task(keep(child, self._table.write, self._say, self._warn)))
        finally:
            for start in starting:
                start.cancel()
            await asyncio.gather(*starting, return_exceptions=True)

    def _idle_engine(self, schedulers: Sequence[Child], supervisors: Sequence[Child]) -> str | None:
        """Returns why one of the engines serves nothing; None when all run."""
        told = {engine: why for scheduler in schedulers for engine, why in scheduler.engines().items()}
        for number in range(self._settings.engines):
            engine = f"engine-{number}"
            why = told.get(engine, f"no scheduler has {engine} yet")
            if why is not None:
                pods = supervisors[number * self._settings.pp :][: self._settings.pp]
                starting = (pod.starting() for pod in pods)
                return next((f"{why}, {rank}" for rank in starting if rank), why)
        return None

    def _untold(self, supervisors: Sequence[Child]) -> str | None:
        """Names a supervisor that has not reported its ranks yet; None when `processes.json` has all ranks."""
        for ordinal, supervisor in enumerate(supervisors):
            ranks = self._table.ranks.get(ordinal, ())
            if not ranks or not all(rank.pid for rank in ranks):
                return f"{supervisor.name} has not told of its ranks yet"
        return None

    # -- keeping it running

    async def _watch_ranks(self, ordinal: int, supervisor: Child) -> None:
        """Keeps the ranks of `processes.json` current, and says which of them have ended."""
        while True:
            try:
                async with self._transport.channel(supervisor.address, Role.WORKER, ()) as channel:
                    async for table in SupervisorStub(channel).Watch(pb.WatchRequest()):
                        before = self._table.ranks.get(ordinal, [])
                        self._table.ranks[ordinal] = list(table.ranks)
                        self._rank_ends.compare(ordinal, before, table.ranks)
                        self._table.write()
            except grpc.aio.AioRpcError:
                self._table.ranks.pop(ordinal, None)
                self._table.write()
            await asyncio.sleep(REDIAL)

    async def _end(self, child: Child, seconds: float) -> None:
        pid = child.pid
        if not await child.end(max(0.0, seconds)):
            self._warn(f"{child.name} (pid {pid}) did not drain and was killed")


def check_ports(settings: StackSettings) -> None:
    """Raises FailedPrecondition when a port of the first endpoint, or one that is given for the page, cannot be had."""
    ports = {"port": settings.port, "http_port": settings.http_port}
    if settings.ui and settings.ui_port is not None:
        ports["ui_port"] = settings.ui_port
    for (one, port), (other, same) in combinations(ports.items(), 2):
        if port and port == same:
            what = "port is gRPC's, http_port the OpenAI API's, ui_port the page's"
            raise FailedPrecondition(f"{other}: is {port}, and {one} is the same; {what}")
    for name, port in ports.items():
        try:
            check_port(name, settings.host, port)
        except Unavailable as error:
            raise FailedPrecondition(str(error)) from None
