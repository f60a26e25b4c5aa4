"""A scheduling policy decides which requests run next, over how many positions, and in which memory.

The core, the wire and the ranks take whatever a plan says: parts of prompts, rows that grow, requests that give up
their rows and start again. `sets.py` has the policies by name.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from .memory import Memory
from .request import Request
from .selection import Limits, Plan


def limits_of(policy: "Policy", max_bs: int, n_workers: int) -> Limits:
    """The bounds of an engine's first batch. Raises ValueError where the policy and `max_bs` do not go together."""
    positions = policy.positions
    if positions is not None and policy.seconds is not None:
        positions = max(positions, max_bs + 1)
    return Limits(max_bs, n_workers, positions)


class Policy(Protocol):
    """Decides for one engine. It keeps nothing: requests and memory have all state, so a journal replays."""

    @property
    def name(self) -> str:
        """The text by which `policy_named` finds it again."""
        ...

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

    @property
    def positions(self) -> int | None:
        """Positions that an iteration runs at most; None: as many as its requests have."""
        ...

    @property
    def drafts(self) -> str:
        """The source of drafts, which masters read: "ngram", the text itself; "off": it has no drafts."""
        ...

    @property
    def prefix(self) -> str:
        """Whose keys and values a request may begin with: "tenant", those of its own; "shared", all; "off", none."""
        ...

    @property
    def seconds(self) -> float | None:
        """Seconds that an iteration may take: `positions` then follow what is measured. None: they stay."""
        ...

    def order(self, request: Request) -> tuple[float, ...]:
        """A sort key: the smallest comes first.

        It never changes for a request: the core sorts it in once, when the request has been claimed.
        """
        ...

    def memory(self, n_slots: int, block_size: int) -> Memory:
        """The empty memory of an engine that has formed."""
        ...

    def plan(self, ready: Iterable[Request], live: Sequence[Request], limits: Limits, memory: Memory) -> Plan:
        """The next batch of `ready`, which are those of the `live` requests that may run; both are in `order`.

        Changes nothing. A plan that preempts has a batch.
        """
        ...

    def violations(self, requests: Sequence[Request], memory: Memory) -> list[str]:
        """Sentences about broken promises of this policy. requests: the live ones, in `order`."""
        ...
