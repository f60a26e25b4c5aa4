"""Kills each process of a stack at each moment of a request's life: no stream is harmed, and nothing is left behind.

    python tests/e2e/kill_matrix.py --rounds 20 [--seed 1] [--tp 2] [--pp 2] [--victim rank] [--moment increment]
        [--minutes 30] [--record FILE]

A round takes every pair of a victim and a moment, in an order of the seed. Beside the request that is watched others
run, which fill the batch. All must have the tokens of an undisturbed run. The pause is the longest time that the
watched request waited for a token (after its end: until it was read again twice). `--record` adds a line for each kill
to a file, of which `kill_table.py` makes a table. SIGTERM and SIGINT end it after the kill of then, with all checks.
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from checkpoints import make_gpt2  # noqa: E402
from e2e.kill_table import Kill, Moment, table  # noqa: E402
from stacks import folder_in_memory  # noqa: E402

from orca_chaos.client import Caller, Stream, Violation  # noqa: E402
from orca_chaos.faults import Fault, Kind, Victim  # noqa: E402
from orca_chaos.late import WORTH_TELLING, watched  # noqa: E402
from orca_chaos.local_target import LocalTarget, local_target  # noqa: E402
from orca_chaos.oracle import Known, learn  # noqa: E402
from orca_chaos.rounds import HEALED, healed, nothing_left  # noqa: E402
from orca_common.service import stop_event  # noqa: E402
from orca_local.settings import ServeSettings  # noqa: E402
from orca_pool.keys import Keys  # noqa: E402
from orca_pool.link import Link  # noqa: E402

FILLERS = 2  # requests beside the watched one: as many as a batch holds
FEW = ("supervisor", "fork server", "rank")  # roles without a process to spare: all must run before the next kill
TRIES = 20  # a moment may pass while it is looked for
LONGEST = 180.0  # seconds until a moment comes
LOOK = 0.001  # seconds between looks whether it has


class Passed(Exception):
    """The moment was over when it was found."""


class Matrix:
    """Kills processes of one stack, and checks what each must show."""

    def __init__(self, target: LocalTarget, known: Sequence[Known], seed: int) -> None:
        self._target, self._seed, self._draw = target, seed, random.Random(seed)
        self._known = itertools.cycle(known)
        self._keys, self._link = Keys(target.pool), Link(str(target.redis_url))
        self._ready: list[str] = []  # endpoints, after the last kill
        self._endpoint = itertools.cycle(range(len(target.addresses)))  # of the watched request's first call

    @property
    def victims(self) -> list[Victim]:
        """Every process of the engine and around it. One endpoint and one scheduler stand for those that serve."""
        found = [victim for victim in self._target.victims() if Kind.KILL in victim.kinds]
        return [v for v in found if v.role not in ("endpoint", "scheduler") or v.name.endswith("-0")]

    async def cell(self, victim: Victim, moment: Moment, number: int = 1) -> Kill:
        """Kills one process at one moment, and waits until the next may be. number: of the round, for the record."""
        for _ in range(TRIES):
            try:
                return await self._try(victim, moment, number)
            except Passed:
                continue
        raise Violation(f"the moment {moment!r} was not met in {TRIES} tries")

    async def close(self) -> None:
        await self._link.close()

    async def _try(self, victim: Victim, moment: Moment, number: int) -> Kill:
        self._ready = self._ready or await self._enough()
        first = next(n for n in self._endpoint if f"endpoint-{n}" in self._ready)
        addresses = [*self._target.addresses[first:], *self._target.addresses[:first]]
        others, caller = Caller(addresses[::-1]), Caller(addresses)
        seen = asyncio.Event()
        known = next(self._known)
        gap, last, name = 0.0, time.monotonic(), ""
        begun = last
        goal = self._goal(moment, len(known.tokens))

        def came(stream: Stream) -> None:
            nonlocal gap, last
            now = time.monotonic()
            gap, last = max(gap, now - last), now
            if goal is not None and len(stream.tokens) >= goal:
                seen.set()

        stream = Stream(caller, known.request, known.tokens, came)
        try:
            async with asyncio.timeout(2 * LONGEST), watched() as late, asyncio.TaskGroup() as tasks:
                await self._fill(tasks, others, moment)
                task = tasks.create_task(stream.run())
                try:
                    await self._wait(moment, stream, seen, task)
                except Passed:
                    pass
                else:
                    late.seconds = gap = 0.0
                    begun = last = time.monotonic()
                    name = await self._kill(victim, first)
                await task
                if moment is Moment.AFTER_FINISH:
                    await stream.repeated()
                    gap = time.monotonic() - last
            if victim.role in FEW:
                await healed(self._target)
            self._ready = await self._enough()
        finally:
            await others.close()
            await caller.close()
        if not name:
            raise Passed
        took = time.monotonic() - begun
        shape = self._target.tp, self._target.pp
        times = (round(seconds, 3) for seconds in (gap, late.seconds, took))
        return Kill(self._seed, number, *shape, victim.role, name, moment, *times)

    def _goal(self, moment: Moment, tokens: int) -> int | None:
        """The number of tokens after which the moment has come."""
        match moment:
            case Moment.INCREMENT:
                return self._draw.randint(2, tokens - 2)
            case Moment.LAST_TOKEN:
                return tokens - 1
            case Moment.AFTER_FINISH:
                return tokens
            case _:
                return None

    async def _fill(self, tasks: asyncio.TaskGroup, caller: Caller, moment: Moment) -> None:
        """Other requests: all of a batch's places are taken when the watched one is to wait in the queue."""
        count = FILLERS if moment is Moment.QUEUED else FILLERS - 1
        begun = [asyncio.Event() for _ in range(count)]
        for event in begun:
            known = next(self._known)

            def came(stream: Stream, event: asyncio.Event = event) -> None:
                if stream.tokens:
                    event.set()

            tasks.create_task(Stream(caller, known.request, known.tokens, came).run())
        async with asyncio.timeout(LONGEST):
            for event in begun:
                await event.wait()

    async def _wait(self, moment: Moment, stream: Stream, seen: asyncio.Event, task: asyncio.Task[object]) -> None:
        """Returns at the moment. Raises Passed when it is over."""
        async with asyncio.timeout(LONGEST):
            if moment is Moment.AFTER_FINISH:
                await asyncio.shield(task)
                return
            if moment not in (Moment.QUEUED, Moment.INITIATION):
                await seen.wait()
                return
            wanted = {Moment.QUEUED: "waiting", Moment.INITIATION: "claimed"}[moment]
            while (state := await self._state(stream.request_id)) != wanted:
                if state == "ended" or stream.tokens or (state == "claimed" and moment is Moment.QUEUED):
                    raise Passed
                await asyncio.sleep(LOOK)
            if stream.tokens:
                raise Passed

    async def _enough(self) -> list[str]:
        """Waits until the engine runs with two endpoints and two schedulers: another one may start meanwhile.

        Returns the endpoints that are ready.
        """
        async with asyncio.timeout(HEALED):
            while True:
                endpoints, schedulers, engine = await asyncio.gather(
                    asyncio.to_thread(self._target.ready, "endpoint"),
                    asyncio.to_thread(self._target.ready, "scheduler"),
                    asyncio.to_thread(self._target.serves, "engine-0"),
                )
                if engine and min(len(endpoints), len(schedulers)) >= 2:
                    return endpoints
                await asyncio.sleep(0.1)

    async def _state(self, request_id: str) -> str:
        return (await self._link.command("HGET", f"{self._keys.prefix}request:{request_id}", "state") or b"").decode()

    async def _kill(self, victim: Victim, endpoint: int) -> str:
        """Returns the name of the process that was killed: the endpoint of the request, the master of the engine."""
        name = victim.name
        if victim.role == "endpoint":
            name = f"endpoint-{endpoint}"
        if victim.role == "scheduler":
            name = await asyncio.to_thread(self._target.master, "engine-0")
        if not await self._target.begin(Fault(0, Kind.KILL, Victim(victim.role, name, victim.kinds))):
            raise Violation(f"{name} does not run")
        return name


