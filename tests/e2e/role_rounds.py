"""Kills and freezes ranks and schedulers before, in and after a pull: no request's tokens change, and nothing is left.

    python tests/e2e/role_rounds.py --rounds 24 [--skip 0] [--seed 1] [--tp 2] [--pp 2]

One engine prefills, one decodes, and two schedulers drive them. A round streams requests until one of them stands at
its moment, and then sends SIGKILL or SIGSTOP to a rank of either engine, or to the scheduler that drives it:

before   a request was handed over, and no engine has claimed it
in       the engine that decodes pulls: a rank of the other one is stopped before, so that the pull cannot end
after    the request's keys and values were pulled, and it runs

24 rounds are all of these once, in an order by the seed, from the place --skip on. Each stream must have the tokens of
transformers. At the end no request is in the pool, no slot is reserved at an engine, and the journals replay.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from itertools import cycle, islice, product
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1])]

from e2e.kill_rounds import NEW_TOKENS, SIGNALS, make_model  # noqa: E402
from metrics import Scrape  # noqa: E402
from reference import Reference  # noqa: E402
from stacks import Running, running  # noqa: E402

from orca_chaos.local_target import LocalTarget  # noqa: E402
from orca_chaos.rounds import healed, nothing_left  # noqa: E402
from orca_pool.keys import Keys  # noqa: E402
from orca_pool.link import Link  # noqa: E402
from orca_scheduler.core.core import PAUSE  # noqa: E402
from orca_scheduler.timers import KEEP  # noqa: E402

PREFILL, DECODE = "engine-0", "engine-1"
STREAMS, KNOWN = 12, 40  # at a time, and requests that they have in turn
HELD = 1.0  # s for which a rank is stopped until a pull begins: before it counts as silent


class Moment(StrEnum):
    BEFORE = "before"
    IN = "in"
    AFTER = "after"


class Harm(NamedTuple):
    """The harm of a round: its moment, and its victim."""

    moment: Moment
    engine: str
    role: str  # rank or scheduler
    kind: signal.Signals

    def __str__(self) -> str:
        return f"{self.moment} the pull, {self.kind.name} of a {self.role} of {self.engine}"


HARMS = [Harm(*one) for one in product(Moment, (PREFILL, DECODE), ("rank", "scheduler"), SIGNALS)]


class Rounds:
    """Runs rounds on one stack."""

    def __init__(self, stack: Running, model: Path, draw: random.Random) -> None:
        self._stack, self._draw = stack, draw
        lengths = (1, 40), (NEW_TOKENS, NEW_TOKENS)
        self._asked = cycle(list(islice(Reference(model).random(draw, *lengths), KNOWN)))  # with their tokens
        self.target = LocalTarget(stack.stack, stack.stack._settings, stack.run_dir, None)
        self._prefix, self._link = Keys(self.target.pool).prefix, Link(str(self.target.redis_url))

    async def close(self) -> None:
        await self._link.close()

    async def round(self, harm: Harm) -> float:
        """Returns the seconds from the harm until all streams have ended."""
        await self._pulls_are_tried()
        harmed = asyncio.Event()

        async def stream() -> None:
            while not harmed.is_set():
                prompt, tokens = next(self._asked)
                got = await self._stack.tokens(prompt, NEW_TOKENS)
                assert got == tokens, f"{harm}: the tokens of an undisturbed run"

        streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
        place = self._draw.randrange(self.target.tp * self.target.pp)
        victim = self._pid(harm.engine, place) if harm.role == "rank" else await self._master(harm.engine)
        async with asyncio.timeout(60):
            stopped = await self._until(harm.moment, place)
        os.kill(victim, harm.kind)
        began = time.monotonic()
        harmed.set()
        if stopped not in (0, victim):
            os.kill(stopped, signal.SIGCONT)
        await asyncio.wait_for(asyncio.gather(*streams), 120)
        took = time.monotonic() - began
        with suppress(ProcessLookupError):  # a rank was killed; a scheduler finds that its engines are another's
            os.kill(victim, signal.SIGCONT)
        await healed(self.target)
        return took

    async def _pulls_are_tried(self) -> None:
        """Waits for a pull that is done: after some that failed none is tried for a while."""
        async with asyncio.timeout(PAUSE + 30):
            pulls, prompt = -1.0, next(self._asked)[0]
            while (now := await self._counted("orca_pulls_total", outcome="done")) <= pulls or pulls < 0:
                pulls = now
                await self._stack.tokens(prompt, 2)

    async def _counted(self, name: str, **labels: str) -> float:
        """A sum over both schedulers."""
        schedulers = [child for child in self._stack.stack.children if child.role == "scheduler"]
        return (await asyncio.to_thread(Scrape, *(str(one.status) for one in schedulers))).value(name, **labels)

    async def _until(self, moment: Moment, place: int) -> int:
        """Returns when a request stands at a moment. In a pull, the rank of this place that prefills is stopped
        then, and its pid returned; otherwise 0."""
        if moment is not Moment.IN:
            await self._until_it_stands(moment)
            return 0
        source = self._pid(PREFILL, place)
        while True:
            await self._until_it_stands(Moment.BEFORE)
            os.kill(source, signal.SIGSTOP)
            try:
                async with asyncio.timeout(HELD):
                    await self._until_it_stands(moment)
                return source
            except TimeoutError:
                os.kill(source, signal.SIGCONT)

    async def _until_it_stands(self, moment: Moment) -> None:
        while not await self._stands(moment):
            await asyncio.sleep(0.001)

    async def _stands(self, moment: Moment) -> bool:
        if moment is Moment.BEFORE:
            return await self._link.command("ZCARD", f"{self._prefix}handed") > 0
        for name in await self._link.command("ZRANGE", f"{self._prefix}claimed:{DECODE}", 0, -1):
            kept = await self._link.command("HGET", f"{self._prefix}request:{name.decode()}", "handed_claim")
            if bool(kept) is (moment is Moment.IN):
                return True
        return False

    def _pid(self, engine: str, place: int) -> int:
        """The process of a rank, by its place in the engine."""
        pod = int(engine[-1]) * self.target.pp + place // self.target.tp
        pid = self.target.pid(f"rank-{pod}.{place % self.target.tp}")
        assert pid is not None
        return pid

    async def _master(self, engine: str) -> int:
        """The scheduler that drives an engine."""
        while not (name := await asyncio.to_thread(self.target.master, engine)):
            await asyncio.sleep(0.01)
        pid = self.target.pid(name)
        assert pid is not None
        return pid

    async def nothing_is_kept(self) -> None:
        """Waits until no engine has slots for a request. Those of one that was handed over stay for KEEP at most."""
        async with asyncio.timeout(KEEP + 10):
            while await self._counted("orca_slots", state="reserved"):
                await asyncio.sleep(0.2)


async def play(folder: Path, harms: Sequence[Harm], seed: int, tp: int = 1, pp: int = 1) -> None:
    """Runs a round for each harm on a stack of its own, and looks for what is left."""
    model, draw = make_model(folder / "model"), random.Random(seed)
    numbers = {"roles": "prefill=1,decode=1", "tp": tp, "pp": pp, "schedulers": 2}
    async with running(folder / "run", model, block_size=4, max_batch_size=2, slots=512, **numbers) as stack:
        rounds = Rounds(stack, model, draw)
        for n, harm in enumerate(harms, 1):
            print(f"round {n}: {harm}: streams ended {await rounds.round(harm):.1f} s later", flush=True)
        await rounds.close()
        await rounds.nothing_is_kept()
        await nothing_left(rounds.target)
    print(f"{len(harms)} rounds passed with tp {tp}, pp {pp}: tokens equal, nothing left, journals replay")


def drawn(count: int, seed: int, skip: int = 0) -> list[Harm]:
    """All harms in an order by the seed, from the place `skip` on, and again where more are wanted."""
    order: Iterator[Harm] = cycle(random.Random(seed).sample(HARMS, len(HARMS)))
    return list(islice(order, skip, skip + count))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=len(HARMS))
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="orca-role-rounds-") as temporary:
        harms = drawn(given.rounds, given.seed, given.skip)
        asyncio.run(play(Path(temporary), harms, given.seed, given.tp, given.pp))
