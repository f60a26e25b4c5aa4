"""Is a live run's sequence of iterations the simulated one? Given its arrivals and the moments of its returns, it is.

The simulator, and not a replay, decides here what reaches the core and when: claims, returns, ends.
"""

from collections.abc import Sequence
from math import inf, nextafter
from pathlib import Path
from typing import NamedTuple

from orca_common.errors import FailedPrecondition
from orca_scheduler.core.core import (
    Adopted,
    Arrived,
    BatchReturned,
    Cancelled,
    Commit,
    EngineReady,
    ScheduleBatch,
    Tick,
)
from orca_scheduler.core.request import Arrival
from orca_scheduler.master import journal
from orca_scheduler.master.journal import CoreStep, Heading

from .baseline.selections import any_policy
from .cost import Constant
from .simulator import Delays, Engine, Kind, Running, Simulation
from .workload import Asked


class Compared(NamedTuple):
    """How many iterations there were, and how many of them have another batch."""

    iterations: int
    different: int


class Followed(Simulation):
    """A simulation whose batches return, and whose ticks come, when they did live. Their members are kept."""

    def __init__(self, engine: Engine, returns: Sequence[float], ticks: Sequence[float]) -> None:
        """returns: of each iteration, in their order."""
        super().__init__([engine], Delays(ahead=False))
        self._returns, self.batches = returns, list[ScheduleBatch]()
        for moment in ticks:
            self._at(moment, Kind.TICK, self._engines[0])

    def _await_tick(self, engine: Running) -> None:
        pass

    def _tick(self, engine: Running) -> None:
        self._step(engine, Tick(max(self._now, engine.tick_at or self._now)))  # it began a batch live, so it does here

    def _issue(self, engine: Running, batch: ScheduleBatch) -> None:
        number = len(self.batches)
        self.batches.append(batch)
        engine.sent.append(0.0)
        engine.flight.append((batch.iteration, tuple(member.claim for member in batch.members if member.outputs)))
        moment = self._returns[number] if number < len(self._returns) else inf
        self._at(moment, Kind.RETURN, engine)


def compare(path: Path) -> Compared:
    """Simulates the run of a journal. Raises FailedPrecondition where it has cancellations, or no whole run."""
    numbers, slots, moment = None, 0, -inf
    arrivals, outputs = dict[int, tuple[float, Arrival]](), dict[int, int]()
    batches, returns, ticks, live = list[ScheduleBatch](), list[float](), list[float](), set[int]()
    for line in journal.read(path):
        if isinstance(line, Heading):
            numbers = line.numbers
        if not isinstance(line, CoreStep):
            continue
        event = line.event
        moment = max(event.now, nextafter(moment, inf))  # in the order in which the core took its events
        batches += [action for action in line.actions if isinstance(action, ScheduleBatch)]
        for action in line.actions:
            if isinstance(action, Commit):
                for outcome in action.outcomes:
                    outputs[outcome.claim] = outputs.get(outcome.claim, 0) + (outcome.token is not None)
                live -= {outcome.claim for outcome in action.outcomes if outcome.finish is not None}
        match event:
            case Adopted():
                numbers = {**(numbers or {}), "policy": event.policy}
            case EngineReady():
                slots = event.n_slots
            case Arrived():
                arrivals |= {one.claim: (moment, one) for one in event.requests}
                live |= {one.claim for one in event.requests}
            case BatchReturned():
                returns.append(moment)
            case Tick() if any(isinstance(action, ScheduleBatch) for action in line.actions):
                ticks.append(moment)
            case Cancelled(claims=claims) if live & set(claims):  # not news of ends that the pool has by now
                raise FailedPrecondition(f"{path} has cancellations, which are not simulated")
            case _:
                pass
    if numbers is None or not slots or len(returns) < len(batches):
        raise FailedPrecondition(f"{path} has no run that was brought to its end")
    workload = [
        Asked(at, one.input_tokens, outputs[claim], limit=one.max_new_tokens) for claim, (at, one) in arrivals.items()
    ]
    policy, block = any_policy(numbers["policy"]), numbers["block_size"]
    cost = Constant(0.0, numbers["n_workers"])
    simulation = Followed(Engine(cost, slots, numbers["max_bs"], policy, block, numbers["run_ahead"]), returns, ticks)
    simulation.run(workload)
    names = {claim: number for number, claim in enumerate(arrivals, 1)}

    def told(batch: ScheduleBatch, of: dict[int, int]) -> list[tuple[int, ...]]:
        return [(of.get(m.claim, m.claim), m.row, m.start, m.count, m.outputs, *m.new_blocks) for m in batch.members]

    pairs = zip(batches, simulation.batches, strict=False)
    different = sum(told(theirs, names) != told(ours, {}) for theirs, ours in pairs)
    return Compared(len(batches), different + abs(len(batches) - len(simulation.batches)))
