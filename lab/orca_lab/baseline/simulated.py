"""FasterTransformer's engine in virtual time: a whole batch goes in and comes out (paper sections 4.2 and 6).

The first iteration runs all requests at the length of the shortest prompt. Longer prompts are fed on, one token an
iteration. A request that has ended stays as dead rows until all have. Microbatches pass the stages one behind the
other, and each waits for its own tokens before it begins again (Figure 8b).
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import groupby

from orca_scheduler.core.request import Arrival

from ..cost import Cost, Load
from ..simulator import Result, Served
from ..workload import Workload
from .scheduler import Arrived, BatchReturned, Event, Finished, RequestLevel, RunBatch, Wake

Passed = Callable[[int, int, int, float, float], None]  # microbatch, iteration, stage, begin and end


class Batched:
    """The engine: microbatches of `mbs` requests."""

    def __init__(self, cost: Cost, mbs: int) -> None:
        self.cost, self.mbs = cost, mbs
        self._sums: dict[int, list[list[float]]] = {}  # by rows, for `_alone`

    def seconds(self, sizes: Sequence[tuple[int, int]], passed: Passed | None = None) -> float:
        """The time of a batch of requests, given as their tokens in and out."""
        return self.run(sizes, passed)[0]

    def run(self, sizes: Sequence[tuple[int, int]], passed: Passed | None = None) -> tuple[float, list[float], int]:
        """The time of a batch, how long each stage was busy with it, and its number of iterations."""
        shortest = min(inputs for inputs, _ in sizes)
        iterations = max(inputs - shortest + outputs for inputs, outputs in sizes)
        if len(sizes) <= self.mbs and passed is None:
            seconds, busy = self._alone(len(sizes), shortest, iterations)
        else:
            rows = [min(self.mbs, len(sizes) - first) for first in range(0, len(sizes), self.mbs)]
            seconds, busy = self._piped(rows, shortest, iterations, passed or (lambda *_: None))
        return seconds, busy, iterations

    def _alone(self, rows: int, shortest: int, iterations: int) -> tuple[float, list[float]]:
        """One microbatch: nothing overlaps, so times are sums, and those up to each context are kept."""
        cost = self.cost
        sums = self._sums.setdefault(rows, [[0.0] for _ in range(1 + cost.stages)])
        for context in range(len(sums[0]), shortest + iterations - 1):
            for total, seconds in zip(sums, self._parts(_load(rows, context, 1)), strict=True):
                total.append(total[-1] + seconds)
        first, last = shortest, shortest + iterations - 1
        begin = self._parts(_load(rows, shortest, 0))
        whole, *busy = (one + total[last - 1] - total[first - 1] for one, total in zip(begin, sums, strict=True))
        return whole, busy

    def _parts(self, load: Load) -> list[float]:
        """The time of an iteration that has the engine to itself, and those of its stages."""
        cost = self.cost
        stages = [cost.stage(stage, load) for stage in range(cost.stages)]
        hops = cost.hop(load) * (cost.stages - 1) if cost.stages > 1 else 0.0
        return [cost.host + sum(stages) + hops, *stages]

    def _piped(self, rows: Sequence[int], shortest: int, iterations: int, passed: Passed) -> tuple[float, list[float]]:
        """Microbatches of these sizes, one behind the other."""
        cost = self.cost
        times = dict[tuple[int, int], tuple[list[float], float]]()  # by rows and iteration: of each stage, and of a hop
        free, busy = [0.0] * cost.stages, [0.0] * cost.stages
        back = [0.0] * len(rows)  # when each microbatch's tokens are there
        for iteration in range(iterations):
            for micro, count in enumerate(rows):
                if (count, iteration) not in times:
                    load = _load(count, shortest, iteration)
                    stages = [cost.stage(stage, load) for stage in range(cost.stages)]
                    times[count, iteration] = stages, cost.hop(load) if cost.stages > 1 else 0.0
                stages, hop = times[count, iteration]
                end = there = back[micro] + cost.host
                for stage, seconds in enumerate(stages):
                    begin = max(there, free[stage])
                    end = begin + seconds
                    free[stage], there = end, end + hop
                    busy[stage] += end - begin
                    passed(micro, iteration, stage, begin, end)
                back[micro] = end
        return max(back), busy


def _load(rows: int, shortest: int, iteration: int) -> Load:
    if iteration == 0:
        return Load(rows, 0, 0, rows * shortest, rows * shortest**2, rows * shortest, rows)
    return Load(rows, rows, rows * (shortest + iteration), 0, 0, 0, rows)


def simulate_requests(cost: Cost, max_bs: int, mbs: int, workload: Workload, delay: float = 0.0) -> Result:
    """Serves a workload by one request-level scheduler and one engine."""
    scheduler, engine = RequestLevel(max_bs, delay), Batched(cost, mbs)
    served = [Served(asked) for asked in workload]
    events: list[tuple[float, int, Event]] = []
    for at, together in groupby(enumerate(workload, 1), lambda numbered: numbered[1].at):
        requests = tuple(Arrival(claim, claim, one.input_tokens, one.output_tokens) for claim, one in together)
        heapq.heappush(events, (at, requests[0].claim, Arrived(at, requests)))
    order, last, iterations, rows = len(served), 0.0, 0, 0
    busy = [0.0] * cost.stages
    while events:
        now, _, event = heapq.heappop(events)
        for action in scheduler.step(event):
            order += 1
            match action:
                case RunBatch(requests):
                    seconds, used, passes = engine.run([(r.input_tokens, r.max_new_tokens) for r in requests])
                    iterations, rows = iterations + passes, rows + passes * len(requests)
                    busy = [a + b for a, b in zip(busy, used, strict=True)]
                    for request in requests:
                        served[request.claim - 1].began = now
                    heapq.heappush(events, (now + seconds, order, BatchReturned(now + seconds)))
                case Finished(claims):
                    for claim in claims:
                        served[claim - 1].first = served[claim - 1].ended = last = now
        if (due := scheduler.wake_at) is not None:
            order += 1
            heapq.heappush(events, (due, order, Wake(due)))
    return Result(served, last, iterations, rows, [busy])
