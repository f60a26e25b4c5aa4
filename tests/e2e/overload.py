"""Overload: more requests than an `orca serve` can serve, with deadlines and without. What is still done, and for whom?

    python tests/e2e/overload.py --seconds 60 [--factor 5] [--deadline 12] [--max-waiting 20] [--seed 1]

The model only waits (orca_timed), so the capacity is known: what a closed loop of many clients gets. Requests then come
at `factor` times that rate, as a Poisson process, each on its own; none is sent again. It prints

goodput    requests that ended in time, a second, while the load lasted, and of the best that the load allows
refused    how many were refused, and how long their refusals took
retry      the RetryInfo of the refusals against the time until the next request was accepted: the median of the ratio,
           and of its error either way
starts     the predictions of the accepted requests against the time they waited
recovery   seconds from the load's end until a request comes that is served in time; and until one begins at once
memory     resident MB of each process after a quarter of the time, and at the end

and ends with 1 when a goodput is below 90 % of that best, a recovery longer than 5 s, or a refusal has no RetryInfo.
A request that has not ended after two minutes, and a recovery that has not come by then, end it with TimeoutError.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.rpc import error_details_pb2, status_pb2

sys.path[:0] = [str(Path(__file__).parents[1])]

from checkpoints import make_timed  # noqa: E402
from stacks import Running, folder_in_memory, generation, running  # noqa: E402

ITERATION, BATCH, TOKENS = 0.02, 4, 40  # seconds; requests; new tokens of each: 0.8 s, 5 requests a second
RECOVERY, GOODPUT = 5.0, 0.9
LONGEST = 120.0  # seconds that a request may take, and a recovery


@dataclass(frozen=True)
class Outcome:
    """One request. Moments and durations in seconds."""

    begun: float
    seconds: float
    code: grpc.StatusCode
    retry: float | None = None  # of a refusal
    starts_in: float | None = None  # as predicted
    waited: float | None = None  # in the queue


def retry_of(error: grpc.aio.AioRpcError) -> float | None:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            info = error_details_pb2.RetryInfo()
            for detail in status_pb2.Status.FromString(value).details:  # type: ignore[arg-type]
                if detail.Unpack(info):
                    return info.retry_delay.ToNanoseconds() / 1e9
    return None


class Load:
    """Sends requests and keeps their outcomes."""

    def __init__(self, stack: Running, deadline: float | None, draw: random.Random) -> None:
        self._stub, self._deadline, self._draw = stack.stub, deadline, draw
        self.outcomes: list[Outcome] = []

    async def request(self) -> Outcome:
        begun = time.monotonic()
        starts_in = waited = None
        prompt = [self._draw.randrange(1, 200) for _ in range(8)]
        call = self._stub.Generate(generation(prompt, TOKENS, ignore_eos=True), timeout=self._deadline)
        try:
            async with asyncio.timeout(LONGEST):
                async for response in call:
                    if response.accepted.HasField("starts_in"):
                        starts_in = response.accepted.starts_in.ToNanoseconds() / 1e9
                    if response.finished.HasField("timings"):
                        waited = response.finished.timings.claimed.ToNanoseconds() / 1e9
        except grpc.aio.AioRpcError as error:
            outcome = Outcome(begun, time.monotonic() - begun, error.code(), retry=retry_of(error), starts_in=starts_in)
        else:
            outcome = Outcome(begun, time.monotonic() - begun, grpc.StatusCode.OK, starts_in=starts_in, waited=waited)
        self.outcomes.append(outcome)
        return outcome

    async def closed(self, clients: int, seconds: float) -> float:
        """Requests a second that so many clients get, each with one request at a time."""
        end = time.monotonic() + seconds

        async def client() -> int:
            count = 0
            while time.monotonic() < end:
                count += (await self.request()).code is grpc.StatusCode.OK
            return count

        begun = time.monotonic()
        done = sum(await asyncio.gather(*(client() for _ in range(clients))))
        return done / (time.monotonic() - begun)

    async def open(self, rate: float, seconds: float) -> "list[asyncio.Task[Outcome]]":
        """Requests at a rate, whatever becomes of them. Returns them when the last one was sent."""
        tasks: list[asyncio.Task[Outcome]] = []
        at = time.monotonic()
        end = at + seconds
        while (at := at + self._draw.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tasks.append(asyncio.create_task(self.request()))
        return tasks


def resident(pid: int) -> float:
    """MB of memory that a process has."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * 4096 / 1e6


def memory(stack: Running) -> dict[str, float]:
    return {f"{p['role']} {p['pid']}": resident(p["pid"]) for p in stack.processes() if p["pid"]}


