"""The primary of the pool's Redis is killed under load, and Sentinel makes its replica the primary.

    python tests/e2e/failovers.py --rounds 10 [--replicas 0] [--seed 1] [--servers 3 --down-after 1 1.2 1.6]

A stack runs on a primary with a replica and three Sentinels. In every other round the replica stands still for up to a
second before, without a connection, so it lacks the last writes. Then the primary is killed; once the replica has taken
over, the killed server comes back as its replica. With `redis_replicas` 0 each stream must be right or end with
DATA_LOSS. With 1 (WAITAOF) each must be right. Nothing may be claimed, wait or be left at the end.

Each round says when the parts of the failover came, in seconds after the kill. With three servers, as the chart has
them, one of two replicas stands still, and WAITAOF does not wait for the killed server.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from checkpoints import make_gpt2  # noqa: E402
from replicated import DOWN_AFTER, Replicated  # noqa: E402
from stacks import folder_in_memory  # noqa: E402

from orca_chaos.client import Caller  # noqa: E402
from orca_chaos.load import Load  # noqa: E402
from orca_chaos.local_target import LocalTarget, local_target  # noqa: E402
from orca_chaos.oracle import learn  # noqa: E402
from orca_chaos.rounds import healed, nothing_left  # noqa: E402
from orca_local.settings import ServeSettings  # noqa: E402

PATIENCE = 120.0  # seconds for Sentinel to do its part
LATE = 0.5  # seconds that this program may be late without a word
STEPS = {
    "+odown": "agreed",
    "+elected-leader": "elected",
    "+promoted-slave": "promoted",
    "+slave-reconf-sent": "the other replica told",
}
ALONE = 0.9  # seconds at most that a primary works without its replica before it is killed


async def until(condition: Callable[[], bool], what: str) -> None:
    """Waits until the servers say so. Raises AssertionError after `PATIENCE`."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not await asyncio.to_thread(condition):
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {PATIENCE:.0f} s") from None


async def failover(redis: Replicated, target: LocalTarget, load: Load, alone: float | None) -> str:
    """One round. alone: seconds that the primary works without its replica. Returns what was seen."""
    lost, finished = load.lost, load.finished
    async with load.disturbed() as seen:
        if alone is not None:
            await asyncio.to_thread(redis.part_replica)
            await asyncio.sleep(alone)
        load.faults += 1
        killed = time.time()
        lacked = await asyncio.to_thread(redis.kill_primary)
        await until(redis.taken_over, "the replica takes over")
        redis.rejoin()
        await until(redis.whole, "the killed server follows")
        await healed(target)
    late = f"; this program itself was late by {seen.late:.1f} s" if seen.late > LATE else ""
    ends = f"{load.finished - finished} streams ended right, {load.lost - lost} with DATA_LOSS"
    return f"the replica lacked {lacked} bytes, {parts(redis, killed)}, longest pause {seen.pause:.2f} s, {ends}{late}"


def parts(redis: Replicated, killed: float) -> str:
    """When the Sentinels got ahead, in seconds after the kill."""
    seen = redis.events(killed)
    missed = [f"{moment:.2f}" for moment in seen.get("+sdown", [])]
    steps = [f"{said} {seen[event][0]:.2f}" for event, said in STEPS.items() if event in seen]
    switched = [f"{moment:.2f}" for moment in seen.get("+switch-master", [])]
    return f"missed {' '.join(missed)}, {', '.join(steps)}, named {' '.join(switched)}"


async def run(folder: Path, rounds: int, replicas: int, seed: int, servers: int, down_after: Sequence[float]) -> str:
    """Returns a line of the table."""
    draw = random.Random(f"{seed}/{replicas}")
    model = make_gpt2(folder / "model", heads=6, layers=4, hidden=36, vocab=211, positions=96, seed=7)
    with ExitStack() as running:
        redis = await asyncio.to_thread(Replicated, folder, running, servers - 1, down_after)
        await until(redis.whole, "the Sentinels know the replicas")
        settings = ServeSettings.load(
            model=str(model),
            device="cpu",
            slots=4096,
            threads=1,
            port=0,
            http_port=0,
            max_batch_size=4,
            schedulers=2,
            redis_url=redis.url,
            redis_replicas=replicas,
        )
        async with local_target(settings, folder / "run", print, links=False) as target:
            caller = Caller(target.addresses)
            try:
                known = await learn(caller, seed, 8)
                async with Load(caller, known, seed, streams=4, may_lose=replicas == 0) as load:
                    for number in range(1, rounds + 1):
                        alone = draw.uniform(0.0, ALONE) if number % 2 == 0 else None
                        said = await failover(redis, target, load, alone)
                        print(f"redis_replicas {replicas}, round {number}: {said}", flush=True)
                await nothing_left(target)
            finally:
                await caller.close()
    return f"| {replicas} | {rounds} | {load.finished} | {load.cancelled} | {load.lost} | 0 |"


async def main(given: argparse.Namespace, folder: Path) -> None:
    modes = given.replicas or [0, 1]
    lines = [
        await run(folder / f"replicas-{mode}", given.rounds, mode, given.seed, given.servers, given.down_after)
        for mode in modes
    ]
    print("\n| `redis_replicas` | kills | streams right | cancelled | DATA_LOSS | left in the pool |")
    print("| --- | --- | --- | --- | --- | --- |")
    print("\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--replicas", type=int, action="append", choices=[0, 1], help="only so; both if not given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--servers", type=int, default=2, choices=[2, 3], help="the primary and its replicas")
    parser.add_argument(
        "--down-after", type=float, nargs=3, default=3 * (DOWN_AFTER,), help="seconds, of each Sentinel"
    )
    parser.add_argument("--folder", type=Path, help="of the logs and journals; a temporary one if not given")
    given = parser.parse_args()
    with folder_in_memory() as temporary:
        asyncio.run(main(given, given.folder or Path(temporary)))
