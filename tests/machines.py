"""Orca on machines of their own: every process in a network namespace (namespaces.py), as `make links` needs them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from checkpoints import make_gpt2
from namespaces import Places, places

from orca_chaos.local_target import reserved
from orca_chaos.rounds import healed
from orca_common.settings import variable
from orca_local import embedded_pool
from orca_local.child import MODULE, Child

SCHEDULERS = ("scheduler-0", "scheduler-1")
WORKERS = ("worker-0", "worker-1")  # a stage each
NAMES = ("redis", "endpoint", *SCHEDULERS, *WORKERS)
REDIS_PORT = 6379
DRAIN = 10.0  # seconds for each process to end


class Machines:
    """The processes, each in its place: the `Target` of the checks."""

    engines = endpoints = 1
    pool = "default"

    def __init__(self, where: Places, model: Path, folder: Path) -> None:
        self._where, self._model, self._folder = where, model, folder
        self._children: list[Child] = []
        self._redis: asyncio.subprocess.Process | None = None
        self.redis_url = f"redis://{where.address('redis')}:{REDIS_PORT}/0"
        self.addresses: Sequence[str] = ()

    async def start(self) -> None:
        (self._folder / "logs").mkdir(parents=True)
        await self._start_redis()
        workers = [self._child(name, "orca_worker", ranks=1) for name in WORKERS]
        endpoint = self._child("endpoint", "orca_endpoint")
        await asyncio.gather(*(child.start() for child in (*workers, endpoint)))
        told = ",".join(worker.address for worker in workers)
        for name in SCHEDULERS:
            await self._child(name, "orca_scheduler", workers=told, pp=2, max_batch_size=4, slots=4096).start()
        self.addresses = (endpoint.addresses["grpc"],)
        await healed(self)

    async def stop(self) -> None:
        for child in reversed(self._children):
            if not await child.end(DRAIN + 5):
                print(f"{child.name} did not drain and was killed")
        self._children.clear()
        if self._redis is not None and self._redis.returncode is None:
            self._redis.terminate()
            try:
                await asyncio.wait_for(self._redis.wait(), DRAIN)
            except TimeoutError:
                self._redis.kill()
                await self._redis.wait()

    def driver(self) -> str:
        """The scheduler that drives the engine."""
        schedulers = (child for child in self._children if child.name in SCHEDULERS)
        return next((child.name for child in schedulers if "engine-0" in child.engines()), SCHEDULERS[0])

    async def ailing(self) -> str | None:
        return await asyncio.to_thread(self._ailing)

    async def leftovers(self) -> list[str]:
        await self.stop()
        return await asyncio.to_thread(reserved, self._folder)

    def _ailing(self) -> str | None:
        told: dict[str, str | None] = {}
        for child in self._children:
            if child.pid is None:
                return f"{child.name} has ended: {child.last_words()}"
            if (why := child.unready()) is not None:
                return f"{child.name}: {why}"
            engines = child.engines() if child.name in SCHEDULERS else {}
            if told.keys() & engines.keys():
                return "two schedulers believe that they drive engine-0"
            told |= engines
        return told.get("engine-0", "nobody drives engine-0")

    def _child(self, name: str, module: str, **settings: object) -> Child:
        own = {"host": self._where.address(name), "model": self._model, "redis_url": self.redis_url, "threads": 1}
        own |= {"run_dir": self._folder, "device": "cpu", "drain_seconds": DRAIN, **settings}
        environment = {variable(key): str(value) for key, value in own.items()}
        command = [*self._where.inside(name), *MODULE, module]
        child = Child(name.partition("-")[0], name, command, environment, self._folder / "logs" / f"{name}.log")
        self._children.append(child)
        return child

    async def _start_redis(self) -> None:
        """Returns when it listens."""
        address = self._where.address("redis")
        command = embedded_pool.command(self._folder / "redis", REDIS_PORT)
        command[command.index("--bind") + 1] = address
        with (self._folder / "logs" / "redis.log").open("wb") as log:
            self._redis = await asyncio.create_subprocess_exec(
                *(*self._where.inside("redis"), *command, "--protected-mode", "no"), stdout=log, stderr=log
            )
        async with asyncio.timeout(30):
            while not await listens(address, REDIS_PORT):
                await asyncio.sleep(0.05)


async def listens(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


@asynccontextmanager
async def machines(folder: Path, number: int) -> AsyncIterator[tuple[Machines, Places]]:
    """The processes in their places, from ready to ended. number: of these machines among those of this program."""
    model = make_gpt2(folder / "model", heads=6, layers=4, hidden=36, vocab=211, positions=96, seed=7)
    with places(NAMES, number) as where:
        target = Machines(where, model, folder / "run")
        try:
            await target.start()
            yield target, where
        finally:
            await target.stop()
