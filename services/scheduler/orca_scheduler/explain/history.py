"""An engine's history, made of its journals: its batches, its requests, and how much room it had at each moment.

Moments are ns of the wall clock. A journal's events have the clock of the scheduler that wrote it, and each heading has
both.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from orca_common.reservation import Reservation

from ..core.core import (
    Adopted,
    Arrived,
    BatchReturned,
    BeginHere,
    Cancelled,
    Commit,
    Drain,
    EngineLost,
    EngineReady,
    GiveBack,
    HandOver,
    LetGo,
    Pull,
    Pulled,
    ScheduleBatch,
)
from ..core.policy import Policy
from ..core.request import Arrival, Phase, Request
from ..core.sets import PAPER, policy_named
from ..master.journal import CoreStep, Heading, LifeStep, Line, Named, Note

SECOND = 1_000_000_000
GIVEN_BACK, ELSEWHERE, HANDED_OVER, TO_DECODE = (
    "given back",
    "ended elsewhere",
    "handed over",
    "handed to an engine that decodes",
)  # ends that no reason of the core has


@dataclass(slots=True, eq=False)
class Batch:
    """An iteration. One that has neither returned nor was lost is in flight."""

    iteration: int
    scheduled: int
    size: int
    stop: str  # why the batch holds no more
    returned: int | None = None
    lost: int | None = None
    late: int = 0  # ns for which its tokens waited until the pool kept up


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's part in a batch."""

    batch: Batch
    phase: Phase
    count: int  # positions
    samples: bool
    admitted: bool  # the request begins, or begins again, in a new row


@dataclass(slots=True, eq=False)
class Stay:
    """A request at the engine, from its claim until it left."""

    claim: int
    request: str
    exchange: str = ""  # X-Request-Id of the HTTP request that it came with
    submitted: int | None = None  # by the pool's clock
    claimed: int = 0
    arrival: int = 0  # its place in the queue
    need: int = 0  # slots with which it begins
    prefix_at: str = ""  # the engine that had its prefix as it was submitted
    overtaken: int = 0  # how many were taken before it as it waited for that engine
    inputs: int = 0  # tokens of its prompt
    admitted: bool = False  # the core knows it
    turns: list[Turn] = field(default_factory=list)
    tokens: int = 0  # that it had when it came, and those since
    slots: int = 0  # that it holds
    preempted: bool = False  # it gave up its row, and has no other yet
    pulled: bool = False  # another engine had begun it, and this one pulled its keys and values
    pull_ended: int | None = None  # when they had come, or could not
    left: int | None = None
    why: str = ""  # it left: a reason of the core, or GIVEN_BACK, ELSEWHERE, HANDED_OVER, TO_DECODE


class State(NamedTuple):
    """The engine from one moment until the next one."""

    at: int
    formed: bool
    live: int  # requests that it has
    room: int  # slots that nothing has, and nothing that was claimed needs
    why: str = ""  # the last loss, while it is not formed


