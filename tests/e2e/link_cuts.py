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
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from machines import WORKERS, Machines, machines  # noqa: E402
from namespaces import HERE, Places, missing  # noqa: E402
from stacks import folder_in_memory  # noqa: E402

from orca_chaos.client import Caller, Violation  # noqa: E402
from orca_chaos.load import Load  # noqa: E402
from orca_chaos.oracle import learn  # noqa: E402
from orca_chaos.rounds import first_of, healed, nothing_left  # noqa: E402
from orca_chaos.streams import Disturbance  # noqa: E402
from orca_common.errors import OrcaError  # noqa: E402

# "scheduler" is the one that drives the engine when the link is cut.
LINKS = (
    (HERE, "endpoint"),
    ("endpoint", "redis"),
    ("scheduler", "redis"),
    *(("scheduler", worker) for worker in WORKERS),
    WORKERS,
)
SECONDS = (1.0, 5.0, 30.0)
LATE = 2.0  # seconds that this program stood still itself, from which on a pause says nothing of Orca
STREAMS = 2  # requests at all times, on each set of machines

Way = tuple[str, ...]  # who sends, and to whom: a direction of a link


class Cuts:
    """The rounds, some of them at a time, and what they have shown so far."""

    def __init__(self, folder: Path, seed: int, seconds: Sequence[float], ways: Sequence[Way]) -> None:
        self._folder, self._seed, self._seconds, self._ways = folder, seed, seconds, ways
        self._pauses: defaultdict[tuple[Way, float], list[float]] = defaultdict(list)
        self._cuts: Counter[tuple[Way, float]] = Counter()
        self.passed: list[int] = []
        self.failed: dict[int, str] = {}

    async def run(self, rounds: int, beside: int) -> None:
        """A round that fails ends alone, and keeps its folder."""
        numbers = iter(range(1, rounds + 1))
        async with asyncio.TaskGroup() as lanes:
            for lane in range(beside):
                lanes.create_task(self._lane(lane, numbers))

    def table(self) -> str:
        """Medians and longest of the pauses so far, without those when the machine stood still, and the cuts."""
        lines = ["| dropped | " + " | ".join(f"for {lasting:g} s" for lasting in self._seconds) + " |"]
        lines.append("| --- |" + " --- |" * len(self._seconds))
        for way in self._ways:
            cells = [self._cell(self._pauses[way, lasting], self._cuts[way, lasting]) for lasting in self._seconds]
            lines.append(f"| {' > '.join(way)} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def _say(self, number: int, way: Way, lasting: float, seen: Disturbance) -> None:
        self._cuts[way, lasting] += 1
        late = f"; this machine stood still for {seen.late:.1f} s" if seen.late >= LATE else ""
        name = f"round {number}: {' > '.join(way)} cut for {lasting:g} s"
        print(f"{name}: pause {seen.pause:.1f} s, well after {seen.seconds:.1f} s{late}", flush=True)

    @staticmethod
    def _cell(pauses: Sequence[float], cuts: int) -> str:
        return f"{statistics.median(pauses):.1f} s ({max(pauses):.1f}), {cuts}" if pauses else f"-, {cuts}"

    async def _lane(self, lane: int, numbers: Iterator[int]) -> None:
        for number in numbers:
            folder = self._folder / f"round-{number}"
            folder.mkdir(parents=True)
            try:
                await self._round(number, folder, lane)
            except (Violation, BaseExceptionGroup, OSError, OrcaError) as error:
                self.failed[number] = str(first_of(error) or repr(error))
                print(f"round {number} FAILED: {self.failed[number]}; its logs: {folder}", flush=True)
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
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
                        if seen.late < LATE:
                            self._pauses[way, lasting].append(seen.pause)
                        self._say(number, way, lasting, seen)
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
