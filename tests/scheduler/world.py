"""A world around the core, for its tests: what an engine and a pool would see, kept in books of its own.

`World` makes events, applies the core's actions in the order in which they come, and holds both against books of its
own: who is alive, what the engine's rows and blocks hold, which position each increment writes, who may be selected,
and with a run-ahead who may be selected before its token is back. It reads the core's state only to compare it with its
books, and calls `orca_scheduler.core.invariants` only to see that nothing is wrong there either.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import NamedTuple

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
    GiveBack,
    Outcome,
    Room,
    ScheduleBatch,
    Tick,
)
from orca_scheduler.core.invariants import violations
from orca_scheduler.core.request import Arrival, Phase, Reason
from orca_scheduler.core.selection import Stop

EOS, STOP, WORD = 0, 1, 2  # tokens: of the end, of a stop, and the first of all others
WAIT = -1  # in place of a token: the form's work is not done


def made(*tokens: int | None) -> tuple[tuple[int, ...], ...]:
    """A token of each member of a batch, as it returns; None: it has none."""
    return tuple(() if token is None else (token,) for token in tokens)


class Asked(NamedTuple):
    """What a client asks for."""

    input_tokens: int
    max_new_tokens: int
    eos: bool = False
    stop: bool = False
    patience: float | None = None  # seconds until its deadline


@dataclass(eq=False)
class Life:
    """A claim's life at the engine."""

    arrived: Arrival
    since: int  # number of the event that brought it
    generated: int
    iterations: int = 0  # that it was scheduled in: each makes a token, but for `lost` ones
    lost: int = 0  # iterations in which it waited, or which went on from a token that was not made
    void: int = 0  # those of the latter kind that have not returned
    in_flight: int = 0  # iterations that have not returned
    over: bool = False  # it ended while RUNNING
    row: int | None = None
    last_token: int | None = None

    @property
    def running(self) -> bool:
        return self.in_flight > 0

    @property
    def ends(self) -> bool:
        """It ends with what is in flight, and one knows it."""
        return self.over or self.arrived.generated + self.iterations - self.lost == self.arrived.max_new_tokens

    def overdue(self, now: float) -> bool:
        return self.arrived.deadline is not None and self.arrived.deadline <= now


@dataclass
class Stored:
    """A row as the workers hold it."""

    claim: int
    blocks: tuple[int, ...]
    tokens: int  # positions written


