"""Each link between processes on different machines is cut in each direction, under load: streams wait, and are right.

    python tests/e2e/link_cuts.py --rounds 10 [--beside 5] [--seed 1] [--seconds 1] [--only 'scheduler > redis']

Redis, an endpoint, two schedulers and the two stages of an engine run each in a network namespace of its own; the
client is outside. A round cuts every link for 1, 5 and 30 s in each direction, in an order of the seed. After each cut
all must run again; at the round's end nothing may wait, be claimed or be left. Most of a cut is waiting, so `--beside`
rounds run at a time, each on machines of its own. It takes root (tests/namespaces.py).
"""

import argparse
import asyncio
import itertools
import random
import shutil
import signal
import statistics
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from checkpoints import make_gpt2  # noqa: E402
from namespaces import HERE, Places, missing, places  # noqa: E402
from stacks import folder_in_memory  # noqa: E402

from orca_chaos.client import Caller, Violation  # noqa: E402
from orca_chaos.load import Load  # noqa: E402
from orca_chaos.local_target import reserved  # noqa: E402
from orca_chaos.oracle import learn  # noqa: E402
from orca_chaos.rounds import first_of, healed, nothing_left  # noqa: E402
from orca_chaos.streams import Disturbance  # noqa: E402
from orca_common.errors import OrcaError  # noqa: E402
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
STREAMS = 2  # requests at all times, on each set of machines

Way = tuple[str, ...]  # who sends, and to whom: a direction of a link


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


class Cuts:
    """The rounds, some of them at a time, and what they have shown so far."""

    def __init__(self, folder: Path, seed: int, seconds: Sequence[float], ways: Sequence[Way]) -> None:
        self._folder, self._seed, self._seconds, self._ways = folder, seed, seconds, ways
        self._pauses: defaultdict[tuple[Way, float], list[float]] = defaultdict(list)
        self.passed: list[int] = []
        self.failed: dict[int, str] = {}

    async def run(self, rounds: int, beside: int) -> None:
        """A round that fails ends alone, and keeps its folder."""
        numbers = iter(range(1, rounds + 1))
        async with asyncio.TaskGroup() as lanes:
            for lane in range(beside):
                lanes.create_task(self._lane(lane, numbers))

    def table(self) -> str:
        """Medians and longest of the pauses so far, with the number of cuts."""
        lines = ["| dropped | " + " | ".join(f"for {lasting:g} s" for lasting in self._seconds) + " |"]
        lines.append("| --- |" + " --- |" * len(self._seconds))
        for way in self._ways:
            cells = [self._cell(self._pauses[way, lasting]) for lasting in self._seconds]
            lines.append(f"| {' > '.join(way)} | {' | '.join(cells)} |")
        return "\n".join(lines)

    @staticmethod
    def _cell(pauses: Sequence[float]) -> str:
        return f"{statistics.median(pauses):.1f} s ({max(pauses):.1f}), {len(pauses)}" if pauses else "-"

    async def _lane(self, lane: int, numbers: Iterator[int]) -> None:
        for number in numbers:
            folder = self._folder / f"round-{number}"
            folder.mkdir(parents=True)
            try:
                await self._round(number, folder, lane)
            except (Violation, BaseExceptionGroup, OSError, OrcaError) as error:
                self.failed[number] = str(first_of(error) or repr(error))
                print(f"round {number} FAILED: {self.failed[number]}; its logs: {folder}", flush=True)
            else:
                self.passed.append(number)
                print(f"round {number} passed: tokens equal, nothing claimed, no key left", flush=True)
                shutil.rmtree(folder, ignore_errors=True)

    async def _round(self, number: int, folder: Path, lane: int) -> None:
        draw = random.Random(f"round {self._seed}/{number}")
        cuts = list(itertools.product(self._ways, self._seconds))
        draw.shuffle(cuts)
        async with machines(folder, lane) as (target, where):
            caller = Caller(target.addresses)
            try:
                async with Load(caller, await learn(caller, number, 12), number, streams=STREAMS) as load:
                    for way, lasting in cuts:
                        seen = await cut(target, where, load, way, lasting)
                        self._pauses[way, lasting].append(seen.pause)
                        name = f"round {number}: {' > '.join(way)} cut for {lasting:g} s"
                        print(f"{name}: pause {seen.pause:.1f} s, well after {seen.seconds:.1f} s", flush=True)
            finally:
                await caller.close()
            await nothing_left(target)


async def cut(target: Machines, where: Places, load: Load, way: Way, seconds: float) -> Disturbance:
    """Cuts one direction of a link. Returns what the streams saw until all was well again."""
    driver = await asyncio.to_thread(target.driver)
    source, destination = (driver if name == "scheduler" else name for name in way)
    async with load.disturbed() as seen:
        load.faults += 1
        where.cut(source, destination)
        try:
            await asyncio.sleep(seconds)
        finally:
            where.mend(source, destination)
        await healed(target)
    return seen


def main(given: argparse.Namespace, folder: Path) -> None:
    both = [way for link in LINKS for way in (link, link[::-1])]
    ways = [way for way in both if not given.only or " > ".join(way) in given.only]
    cuts = Cuts(folder, given.seed, given.seconds or SECONDS, ways)
    try:
        asyncio.run(cuts.run(given.rounds, min(given.beside, given.rounds)))
    finally:
        print(f"\n{cuts.table()}\nmedian (longest) of the pauses, and the number of cuts")
        print(f"{len(cuts.passed)} of {given.rounds} rounds passed: tokens equal, nothing claimed, no key left")
    if cuts.failed:
        raise SystemExit("".join(f"round {number}: {why}\n" for number, why in cuts.failed.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--beside", type=int, default=5, help="rounds at a time, at most 16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, action="append", help="how long a cut lasts; may be repeated")
    parser.add_argument("--only", action="append", default=[], help="only this direction; may be repeated")
    parser.add_argument("--folder", type=Path, help="of the logs and journals; a temporary one if not given")
    given = parser.parse_args()
    if (why := missing()) is not None:
        raise SystemExit(f"not run: {why}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what runs in the background
    with folder_in_memory() as temporary:
        main(given, given.folder or Path(temporary))
