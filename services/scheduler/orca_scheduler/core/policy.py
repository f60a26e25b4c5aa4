"""Scheduling policies by name: which requests run next, over how many positions, and in which memory.

A further policy is one class in one file, and a line in `POLICIES`. The core, the wire and the ranks take whatever a
plan says: parts of prompts, rows that grow, requests that give up their rows and start again.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

from orca_common.reservation import Reservation

from .memory import Memory, Slots
from .request import Request
from .selection import Limits, Plan, select


class Policy(Protocol):
    """Decides for one engine. It keeps nothing: requests and memory have all state, so a journal replays."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> frozenset[str]:
        """Words of orca_common.protocol for all that it asks of a model's ranks beyond the paper's iterations."""
        ...

    @property
    def reserves_output(self) -> bool:
        """Whether a request begins only where slots for its input and all its new tokens are free.

        The pool counts its `upfront` slots by this.
        """
        ...

    def order(self, request: Request) -> tuple[float, ...]:
        """A sort key: the smallest comes first.

        It never changes for a request: the core sorts it in once, when the request has been claimed.
        """
        ...

    def memory(self, n_slots: int, block_size: int) -> Memory:
        """The empty memory of an engine that has formed."""
        ...

    def plan(self, ready: Iterable[Request], limits: Limits, memory: Memory) -> Plan:
        """The next batch of `ready`, which is in `order`. Changes nothing. A plan that preempts has a batch."""
        ...

    def violations(self, requests: Sequence[Request], memory: Memory) -> list[str]:
        """Sentences about broken promises of this policy. requests: the live ones, in `order`."""
        ...


class Paper:
    """Algorithm 1 of the paper: first come, first served by iterations; slots for all tokens are reserved at first."""

    name = "paper"
    needs = frozenset[str]()
    reserves_output = True

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.arrived.arrival,)

    def memory(self, n_slots: int, block_size: int) -> Memory:
        return Slots(n_slots, block_size)

    def plan(self, ready: Iterable[Request], limits: Limits, memory: Memory) -> Plan:
        return select(ready, limits, memory)

    def violations(self, requests: Sequence[Request], memory: Memory) -> list[str]:
        rule, begun = Reservation(memory.block_size), [r.arrived for r in requests if r.row is not None]
        need = sum(rule.upfront(arrived.input_tokens, arrived.max_new_tokens) for arrived in begun)
        found = [f"{memory.reserved} slots are reserved, live requests need {need}"] if memory.reserved != need else []
        found += [
            f"claim {b.claim} ran {b.iterations} iterations, claim {a.claim} before it {a.iterations}"
            for a, b in pairwise([r for r in requests if r.in_order and (r.goes_on or not r.running)])
            if b.iterations > a.iterations
        ]
        return found


PAPER = Paper()
POLICIES: dict[str, Policy] = {PAPER.name: PAPER}


def policy_named(name: str) -> Policy:
    """Raises ValueError, which names the policies that there are."""
    if name not in POLICIES:
        raise ValueError(f"policy: there is no {name!r}; there are: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