class World:
    """One engine's core under a sequence of events; every method is one event, checked."""

    def __init__(self, max_bs: int, n_workers: int, block_size: int, run_ahead: int = 0) -> None:
        self.max_bs, self.n_workers, self.block_size, self.run_ahead = max_bs, n_workers, block_size, run_ahead
        self.core = self.fresh()
        self.record: list[tuple[Event, list[Action]]] = []
        self.now = 0.0
        self.n_slots = 0  # in whole blocks; 0: not formed
        self.formed = self.drained = False
        self.sound = True  # no event has failed
        self.next_iteration = 0
        self.lives: dict[int, Life] = {}
        self.rows: dict[int, Stored] = {}
        self.freed: set[int] = set()  # rows of requests that left; the workers have not heard it
        self.in_flight: deque[tuple[int, tuple[int, ...]]] = deque()
        self.queue: list[Arrival] = []  # given back, here or by another engine
        self.stops: Counter[Stop] = Counter()
        self.ahead: Counter[str] = Counter()  # what the run-ahead met
        self._claims = self._arrivals = 0
        self._outcomes: list[tuple[int | None, Outcome]] = []  # that the event must cause
        self._returned: list[tuple[int, bool]] = []

    def fresh(self) -> Core:
        """A core of the same numbers, at its beginning."""
        return Core(self.max_bs, self.n_workers, self.block_size, self.run_ahead)

    # -- events

    def form(self, n_slots: int, gap: int = 1) -> None:
        """The engine forms, with iteration numbers above all used before."""
        self.step(EngineReady(self.now, n_slots, self.next_iteration + gap))

    def lose(self) -> None:
        self.step(EngineLost(self.now))

    def arrive(self, *asked: Asked) -> list[int]:
        """New requests, in one event. Answers their claims."""
        return self._bring([self._ask(one) for one in asked])

    def detour(self, asked: Asked, generated: int) -> None:
        """A request goes to another engine first, which gives it back with tokens; `again` brings it here."""
        self.queue.append(replace(self._ask(asked), generated=min(generated, asked.max_new_tokens - 1)))

    def again(self, index: int) -> None:
        """A request that was given back comes, under its old arrival number and a new claim number."""
        self._bring([self.queue.pop(index % len(self.queue))])

    def echo(self, index: int) -> None:
        """A claim's answer arrives a second time."""
        known = list(self.lives.values())
        self.step(Arrived(self.now, (known[index % len(known)].arrived,)))

    def back(self, *tokens: int | None) -> None:
        """The oldest batch returns, with the first of these tokens; None: the logits were not finite or, in every
        second iteration, the request is stuck; WAIT: it waits."""
        iteration, claims = self.in_flight[0]
        assert len(tokens) >= len(claims), "the test gave too few tokens"
        without = tuple(n for n, token in enumerate(tokens[: len(claims)]) if token is None)
        waiting = tuple(n for n, token in enumerate(tokens[: len(claims)]) if token == WAIT)
        back = made(*(None if token == WAIT else token for token in tokens[: len(claims)]))
        self.step(BatchReturned(self.now, iteration, back, without if iteration % 2 else (), waiting))

    def cancel(self, *claims: int) -> None:
        self.step(Cancelled(self.now, claims))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.step(Tick(self.now))

    def drain(self) -> None:
        self.step(Drain(self.now))

    def quiesce(self) -> None:
        """Lets everything end, and looks at what is left: nothing."""
        if self.formed and not self.drained:
            left = sum(life.arrived.max_new_tokens - life.generated + life.void for life in self.lives.values())
            steps = 0
            while self.lives:
                assert self.in_flight, f"claims {sorted(self.lives)} are alive and nothing runs: a deadlock"
                self.back(*[WORD] * self.max_bs)
                steps += 1
                assert steps <= left + self.n_workers + self.run_ahead, "iterations return and requests do not advance"
        while self.in_flight:
            self.back(*[WORD] * self.max_bs)
        if self.drained:
            assert all(not life.running for life in self.lives.values())
            self.lose()
        assert not self.lives
        assert not self.core.requests
        assert self.core.n_scheduled == 0
        assert self.core.memory.reserved == 0
        self.audit()

    # -- the books

    def step(self, event: Event) -> list[Action]:
        """Applies an event to the core and to the books, and compares."""
        self.sound = False
        actions = self.core.step(event)
        self.record.append((event, actions))
        self._outcomes, self._returned = [], []
        self._apply(event)
        batches = [action for action in actions if isinstance(action, ScheduleBatch)]
        others = [action for action in actions if not isinstance(action, ScheduleBatch)]
        assert actions == [*batches, *others], "a batch waits for a commit or a give-back"
        outcomes: list[tuple[int | None, Outcome]] = []
        given: list[tuple[int, bool]] = []
        for action in actions:
            match action:
                case ScheduleBatch():
                    self._scheduled(action)
                case Commit():
                    assert action.outcomes, "an empty commit"
                    outcomes += [(action.iteration, outcome) for outcome in action.outcomes]
                case GiveBack():
                    given += action.requests
        assert Counter(outcomes) == Counter(self._outcomes)
        assert Counter(given) == Counter(self._returned)
        self._settled()
        self.sound = True
        return actions

    def _ask(self, asked: Asked) -> Arrival:
        self._arrivals += 1
        return Arrival(
            claim=0,
            arrival=self._arrivals,
            input_tokens=asked.input_tokens,
            max_new_tokens=asked.max_new_tokens,
            eos_token_ids=(EOS,) if asked.eos else (),
            stop_token_ids=(STOP,) if asked.stop else (),
            deadline=None if asked.patience is None else self.now + asked.patience,
        )

    def _bring(self, arrivals: list[Arrival]) -> list[int]:
        first = self._claims + 1
        self._claims += len(arrivals)
        named = tuple(replace(arrival, claim=first + n) for n, arrival in enumerate(arrivals))
        self.step(Arrived(self.now, named))
        return [arrival.claim for arrival in named]

    def _apply(self, event: Event) -> None:
        match event:
            case EngineReady():
                self.n_slots = event.n_slots // self.block_size * self.block_size
                self.formed, self.drained, self.next_iteration = True, False, event.iteration
                self.rows.clear()
                self.freed.clear()
            case EngineLost():
                for claim, life in list(self.lives.items()):
                    del self.lives[claim]
                    self.ahead["lost in two batches"] += life.in_flight == 2
                    if not life.over:
                        self._give_back(life.arrived, life.generated, life.running)
                self.in_flight.clear()
                self.formed, self.n_slots = False, 0
            case Arrived():
                for arrival in event.requests:
                    self._claimed(arrival)
                self._expire()
            case Cancelled():
                for claim in event.claims:
                    if claim in self.lives:
                        self.ahead["cancelled in two batches"] += self.lives[claim].in_flight == 2
                        self._end(self.lives[claim])
            case BatchReturned():
                self._batch_returned(event)
            case Drain():
                self.drained = True
            case Tick():
                self._expire()

    def _claimed(self, arrival: Arrival) -> None:
        if arrival.claim in self.lives:
            return
        if not self.formed:
            self._give_back(arrival, arrival.generated, False)
        elif arrival.input_tokens + arrival.max_new_tokens > self.n_slots:
            self._returned.append((arrival.claim, False))  # the pool leaves it to a larger engine
        else:
            self.lives[arrival.claim] = Life(arrival, len(self.record), arrival.generated)

    def _give_back(self, arrival: Arrival, generated: int, running: bool) -> None:
        self._returned.append((arrival.claim, running))
        self.queue.append(replace(arrival, generated=generated))

    def _batch_returned(self, event: BatchReturned) -> None:
        iteration, claims = self.in_flight.popleft()
        assert iteration == event.iteration
        for n, (claim, tokens) in enumerate(zip(claims, event.made, strict=True)):
            life, token = self.lives[claim], tokens[0] if tokens else None
            life.in_flight -= 1
            if life.over:
                self._end(life)
                continue
            late = life.overdue(event.now)
            if not late and (life.void or n in event.waiting):
                self._made_nothing(life)
                continue
            if late:
                finish = Reason.DEADLINE
            elif token is None:
                finish = Reason.STUCK if n in event.stuck else Reason.NOT_FINITE
            elif token == STOP and life.arrived.stop_token_ids:
                finish = Reason.STOP_TOKEN
            elif token == EOS and life.arrived.eos_token_ids:
                finish = Reason.EOS
            elif life.generated + 1 == life.arrived.max_new_tokens:
                finish = Reason.LENGTH
            else:
                finish = None
            self._outcomes.append((iteration, Outcome(claim, life.generated, None if late else token, finish)))
            if not late and token is not None:
                life.generated, life.last_token = life.generated + 1, token
            if finish is not None:
                self._end(life)
                assert life.in_flight <= self.run_ahead
                assert not life.in_flight or finish is not Reason.LENGTH, "an end that was known cost a row"
                self.ahead[f"{finish.name} found late"] += life.in_flight

    def _made_nothing(self, life: Life) -> None:
        """It waits, and runs the position before the missing token again; or what it made went on from there."""
        if life.void:
            life.void -= 1
            self.ahead["void"] += 1
            return
        assert life.row is not None
        life.void = life.in_flight
        life.lost += 1 + life.void
        self.rows[life.row].tokens = life.arrived.input_tokens + life.generated - 1

    def _expire(self) -> None:
        for life in list(self.lives.values()):
            if not life.running and life.overdue(self.now):
                self._outcomes.append((None, Outcome(life.arrived.claim, life.generated, None, Reason.DEADLINE)))
                self._end(life)

    def _end(self, life: Life) -> None:
        life.over = True
        if not life.running:
            self._leave(life)

    def _leave(self, life: Life) -> None:
        """What it held is free, and the workers hear of it with the next batch."""
        del self.lives[life.arrived.claim]
        if life.row is not None:
            assert self.rows[life.row].claim == life.arrived.claim
            self.freed.add(life.row)

    @property
    def reserved(self) -> int:
        """Slots that live requests hold, in whole blocks."""
        held = (stored for row, stored in self.rows.items() if row not in self.freed)
        return sum(len(stored.blocks) for stored in held) * self.block_size

    def _blocks(self, life: Life) -> int:
        return -(-(life.arrived.input_tokens + life.arrived.max_new_tokens) // self.block_size)

    def _eligible(self, ahead: bool = False) -> list[Life]:
        """Requests that wait for an iteration, by arrival; `ahead`: with those that will, for all that is known, when
        the oldest batch is back."""
        oldest = self.in_flight[0][1] if ahead and self.in_flight else ()
        found = [life for life in self.lives.values() if not life.running]
        found += [
            life for claim in oldest if (life := self.lives[claim]).running and life.in_flight == 1 and not life.ends
        ]
        return sorted(found, key=lambda life: life.arrived.arrival)

    def _can_go(self, eligible: list[Life]) -> bool:
        """There is a batch among these: an INCREMENT, or a first INITIATION that fits."""
        return any(life.row is not None for life in eligible) or (
            bool(eligible) and self._blocks(eligible[0]) * self.block_size <= self.n_slots - self.reserved
        )

    def _scheduled(self, batch: ScheduleBatch) -> None:
        """A batch was scheduled: was it the right one, and can the workers run it?"""
        assert self.formed
        assert not self.drained
        assert len(self.in_flight) < self.n_workers + self.run_ahead
        assert 0 < len(batch.members) <= self.max_bs
        assert batch.iteration == self.next_iteration
        self.next_iteration += 1
        self.stops[Stop(batch.stop)] += 1
        self._check_selection(batch)
        assert len(batch.free_rows) == len(set(batch.free_rows))
        assert set(batch.free_rows) == self.freed
        for row in batch.free_rows:
            del self.rows[row]
        self.freed.clear()
        for n, member in enumerate(batch.members):
            life = self.lives[member.claim]
            assert member.outputs == 1, "Algorithm 1 cuts no prompt, and guesses nothing"
            assert not member.shared
            if n < batch.admitted:
                assert life.row is None
                assert member.phase is Phase.of(0, member.count)
                assert member.row not in self.rows, "a row is given away before its request was freed"
                used = {block for stored in self.rows.values() for block in stored.blocks}
                assert len(set(member.new_blocks)) == len(member.new_blocks) == self._blocks(life)
                assert used.isdisjoint(member.new_blocks), "a block is given to two live requests"
                assert all(0 <= block < self.n_slots // self.block_size for block in member.new_blocks)
                assert (member.start, member.count) == (0, life.arrived.input_tokens + life.arrived.generated)
                assert member.token is None
                life.row = member.row
                self.rows[member.row] = Stored(member.claim, member.new_blocks, member.count)
            else:
                stored = self.rows[member.row]
                assert stored.claim == member.claim
                assert member.phase is (Phase.INCREMENT if member.start else Phase.INITIATION)
                assert member.count == 1
                assert member.start == stored.tokens, "an increment leaves a hole, or writes a position twice"
                if self.run_ahead:
                    assert member.token is None
                else:
                    assert member.token == life.last_token
                    assert (member.token is None) == (member.start < life.arrived.input_tokens + life.arrived.generated)
                assert member.new_blocks == ()
                stored.tokens += 1
            assert self.rows[member.row].tokens <= len(self.rows[member.row].blocks) * self.block_size
            life.in_flight += 1
            life.iterations += 1
            assert life.in_flight <= 1 + self.run_ahead
        assert batch.reserved == self.reserved <= self.n_slots
        self.in_flight.append((batch.iteration, tuple(member.claim for member in batch.members)))
        self.ahead["n_workers + 1 batches"] += len(self.in_flight) == self.n_workers + 1

    def _check_selection(self, batch: ScheduleBatch) -> None:
        """FCFS: whoever was passed over found the batch full, or (INITIATION alone) the slots taken."""
        eligible = self._eligible()
        chosen = {member.claim for member in batch.members}
        if len(self.in_flight) >= self.n_workers or not self._can_go(eligible):
            assert self.run_ahead, "Algorithm 1 has no batch here"
            eligible = self._eligible(ahead=True)
            runs = [life.running for life in eligible if life.arrived.claim in chosen]
            waited = [life for life in eligible if life.arrived.claim in chosen and life.row is not None]
            self.ahead["INCREMENTs that waited"] += sum(not life.running for life in waited)
            self.ahead["newcomers beside those ahead"] += len(set(runs)) == 2
            self.ahead["ahead while a worker idles"] += len(self.in_flight) < self.n_workers
            self.ahead["ahead of the slots"] += batch.stop == Stop.SLOTS
        assert chosen <= {life.arrived.claim for life in eligible}, "a request runs that may not"
        assert len(chosen) == len(batch.members), "a request is twice in a batch"
        by_arrival = [life for life in eligible if life.arrived.claim in chosen]
        in_order = sorted(by_arrival, key=lambda life: life.row is not None)  # stable: initiations, then increments
        assert [member.claim for member in batch.members] == [life.arrived.claim for life in in_order]
        free, blocked, taken = self.n_slots - self.reserved, False, 0
        for life in eligible:
            need = 0 if life.row is not None else self._blocks(life) * self.block_size
            if life.arrived.claim in chosen:
                assert not (need and blocked), "an initiation overtook one that did not fit"
                free -= need
                taken += 1
                assert free >= 0
                continue
            blocked = blocked or need > free
            assert taken == self.max_bs or (need and blocked), "a request was passed over for no reason"
        last = max(n for n, life in enumerate(eligible) if life.arrived.claim in chosen)
        if taken == self.max_bs and last + 1 < len(eligible):
            assert batch.stop == Stop.BATCH_FULL
        else:
            assert batch.stop == (Stop.SLOTS if len(eligible) > taken else Stop.POOL)

    def _settled(self) -> None:
        """After every event."""
        assert len(self.in_flight) <= self.n_workers + self.run_ahead
        assert self.core.n_scheduled == len(self.in_flight)
        theirs_in_flight = [(f.iteration, tuple(r.claim for r in f.requests)) for f in self.core.in_flight]
        assert theirs_in_flight == list(self.in_flight)
        theirs = {r.claim: (r.generated, r.iterations, r.in_flight) for r in self.core.requests}
        assert theirs == {
            claim: (life.generated, life.iterations, life.in_flight) for claim, life in self.lives.items()
        }
        if self.formed:
            assert self.core.memory.reserved == self.reserved
            assert self.core.memory.n_slots == self.n_slots
        if self.formed and not self.drained:
            if len(self.in_flight) < self.n_workers:
                assert not self._can_go(self._eligible()), "a request waits and a worker idles"
            if self.run_ahead and len(self.in_flight) <= self.n_workers:
                assert not self._can_go(self._eligible(ahead=True)), "a batch could be ahead"
        lives = sorted(self.lives.values(), key=lambda life: life.arrived.arrival)
        for n, earlier in enumerate(lives):
            for later in lives[n + 1 :]:
                passed_over = self.run_ahead and (earlier.ends or earlier.lost)  # as if it needed no more
                if earlier.since <= later.since and not passed_over:
                    assert earlier.iterations >= later.iterations, "iteration-level FCFS is broken"
        room = self.core.room()
        if self.formed and not self.drained:
            taken = sum(self._blocks(life) for life in self.lives.values() if life.row is None) * self.block_size
            gained = sum(self._blocks(life) for life in self._leaving()) * self.block_size
            assert room.slots == max(0, self.n_slots - self.reserved - taken + gained)
            staying = sum(not (life.running and life.ends) for life in self.lives.values())
            assert room.requests == max(0, self.max_bs * self.n_workers - staying)
        else:
            assert room == Room(0, 0)
        assert violations(self.core) == []

    def _leaving(self) -> list[Life]:
        """Who ends before another batch may be scheduled."""
        if len(self.in_flight) < self.n_workers + self.run_ahead:
            return []
        oldest = (self.lives[claim] for claim in self.in_flight[0][1])
        return [life for life in oldest if life.in_flight == 1 and life.ends]

    def audit(self) -> None:
        """The record alone, from the first event: each claim ends exactly once, its tokens have no hole, and no more
        rows were run for it than its end could be known to make needless."""
        next_index: dict[int, int] = {}  # of the claims that live
        arrived: dict[int, Arrival] = {}
        rows: Counter[int] = Counter()  # of iterations, for each claim, but for those that it lost by waiting
        flights: dict[int, list[int]] = {}  # claims, by iteration
        void: Counter[int] = Counter()  # of flights, for each claim

        def ends(claim: int, late: int) -> None:
            wasted = rows[claim] - (next_index.pop(claim) - arrived[claim].generated)
            assert 0 <= wasted <= late, "rows were run for a request that had ended"

        for event, actions in self.record:
            if isinstance(event, Arrived):
                fresh = {arrival.claim: arrival for arrival in event.requests if arrival.claim not in arrived}
                arrived |= fresh
                next_index |= {claim: arrival.generated for claim, arrival in fresh.items()}
            if isinstance(event, EngineLost):
                flights.clear()
            if isinstance(event, BatchReturned):
                for n, claim in enumerate(flights.pop(event.iteration)):
                    rows[claim] -= bool(void[claim]) or n in event.waiting
                    if void[claim]:
                        void[claim] -= 1
                    elif n in event.waiting:
                        void[claim] = sum(claim in claims for claims in flights.values())
            if isinstance(event, Cancelled):
                for claim in set(event.claims) & set(next_index):
                    ends(claim, 1 + self.run_ahead)
            ended_now = {
                outcome.claim
                for action in actions
                if isinstance(action, Commit)
                for outcome in action.outcomes
                if outcome.finish is not None
            }
            for action in actions:
                if isinstance(action, Commit):
                    for claim, base, token, finish in action.outcomes:
                        assert next_index[claim] == base
                        next_index[claim] += token is not None
                        assert next_index[claim] <= arrived[claim].max_new_tokens
                        if finish is Reason.DEADLINE:
                            ends(claim, 0 if action.iteration is None else 1 + self.run_ahead)
                        elif finish in (Reason.NOT_FINITE, Reason.STUCK):
                            ends(claim, 1 + self.run_ahead)
                        elif finish is not None:
                            ends(claim, 0 if finish is Reason.LENGTH else self.run_ahead)
                elif isinstance(action, GiveBack):
                    for claim, running in action.requests:
                        ends(claim, (1 + self.run_ahead) * running)
                elif isinstance(action, ScheduleBatch):
                    claims = [member.claim for member in action.members]
                    assert set(claims) <= set(next_index)
                    assert ended_now.isdisjoint(claims), "a request runs that this very event has ended"
                    rows.update(claims)
                    flights[action.iteration] = claims
        assert not next_index, "a request never ended"


def storm(draw: random.Random, steps: int) -> World:
    """A world after a random sequence of events, not yet quiet."""
    world = World(
        max_bs=draw.randint(1, 5),
        n_workers=draw.randint(1, 4),
        block_size=draw.choice((1, 4, 16)),
        run_ahead=draw.randint(0, 1),
    )
    largest = world.block_size * draw.randint(2, 12) + draw.randrange(world.block_size)
    usual = draw.choice((largest, largest // 3, largest // 6))  # the larger requests are, the fewer run at a time
    calm = draw.choice((0.0, 0.02))  # how often the engine is lost
    impatient = draw.choice((0.0, 0.3))
    world.form(largest)

    def asked() -> Asked:
        size = usual if draw.random() < 0.9 else largest
        total = draw.randint(2, max(2, size + (draw.random() < 0.05)))
        inputs = draw.randint(1, total - 1)
        patience = draw.uniform(0, 3) if draw.random() < impatient else None
        return Asked(inputs, total - inputs, draw.random() < 0.5, draw.random() < 0.5, patience)

    for _ in range(steps):
        luck = draw.random()
        if not world.formed and luck < 0.5:
            world.form(largest, draw.randint(1, 3))
        elif luck < 0.5:
            if world.in_flight:
                world.back(*[draw.choice((EOS, STOP, None, WAIT, *range(WORD, 12))) for _ in range(world.max_bs)])
        elif luck < 0.7:
            if len(world.lives) < 12:
                world.arrive(*[asked() for _ in range(draw.randint(1, 3))])
        elif luck < 0.78:
            world.cancel(*draw.sample(range(max(1, world._claims - 9), world._claims + 3), 2))
        elif luck < 0.86:
            world.tick(draw.uniform(0, 0.5))
        elif luck < 0.91:
            for _ in range(draw.randint(1, 3)):
                world.detour(asked(), draw.randint(0, 3))
        elif luck < 0.96:
            for _ in range(min(len(world.queue), draw.randint(1, 4))):
                world.again(draw.randrange(len(world.queue)))
        elif luck < 0.98:
            if world.lives:
                world.echo(draw.randrange(len(world.lives)))
        elif luck < 0.98 + calm:
            if world.drained or draw.random() < 0.7:
                world.lose()
            else:
                world.drain()
        elif draw.random() < 0.02:
            world.drain()
    return world
