"""The scheduler core: Algorithm 1 as a pure state machine, `step(event) -> actions`.

See docs/design.md, "The scheduler core".

No clock, no I/O, no randomness: time and numbers come in with the events, so the same events give the same actions,
whether they come from a live engine, a simulation or a journal.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

from orca_common.protocol import SHARED

from .drafting import adapt
from .policy import Policy, limits_of
from .request import Arrival, Phase, Reason, Request
from .roles import Role
from .selection import Plan, Stop
from .sets import PAPER, policy_named

# -- events


@dataclass(frozen=True, slots=True)
class Adopted:
    """From its next formation on the engine runs by this policy, which its model can do."""

    now: float
    policy: str


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine's ranks are formed, and will free all rows. `iteration` is above every number that was used."""

    now: float
    n_slots: int
    iteration: int


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine's ranks, and all they held, are gone."""

    now: float


@dataclass(frozen=True, slots=True)
class Arrived:
    """Requests were claimed from the pool. Those that the core has already are ignored. Requests larger than the
    engine, or arriving without one, are given back."""

    now: float
    requests: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """These claims ended elsewhere: cancelled, expired, stopped by an endpoint, or claimed by another engine."""

    now: float
    claims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchReturned:
    """The oldest batch in flight came back, with the tokens of each of its members that has outputs, in their order:
    none of a member whose logits were not finite, which is stuck, or which waits. `offered` says how many drafts there
    are to follow them, and `keys` are those of the blocks that they fill."""

    now: float
    iteration: int
    made: tuple[tuple[int, ...], ...]
    stuck: tuple[int, ...] = ()  # places in `made` without a token: none can follow by the form of the answer
    waiting: tuple[int, ...] = ()  # the same: the form's work is not done, so the last position runs again
    offered: tuple[int, ...] = ()  # for each member in `made`; empty: none for any
    keys: tuple[tuple[int, str], ...] = ()  # a claim, and the key of its next block


@dataclass(frozen=True, slots=True)
class Drain:
    """Schedule nothing more: the scheduler or a rank is leaving, or the engine is no longer discovered."""

    now: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines, and the moment that `Core.tick_at` named."""

    now: float


@dataclass(frozen=True, slots=True)
class Measured:
    """By what iterations took, they may have this many positions from now on, or one more than `max_bs`."""

    now: float
    positions: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """A pull has ended: on all ranks, or on none so that the request could go on."""

    now: float
    claim: int
    done: bool


@dataclass(frozen=True, slots=True)
class LetGo:
    """The rows of these claims, which were handed over, are not needed any more."""

    now: float
    claims: tuple[int, ...]


Event = (
    Adopted | EngineReady | EngineLost | Arrived | Cancelled | BatchReturned | Drain | Tick | Measured | Pulled | LetGo
)

# -- actions


class Member(NamedTuple):
    """One request's part in an iteration: `count` positions from `start` on.

    Ranks have the tokens of an admission; `token` is that of a later position. With a run-ahead it is None, and they
    take it from their own memory. Drafts are guesses for the positions behind those whose tokens are known. The
    iteration makes a token at each of them, and those count that follow right drafts alone: the stream is the one that
    there is without drafts.
    """

    claim: int
    row: int
    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - a tuple's method, which is not called here
    outputs: int  # how many tokens it may make. 0: a part of a prompt; 1: it reaches the last known one; more: drafts
    new_blocks: tuple[int, ...]  # that the row gets, behind those that it has
    token: int | None
    shared: int = 0  # how many of `new_blocks`, the first ones, other rows have: a new row begins behind them

    @property
    def drafts(self) -> int:
        """How many of its last positions are drafts."""
        return max(self.outputs - 1, 0)

    @property
    def phase(self) -> Phase:
        return Phase.of(0 if self.shared else self.start, self.count - self.drafts)


@dataclass(frozen=True, slots=True)
class ScheduleBatch:
    """Run one iteration. `members` stand in the order in which ranks run them: the first `admitted` have new rows, the
    others have run before; each kind in the policy's order. `free_rows` ended since the last one."""

    iteration: int
    members: tuple[Member, ...]
    admitted: int
    free_rows: tuple[int, ...]
    reserved: int  # slots, after this selection
    stop: str  # why the batch holds no more
    preempted: tuple[int, ...] = ()  # claims that gave up their rows, which are among `free_rows`

    @property
    def positions(self) -> int:
        """Positions that the iteration computes, those of drafts included."""
        return sum([member.count for member in self.members])


