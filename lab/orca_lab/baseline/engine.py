"""FasterTransformer's engine on our own ranks: a whole batch goes in and comes out (paper sections 2, 4.2 and 6).

`BatchCore` has the events and actions of the scheduler's core, so all that drives the core drives it, too: a live
engine master, the simulator, the replay of a journal. The ranks run its iterations as any other, with the same kernels
and the same partition. `RequestLevel` alone decides which requests make a batch.

- Keys and values of `max_bs` longest sequences are allocated beforehand: each row has room for one of them.
- The first iteration runs all requests at the length of the shortest prompt. Longer prompts are fed on, one token an
  iteration.
- A request that has ended goes on as a dead row until all have. All answers return together.
- Microbatches of `mbs` requests pass the stages one behind the other. Each begins again when its tokens are back.

Requests have neither logprobs nor forms here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from orca_common.errors import FailedPrecondition
from orca_common.protocol import PARTS
from orca_scheduler.core.core import (
    Action,
    Arrived,
    BatchReturned,
    Cancelled,
    Commit,
    Core,
    Drain,
    EngineLost,
    EngineReady,
    Event,
    Flight,
    GiveBack,
    Measured,
    Outcome,
    Room,
    ScheduleBatch,
    Tick,
)
from orca_scheduler.core.memory import Memory, Slots
from orca_scheduler.core.request import Arrival, Reason, Request
from orca_scheduler.core.selection import Limits, Plan
from orca_scheduler.core.sets import FirstCome

from . import scheduler
from .scheduler import Finished, RequestLevel, RunBatch

NAME = "request-level"


class Dense(Slots):
    """Memory in which each row has the slots of a longest sequence, in blocks that lie one behind the other."""

    def __init__(self, n_slots: int, block_size: int, longest: int) -> None:
        super().__init__(n_slots, block_size)
        self.of_a_row = -(-longest // block_size) * block_size  # slots

    def whole(self, request: Request) -> int:
        return self.of_a_row


@dataclass(frozen=True, slots=True)
class WholeBatches(FirstCome):
    """The policy of a `BatchCore`, which plans by itself. `longest`: tokens of the longest sequence. `delay`: seconds
    for which a batch that is not full waits for more requests."""

    mbs: int = 1
    longest: int = 1
    delay: float = 0.0

    @property
    def name(self) -> str:
        return f"{NAME},mbs={self.mbs},longest={self.longest}" + (f",delay={self.delay}" if self.delay else "")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({PARTS})

    def memory(self, n_slots: int, block_size: int) -> Dense:
        return Dense(n_slots, block_size, self.longest)

    def plan(self, ready: Iterable[Request], live: Sequence[Request], limits: Limits, memory: Memory) -> Plan:
        raise AssertionError("a BatchCore asks for no plan")

    def violations(self, requests: Sequence[Request], memory: Memory) -> list[str]:
        return memory.violations(requests)

    @classmethod
    def read(cls, text: str) -> "WholeBatches":
        """Reads a policy's name. Raises ValueError."""
        try:
            parts = dict(part.split("=") for part in text.split(",")[1:])
            mbs, longest, delay = int(parts.pop("mbs")), int(parts.pop("longest")), float(parts.pop("delay", 0))
            found = cls(mbs=mbs, longest=longest, delay=delay)
        except (KeyError, ValueError):
            parts, found = {"": ""}, cls()
        if parts or min(found.mbs, found.longest) < 1 or not 0 <= found.delay < inf:
            raise ValueError(f"policy: {text!r} is not as in {NAME},mbs=4,longest=1024")
        return found


