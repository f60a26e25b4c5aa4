"""The lab's simulated pool against the real one: engines that ask for as much get the same requests, in order."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from pool.lab import Lab

from orca_common.priorities import Priority, lift_of
from orca_common.reservation import Reservation
from orca_lab.cost import Constant
from orca_lab.simulator import Delays, Engine, Running, Simulation
from orca_lab.workload import POISSON, Asked, Lengths, Seeds, drawn
from orca_pool.records import Attached, ClaimAnswer, Turn
from orca_scheduler.core.core import Action, Arrived, Event

AGING = 60.0


@dataclass
class Claim:
    """An engine has asked the simulated pool, and got these requests, by their places in the workload."""

    now: float
    engine: int
    count: int
    slots: int
    yielding: list[tuple[int, int]]
    taken: list[int] = field(default_factory=list[int])


class Watched(Simulation):
    """A simulation that notes each claim."""

    def __init__(self, engines: Sequence[Engine], delay: float) -> None:
        self.claims = list[Claim]()
        super().__init__(engines, Delays(claim=delay, ahead=False), self._note, aging=AGING)

    def _take(self, engine: Running) -> None:
        room = engine.core.room()
        self.claims.append(Claim(self._now, engine.number, room.requests, room.slots, engine.core.yielding()))
        super()._take(engine)

    def _note(self, engine: int, event: Event, actions: Sequence[Action]) -> None:
        if isinstance(event, Arrived):
            self.claims[-1].taken += [one.claim - 1 for one in event.requests]


@pytest.mark.parametrize("seed", range(12))
async def test_claims_are_those_of_the_real_pool(lab: Lab, seed: int) -> None:
    chance = random.Random(seed)
    classes = chance.choice(((Priority.NORMAL,), (Priority.HIGH, Priority.NORMAL, Priority.LOW)))
    load = drawn(Lengths((2, 20), (1, 12)), POISSON, 120, 60, Seeds.of(seed))
    workload = [one._replace(priority=chance.choice(classes)) for one in load]
    slots = chance.choice((64, 320))
    engines = [Engine(Constant(0.004), slots, chance.randint(1, 5))] * chance.randint(1, 3)
    simulation = Watched(engines, chance.choice((0.0, 0.003)))
    simulation.run(workload)
    await lab.endpoint()
    names = [await lab.engine(f"g{n}", slots) for n in range(len(engines))]
    began, waiting = lab.now, list(enumerate(workload))
    for claim in simulation.claims:
        while waiting and waiting[0][1].at <= claim.now:
            number, asked = waiting.pop(0)
            await advance_to(lab, began + round(asked.at * 1e6))
            await submit(lab, number, asked)
        await advance_to(lab, began + round(claim.now * 1e6))
        name = names[claim.engine]
        answer = await lab.pool.claim(
            *(name, *lab.terms[name], lab.heard[name]),
            count=claim.count,
            slots=claim.slots,
            total=slots,
            yielding=[(priority, order + began) for priority, order in claim.yielding],
        )
        assert isinstance(answer, ClaimAnswer)
        lab.heard[name] = answer.last_claim
        assert [int(one.request_id) for one in answer.requests] == claim.taken
    assert sorted(number for claim in simulation.claims for number in claim.taken) == list(range(len(workload)))


async def advance_to(lab: Lab, moment: int) -> None:
    await lab.advance((moment - lab.now) / 1e6)


async def submit(lab: Lab, number: int, asked: Asked) -> None:
    upfront = Reservation(16, True).upfront(asked.input_tokens, asked.output_tokens)
    turn = Turn(lift_of(Priority(asked.priority), AGING), priority=asked.priority)
    said = await lab.submit(str(number), asked.tokens, upfront, max_waiting=1000, turn=turn)
    assert isinstance(said, Attached)