class History:
    """One engine's past. `end`: the moment of the last event."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.states: list[State] = []
        self.batches: list[Batch] = []
        self.stays: list[Stay] = []
        self.max_bs = self.n_workers = self.end = 0
        self._term = -1
        self._offset = 0  # from the events' clock to the wall's
        self._live: dict[int, Stay] = {}  # by claim
        self._known: dict[int, Stay] = {}  # of this term, those included that have left
        self._kept: dict[int, Stay] = {}  # that have left and still hold slots
        self._flying: dict[int, Batch] = {}  # by iteration
        self._names: dict[int, Named] = {}
        self._policy: Policy = PAPER
        self._reservation = Reservation(1)
        self._block = 1
        self._n_slots = self._reserved = self._spare = 0
        self._formed, self._why = False, ""

    # -- what it is asked

    @property
    def begin(self) -> int:
        return self.states[0].at if self.states else 0

    @property
    def places(self) -> int:
        """Requests that it takes at a time."""
        return self.max_bs * self.n_workers

    def states_between(self, begin: int, end: int) -> Iterable[tuple[State, int, int]]:
        """Yields the states of a time, each with its part of it. Nothing is known before the first one."""
        first = bisect_right(self.states, begin, key=lambda state: state.at) - 1
        for n in range(max(first, 0), len(self.states)):
            state = self.states[n]
            if state.at >= end:
                break
            until = self.states[n + 1].at if n + 1 < len(self.states) else end
            left, right = max(state.at, begin), min(until, end)
            if left < right:
                yield state, left, right

    def batches_between(self, begin: int, end: int) -> list[Batch]:
        """The batches that were scheduled in this time: from `begin` on, before `end`."""
        first = bisect_left(self.batches, begin, key=lambda batch: batch.scheduled)
        last = bisect_left(self.batches, end, lo=first, key=lambda batch: batch.scheduled)
        return self.batches[first:last]

    def state_at(self, at: int) -> State | None:
        """The engine's state at a moment; None: no journal has it."""
        n = bisect_right(self.states, at, key=lambda state: state.at) - 1
        return self.states[n] if n >= 0 else None

    def in_flight(self, at: int) -> int:
        """Batches that were in flight at a moment."""
        last = bisect_right(self.batches, at, key=lambda batch: batch.scheduled)
        near = self.batches[max(last - self.n_workers - 1, 0) : last]  # a run-ahead is one more
        ends = (batch.returned if batch.lost is None else batch.lost for batch in near)
        return sum(end is None or end > at for end in ends)

    def holders(self, begin: int, end: int) -> list[Stay]:
        """The requests that had slots at some moment of this time, the largest first."""
        found = [
            stay
            for stay in self.stays
            if stay.turns and stay.turns[0].batch.scheduled < end and (stay.left is None or stay.left > begin)
        ]
        return sorted(found, key=lambda stay: -stay.need)

    # -- how it is made

    def take(self, lines: Iterable[Line]) -> None:
        """Goes on with a journal's next lines."""
        for line in lines:
            match line:
                case Heading():
                    self._begin(line)
                case CoreStep():
                    self._step(line)
                case LifeStep(event):
                    self.end = max(self.end, self._wall(event.now))
                case Note(values):
                    self._note(values)

    def _wall(self, now: float) -> int:
        return round(now * SECOND) + self._offset

    def _begin(self, heading: Heading) -> None:
        numbers = heading.numbers
        self._offset = heading.wall - round(heading.now * SECOND)
        self.max_bs, self.n_workers = numbers["max_bs"], numbers["n_workers"]
        self._block = numbers["block_size"]
        self._adopt(numbers["policy"])
        self._names |= heading.claims
        if heading.term == self._term:
            return  # a term goes on in another file
        self._term = heading.term
        for stay in self._live.values():
            self._leave(stay, heading.wall, HANDED_OVER)
        self._live.clear()
        self._known.clear()
        self._kept.clear()
        self._lose(heading.wall)
        state: dict[str, Any] = heading.state
        self._formed = state["formed"] and not state["draining"]
        self._why = ""
        self._hold(state["memory"].get("n_slots", 0))
        rows = {row: len(blocks) for row, blocks in state["memory"].get("rows", [])}
        for values in state["requests"]:
            # Of any release: fields that this one does not have are left out.
            request = msgspec.convert(values, Request)
            stay = self._arrive(request.arrived, heading.wall)
            stay.tokens = request.generated
            stay.slots = 0 if request.row is None else rows.get(request.row, 0) * self._block
            if request.row is None and request.preemptions:
                self._preempted(stay)
        self._reserved = sum(rows.values()) * self._block
        self._stand(heading.wall)

    def _adopt(self, policy: str) -> None:
        self._policy = policy_named(policy)
        self._reservation = Reservation(self._block, self._policy.reserves_output)

    def _arrive(self, arrival: Arrival, at: int) -> Stay:
        stay = self._live.get(arrival.claim) or self._claim(arrival.claim, at)
        stay.admitted, stay.arrival, stay.tokens = True, arrival.arrival, arrival.generated
        stay.need = self._reservation.upfront(arrival.input_tokens, arrival.max_new_tokens)
        stay.inputs = arrival.input_tokens
        return stay

    def _hold(self, n_slots: int) -> None:
        """The engine has memory for this number of slots."""
        memory = self._policy.memory(n_slots, self._block)
        self._n_slots, self._spare = memory.n_slots, memory.spare

    def _preempted(self, stay: Stay) -> None:
        """Takes a preemption: the request begins again with its prompt and its tokens."""
        stay.slots, stay.preempted = 0, True
        stay.need = self._reservation.upfront(stay.inputs + stay.tokens, 0)

    def _claim(self, claim: int, at: int) -> Stay:
        named = self._names.get(claim)
        stay = Stay(claim, named.request if named else f"claim {claim}", claimed=at)
        if named is not None:
            stay.exchange, stay.submitted = named.exchange, named.submitted * 1000 or None
        self._live[claim] = self._known[claim] = stay
        self.stays.append(stay)
        return stay

    def _note(self, values: dict[str, Any]) -> None:
        match values:
            case {"claims": claims, "submitted": submitted, "now": now}:
                for text, name in claims.items():
                    claim = int(text)
                    self._names[claim] = Named(name, submitted[text], values.get("exchanges", {}).get(text, ""))
                    if claim not in self._known:
                        stay = self._claim(claim, self._wall(now))
                        stay.prefix_at, stay.overtaken = values.get("prefix_at", {}).get(text, ("", 0))
            case {"lost": verdict, "now": now}:
                self._why = verdict
                self._stand(self._wall(now))
            case _:
                pass

    def _step(self, line: CoreStep) -> None:
        event, at = line.event, self._wall(line.event.now)
        taken = at + round(line.late * SECOND)
        match event:
            case Adopted():
                self._adopt(event.policy)
            case EngineReady():
                self._formed, self._reserved = True, 0
                self._hold(event.n_slots)
            case EngineLost():
                self._formed = False
                self._lose(at)
            case Drain():
                self._formed, self._why = False, "it was being left"
            case Arrived():
                for arrival in event.requests:
                    known = self._known.get(arrival.claim)
                    if known is None or not known.admitted:
                        self._arrive(arrival, at)
            case Cancelled():
                for claim in event.claims:
                    self._end(claim, at, ELSEWHERE)
                self._let_go(event.claims)
            case LetGo():
                self._let_go(event.claims)
            case Pulled():
                if (stay := self._live.get(event.claim)) is not None and stay.pulled:
                    stay.pull_ended = at
            case BatchReturned():
                batch = self._flying.pop(event.iteration, None)
                if batch is not None:
                    batch.returned, batch.late = at, taken - at
            case _:
                pass
        for action in line.actions:
            match action:
                case Commit():
                    for outcome in action.outcomes:
                        stay = self._live.get(outcome.claim)
                        if stay is not None and outcome.token is not None:
                            stay.tokens += 1
                        if outcome.finish is not None:
                            self._end(outcome.claim, at, str(outcome.finish))
                case GiveBack():
                    for claim, _ in action.requests:
                        self._end(claim, at, GIVEN_BACK)
                case HandOver():
                    for claim in [one.claim for one in action.requests if one.claim in self._live]:
                        self._kept[claim] = stay = self._live.pop(claim)
                        self._leave(stay, at, TO_DECODE)
                case Pull():
                    if (stay := self._live.get(action.claim)) is not None:
                        stay.pulled, stay.slots = True, len(action.blocks) * self._block
                        self._reserved += stay.slots
                case BeginHere():
                    for stay in filter(None, (self._live.get(claim) for claim in action.claims)):
                        self._reserved -= stay.slots
                        stay.slots = 0
                case ScheduleBatch():
                    pass
        for action in line.actions:
            if isinstance(action, ScheduleBatch):  # last: its slots are those after the ends
                self._schedule(action, taken)
        if isinstance(event, EngineLost):
            self._kept.clear()
            self._reserved = self._n_slots = 0
        self._stand(taken)

    def _lose(self, at: int) -> None:
        """Marks the batches in flight, which will not return to this scheduler."""
        for batch in self._flying.values():
            batch.lost = at
        self._flying.clear()

    def _schedule(self, action: ScheduleBatch, at: int) -> None:
        batch = Batch(action.iteration, at, len(action.members), action.stop)
        self.batches.append(batch)
        self._flying[action.iteration] = batch
        self._reserved = action.reserved
        for claim in action.preempted:
            if claim in self._live:
                self._preempted(self._live[claim])
        for n, member in enumerate(action.members):
            stay = self._live.get(member.claim)
            if stay is not None:
                admitted = n < action.admitted
                stay.preempted = stay.preempted and not admitted
                stay.turns.append(Turn(batch, member.phase, member.count, member.outputs > 0, admitted))
                stay.slots += (len(member.new_blocks) - member.shared) * self._block

    def _end(self, claim: int, at: int, why: str) -> None:
        stay = self._live.pop(claim, None)
        if stay is not None:
            self._reserved -= stay.slots
            self._leave(stay, at, why)

    def _let_go(self, claims: Iterable[int]) -> None:
        """Frees the slots of requests that were handed over."""
        for stay in filter(None, (self._kept.pop(claim, None) for claim in claims)):
            self._reserved -= stay.slots

    def _leave(self, stay: Stay, at: int, why: str) -> None:
        stay.left, stay.why = at, why

    def _stand(self, at: int) -> None:
        """Notes how the engine stands from now on."""
        self.end = max(self.end, at)
        waiting = sum(stay.need for stay in self._live.values() if stay.admitted and not stay.slots)
        spare = self._spare if self._reserved else 0
        room = max(self._n_slots - self._reserved - waiting - spare, 0)
        at = max(at, self.states[-1].at) if self.states else at
        state = State(at, self._formed, len(self._live), room, "" if self._formed else self._why)
        if self.states and self.states[-1][1:] == state[1:]:
            return
        self.states.append(state)