@asynccontextmanager
async def matrix(folder: Path, seed: int, tp: int, pp: int) -> AsyncIterator[Matrix]:
    """A stack, its requests and their tokens. At the end, nothing of them may be left in the pool or the engine.

    The model's few positions keep the requests at 16 to 20 tokens: nothing needs more, and each costs time.
    """
    model = make_gpt2(folder / "model", heads=6, layers=4, hidden=36, vocab=211, positions=68, seed=7)
    settings = {"tp": tp, "pp": pp, "endpoints": 3, "schedulers": 3, "max_batch_size": FILLERS, "threads": 1}
    of_stack = ServeSettings.load(model=str(model), device="cpu", slots=4096, port=0, http_port=0, **settings)
    async with local_target(of_stack, folder / "run", print, links=False) as target:
        caller = Caller(target.addresses)
        known = await learn(caller, seed, 12)
        await caller.close()
        lab = Matrix(target, known, seed)
        yield lab
        await lab.close()
        await healed(target)
        await nothing_left(target)


async def rounds_of(
    lab: Matrix, chosen: Sequence[Victim], moments: Sequence[Moment], rounds: int, seed: int
) -> AsyncIterator[Kill]:
    """Every pair of a victim and a moment, `rounds` times, each time in another order."""
    draw = random.Random(seed)
    for number in range(1, rounds + 1):
        cells = list(itertools.product(chosen, moments))
        draw.shuffle(cells)
        for victim, moment in cells:
            try:
                yield await lab.cell(victim, moment, number)
            except Exception:
                print(f"seed {seed}, round {number}: {victim.name} killed, {moment}", flush=True)
                raise


async def main(folder: Path, given: argparse.Namespace) -> None:
    kills: list[Kill] = []
    end, stop = time.monotonic() + given.minutes * 60, stop_event()
    async with matrix(folder, given.seed, given.tp, given.pp) as lab:
        chosen = [v for v in lab.victims if not given.victim or v.role in given.victim or v.name in given.victim]
        async for kill in rounds_of(lab, chosen, given.moment or list(Moment), given.rounds, given.seed):
            kills.append(kill)
            late = f" (this program itself was late by {kill.late:.1f} s)" if kill.late > WORTH_TELLING else ""
            what = f"round {kill.round}: {kill.name} killed, {kill.moment}: pause {kill.pause:.2f} s"
            print(f"{what}, on after {kill.took:.1f} s{late}", flush=True)
            if given.record is not None:
                with given.record.open("a") as record:
                    record.write(json.dumps(kill._asdict()) + "\n")
            if stop.is_set() or time.monotonic() > end:
                break
    print(f"\n{table(kills)}\nNo slot is reserved, no claim and no key left.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="of the logs and journals; a temporary one if not given")
    parser.add_argument("--record", type=Path, help="gets a line for each kill")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no other kill begins")
    parser.add_argument("--victim", action="append", default=[], help="only this role or process; may be repeated")
    parser.add_argument("--moment", action="append", type=Moment, choices=list(Moment), help="only this one")
    arguments = parser.parse_args()
    with folder_in_memory() as temporary:
        asyncio.run(main(arguments.folder or Path(temporary), arguments))