class Outcome(NamedTuple):
    """A new token of a request, or its end, or both."""

    claim: int
    base: int  # index of the token
    token: int | None
    finish: Reason | None


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens and ends for the pool. `iteration` made the tokens; None: only ends, or tokens of several iterations,
    which then have no logprobs."""

    iteration: int | None
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Requests to return to the pool: (claim, was it RUNNING when the engine was lost)."""

    requests: tuple[tuple[int, bool], ...]


class HandedOver(NamedTuple):
    """A request that leaves with its first token: its row has the keys and values of this number of positions."""

    claim: int
    row: int
    positions: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """Requests for engines that decode, whose tokens are in this step's commit. They keep their rows until LetGo."""

    requests: tuple[HandedOver, ...]


@dataclass(frozen=True, slots=True)
class Pull:
    """Give a request its row and blocks, and fill them with the keys and values of `positions` that another engine has.

    It has a number of its own among the iterations, and no members. `free_rows` as in ScheduleBatch.
    """

    iteration: int
    claim: int
    row: int
    positions: int
    blocks: tuple[int, ...]
    free_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BeginHere:
    """These requests, which another engine had begun, begin again on this one: their pull has failed, or was not
    `tried` because the last ones had failed. The other engine may let go of them."""

    claims: tuple[int, ...]
    tried: bool


Action = ScheduleBatch | Commit | GiveBack | HandOver | Pull | BeginHere

NOTHING = Plan((), Stop.POOL)
PULLS = 3  # in a row that failed, after which none is tried for PAUSE seconds, and then one at a time
PAUSE = 10.0  # as long as one pull may take
FORM = 2  # of states: in 1 the core had tokens of prompts and drafts, and made keys of them

# One of each is made for each row of an iteration, so from a tuple: in 0.15 us, where Member(..) itself takes 0.4.
_member: Callable[[tuple[int, int, int, int, int, tuple[int, ...], int | None, int]], Member]
_member = partial(cast(Any, tuple).__new__, Member)
_outcome: Callable[[tuple[int, int, int | None, Reason | None]], Outcome]
_outcome = partial(cast(Any, tuple).__new__, Outcome)


@dataclass(frozen=True, slots=True)
class Room:
    """The room for requests that may be claimed from the pool."""

    requests: int
    slots: int


class Flight(NamedTuple):
    """A batch in flight: its requests, and how many tokens each of them may get."""

    iteration: int
    requests: tuple[Request, ...]
    outputs: tuple[int, ...]


