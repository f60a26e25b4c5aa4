"""Each link between processes on different machines is cut in each direction, under load: streams wait, and are right.

    python tests/e2e/link_cuts.py --rounds 10 [--seed 1] [--seconds 1 --seconds 5] [--only 'scheduler > redis']

Redis, an endpoint, two schedulers and the two stages of an engine run each in a network namespace of its own; the
client is outside. A round cuts every link for 1, 5 and 30 s in each direction, in an order of the seed. After each cut
all must run again; at the end nothing may wait, be claimed or be left. It takes root (tests/namespaces.py).
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from checkpoints import make_gpt2  # noqa: E402
from namespaces import HERE, MISSING, Places, places  # noqa: E402

from orca_chaos.client import Caller  # noqa: E402
from orca_chaos.load import Load  # noqa: E402
from orca_chaos.local_target import reserved  # noqa: E402
from orca_chaos.oracle import learn  # noqa: E402
from orca_chaos.rounds import healed, nothing_left  # noqa: E402
from orca_common.settings import variable  # noqa: E402
from orca_local import embedded_pool  # noqa: E402
from orca_local.child import MODULE, Child  # noqa: E402

SCHEDULERS = ("scheduler-0", "scheduler-1")
WORKERS = ("worker-0", "worker-1")  # a stage each
NAMES = ("redis", "endpoint", *SCHEDULERS, *WORKERS)
# "scheduler" is the one that drives the engine when the link is cut.
LINKS = (
    (HERE, "endpoint"),
    ("endpoint", "redis"),
    ("scheduler", "redis"),
    *(("scheduler", worker) for worker in WORKERS),
    WORKERS,
)
SECONDS = (1.0, 5.0, 30.0)
REDIS_PORT = 6379
DRAIN = 10.0  # seconds for each process to end


class Machines:
    """The processes, each in its place: the `Target` of the checks."""

    engines = 1
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
        workers = [self._child(name, "orca_worker.supervisor", ranks=1) for name in WORKERS]
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
async def machines(folder: Path) -> AsyncIterator[tuple[Machines, Places]]:
    """The processes in their places, from ready to ended."""
    model = make_gpt2(folder / "model", heads=6, layers=4, hidden=36, vocab=211, positions=96, seed=7)
    with places(NAMES) as where:
        target = Machines(where, model, folder / "run")
        try:
            await target.start()
            yield target, where
        finally:
            await target.stop()


async def main(folder: Path, rounds: int, seed: int, seconds: Sequence[float], only: Sequence[str]) -> None:
    draw = random.Random(seed)
    pauses: defaultdict[tuple[str, float], list[float]] = defaultdict(list)
    both = [pair for link in LINKS for pair in (link, link[::-1])]
    chosen = [way for way in both if not only or " > ".join(way) in only]
    async with machines(folder) as (target, where):
        caller = Caller(target.addresses)
        async with Load(caller, await learn(caller, seed, 12), seed, streams=4) as load:
            for number in range(rounds):
                cuts = list(itertools.product(chosen, seconds))
                draw.shuffle(cuts)
                for way, lasting in cuts:
                    pause = await cut(target, where, load, way, lasting)
                    name = " > ".join(way)
                    pauses[name, lasting].append(pause)
                    print(f"round {number + 1}: {name} cut for {lasting:g} s: pause {pause:.1f} s", flush=True)
        await caller.close()
        await nothing_left(target)
    print("\n| dropped | " + " | ".join(f"for {lasting:g} s" for lasting in seconds) + " |")
    print("| --- |" + " --- |" * len(seconds))
    for name in (" > ".join(way) for way in chosen):
        columns = [pauses[name, lasting] for lasting in seconds]
        print(f"| {name} | " + " | ".join(f"{statistics.median(c):.1f} s ({max(c):.1f})" for c in columns) + " |")
    print(f"{rounds} rounds passed: medians (longest) of the pauses; tokens equal, nothing claimed, no key left")


async def cut(target: Machines, where: Places, load: Load, way: Sequence[str], seconds: float) -> float:
    """Cuts one direction of a link. Returns the longest pause of a stream until all was well again."""
    driver = await asyncio.to_thread(target.driver)
    source, destination = (driver if name == "scheduler" else name for name in way)
    async with load.disturbed() as seen:
        where.cut(source, destination)
        try:
            await asyncio.sleep(seconds)
        finally:
            where.mend(source, destination)
        await healed(target)
    return seen.pause


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, action="append", help="how long a cut lasts; may be repeated")
    parser.add_argument("--only", action="append", default=[], help="only this direction; may be repeated")
    parser.add_argument("--folder", type=Path, help="of the logs and journals; a temporary one if not given")
    given = parser.parse_args()
    if MISSING is not None:
        raise SystemExit(f"not run: {MISSING}")
    with tempfile.TemporaryDirectory(prefix="orca-link-cuts-", ignore_cleanup_errors=True) as temporary:
        lasting = given.seconds or SECONDS
        asyncio.run(main(given.folder or Path(temporary), given.rounds, given.seed, lasting, given.only))