def slots_for(max_bs: int, longest: int, block_size: int) -> int:
    """Slots that are allocated beforehand."""
    return max_bs * -(-longest // block_size) * block_size


class BatchCore(Core):
    """Runs one batch of at most `max_bs` requests after the other, each until all its requests have ended.

    `n_workers` is the number of microbatches. Up to `max_bs` further requests wait here for the next batch.
    """

    policy: WholeBatches

    def __init__(self, max_bs: int, block_size: int, policy: WholeBatches) -> None:
        super().__init__(max_bs, -(-max_bs // policy.mbs), block_size, 0, policy)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._scheduler = RequestLevel(self.limits.max_bs, self.policy.delay)
        self._end_at = 0  # positions of a row when the last iteration of the batch has run
        self._made: dict[int, list[int]] = {}  # tokens by claim, until the batch ends
        self._reasons: dict[int, Reason] = {}  # why requests of the batch have ended

    @property
    def tick_at(self) -> float | None:
        return self._scheduler.wake_at

    def room(self) -> Room:
        """For the next batch. The pool's queue keeps what comes after it."""
        if not self._formed or self._draining:
            return Room(0, 0)
        count = self.limits.max_bs - len(self._scheduler.queue)
        return Room(count, count * slots_for(1, self.policy.longest, self.block_size))

    def step(self, event: Event) -> list[Action]:
        actions: list[Action] = []
        match event:
            case EngineReady():
                self._ready(event)
            case EngineLost():
                actions += self._lost()
            case Arrived():
                actions += self._arrived(event)
                known = tuple(one for one in event.requests if one.claim in self._claims)
                if known and not self._draining:
                    actions += self._tell(scheduler.Arrived(event.now, known))
            case Cancelled():
                actions += self._cancel(event.now, event.claims)
            case BatchReturned():
                actions += self._returned(event)
            case Drain():
                self._draining = True  # the batch that runs goes on to its end, and no other begins
                self._tell(scheduler.Cancelled(event.now, tuple(one.claim for one in self._scheduler.queue)))
            case Tick():
                actions += self._expire(event.now)
                actions += self._tell(scheduler.Wake(event.now))
            case Measured():
                pass
        return sorted(actions, key=lambda action: not isinstance(action, ScheduleBatch))

    def _ready(self, event: EngineReady) -> None:
        """Raises FailedPrecondition where the memory is too small."""
        need = slots_for(self.limits.max_bs, self.policy.longest, self.block_size)
        if event.n_slots < need:
            raise FailedPrecondition(
                f"slots: {self.limits.max_bs} sequences of {self.policy.longest} tokens need {need}; the engine's "
                f"memory has {event.n_slots}"
            )
        self.memory = self.policy.memory(event.n_slots, self.block_size)
        self._iteration, self._formed, self._draining = event.iteration, True, False
        self._free_rows.clear()

    def _tell(self, event: scheduler.Event) -> list[Action]:
        """Tells the scheduler an event, and does what it says."""
        actions: list[Action] = []
        for action in self._scheduler.step(event):
            match action:
                case RunBatch(requests):
                    actions += self._begin([self._claims[one.claim] for one in requests])
                case Finished(claims):
                    actions += self._finish(claims, event.now)
        return actions

    def _begin(self, batch: Sequence[Request]) -> list[Action]:
        """The first iteration of each microbatch, at the length of the shortest prompt of the whole batch."""
        shortest = min(request.known for request in batch)
        self._end_at = max(request.arrived.max_tokens for request in batch) - 1
        self._made = {request.claim: [] for request in batch}
        first = list[Action]()
        for at in range(0, len(batch), self.policy.mbs):
            micro, members = batch[at : at + self.policy.mbs], []
            for request, (row, blocks, _) in zip(micro, self.memory.admit(micro), strict=True):
                request.begin(row, len(blocks) * self.block_size)
                members.append(self._member(request, shortest, blocks))
            first.append(self._issued(micro, members, admitted=len(micro)))
        return first

    def _issued(self, micro: Sequence[Request], members: Sequence[Any], admitted: int = 0) -> ScheduleBatch:
        self.in_flight.append(Flight(self._iteration, tuple(micro), tuple(member.outputs for member in members)))
        batch = ScheduleBatch(
            *(self._iteration, tuple(members), admitted, tuple(self._free_rows), self.memory.reserved),
            stop="the batch that began runs to its end",
        )
        self._free_rows.clear()
        self._iteration += 1
        return batch

    def _returned(self, event: BatchReturned) -> list[Action]:
        """A microbatch's tokens. It runs on, dead rows and all, or the batch ends with its last microbatch."""
        flight = self.in_flight.popleft()
        assert event.iteration == flight.iteration, f"{event.iteration} returned before {flight.iteration}"
        place = -1
        for request, most in zip(flight.requests, flight.outputs, strict=True):
            request.in_flight -= 1
            if not most:
                continue  # its prompt is longer
            place += 1
            for token in event.made[place]:
                request.last_token = token
            if not request.ended:
                self._learn(request, event.made[place], stuck=place in event.stuck or place in event.waiting)
        whole = [self._claims[one.claim] for one in self._scheduler.running]
        if flight.requests[0].computed < self._end_at and not all(request.ended for request in whole):
            return [self._issued(flight.requests, [self._member(request, 1) for request in flight.requests])]
        return [] if self.in_flight else self._tell(scheduler.BatchReturned(event.now))

    def _learn(self, request: Request, made: Sequence[int], stuck: bool) -> None:
        if not made:
            request.last_token = request.last_token or 0  # the dead row needs one
            self._end_row(request, Reason.STUCK if stuck else Reason.NOT_FINITE)
            return
        request.generated += 1
        self._made[request.claim].append(made[0])
        if (reason := request.end_by(made[0])) is not None:
            self._end_row(request, reason)

    def _end_row(self, request: Request, reason: Reason) -> None:
        """Ends a row's request: from now on the row is dead."""
        request.ended = True
        self._reasons[request.claim] = reason

    def _finish(self, claims: Sequence[int], now: float) -> list[Action]:
        """The batch has ended: its answers return, and its rows are free. claims: of requests that are still wanted."""
        outcomes = list[Outcome]()
        for claim in claims:
            request, made = self._claims[claim], self._made[claim]
            late = request.overdue(now)
            reason = Reason.DEADLINE if late else self._reasons[claim]
            with_token = not late and reason not in (Reason.NOT_FINITE, Reason.STUCK)
            first = request.arrived.generated
            outcomes += [Outcome(claim, first + n, token, None) for n, token in enumerate(made)]
            if with_token:
                outcomes[-1] = outcomes[-1]._replace(finish=reason)
            else:
                outcomes.append(Outcome(claim, request.generated, None, reason))
        for request in [one for one in self._pool if one.row is not None]:
            self._remove(request)
        self._made, self._reasons = {}, {}
        return [Commit(None, tuple(outcomes))] if outcomes else []

    def _cancel(self, now: float, claims: Iterable[int]) -> list[Action]:
        """Cancels requests: those that wait are gone, those that run go on as dead rows."""
        known = tuple(claim for claim in claims if claim in self._claims)
        for request in [self._claims[claim] for claim in known]:
            request.ended = True
            if request.row is None:
                self._remove(request)
        return self._tell(scheduler.Cancelled(now, known)) if known else []

    def _expire(self, now: float) -> list[Action]:
        """Ends requests that wait past their deadline."""
        late = [request for request in self._pool if request.row is None and request.overdue(now)]
        outcomes = tuple(Outcome(one.claim, one.generated, None, Reason.DEADLINE) for one in late)
        return [*self._cancel(now, [one.claim for one in late]), Commit(None, outcomes)] if late else []

    def _lost(self) -> list[Action]:
        """Gives back all of the batch, whatever it has made: nothing of it was committed."""
        requests = tuple((r.claim, r.running) for r in self._pool if not r.ended or r.claim in self._reasons)
        super()._lost()
        self._begin_anew()
        return [GiveBack(requests)] if requests else []

    def state(self) -> dict[str, Any]:
        batch = {
            "scheduler": self._scheduler.state(),
            "end_at": self._end_at,
            "made": list(self._made.items()),
            "reasons": list(self._reasons.items()),
        }
        return super().state() | {"batch": batch}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        batch = state["batch"]
        arrivals: dict[int, Arrival] = {claim: request.arrived for claim, request in self._claims.items()}
        self._scheduler.restore(batch["scheduler"], arrivals)
        self._end_at, self._made = batch["end_at"], {claim: list(made) for claim, made in batch["made"]}
        self._reasons = {claim: Reason(reason) for claim, reason in batch["reasons"]}
