"""Two schedulers and two engines under load: what a frozen master, a dead one, and an outage of Redis cost.

    python tests/e2e/takeovers.py --rounds 5 [--stopped 10] [--outage 20] [--only stopped]
    python tests/e2e/takeovers.py --rounds 100 --only deaths [--endpoints 1] [--schedulers 1]

stopped   A master is stopped for 10 s and wakes: another has its engine, and what it writes late is refused.
outage    Redis stands still for 20 s: afterwards the same schedulers master the same engines in the same terms.
killed    A scheduler dies while its engine is well: the engine keeps its epoch, and its ranks their processes.
deaths    One process of each role is killed, one after the other. At the end a table has their pauses.

In each, every stream must have the tokens of an undisturbed run.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1])]

from checkpoints import make_gpt2  # noqa: E402

from orca_chaos.client import Caller  # noqa: E402
from orca_chaos.faults import Fault, Kind, Victim  # noqa: E402
from orca_chaos.late import WORTH_TELLING  # noqa: E402
from orca_chaos.load import Load  # noqa: E402
from orca_chaos.local_target import LocalTarget, local_target  # noqa: E402
from orca_chaos.oracle import learn  # noqa: E402
from orca_chaos.rounds import healed, nothing_left  # noqa: E402
from orca_common.backoff import WORKED  # noqa: E402
from orca_local.settings import ServeSettings  # noqa: E402
from orca_pool.keys import Keys  # noqa: E402
from orca_pool.link import Link  # noqa: E402

SCENARIOS = ("stopped", "outage", "killed", "deaths")
ROLES = ("endpoint", "scheduler", "supervisor", "rank", "redis")
ENGINES = ("engine-0", "engine-1")
AIM = 1.0  # seconds: the pause that a death should make
REFUSED = "the lease is no longer this term's"  # in a scheduler's log, where the pool refused a write of an old term


class Held(NamedTuple):
    """Who masters an engine, and how it stands."""

    owner: str
    term: str
    epoch: str


class Takeovers:
    """Runs the scenarios on one stack, and asserts what each must show."""

    def __init__(self, target: LocalTarget, load: Load, run_dir: Path) -> None:
        self._target, self._load, self._run_dir = target, load, run_dir
        self._keys, self._link = Keys(target.pool), Link(str(target.redis_url))
        self.pauses: dict[str, list[float]] = {role: [] for role in ROLES}  # of `deaths`

    async def close(self) -> None:
        await self._link.close()

    async def stopped(self, seconds: float) -> str:
        """Stops the master of engine-0, and lets it wake."""
        before, refused = await self._settled(), self._refused()
        pause = await self._harm("scheduler", await self._master(), Kind.STOP, seconds)
        after = await self._held()
        assert after["engine-0"].term != before["engine-0"].term, "nobody took the engine"
        assert int(after["engine-0"].term) > int(before["engine-0"].term)
        count = self._refused() - refused
        assert count > 0, "the master that woke was refused nothing"
        return f"pause {pause:.1f} s; {count} terms ended by a refused write; epochs {self._kept(before, after)}"

    async def outage(self, seconds: float) -> str:
        """Stops Redis."""
        before = await self._settled()
        pause = await self._harm("redis", "redis", Kind.STOP, seconds)
        after = await self._held()
        assert after == before, f"masters, terms or epochs moved: {before} -> {after}"
        return f"pause {pause:.1f} s, {pause - seconds:.1f} s beyond the outage; no master, term or epoch moved"

    async def killed(self) -> str:
        """Kills the master of engine-0."""
        before, pids = await self._settled(), self._pids()
        pause = await self._harm("scheduler", await self._master(), Kind.KILL, 0)
        after = await self._held()
        assert int(after["engine-0"].term) > int(before["engine-0"].term)
        assert {e: held.epoch for e, held in after.items()} == {e: held.epoch for e, held in before.items()}
        assert self._pids() == pids, "a rank has another process"
        return f"pause {pause:.1f} s (the aim is {AIM} s); same epochs, same pids"

    async def deaths(self, rng: random.Random) -> str:
        """Kills a process of each role."""
        await asyncio.sleep(WORKED)  # who dies sooner is started again later, as one that cannot stay up
        said: list[str] = []
        for role in ROLES:
            name = rng.choice([victim.name for victim in self._target.victims() if victim.role == role])
            pause = await self._harm(role, name, Kind.KILL, 0)
            self.pauses[role].append(pause)
            said.append(f"{name} {pause:.2f} s")
        return ", ".join(said)

    def table(self) -> str:
        """The pauses of `deaths`, as a table in Markdown."""
        lines = ["| killed | times | median | p99 | longest |", "| --- | --- | --- | --- | --- |"]
        for role, pauses in self.pauses.items():
            p99 = sorted(pauses)[math.ceil(0.99 * len(pauses)) - 1]
            values = (statistics.median(pauses), p99, max(pauses))
            lines.append(f"| {role} | {len(pauses)} | {' | '.join(f'{value:.2f} s' for value in values)} |")
        return "\n".join(lines)

    async def _harm(self, role: str, name: str, kind: Kind, seconds: float) -> float:
        """Does one fault. Returns the longest pause of a stream until all was well again."""
        fault = Fault(0, kind, Victim(role, name, (kind,)), seconds)
        async with self._load.disturbed() as seen:
            assert await self._target.begin(fault)
            await asyncio.sleep(seconds)
            await self._target.end(fault)
            await healed(self._target)
        if seen.late > WORTH_TELLING:
            print(f"  (this program itself was late by {seen.late:.1f} s)")
        return seen.pause

    async def _settled(self) -> dict[str, Held]:
        """Waits until each scheduler masters an engine: an earlier fault may have left both with one."""
        async with asyncio.timeout(60):
            while len({held.owner for held in (await self._held()).values()}) < len(ENGINES):
                await asyncio.sleep(0.1)
        await healed(self._target)
        return await self._held()

    async def _master(self) -> str:
        async with asyncio.timeout(60):
            while not (name := await asyncio.to_thread(self._target.master, "engine-0")):
                await asyncio.sleep(0.1)
        return name

    async def _held(self) -> dict[str, Held]:
        found = {}
        for engine in ENGINES:
            lease = await self._link.command("HGET", f"{self._keys.prefix}leases", engine)
            epoch = await self._link.command("HGET", f"{self._keys.prefix}engine:{engine}", "epoch")
            _, term, owner = (lease or b"0 0 ").decode().split(" ", 2)
            found[engine] = Held(owner, term, (epoch or b"").decode())
        return found

    def _kept(self, before: dict[str, Held], after: dict[str, Held]) -> str:
        return "kept" if all(before[e].epoch == after[e].epoch for e in ENGINES) else "formed anew"

    def _pids(self) -> list[int | None]:
        return [self._target.pid(victim.name) for victim in self._target.victims() if victim.role == "rank"]

    def _refused(self) -> int:
        """How many terms ended because the pool refused a write, in all schedulers' logs."""
        count = 0
        for log in self._run_dir.glob("logs/scheduler-*.log"):
            lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
            count += sum(line.get("event") == "engine left" and line.get("why") == REFUSED for line in lines)
        return count


