"""The latencies of a case of `orca_bench.pool`, in a process of its own: engines, endpoints and schedulers that share
one Redis, with the services' own ledger, delivery, pool and link.

    python -m orca_bench.pool_load URL CASE SECONDS

CASE is JSON. Prints JSON. The times of the leases are set before the services' code is imported.
"""

import asyncio
import itertools
import json
import random
import sys
from collections import defaultdict
from typing import Any, NamedTuple

from orca_bench.pool_drive import BATCH, FILLED, PER_SECOND, PROMPT, SLOTS, TOKENS
from orca_lab.timeline import percentile
from orca_pool import leases


class Case(NamedTuple):
    """How many of each there are, and how many times slower they work, and renew their leases."""

    engines: int
    endpoints: int
    schedulers: int
    slow_work: float = 1.0
    slow_leases: float = 1.0


def slow_down(times: float) -> None:
    """Makes all leases longer. Comes before the services' code is imported."""
    for name in ("RENEW_SECONDS", "LEASE_SECONDS", "GAP_SECONDS"):
        setattr(leases, name, getattr(leases, name) * times)


async def run(url: str, case: Case, seconds: float) -> dict[str, Any]:
    """Runs the case for so many seconds, and returns what it found."""
    from orca_endpoint.calls.delivery import Delivery
    from orca_pool.pool import Pool
    from orca_pool.records import Attached, EngineInfo, EngineLoad, Packet, Reason
    from orca_pool.wire import TOKEN
    from orca_scheduler.core.core import Room
    from orca_scheduler.lifecycle.events import Claimed, Opened
    from orca_scheduler.master.ledger import EndedElsewhere, Ledger, News

    loop = asyncio.get_running_loop()
    submitted: dict[str, float] = {}
    made: dict[tuple[str, int], float] = {}
    to_claim, to_delivery = list[float](), list[float]()
    counts: dict[str, int] = defaultdict(int)
    numbers = itertools.count()
    working = asyncio.Event()
    chance = random.Random(1)
    tasks: set[asyncio.Task[Any]] = set()

    def spawn(work: Any) -> None:
        tasks.add(asyncio.ensure_future(work))

    class Counting(Pool):
        async def claim(self, *args: Any, **options: Any) -> Any:
            answer = await super().claim(*args, **options)
            counts["empty claims"] += answer is not None and not answer.requests
            return answer

    class Master:
        """An engine that computes nothing, and the real ledger of its term."""

        def __init__(self, pool: Pool, owner: str, name: str, term: int) -> None:
            self._name, self._iteration = name, 0
            self._left: dict[int, int] = {}  # claim -> tokens to make
            self.ledger = Ledger(pool, name, owner, term, self._room, self._load, self._post, lambda *_: None)

        def _room(self) -> Room:
            free = BATCH - len(self._left)
            return Room(free, free * SLOTS)

        def _load(self) -> EngineLoad:
            free = BATCH - len(self._left)
            pace = case.slow_work / PER_SECOND
            return EngineLoad(BATCH, free * SLOTS, pace, pace * min(self._left.values(), default=0))

        def _post(self, news: News) -> None:
            match news:
                case Opened():
                    spawn(self._form())
                case Claimed(_, claims):
                    for held in self.ledger.outputs.of(claims):
                        self._left[held.claimed.claim] = TOKENS
                        if start := submitted.pop(held.claimed.request_id, None):
                            to_claim.append(loop.time() - start)
                    self.ledger.admitted()
                case EndedElsewhere() as ended:
                    for claim in ended.claims:
                        self._left.pop(claim, None)
                        self.ledger.outputs.drop(claim)
                case _:
                    pass

        async def _form(self) -> None:
            self._iteration = await self.ledger.formed(EngineInfo(self._name, 1, 1, BATCH * SLOTS, 0), 0)

        async def iterate(self) -> None:
            """Makes a token for each request, again and again."""
            await working.wait()
            step = case.slow_work / PER_SECOND
            at = loop.time() + chance.random() * step
            while True:
                await asyncio.sleep(max(0.0, at - loop.time()))
                at = max(at + step, loop.time() - step)
                if not self._left or not self.ledger.keeps_up(self._iteration):
                    continue
                self._iteration += 1
                made[self._name, self._iteration] = loop.time()
                for claim, left in list(self._left.items()):
                    token = TOKEN.pack(7, -0.5, self._iteration)
                    self.ledger.outputs.append(claim, token, Reason.LENGTH if left == 1 else None)
                    self._left[claim] = left - 1
                    if left == 1:
                        del self._left[claim]
                counts["iterations"] += 1
                self.ledger.used(self._iteration)
                self.ledger.committable()
                self.ledger.claimable()

    class Listener:
        """One call of an endpoint. Its end submits the next one."""

        def __init__(self, request_id: str) -> None:
            self.request_id, self.attempt = request_id, 1
            self.delivery: Delivery | None = None

        def put(self, packet: Packet) -> None:
            if packet.tokens and (start := made.get((packet.engine, packet.tokens[-1].iteration))):
                to_delivery.append(loop.time() - start)
            if packet.finish is not None:
                assert self.delivery is not None
                self.delivery.remove(self)
                spawn(submit())

        def resync(self) -> None:
            counts["resyncs"] += 1

        def wake(self) -> None:
            pass

    async def submit() -> None:
        pool, delivery = chance.choice(doors)
        call = Listener(f"request-{next(numbers):016}")
        call.delivery = delivery
        delivery.add(call)
        submitted[call.request_id] = loop.time()
        answer = await pool.submit(
            call.request_id,
            PROMPT,
            "d" * 40,
            SLOTS,
            SLOTS,
            deadline_in=600.0 * case.slow_work,
            detach_grace=5.0,
            endpoint=delivery.incarnation,
            attempt=1,
            max_waiting=1 << 20,
            new_tokens=TOKENS,
        )
        assert isinstance(answer, Attached), answer
        counts["submits"] += 1

    async def look(pool: Pool, name: str) -> None:
        """A scheduler's look at the leases."""
        while True:
            await pool.renew_scheduler(name)
            await asyncio.sleep(leases.RENEW_SECONDS)

    probe = Pool(url, "bench", patience=20.0)
    command = probe._link.command
    await command("CONFIG", "SET", "appendfsync", "no")
    doors = [(pool := Pool(url, "bench", patience=20.0), Delivery(pool)) for _ in range(case.endpoints)]
    for _, delivery in doors:
        spawn(delivery.renew())
        spawn(delivery.read())
    while not all(delivery.registered for _, delivery in doors):
        await asyncio.sleep(0.01)
    schedulers = [Counting(url, "bench", patience=20.0) for _ in range(case.schedulers)]
    for i, pool in enumerate(schedulers):
        spawn(look(pool, f"s{i}"))

    # The first engine lets requests in; the others come when all wait, so that nobody claims while they are submitted.
    masters: list[Master] = []
    term = await probe.acquire("g0", "s0", None)
    assert term is not None
    await probe.renew("g0", "s0", term, form=EngineInfo("g0", 1, 1, BATCH * SLOTS, 0))
    waiting = round(FILLED * BATCH * case.engines)
    for first in range(0, waiting, 32):
        await asyncio.gather(*(submit() for _ in range(first, min(first + 32, waiting))))
    for i in range(case.engines):
        pool, owner, name = schedulers[i % case.schedulers], f"s{i % case.schedulers}", f"g{i}"
        term = term if i == 0 else await pool.acquire(name, owner, None)
        assert term is not None
        master = Master(pool, owner, name, term)
        spawn(master.ledger.run(False))
        spawn(master.iterate())
        masters.append(master)
    while submitted:
        await asyncio.sleep(0.05)
    to_claim.clear()

    # Requests are spread over their lives, as they would be after some time: not all of them end at once.
    for master in masters:
        for claim in master._left:
            master._left[claim] = chance.randint(1, TOKENS)
    working.set()
    await asyncio.sleep(min(5.0, 2 * case.slow_work / PER_SECOND))
    for name in ("iterations", "empty claims", "submits"):
        counts[name] = 0
    to_claim.clear()
    to_delivery.clear()
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "commits": counts["iterations"] / seconds,
        "claim_ms": percentile(to_claim or [0.0], 0.99) * 1e3,
        "delivery_ms": percentile(to_delivery or [0.0], 0.99) * 1e3,
        "empty_claims": counts["empty claims"] / max(1, counts["submits"]),
        "resyncs": counts["resyncs"],
    }


def main() -> None:
    url, case, seconds = sys.argv[1:]
    asked = Case(**json.loads(case))
    slow_down(asked.slow_leases)
    print(json.dumps(asyncio.run(run(url, asked, float(seconds)))))


if __name__ == "__main__":
    main()
