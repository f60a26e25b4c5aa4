"""Runs the rounds: faults at their moments, under load, until everything is well again; then looks at what is left."""

import asyncio
from collections.abc import Callable

from .client import Caller, Violation
from .faults import Fault, Victim, plan
from .load import Load
from .oracle import learn
from .pool_check import leftovers
from .record import Record
from .report import Report, Round, counted
from .target import Target, Watched

HEALED = 180.0  # seconds within which everything must run again


async def run(
    target: Target,
    *,
    seed: int,
    rounds: int,
    first: int,
    streams: int,
    chosen: Callable[[Victim], bool],
    record: Record,
    say: Callable[[str], None],
) -> Report:
    """Rounds `first` to `first + rounds - 1` of a seed, but those that `record` has. It gets the others when they end.

    chosen: which victims may be hit. say: called with a sentence for each step. Returns the report of all rounds of the
    record. Raises Violation, whose sentence names the round.
    """
    victims = [victim for victim in target.victims() if chosen(victim)]
    plans = {number: tuple(plan(seed, number, victims)) for number in range(first, first + rounds)}
    plans = {number: faults for number, faults in plans.items() if not record.has(number, faults)}
    number = first
    caller = Caller(target.addresses)
    try:
        known = await learn(caller, seed)
        say(f"{len(known)} requests learned, {counted(len(victims), 'victim')}, {counted(streams, 'stream')}")
        async with Load(caller, known, seed, streams) as load:
            for number, faults in plans.items():
                say(f"round {number}: {'; '.join(map(str, faults))}")
                async with load.disturbed() as seen:
                    done = await asyncio.gather(*(_one(target, load, fault) for fault in faults))
                    await healed(target)
                ended = Round(number, faults, tuple(done), seen.pause, seen.seconds, seen.late)
                record.add(ended)
                say(f"  {ended}")
        await nothing_left(target)
    except (Violation, BaseExceptionGroup) as error:
        violation = first_of(error)
        if violation is None:
            raise
        raise Violation(f"round {number}: {violation}") from None
    finally:
        await caller.close()
    ends = f"finished: {counted(load.finished, 'request')}, cancelled: {load.cancelled}, given up: {load.poisoned}"
    say(f"{ends}, in {counted(load.calls, 'call')}; nothing is left of them")
    return Report(record.rounds.values())


async def _one(target: Target, load: Load, fault: Fault) -> bool:
    """Does a fault at its moment, and heals it when it is over. False: there was nothing to hit."""
    await asyncio.sleep(fault.at)
    load.faults += 1
    begun = await target.begin(fault)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        await target.end(fault)
    return begun


async def healed(target: Watched) -> None:
    """Waits until everything runs again. Raises Violation."""
    why: str | None = "nothing was looked at"
    try:
        async with asyncio.timeout(HEALED):
            while (why := await target.ailing()) is not None:
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise Violation(f"not all is well {HEALED:.0f} s after the faults: {why}") from None


async def nothing_left(target: Watched) -> None:
    """Raises Violation when something of the ended requests is left: in the pool, or reserved in an engine."""
    found = []
    if target.redis_url is not None:
        found += await leftovers(target.redis_url, target.pool, target.engines, target.endpoints)
    found += await target.leftovers()
    if found:
        raise Violation("at the end: " + "; ".join(found[:10]))


def first_of(error: BaseException) -> Violation | None:
    """The first violation in an exception or a group of them."""
    if isinstance(error, Violation):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(first_of, error.exceptions)), None)
    return None
