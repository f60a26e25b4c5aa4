"""Plans the faults: which, when, and on what. All chance comes from the seed and the round's number."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

WITHIN = 2.0  # seconds after a round's start in which its faults begin
LASTING = (0.3, 5.0)  # seconds that a fault with a duration lasts
MOST = 3  # faults of a round
ALONE = 0.5  # share of the rounds with a single fault, which show its cost


class Kind(StrEnum):
    """A kind of fault."""

    KILL = "kill"  # SIGKILL, or a pod deleted without grace
    STOP = "stop"  # SIGSTOP, and SIGCONT when it is over
    DELAY = "delay"  # each message takes longer
    HOLD_TO = "hold to"  # messages in one direction wait: packets are dropped on their way there ..
    HOLD_FROM = "hold from"  # .. or back
    CUT = "cut"  # connections end, and none can be made
    LOSE = "lose"  # the next message is lost, and its connection with it
    DOUBLE = "double"  # the next messages come twice


OF_PROCESSES = (Kind.KILL, Kind.STOP)
OF_LINKS = (Kind.DELAY, Kind.HOLD_TO, Kind.HOLD_FROM, Kind.CUT, Kind.LOSE, Kind.DOUBLE)
AT_ONCE = (Kind.KILL, Kind.LOSE, Kind.DOUBLE)  # these last no time


@dataclass(frozen=True)
class Victim:
    """A target of faults: a process, or the way between two."""

    role: str  # such as "scheduler", or "scheduler > rank"
    name: str  # such as "scheduler-1", or "scheduler > rank-0.1"
    kinds: tuple[Kind, ...]  # of faults that its target can do to it


@dataclass(frozen=True)
class Fault:
    """One fault. `at`: seconds after its round's start. `seconds`: how long it lasts. `amount`: seconds of delay."""

    at: float
    kind: Kind
    victim: Victim
    seconds: float = 0.0
    amount: float = 0.0

    @property
    def label(self) -> str:
        """The fault's kind, for tables: the same for all victims of a role."""
        return f"{self.kind} {self.victim.role}"

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.at:.2f} s: {self.kind} {self.victim.name}{lasting}"


def plan(seed: int, number: int, victims: Sequence[Victim]) -> list[Fault]:
    """The faults of a round, in order. The same seed, number and victims give the same faults.

    A role is drawn first, then one of its victims: each role gets the same share, however many processes it has.
    """
    draw = random.Random(f"{seed}/{number}")
    count = 1 if draw.random() < ALONE else draw.randint(2, MOST)
    roles = sorted({victim.role for victim in victims})
    faults = []
    for _ in range(count):
        role = draw.choice(roles)
        victim = draw.choice([victim for victim in victims if victim.role == role])
        kind = draw.choice(victim.kinds)
        seconds = 0.0 if kind in AT_ONCE else round(draw.uniform(*LASTING), 2)
        amount = round(draw.uniform(0.02, 0.4), 3) if kind is Kind.DELAY else 0.0
        faults.append(Fault(round(draw.uniform(0, WITHIN), 3), kind, victim, seconds, amount))
    return sorted(faults, key=lambda fault: fault.at)
