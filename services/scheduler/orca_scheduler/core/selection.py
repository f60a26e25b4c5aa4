"""Select of Algorithm 1 (paper section 4.2). The numbers are the paper's lines."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from .memory import Memory
from .request import Request


class Stop(StrEnum):
    """Why a selection holds no more requests."""

    BATCH_FULL = "max_bs requests are selected"
    SLOTS = "the next request does not fit in the free slots"
    POSITIONS = "the iteration has all its positions"
    SHARE = "it has its share of the requests: other batches in flight get theirs"
    POOL = "no other request is waiting for an iteration"


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of a batch. Raises ValueError where increments alone could use all its positions."""

    max_bs: int  # requests
    n_workers: int = 1  # batches in flight that share an engine's requests
    positions: int | None = None  # computed in an iteration at most

    def __post_init__(self) -> None:
        if self.positions is not None and self.positions <= self.max_bs:
            raise ValueError(
                f"policy: positions={self.positions} must be above max_batch_size, {self.max_bs}: each request of a "
                "batch computes one, and prompts need some"
            )

    @property
    def places(self) -> int:
        """Requests that the batches in flight can hold together."""
        return self.max_bs * self.n_workers


@dataclass(frozen=True, slots=True)
class Plan:
    """The next batch: requests, and how many of its `remaining` positions each of them runs."""

    batch: tuple[tuple[Request, int], ...]
    stop: str  # why it holds no more: a `Stop`, or a sentence of another policy
    preempt: tuple[Request, ...] = ()  # first give up their rows, and start again later; none of them is RUNNING
    # By claim, of requests that run all their `remaining` positions: how many of the `offered` drafts they run, too.
    drafts: Mapping[int, int] = field(default_factory=dict[int, int])


def select(pool: Iterable[Request], limits: Limits, memory: Memory) -> Plan:
    """The next batch from `pool`: requests that are not RUNNING (line 17), in the policy's order, which is that
    of arrival for `paper` (line 18).

    Changes nothing: the caller reserves for what was selected. A failed reservation stops the scan for requests in
    their initiation phase (line 25), which keeps the order FCFS; it never keeps an INCREMENT request out, because its
    slots are reserved already.
    """
    batch: list[tuple[Request, int]] = []  # line 16
    free, blocked = memory.free, False  # n_slots - n_rsrv
    for request in pool:  # line 19
        if len(batch) == limits.max_bs:  # line 20
            return Plan(tuple(batch), Stop.BATCH_FULL)
        count = request.known - request.computed  # `remaining`, of which a call takes 0.1 us a row
        if request.row is None:  # line 21: INITIATION
            need = memory.need(request, count)  # line 22
            if blocked or need > free:  # line 23
                blocked = True  # line 24
                continue
            free -= need  # line 25
        batch.append((request, count))  # line 26: for both phases
    return Plan(tuple(batch), Stop.SLOTS if blocked else Stop.POOL)  # line 27
