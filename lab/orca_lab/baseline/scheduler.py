"""Request-level scheduling, as a pure state machine like the core: `step(event) -> actions`.

Triton's dynamic batching: whenever the engine is free, it gets at most `max_bs` requests from the head of the queue,
and keeps them until all have ended. With a delay, a smaller batch waits for more requests until its oldest one has
waited that long.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orca_scheduler.core.request import Arrival


@dataclass(frozen=True, slots=True)
class Arrived:
    now: float
    requests: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """These claims are not wanted any more. In the engine they stay, as dead rows, until their batch has ended."""

    now: float
    claims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchReturned:
    """The engine is free again: all requests of its batch have ended."""

    now: float


@dataclass(frozen=True, slots=True)
class Wake:
    """The moment has come that `RequestLevel.wake_at` named."""

    now: float


Event = Arrived | Cancelled | BatchReturned | Wake


@dataclass(frozen=True, slots=True)
class RunBatch:
    """Run these requests until all have ended."""

    requests: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """These claims have ended, and return to their clients now, however early their last token was made."""

    claims: tuple[int, ...]


Action = RunBatch | Finished


class RequestLevel:
    """Schedules one engine. `delay`: seconds for which a batch that is not full waits for more requests."""

    def __init__(self, max_bs: int, delay: float = 0.0) -> None:
        self.max_bs, self.delay = max_bs, delay
        self.running: tuple[Arrival, ...] = ()
        self._queue: deque[tuple[float, Arrival]] = deque()
        self._cancelled: set[int] = set()

    @property
    def queue(self) -> Sequence[Arrival]:
        """Requests that wait, the oldest first."""
        return [request for _, request in self._queue]

    @property
    def wake_at(self) -> float | None:
        """The moment of the next Wake: a batch begins then, full or not. None: none waits for more requests."""
        return self._queue[0][0] + self.delay if self._queue and not self.running else None

    def step(self, event: Event) -> list[Action]:
        """Applies one event and says what is to be done about it, in this order."""
        actions: list[Action] = []
        match event:
            case Arrived():
                self._queue.extend((event.now, request) for request in event.requests)
            case Cancelled():
                gone = set(event.claims)
                self._queue = deque(entry for entry in self._queue if entry[1].claim not in gone)
                self._cancelled |= gone & {request.claim for request in self.running}
            case BatchReturned():
                assert self.running, "a batch returned that was not begun"
                claims = tuple(r.claim for r in self.running if r.claim not in self._cancelled)
                actions.append(Finished(claims))
                self.running = ()
                self._cancelled.clear()
            case Wake():
                pass
        due = self.wake_at
        if due is not None and (len(self._queue) >= self.max_bs or event.now >= due):
            count = min(self.max_bs, len(self._queue))
            self.running = tuple(self._queue.popleft()[1] for _ in range(count))
            actions.append(RunBatch(self.running))
        return actions

    def state(self) -> dict[str, Any]:
        """The whole state as plain values, requests by their claims. `restore` takes it."""
        return {
            "running": [request.claim for request in self.running],
            "queue": [(moment, request.claim) for moment, request in self._queue],
            "cancelled": sorted(self._cancelled),
        }

    def restore(self, state: Mapping[str, Any], requests: Mapping[int, Arrival]) -> None:
        """Takes over the `state` of another one. It may have gone through JSON."""
        self.running = tuple(requests[claim] for claim in state["running"])
        self._queue = deque((moment, requests[claim]) for moment, claim in state["queue"])
        self._cancelled = set(state["cancelled"])