async def main(
    folder: Path, rounds: int, seed: int, stopped: float, outage: float, only: Sequence[str], **counts: int
) -> None:
    model = make_gpt2(folder / "model", heads=6, layers=4, hidden=36, vocab=211, positions=96, seed=7)
    processes: dict[str, Any] = {"engines": len(ENGINES), "max_batch_size": 4, **counts}
    settings = ServeSettings.load(
        model=str(model), device="cpu", slots=4096, threads=1, port=0, http_port=0, **processes
    )
    async with local_target(settings, folder / "run", print, links=False) as target:
        caller = Caller(target.addresses)
        async with Load(caller, await learn(caller, seed, 12), seed, streams=6) as load:
            lab, rng = Takeovers(target, load, folder / "run"), random.Random(seed)
            work = {
                "stopped": lambda: lab.stopped(stopped),
                "outage": lambda: lab.outage(outage),
                "killed": lab.killed,
                "deaths": lambda: lab.deaths(rng),
            }
            for number in range(rounds):
                for name in only or SCENARIOS:
                    print(f"round {number + 1}: {name}: {await work[name]()}", flush=True)
            if "deaths" in (only or SCENARIOS):
                print(lab.table())
            await lab.close()
        await caller.close()
        await nothing_left(target)
    print(f"{rounds} rounds passed: tokens equal, no slot reserved, no claim and no key left")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stopped", type=float, default=10.0, help="seconds")
    parser.add_argument("--outage", type=float, default=20.0, help="seconds")
    parser.add_argument("--only", action="append", choices=SCENARIOS, default=[])
    parser.add_argument("--endpoints", type=int, default=2)
    parser.add_argument("--schedulers", type=int, default=2, help="`deaths` alone can do with 1")
    parser.add_argument("--folder", type=Path, help="of the logs and journals; a temporary one if not given")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="orca-takeovers-", ignore_cleanup_errors=True) as temporary:
        folder = given.folder or Path(temporary)
        faults = given.stopped, given.outage, given.only
        counts = {"endpoints": given.endpoints, "schedulers": given.schedulers}
        asyncio.run(main(folder, given.rounds, given.seed, *faults, **counts))