def error_of(pairs: list[tuple[float, float]]) -> str:
    """How predictions compare with what came."""
    ratios = [max(predicted, 0.1) / max(actual, 0.1) for predicted, actual in pairs]
    if not ratios:
        return "none to compare"
    either = statistics.median(max(ratio, 1 / ratio) for ratio in ratios)
    return f"ratio {statistics.median(ratios):.2f}, off by a factor of {either:.2f} (medians of {len(ratios)})"


async def overload(stack: Running, args: argparse.Namespace, deadline: float | None, best: float) -> bool:
    """One overload. Whether it was honest."""
    load = Load(stack, deadline, random.Random(args.seed))
    begun = time.monotonic()
    sampled: dict[str, float] = {}

    async def sample() -> None:
        nonlocal sampled
        await asyncio.sleep(args.seconds / 4)
        sampled = memory(stack)

    sampling: asyncio.Task[None] = asyncio.create_task(sample())
    tasks = await load.open(best * args.factor, args.seconds)
    ended, after = time.monotonic(), memory(stack)
    probe = Load(stack, args.deadline or None, random.Random(args.seed + 1))
    async with asyncio.timeout(LONGEST):
        while (await probe.request()).code is not grpc.StatusCode.OK or probe.outcomes[-1].seconds > 2 * args.alone:
            await asyncio.sleep(0.1)
    recovery = next(o.begun for o in probe.outcomes if o.code is grpc.StatusCode.OK) - ended
    empty = probe.outcomes[-1].begun - ended
    await asyncio.gather(*tasks)
    await sampling
    # The first requests fill the queue, so goodput counts from the moment at which the first of them must have ended.
    since = begun + 2 * args.alone
    good = [o for o in load.outcomes if o.code is grpc.StatusCode.OK and since <= o.begun + o.seconds <= ended]
    goodput = len(good) / (ended - since)
    refusals = [o for o in load.outcomes if o.code is grpc.StatusCode.RESOURCE_EXHAUSTED]
    served = [o for o in load.outcomes if o.waited is not None]
    retries: list[tuple[float, float]] = []
    for refusal in refusals:
        following = min((o.begun for o in served if o.begun > refusal.begun), default=None)
        if following is not None and refusal.retry:
            retries.append((refusal.retry, following - refusal.begun))
    starts = [(o.starts_in, o.waited) for o in served if o.starts_in is not None and o.waited is not None]
    silent = sum(o.retry is None for o in refusals)
    kind = "no deadline" if deadline is None else f"deadlines of {deadline:g} s"
    print(f"-- {kind}, {best * args.factor:.1f} requests/s")
    print("outcomes ", dict(Counter(o.code.name for o in load.outcomes)))
    best *= min(1.0, args.factor)  # more than comes cannot be done
    print(f"goodput   {goodput:.2f} requests/s, {goodput / best:.0%} of the best")
    print(f"refused   {len(refusals)}, without RetryInfo {silent}, the slowest after", end=" ")
    print(f"{max((o.seconds for o in refusals), default=0) * 1000:.0f} ms")
    print(f"retry     {error_of(retries)}")
    print(f"starts    {error_of(starts)}")
    print(f"recovery  {recovery:.1f} s; the queue is empty after {empty:.1f} s")
    print("memory   ", ", ".join(f"{name}: {sampled.get(name, 0):.0f} -> {mb:.0f} MB" for name, mb in after.items()))
    return goodput >= GOODPUT * best and recovery <= RECOVERY and not silent


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=5.0)
    parser.add_argument("--deadline", type=float, default=12.0, help="in seconds; 0: only the part without deadlines")
    parser.add_argument("--max-waiting", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    honest = True
    for deadline in (args.deadline, None) if args.deadline else (None,):
        with folder_in_memory() as folder:
            model = make_timed(Path(folder) / "model", seconds=ITERATION)
            # Without deadlines, only its bound keeps a queue short. One host has half of it.
            waiting = 4096 if deadline is not None else 2 * args.max_waiting
            async with running(Path(folder) / "run", model, max_batch_size=BATCH, max_waiting=waiting) as stack:
                load = Load(stack, None, random.Random(args.seed))
                await load.request()
                args.alone = (await load.request()).seconds
                best = await load.closed(3 * BATCH, max(5.0, args.seconds / 6))
                print(f"alone {args.alone:.2f} s a request; the best {best:.2f} requests/s")
                honest &= await overload(stack, args, deadline, best)
    print("as promised" if honest else "NOT as promised")
    return 0 if honest else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