class Core:
    """Schedules one engine: at most `max_bs` requests a batch and `n_workers` batches in flight, chosen by `policy`.

    `run_ahead` 0 is the paper's loop. With 1, one batch more may be in flight: requests of the oldest batch may be
    scheduled again before their tokens are back. The core then learns one iteration late that a request ended by its
    token, and discards what that iteration made of it. An end by length is known in time.

    With a `role` it runs one phase alone: requests leave with their first token, or come with their keys and values.
    """

    def __init__(
        self,
        max_bs: int,
        n_workers: int,
        block_size: int,
        run_ahead: int = 0,
        policy: Policy = PAPER,
        role: Role = Role.MIXED,
    ) -> None:
        assert run_ahead in (0, 1), "a request is in one batch in flight, or in two"
        assert not (run_ahead and role), "requests change engines with all their tokens known"
        self.role, self._max_bs = role, max_bs
        self.n_workers, self.block_size, self.run_ahead = n_workers, block_size, run_ahead
        self._adopt(policy)
        self.in_flight: deque[Flight] = deque()  # oldest first
        self._pool: list[Request] = []  # live requests, in the policy's order
        self._claims: dict[int, Request] = {}
        self._kept: dict[int, Request] = {}  # handed over, by claim: another engine may still need their rows
        self._free_rows: list[int] = []  # ended since the last batch: the ranks do not know yet
        self._preempted: set[Request] = set()  # in this step
        self._iteration = 0
        self._last_arrival = 0
        self._formed = self._draining = False
        self.failed_pulls = 0  # in a row
        self.pull_at = 0.0  # no pull is tried before

    def _adopt(self, policy: Policy) -> None:
        self.policy = policy
        self.limits = limits_of(policy, self._max_bs, self.n_workers)
        self._shares = SHARED in policy.needs
        self.memory = policy.memory(0, self.block_size)

    @property
    def tick_at(self) -> float | None:
        """The moment of a Tick that it waits for, beside those of deadlines; None: it waits for none."""
        return None

    @property
    def n_scheduled(self) -> int:
        return len(self.in_flight)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Live requests, in the policy's order, those included that ended while RUNNING."""
        return tuple(self._pool)

    @property
    def kept(self) -> tuple[Request, ...]:
        """Requests that were handed over and still have their rows."""
        return tuple(self._kept.values())

    def room(self) -> Room:
        """The number of further requests that may be claimed, and their slots.

        Those in their last iteration, as far as that is known, take no place in another batch. So the next ones are
        claimed while it runs, and stand in the pool when it returns. Slots count from the next moment at which a batch
        may be scheduled: now, or when the oldest batch in flight returns.
        """
        if not self._formed or self._draining:
            return Room(0, 0)
        staying = self._staying()
        leaving = self._leaving() if len(staying) < len(self._pool) else []
        slots = self.memory.room([r for r in self._pool if r.row is None], leaving)
        return Room(max(0, self.limits.places - len(staying)), max(0, slots))

    def _staying(self) -> list[Request]:
        """Live requests, in the policy's order, that may be in a later batch than those in flight: also one that its
        drafts would end, for they may be wrong."""
        drafting = [flight for flight in self.in_flight if max(flight.outputs) > 1]
        drafted = {r for flight in drafting for r, most in zip(*flight[1:], strict=True) if most > 1}
        # `goes_on`, of which a call takes 0.1 us a row
        return [r for r in self._pool if not r.ended and (r.known < r.arrived.max_tokens or r in drafted)]

    def _leaving(self) -> list[int]:
        """Rows that are free before another batch may be scheduled, as far as is known before the oldest returns."""
        if self.n_scheduled < self.n_workers + self.run_ahead:
            return []
        _, requests, outputs = self.in_flight[0]
        ends = (r for r, most in zip(requests, outputs, strict=True) if r.in_flight == 1 and most < 2 and not r.goes_on)
        return [request.row for request in ends if request.row is not None]

    def yielding(self) -> list[tuple[int, int]]:
        """Class and order of requests that give way to new ones of a higher class, which come before them: the last one
        first. Theirs are the places of an engine that is full; they pause then, and keep their slots. As many requests
        as there are places may be paused. Those in their last iteration have no place any more."""
        places, staying = self.limits.places, self._staying()
        if not self._formed or self._draining or self.role or len(staying) < places:
            return []
        most = max(0, 2 * places - len(staying))
        return [(r.arrived.priority, r.arrived.arrival) for r in staying[:places]][::-1][:most]

    def step(self, event: Event) -> list[Action]:
        """Applies one event and says what is to be done about it, in this order.

        Batches come first: stage 0 would wait while a commit is put together.
        """
        actions: list[Action] = []
        self._preempted.clear()
        match event:
            case Adopted():
                assert not self._formed, "an engine runs by one policy from its formation on"
                self._adopt(policy_named(event.policy))
            case EngineReady():
                assert not self._pool, "an engine was formed before its loss was told"
                self.memory = self.policy.memory(event.n_slots, self.block_size)
                self._iteration, self._formed, self._draining = event.iteration, True, False
                self._free_rows.clear()
            case EngineLost():
                actions += self._lost()
            case Arrived():
                actions += self._arrived(event)
            case Cancelled():
                for claim in event.claims:
                    if claim in self._claims:
                        self._end(self._claims[claim])
                self._let_go(event.claims)
            case BatchReturned():
                actions += self._returned(event)
            case Drain():
                self._draining = True
            case Tick():
                actions += self._expire(event.now)
            case Measured():
                self.limits = replace(self.limits, positions=max(event.positions, self.limits.max_bs + 1))
            case Pulled():
                actions += self._pulled(event)
            case LetGo():
                self._let_go(event.claims)
        batches: list[Action] = []
        if self.role is Role.DECODE:
            if self.failed_pulls >= PULLS:
                actions += self._begin_untried(event.now)
            batches += self._begin_pulls()
        while (batch := self._schedule()) is not None:
            batches.append(batch)
        return batches + actions

    def state(self) -> dict[str, Any]:
        """The whole state as plain values, for the head of a journal. `restore` takes it."""
        return {
            "form": FORM,
            "memory": self.memory.state(),
            "requests": [asdict(request) for request in self._pool],
            "in_flight": [
                (number, [r.claim for r in requests], outputs) for number, requests, outputs in self.in_flight
            ],
            "free_rows": list(self._free_rows),
            "iteration": self._iteration,
            "last_arrival": self._last_arrival,
            "formed": self._formed,
            "draining": self._draining,
            "positions": self.limits.positions,
            **({"kept": [asdict(request) for request in self._kept.values()]} if self._kept else {}),
            **({"pulls": (self.failed_pulls, self.pull_at)} if self.failed_pulls else {}),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over the `state` of another core that was made with the same numbers. It may have gone through JSON.

        Raises ValueError for one of another form.
        """
        if (form := state.get("form", 1)) != FORM:
            raise ValueError(f"the journal has form {form}: the release that wrote it replays it, this one form {FORM}")
        self.memory.restore(state["memory"])
        self._pool = [Request.restored(values) for values in state["requests"]]
        self._claims = {request.claim: request for request in self._pool}
        self.in_flight = deque(
            Flight(iteration, tuple(self._claims[claim] for claim in claims), tuple(outputs))
            for iteration, claims, outputs in state["in_flight"]
        )
        self._free_rows, self._iteration = list(state["free_rows"]), state["iteration"]
        self._last_arrival = state["last_arrival"]
        self._formed, self._draining = state["formed"], state["draining"]
        self.limits = replace(self.limits, positions=state.get("positions", self.limits.positions))
        kept = [Request.restored(values) for values in state.get("kept", ())]
        self._kept = {request.claim: request for request in kept}
        self.failed_pulls, self.pull_at = state.get("pulls", (0, 0.0))

    def _schedule(self) -> ScheduleBatch | None:
        """Algorithm 1, lines 3 to 7: one batch, if one may be in flight and there is work for it."""
        if not self._formed or self._draining:
            return None
        plan = NOTHING
        if self._shares and self.n_scheduled < self.n_workers + self.run_ahead:
            for request in self._pool:
                if request.row is None and not request.elsewhere:
                    request.computed = self.memory.match(request)
        if self.n_scheduled < self.n_workers:  # line 8
            plan = self.policy.plan(self._waiting(), self._pool, self.limits, self.memory)  # line 4
        if not plan.batch and self.run_ahead and self.n_scheduled <= self.n_workers:
            plan = self.policy.plan(self._returning(), self._pool, self.limits, self.memory)
        if not plan.batch:
            return None  # an empty batch is never run: the next event comes here again
        for request in plan.preempt:
            self._preempt(request)
        new = [part for part in plan.batch if part[0].row is None]
        going_on, drafts, members = plan.batch, plan.drafts, list[Member]()
        if new:
            going_on = [part for part in plan.batch if part[0].row is not None]
            begun = self.memory.admit([request for request, _ in new])
            for (request, count), (row, blocks, shared) in zip(new, begun, strict=True):
                request.begin(row, len(blocks) * self.block_size)
                request.filled = shared
                members.append(self._member(request, count, blocks, shared))
        if drafts:
            members += [self._member(r, count, drafts=drafts.get(r.claim, 0)) for r, count in going_on]
        else:
            members += [self._member(request, count) for request, count in going_on]
        parts = [*new, *going_on]
        requests, outputs = tuple([part[0] for part in parts]), tuple([member[4] for member in members])
        self.in_flight.append(Flight(self._iteration, requests, outputs))  # line 7: n_scheduled grows by one batch
        action = ScheduleBatch(
            self._iteration,
            tuple(members),
            len(new),
            tuple(self._free_rows),
            self.memory.reserved,
            str(plan.stop),
            tuple(request.claim for request in plan.preempt),
        )
        self._free_rows.clear()
        self._iteration += 1
        return action

    def _waiting(self) -> Iterator[Request]:
        """Line 17: the pool without RUNNING requests.

        Nor those that gave up their rows in this very step: their last tokens are not settled when its batches leave.
        """
        if self._preempted or self.role:
            ready = (r for r in self._pool if not r.in_flight and not r.elsewhere)
            return (request for request in ready if request not in self._preempted)
        return (request for request in self._pool if not request.in_flight)

    def _returning(self) -> Iterator[Request]:
        """The same, as if the oldest batch had returned and none of its requests had ended by its token. How far a
        request with drafts comes is not known before."""
        oldest = {r for r, outputs in zip(*self.in_flight[0][1:], strict=True) if outputs < 2} if self.in_flight else ()
        return (
            r
            for r in self._pool
            if (not r.in_flight and r not in self._preempted) or (r.in_flight == 1 and r in oldest and r.goes_on)
        )

    def _grown(self, request: Request, count: int) -> tuple[int, ...]:
        """Blocks that a row gets for the request's next `count` positions."""
        need = self.memory.need(request, count)
        if not need or request.row is None:
            return ()
        blocks = self.memory.grow(request.row, need)
        request.holds += len(blocks) * self.block_size
        return blocks

    def _member(
        self,
        request: Request,
        count: int,
        blocks: tuple[int, ...] = (),
        shared: int = 0,
        drafts: int = 0,
    ) -> Member:
        """The request's part in the batch that is being made. blocks: of a new row; others grow here."""
        start, known, run, outputs = request.computed, request.known, count, 0
        end = start + count
        assert start < end <= known, "a plan runs a position whose token is not known"
        if end == known:
            outputs, request.initiated = 1, True
        if drafts:
            outputs, run = outputs + drafts, count + drafts
            assert 1 < outputs <= request.arrived.max_tokens - known, "a plan has drafts too many"
        if start + run > request.holds:
            blocks = self._grown(request, run)
        request.computed = start + run
        request.known = known + outputs
        request.in_flight += 1  # line 6
        request.iterations += 1
        if request.filled < len(request.keys) - 1 and end // self.block_size > request.filled:
            request.filled = self.memory.fill(request, end)
        token = None if self.run_ahead else request.last_token
        row: Any = request.row  # it has one now
        return _member((request.arrived.claim, row, start, run, outputs, blocks, token, shared))

    def _preempt(self, request: Request) -> None:
        """Takes a waiting request's row. It starts again, with its prompt and all tokens that it has made."""
        assert not request.running, "a RUNNING request was preempted"
        self._release(request)
        request.computed, request.last_token, request.initiated, request.offered = 0, None, False, 0
        request.preemptions += 1
        self._preempted.add(request)

    def _release(self, request: Request) -> None:
        """Takes a request's row back, if it has one. The ranks learn of it with the next batch."""
        if request.row is not None:
            self.memory.release(request.row)
            self._free_rows.append(request.row)
            request.row, request.holds = None, 0

    def _arrived(self, event: Arrived) -> list[Action]:
        if not self._formed:  # claimed while the engine was lost
            return [GiveBack(tuple((arrival.claim, False) for arrival in event.requests))] if event.requests else []
        too_large: list[tuple[int, bool]] = []  # claimed before the engine was formed again with fewer slots
        for arrival in event.requests:
            if arrival.claim in self._claims:
                continue
            if arrival.max_tokens > self.memory.n_slots:
                too_large.append((arrival.claim, False))  # a larger engine may exist: the pool knows, and judges
                continue
            in_order = arrival.arrival > self._last_arrival and self.role is not Role.DECODE  # pulls end in any order
            request = Request.of(arrival, in_order)
            self._last_arrival = max(self._last_arrival, arrival.arrival)
            insort(self._pool, request, key=self.policy.order)
            self._claims[request.claim] = request
        return [GiveBack(tuple(too_large)), *self._expire(event.now)] if too_large else self._expire(event.now)

    def _returned(self, event: BatchReturned) -> list[Action]:
        """Lines 9 to 14: the requests of a returned batch go on as INCREMENT, or end and release their slots."""
        iteration, requests, outputs = self.in_flight.popleft()
        assert event.iteration == iteration, f"iteration {event.iteration} returned before {iteration}"
        assert len(event.made) == len(outputs) - outputs.count(0), "a batch returned with tokens of other members"
        outcomes: list[Outcome] = []
        made, waiting, offered, place, tokens = event.made, event.waiting, event.offered, -1, ()
        for claim, key in event.keys:
            if claim in self._claims:
                self._claims[claim].keys.append(key)
        for request, most in zip(requests, outputs, strict=True):
            request.in_flight -= 1
            if most:
                place += 1
                tokens = made[place]
                if not tokens and place not in waiting and place not in event.stuck and request.row is not None:
                    self.memory.spoil(request.row)  # its logits were not finite
            if request.ended:
                self._end(request)  # what it generated after its end is void
            elif request.arrived.deadline is not None and request.overdue(event.now):  # a call takes 0.05 us a row
                outcomes.append(Outcome(request.claim, request.generated, None, Reason.DEADLINE))
                self._end(request)
            elif request.void:
                request.void -= 1
            elif not most:
                continue  # a part of its prompt
            elif waiting and place in waiting:
                request.wait()
            elif not tokens:
                reason = Reason.STUCK if place in event.stuck else Reason.NOT_FINITE
                outcomes.append(Outcome(request.claim, request.generated, None, reason))
                self._end(request)
            else:
                if most > 1:
                    request.fall_back(most - len(tokens))
                    adapt(request, len(tokens) - 1, most - 1)
                request.offered = offered[place] if offered else 0
                for token in tokens:
                    index = request.generated
                    request.generated += 1
                    request.last_token = token
                    finish = request.end_by(token)
                    outcomes.append(_outcome((request.arrived.claim, index, token, finish)))
                    if finish is not None:
                        self._end(request)
                        break  # tokens behind its end are void
        actions: list[Action] = [Commit(iteration, tuple(outcomes))] if outcomes else []
        return actions + self._hand_over(requests) if self.role is Role.PREFILL else actions

    def _hand_over(self, requests: Iterable[Request]) -> list[Action]:
        """Lets those of a returned batch leave that have got a token and go on."""
        leaving = [r for r in requests if not r.ended and r.generated > r.arrived.generated]
        for request in leaving:
            self._pool.remove(request)
            del self._claims[request.claim]
            self._kept[request.claim] = request
            request.in_order = False  # it runs no more, and others do
        handed = tuple(HandedOver(r.claim, r.row, r.computed) for r in leaving if r.row is not None)
        return [HandOver(handed)] if handed else []

    def _let_go(self, claims: Iterable[int]) -> None:
        """Frees the rows of those that were handed over."""
        for claim in claims:
            if claim in self._kept:
                self._release(self._kept.pop(claim))

    def _begin_pulls(self) -> list[Action]:
        """Rows for requests whose keys and values another engine has, in the policy's order, as far as slots are free.

        A request is RUNNING while its blocks are filled: until then no other may have them.
        """
        pulls = list[Action]()
        if not self._formed or self._draining:
            return pulls
        for request in [r for r in self._pool if r.elsewhere and not r.in_flight]:
            if self.memory.need(request, request.remaining) > self.memory.free:
                break
            [(row, blocks, _)] = self.memory.admit([request])
            request.begin(row, len(blocks) * self.block_size)
            request.in_flight = 1
            free_rows, iteration = tuple(self._free_rows), self._iteration
            pulls.append(Pull(iteration, request.claim, row, request.elsewhere, blocks, free_rows))
            self._free_rows.clear()
            self._iteration += 1
        return pulls

    def _pulled(self, event: Pulled) -> list[Action]:
        """The request goes on with increments. One whose blocks were not filled begins again, on this engine:
        however often pulls fail, a request waits for one of them alone."""
        request = self._claims.get(event.claim)
        if request is None or not (request.elsewhere and request.in_flight):
            return []
        request.in_flight = 0
        if request.ended:
            self._end(request)
            return []
        if event.done:
            request.computed, request.elsewhere, request.initiated = request.elsewhere, 0, True
            self.failed_pulls, self.pull_at = 0, 0.0
            return self._expire(event.now)
        self.failed_pulls += 1
        if self.failed_pulls >= PULLS and event.now >= self.pull_at:  # those under way then make it no longer
            self.pull_at = event.now + PAUSE
        return [*self._begin_here([request], tried=True), *self._expire(event.now)]

    def _begin_untried(self, now: float) -> list[Action]:
        """After failures: when their pause is over, one pull is tried, and the others wait for none."""
        pulling = any(r.elsewhere and r.in_flight for r in self._pool)
        one = now >= self.pull_at and not pulling
        return self._begin_here([r for r in self._pool if r.elsewhere and not r.in_flight][one:], tried=False)

    def _begin_here(self, requests: Sequence[Request], *, tried: bool) -> list[Action]:
        """Has requests compute what another engine has."""
        for request in requests:
            self._release(request)
            request.elsewhere = request.computed = 0
        return [BeginHere(tuple(r.claim for r in requests), tried)] if requests else []

    def _expire(self, now: float) -> list[Action]:
        """Ends requests past their deadline. A RUNNING one ends when its batch returns."""
        late = [r for r in self._pool if not r.running and r.overdue(now)]
        for request in late:
            self._end(request)
        outcomes = tuple(Outcome(r.claim, r.generated, None, Reason.DEADLINE) for r in late)
        return [Commit(None, outcomes)] if outcomes else []

    def _lost(self) -> list[Action]:
        requests = tuple((r.claim, r.running) for r in self._pool if not r.ended)
        self._kept.clear()
        self._pool.clear()
        self._claims.clear()
        self.in_flight.clear()
        self.failed_pulls, self.pull_at = 0, 0.0
        self.memory, self._formed = self.policy.memory(0, self.block_size), False
        return [GiveBack(requests)] if requests else []

    def _end(self, request: Request) -> None:
        """Ends a request now, or, when it is RUNNING, as soon as its batches have returned."""
        request.ended = True
        if not request.running:
            self._remove(request)

    def _remove(self, request: Request) -> None:
        self._pool.remove(request)
        del self._claims[request.claim]
        self._release(request)
