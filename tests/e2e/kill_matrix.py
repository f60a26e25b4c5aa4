"""Kills each process of a stack at each moment of a request's life: no stream is harmed, and nothing is left behind.

    python tests/e2e/kill_matrix.py --rounds 20 [--seed 1] [--tp 2] [--pp 2] [--victim rank] [--moment increment]

A round takes every pair of a victim and a moment, in an order of the seed. Beside the request that is watched others
run, which fill the batch. All must have the tokens of an undisturbed run. The pause is the longest time that the
watched request waited for a token (after its end: until it was read again twice).
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from checkpoints import make_gpt2  # noqa: E402

from orca_chaos.client import Caller, Stream, Violation  # noqa: E402
from orca_chaos.faults import Fault, Kind, Victim  # noqa: E402
from orca_chaos.local_target import LocalTarget, local_target  # noqa: E402
from orca_chaos.oracle import Known, learn  # noqa: E402
from orca_chaos.rounds import healed, nothing_left  # noqa: E402
from orca_local.settings import ServeSettings  # noqa: E402
from orca_pool.keys import Keys  # noqa: E402
from orca_pool.link import Link  # noqa: E402

FILLERS = 2  # requests beside the watched one: as many as a batch holds
TRIES = 20  # a moment may pass while it is looked for
LONGEST = 60.0  # seconds until a moment comes


class Moment(StrEnum):
    """Of a request's life, at which a process is killed."""

    QUEUED = "queued"
    INITIATION = "initiation"
    INCREMENT = "increment"
    LAST_TOKEN = "last token"
    AFTER_FINISH = "after finish"


class Passed(Exception):
    """The moment was over when it was found."""


class Matrix:
    """Kills processes of one stack, and checks what each must show."""

    def __init__(self, target: LocalTarget, known: Sequence[Known], draw: random.Random) -> None:
        self._target, self._draw = target, draw
        self._known = itertools.cycle(known)
        self._keys, self._link = Keys(target.pool), Link(str(target.redis_url))
        self.pauses: defaultdict[tuple[str, Moment], list[float]] = defaultdict(list)

    @property
    def victims(self) -> list[Victim]:
        """Every process of the engine and around it; of endpoints and schedulers, the one that serves."""
        found = [victim for victim in self._target.victims() if Kind.KILL in victim.kinds]
        return [v for v in found if v.role not in ("endpoint", "scheduler") or v.name.endswith("-0")]

    async def cell(self, victim: Victim, moment: Moment) -> float:
        """Kills one process at one moment, and waits until all is well. Returns the pause in seconds."""
        for _ in range(TRIES):
            try:
                pause = await self._try(victim, moment)
            except Passed:
                continue
            self.pauses[victim.role, moment].append(pause)
            return pause
        raise Violation(f"the moment {moment!r} was not met in {TRIES} tries")

    async def close(self) -> None:
        await self._link.close()

    async def _try(self, victim: Victim, moment: Moment) -> float:
        addresses = list(self._target.addresses)  # the first call goes to endpoint-0
        others, caller = Caller(addresses[::-1]), Caller(addresses)
        seen = asyncio.Event()
        known = next(self._known)
        gap, last = 0.0, time.monotonic()
        goal = self._goal(moment, len(known.tokens))

        def came(stream: Stream) -> None:
            nonlocal gap, last
            now = time.monotonic()
            gap, last = max(gap, now - last), now
            if goal is not None and len(stream.tokens) >= goal:
                seen.set()

        stream = Stream(caller, known.request, known.tokens, came)
        passed = False
        try:
            async with asyncio.timeout(2 * LONGEST), asyncio.TaskGroup() as tasks:
                await self._fill(tasks, others, moment)
                task = tasks.create_task(stream.run())
                try:
                    await self._wait(moment, stream, seen, task)
                except Passed:
                    passed = True
                else:
                    gap, last = 0.0, time.monotonic()
                    await self._kill(victim)
                await task
                if moment is Moment.AFTER_FINISH:
                    await stream.repeated()
                    gap = time.monotonic() - last
            await healed(self._target)
        finally:
            await others.close()
            await caller.close()
        if passed:
            raise Passed
        return gap

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
            if stream.tokens:
                raise Passed

    async def _state(self, request_id: str) -> str:
        return (await self._link.command("HGET", f"{self._keys.prefix}request:{request_id}", "state") or b"").decode()

    async def _kill(self, victim: Victim) -> None:
        if victim.role == "scheduler":
            name = await asyncio.to_thread(self._target.master, "engine-0")
            victim = Victim(victim.role, name, victim.kinds)
        if not await self._target.begin(Fault(0, Kind.KILL, victim)):
            raise Violation(f"{victim.name} does not run")


@asynccontextmanager
async def matrix(folder: Path, seed: int, tp: int, pp: int) -> AsyncIterator[Matrix]:
    """A stack, its requests and their tokens. At the end, nothing of them may be left in the pool or the engine."""
    model = make_gpt2(folder / "model", heads=6, layers=4, hidden=36, vocab=211, positions=96, seed=7)
    settings = {"tp": tp, "pp": pp, "endpoints": 2, "schedulers": 2, "max_batch_size": FILLERS, "threads": 1}
    of_stack = ServeSettings.load(model=str(model), device="cpu", slots=4096, port=0, http_port=0, **settings)
    async with local_target(of_stack, folder / "run", print) as target:
        caller = Caller(target.addresses)
        known = await learn(caller, seed, 12)
        await caller.close()
        lab = Matrix(target, known, random.Random(seed))
        yield lab
        await lab.close()
        await nothing_left(target)


async def main(
    folder: Path, rounds: int, seed: int, tp: int, pp: int, victims: Sequence[str], moments: Sequence[Moment]
) -> None:
    draw = random.Random(seed)
    async with matrix(folder, seed, tp, pp) as lab:
        chosen = [victim for victim in lab.victims if not victims or victim.role in victims]
        for number in range(rounds):
            cells = list(itertools.product(chosen, moments))
            draw.shuffle(cells)
            for victim, moment in cells:
                try:
                    pause = await lab.cell(victim, moment)
                except Exception:
                    print(f"seed {seed}, round {number + 1}: {victim.name} killed, {moment}", flush=True)
                    raise
                print(f"round {number + 1}: {victim.name} killed, {moment}: pause {pause:.2f} s", flush=True)
    print("\n| killed | " + " | ".join(moments) + " |")
    print("| --- |" + " --- |" * len(moments))
    for role in sorted({victim.role for victim in chosen}):
        columns = [lab.pauses[role, moment] for moment in moments]
        print(f"| {role} | " + " | ".join(f"{statistics.median(c):.1f} s ({max(c):.1f})" for c in columns) + " |")
    print(f"{rounds} rounds of {len(chosen) * len(moments)} kills passed: medians (longest) of the pauses; tokens")
    print("equal, no slot reserved, no claim and no key left")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="of the logs and journals; a temporary one if not given")
    parser.add_argument("--victim", action="append", default=[], help="only this role; may be repeated")
    parser.add_argument("--moment", action="append", type=Moment, choices=list(Moment), help="only this one")
    given = parser.parse_args()
    moments = given.moment or list(Moment)
    with tempfile.TemporaryDirectory(prefix="orca-kill-matrix-", ignore_cleanup_errors=True) as temporary:
        folder = given.folder or Path(temporary)
        asyncio.run(main(folder, given.rounds, given.seed, given.tp, given.pp, given.victim, moments))
