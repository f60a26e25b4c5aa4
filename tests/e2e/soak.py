"""A soak: many requests at a load that a stack can serve. Does its memory grow for as long as they come?

    python tests/e2e/soak.py --seconds 1200 [--factor 0.8] [--retention 60] [--iteration 0.005] [--seed 1]

Memory that grows has two causes. Stores with a bound fill: ended requests, for `retention` seconds. And something may
leak. So `retention` is short: the stores are full long before a quarter of the time is over, and from then on the pool
keeps as many requests as at the end. What still grows is then told as bytes for each request that came meanwhile.

It prints, for moments of equal load, the resident MB of each process, and what Redis itself counts: its memory, keys,
and how many of them are requests. It ends with 1 when between the second quarter and the last one

- a process has kept more than 512 bytes of each request: less than any record of one has;
- Redis has kept more than 64, by its own count; or its keys have become more by a tenth;
- a request failed; or fewer than 2,000 came between, which say nothing: an allocator keeps a page or a hundred.

Both quarters count by the median of their samples: a page more or less, and a rewrite of Redis's file, are no leak.
An iteration takes 5 ms, so that thousands of requests come between them.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from redis.asyncio import Redis

sys.path[:0] = [str(Path(__file__).parents[1])]

from checkpoints import make_timed  # noqa: E402
from overload import BATCH, Load, memory  # noqa: E402
from stacks import Running, folder_in_memory, running  # noqa: E402

SAMPLES, ENOUGH = 40, 2000
OF_PROCESS, OF_REDIS, MORE_KEYS = 512.0, 64.0, 1.1  # bytes of a request; bytes of a request; times


@dataclass(frozen=True)
class Sample:
    """What there was at a moment. Memory in MB."""

    at: float  # seconds
    done: int  # requests that had ended
    processes: dict[str, float]
    redis: float  # as Redis counts it
    keys: int
    retained: int  # ended requests in the pool

    def __str__(self) -> str:
        processes = ", ".join(f"{name} {mb:.1f}" for name, mb in self.processes.items())
        own = f"redis by its own count {self.redis:.3f}, {self.keys} keys, {self.retained} ended requests"
        return f"{self.at / 60:5.1f} min, {self.done:6d} requests: {own}; {processes}"


async def sample(stack: Running, redis: Redis, load: Load, begun: float) -> Sample:
    info = await redis.info("memory")
    ended = await redis.zcard("orca:{default}:ended")
    at = time.monotonic() - begun
    return Sample(at, len(load.outcomes), memory(stack), info["used_memory"] / 1e6, await redis.dbsize(), ended)


def growth(samples: list[Sample]) -> list[tuple[str, float, float]]:
    """Of each count of bytes: its name, MB that it grew from the second quarter to the last, bytes a request."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    requests = max(1.0, statistics.median(s.done for s in late) - statistics.median(s.done for s in early))

    def grown(before: list[float], after: list[float]) -> tuple[float, float]:
        more = statistics.median(after) - statistics.median(before)
        return more, more * 1e6 / requests

    names = early[0].processes.keys() & late[-1].processes.keys()
    found = [(n, *grown([s.processes[n] for s in early], [s.processes[n] for s in late])) for n in sorted(names)]
    return [*found, ("redis by its own count", *grown([s.redis for s in early], [s.redis for s in late]))]


def judged(samples: list[Sample]) -> bool:
    """Prints what grew. Whether it is little enough."""
    quarter, well = len(samples) // 4, True
    for name, more, each in growth(samples):
        bound = OF_REDIS if name.endswith("count") else OF_PROCESS
        well &= each <= bound
        print(f"{name}: {more:+.2f} MB, {each:+.0f} bytes a request (the bound is {bound:.0f})")
    before, after = (
        statistics.median(s.keys for s in part) for part in (samples[quarter : 2 * quarter], samples[-quarter:])
    )
    print(f"keys: {before:.0f} -> {after:.0f}")
    requests = samples[-quarter].done - samples[2 * quarter - 1].done
    print(f"{requests} requests came between these quarters (at least {ENOUGH} are needed)")
    return well and after <= MORE_KEYS * before and requests >= ENOUGH


async def soak(stack: Running, args: argparse.Namespace) -> bool:
    load = Load(stack, None, random.Random(args.seed))
    best = await load.closed(3 * BATCH, 20.0)
    print(f"the best {best:.2f} requests/s; {best * args.factor:.2f} come")
    load.outcomes.clear()
    samples: list[Sample] = []
    begun = time.monotonic()
    url = next(child for child in stack.stack.children if child.name == "redis").address
    async with Redis.from_url(url) as redis:
        coming = asyncio.create_task(load.open(best * args.factor, args.seconds))
        for n in range(1, SAMPLES + 1):
            await asyncio.sleep(max(0.0, begun + args.seconds * n / SAMPLES - time.monotonic()))
            samples.append(await sample(stack, redis, load, begun))
            if n % (SAMPLES // 8) == 0:
                print(samples[-1], flush=True)
        await asyncio.gather(*await coming)
    failed = sum(outcome.code is not grpc.StatusCode.OK for outcome in load.outcomes)
    print(f"{len(load.outcomes)} requests, {failed} failed")
    return judged(samples) and not failed


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--factor", type=float, default=0.8)
    parser.add_argument("--retention", type=float, default=60.0, help="seconds; less than a quarter of --seconds")
    parser.add_argument("--iteration", type=float, default=0.005, help="seconds of an iteration")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.retention >= args.seconds / 4:
        parser.error("--retention must be less than a quarter of --seconds: the stores must be full by then")
    with folder_in_memory() as folder:
        model = make_timed(Path(folder) / "model", seconds=args.iteration)
        settings = {"max_batch_size": BATCH, "max_waiting": 4096, "retention": args.retention}
        async with running(Path(folder) / "run", model, **settings) as stack:
            flat = await soak(stack, args)
    print("flat" if flat else "NOT flat")
    return 0 if flat else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
