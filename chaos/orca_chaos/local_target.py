"""Chaos on `orca serve`: signals to its processes, and proxies between them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from orca_local.child import RedisChild
from orca_local.settings import StackSettings
from orca_local.stack import Stack, direct
from orca_scheduler.master.journal import CoreStep, Heading, files_in, read, restored

from .faults import OF_LINKS, OF_PROCESSES, Fault, Kind, Victim
from .links import Direction, Link
from .network import REDIS, Network

SIGNALS = {Kind.KILL: signal.SIGKILL, Kind.STOP: signal.SIGSTOP}
FORKS = "fork-server-"  # and the ordinal of its pod, or OF_PODS
OF_PODS = "pods"
DOUBLED = 8  # messages in a row that come twice


@asynccontextmanager
async def local_target(
    settings: StackSettings, run_dir: Path, say: Callable[[str], None], *, links: bool = True
) -> AsyncIterator["LocalTarget"]:
    """A stack of its own, from ready to ended. links: whether there are proxies between its processes, to be hit.

    The proxies run in this process. Whenever it waits for a core, all of the stack's processes are cut off from each
    other. So rounds that only hit processes run without proxies.
    """
    network = Network() if links else None
    stack = Stack(settings, run_dir, say, route=network.route if network is not None else direct)
    try:
        await stack.start()
        yield LocalTarget(stack, settings, run_dir, network)
    finally:
        if network is not None:
            network.heal()
        await stack.stop()
        if network is not None:
            await network.close()


def victims_of(settings: StackSettings, *, redis: bool = True, links: bool = True) -> list[Victim]:
    """Every process of a stack with these settings, and the ways between them where they can be hit.

    redis: whether the stack's Redis is its own. links: whether there are proxies between its processes.
    """
    pods = range(settings.engines * settings.pp)
    ranks = [f"rank-{pod}.{rank}" for pod in pods for rank in range(settings.tp)]
    schedulers = [f"scheduler-{n}" for n in range(settings.schedulers)]
    endpoints = [f"endpoint-{n}" for n in range(settings.endpoints)]
    supervisors = [f"supervisor-{pod}" for pod in pods]
    processes = [
        Victim(name.partition("-")[0], name, OF_PROCESSES)
        for name in (*endpoints, *schedulers, *supervisors, *ranks, *([REDIS] if redis else []))
    ]
    processes += [Victim("fork server", f"{FORKS}{of}", OF_PROCESSES) for of in (OF_PODS, *pods)]
    if not links:
        return processes
    return [
        *processes,
        *(Victim("endpoint > redis", f"{name} > {REDIS}", OF_LINKS) for name in endpoints),
        *(Victim("scheduler > redis", f"{name} > {REDIS}", OF_LINKS) for name in schedulers),
        *(Victim("scheduler > supervisor", f"scheduler > {name}", OF_LINKS) for name in supervisors),
        *(Victim("scheduler > rank", f"scheduler > {name}", OF_LINKS) for name in ranks),
        *(Victim("rank > rank", f"rank > {name}", OF_LINKS) for name in ranks if len(ranks) > 1),
        Victim("all > redis", f"all > {REDIS}", OF_LINKS),
    ]


class LocalTarget:
    """`Target` on the processes of this machine."""

    def __init__(self, stack: Stack, settings: StackSettings, run_dir: Path, network: Network | None) -> None:
        self._stack, self._settings, self._run_dir, self._network = stack, settings, run_dir, network
        self._stopped: dict[Fault, int] = {}  # frozen processes, by the fault that froze them
        self._killed: dict[str, int] = {}  # processes that were killed and may not have been missed yet
        self.addresses: Sequence[str] = tuple(stack.grpc_addresses)
        self.http_addresses: Sequence[str] = tuple(stack.http_addresses)
        self.engines, self.endpoints = settings.engines, settings.endpoints
        self.tp, self.pp = settings.tp, settings.pp
        self.pool: str = settings.model_dump()["pool"]
        redis = next((child for child in stack.children if isinstance(child, RedisChild)), None)  # None: the user's
        self._own_redis = redis is not None
        self.redis_url: str | None = settings.redis_url if redis is None else redis.url

    # -- who can be hit

    def victims(self) -> Sequence[Victim]:
        return victims_of(self._settings, redis=self._own_redis, links=self._network is not None)

    def pid(self, name: str) -> int | None:
        """The process of this name that runs now; None: none. Blocks for at most 5 s."""
        if name == FORKS + OF_PODS:
            return self._stack.fork_server
        if name.startswith(FORKS):
            supervisor = f"supervisor-{name.removeprefix(FORKS)}"
            return next((c.fork_server() for c in self._stack.children if c.name == supervisor and c.pid), None)
        if name.startswith("rank-"):
            pod, local = map(int, name.removeprefix("rank-").split("."))
            return self._stack.rank_pid(pod, local)
        return next((child.pid for child in self._stack.children if child.name == name), None)

    def master(self, engine: str) -> str:
        """The scheduler that drives an engine now; "" when none does. Blocks for at most 5 s a scheduler."""
        schedulers = (child for child in self._stack.children if child.role == "scheduler" and child.pid)
        return next((child.name for child in schedulers if engine in child.engines()), "")

    def serves(self, engine: str) -> bool:
        """Whether a scheduler says that the engine runs. Blocks for at most 5 s a scheduler."""
        schedulers = (child for child in self._stack.children if child.role == "scheduler" and child.pid)
        return any(child.engines().get(engine, "nobody drives it") is None for child in schedulers)

    def _links(self, victim: Victim) -> list[Link]:
        """The links that "SOURCE > DESTINATION" means; SOURCE may be the beginning of several names, or "all"."""
        if self._network is None:
            return []
        source, _, destination = victim.name.partition(" > ")
        source = "" if source == "all" else source
        return [
            link for link in self._network.links if link.destination == destination and link.source.startswith(source)
        ]

    # -- what is done to them

    async def begin(self, fault: Fault) -> bool:
        if fault.kind in SIGNALS:
            pid = await asyncio.to_thread(self.pid, fault.victim.name)
            if pid is None:
                return False
            if fault.kind is Kind.STOP:
                self._stopped[fault] = pid
            else:
                self._killed[fault.victim.name] = pid
            with suppress(ProcessLookupError):
                os.kill(pid, SIGNALS[fault.kind])
            return True
        links = self._links(fault.victim)
        for link in links:
            match fault.kind:
                case Kind.DELAY:
                    link.delay = fault.amount
                case Kind.HOLD_TO:
                    link.hold(Direction.TO)
                case Kind.HOLD_FROM:
                    link.hold(Direction.FROM)
                case Kind.CUT:
                    link.sever()
                case Kind.LOSE:
                    link.lose(1)
                case Kind.DOUBLE:
                    link.double(DOUBLED)
        return bool(links)

    async def end(self, fault: Fault) -> None:
        if (pid := self._stopped.pop(fault, None)) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for link in self._links(fault.victim):
            match fault.kind:
                case Kind.DELAY:
                    link.delay = 0.0
                case Kind.HOLD_TO:
                    link.release(Direction.TO)
                case Kind.HOLD_FROM:
                    link.release(Direction.FROM)
                case Kind.CUT:
                    link.mend()
                case _:
                    pass

    # -- how it is

    async def ailing(self) -> str | None:
        return await asyncio.to_thread(self._ailing)

    def _ailing(self) -> str | None:
        self._killed = {name: pid for name, pid in self._killed.items() if self.pid(name) in (None, pid)}
        if self._killed:
            return f"{', '.join(self._killed)}: not started again yet"
        told: dict[str, str | None] = {}
        for child in self._stack.children:
            if child.pid is None:
                return f"{child.name} does not run"
            if child.role in ("endpoint", "scheduler", "supervisor") and (why := child.unready()) is not None:
                return f"{child.name}: {why}"
            engines = child.engines() if child.role == "scheduler" else {}
            if twice := told.keys() & engines.keys():
                return f"two schedulers believe that they drive {', '.join(twice)}"
            told |= engines
        names = [f"engine-{n}" for n in range(self.engines)]
        return next((why for why in (told.get(n, f"nobody drives {n}") for n in names) if why is not None), None)

    def ready(self, role: str) -> list[str]:
        """The names of the processes of a role that are ready. Blocks for at most 5 s a process."""
        return [c.name for c in self._stack.children if c.role == role and c.pid and c.unready() is None]

    async def leftovers(self) -> list[str]:
        """Ends the stack, so that its journals are whole, and looks for reserved slots in each engine's last one."""
        await self._stack.stop()
        return await asyncio.to_thread(reserved, self._run_dir)


def reserved(run_dir: Path) -> list[str]:
    """Checks the end of each engine's newest journal: it replays, and no slot is reserved."""
    found = []
    newest = {file.engine: file.path for file in files_in(run_dir) if not file.older}  # the oldest ones are first
    for path in newest.values():
        heading, *lines = read(path)
        assert isinstance(heading, Heading)
        core, _ = restored(heading)
        for line in lines:
            if isinstance(line, CoreStep) and line.actions != tuple(core.step(line.event)):
                found.append(f"{path.name}: {line.event} replays to other actions")
        if core.memory.reserved:
            found.append(f"{path.name}: {core.memory.reserved} slots are reserved at the end")
    return found
