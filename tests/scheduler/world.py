"""A world around the core, for its tests: what an engine and a pool would see, kept in books of its own.

`World` makes events, hears the core's actions, and holds both against books written from them alone: who is alive, what
the engine's rows and blocks hold, which position each increment writes, who may be selected. It knows nothing of
`orca_scheduler.invariants`, and reads the core's state only to compare it with its own.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

from orca_scheduler.core import (
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
from orca_scheduler.invariants import violations
from orca_scheduler.request import Arrival, Phase, Reason
from orca_scheduler.selection import Stop

EOS, STOP, WORD = 0, 1, 2  # tokens: of the end, of a stop, and the first of all others


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
    iterations: int = 0
    running: bool = False
    over: bool = False  # it ended while RUNNING
    row: int | None = None
    last_token: int | None = None

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

    def __init__(self, max_bs: int, n_workers: int, block_size: int) -> None:
        self.core = Core(max_bs, n_workers, block_size)
        self.max_bs, self.n_workers, self.block_size = max_bs, n_workers, block_size
        self.record: list[tuple[Event, list[Action]]] = []
        self.now = 0.0
        self.n_slots = 0  # in whole blocks; 0: not formed
        self.formed = self.drained = False
        self.next_iteration = 0
        self.lives: dict[int, Life] = {}
        self.rows: dict[int, Stored] = {}
        self.freed: set[int] = set()  # rows of requests that left; the workers have not heard it
        self.in_flight: deque[tuple[int, tuple[int, ...]]] = deque()
        self.queue: list[Arrival] = []  # given back, here or by another engine
        self.stops: Counter[Stop] = Counter()
        self._claims = self._arrivals = 0
        self._outcomes: list[tuple[int | None, Outcome]] = []  # that the event must cause
        self._returned: list[tuple[int, bool]] = []

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
        self.queue.append(self._ask(asked)._replace(generated=min(generated, asked.max_new_tokens - 1)))

    def again(self, index: int) -> None:
        """A request that was given back comes, under its old arrival number and a new claim number."""
        self._bring([self.queue.pop(index % len(self.queue))])

    def echo(self, index: int) -> None:
        """A claim's answer arrives a second time."""
        known = list(self.lives.values())
        self.step(Arrived(self.now, (known[index % len(known)].arrived,)))

    def back(self, *tokens: int) -> None:
        """The oldest batch returns, with the first of these tokens."""
        iteration, claims = self.in_flight[0]
        assert len(tokens) >= len(claims), "the test gave too few tokens"
        self.step(BatchReturned(self.now, iteration, tokens[: len(claims)]))

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
            left = sum(life.arrived.max_new_tokens - life.generated for life in self.lives.values())
            steps = 0
            while self.lives:
                assert self.in_flight, f"claims {sorted(self.lives)} are alive and nothing runs: a deadlock"
                self.back(*[WORD] * self.max_bs)
                steps += 1
                assert steps <= left + self.n_workers, "iterations return and requests do not advance"
        while self.in_flight:
            self.back(*[WORD] * self.max_bs)
        if self.drained:
            assert all(not life.running for life in self.lives.values())
            self.lose()
        assert not self.lives
        assert not self.core.requests
        assert self.core.n_scheduled == 0
        assert self.core.slots.reserved == 0
        self.audit()

    # -- the books

    def step(self, event: Event) -> list[Action]:
        """Applies an event to the core and to the books, and compares."""
        actions = self.core.step(event)
        self.record.append((event, actions))
        self._outcomes, self._returned = [], []
        self._apply(event)
        batches = [action for action in actions if isinstance(action, ScheduleBatch)]
        told = [action for action in actions if not isinstance(action, ScheduleBatch)]
        assert actions == [*told, *batches], "a batch was scheduled before what is known was told"
        commits = [action for action in told if isinstance(action, Commit)]
        assert all(commit.outcomes for commit in commits), "an empty commit"
        outcomes = [(commit.iteration, outcome) for commit in commits for outcome in commit.outcomes]
        assert Counter(outcomes) == Counter(self._outcomes)
        given = [pair for action in told if isinstance(action, GiveBack) for pair in action.requests]
        assert Counter(given) == Counter(self._returned)
        for batch in batches:
            self._scheduled(batch)
        self._settled()
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
        named = tuple(arrival._replace(claim=first + n) for n, arrival in enumerate(arrivals))
        self.step(Arrived(self.now, named))
        return [arrival.claim for arrival in named]

    def _apply(self, event: Event) -> None:
        match event:
            case EngineReady():
                self.n_slots = event.n_slots // self.block_size * self.block_size
                self.formed, self.next_iteration = True, event.iteration
                self.rows.clear()
                self.freed.clear()
            case EngineLost():
                for claim, life in list(self.lives.items()):
                    del self.lives[claim]
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
            self._outcomes.append((None, Outcome(arrival.claim, arrival.generated, None, Reason.NEVER_FITS)))
        else:
            self.lives[arrival.claim] = Life(arrival, len(self.record), arrival.generated)

    def _give_back(self, arrival: Arrival, generated: int, running: bool) -> None:
        self._returned.append((arrival.claim, running))
        self.queue.append(arrival._replace(generated=generated))

    def _batch_returned(self, event: BatchReturned) -> None:
        iteration, claims = self.in_flight.popleft()
        assert iteration == event.iteration
        for claim, token in zip(claims, event.token_ids, strict=True):
            life = self.lives[claim]
            life.running = False
            if life.over:
                self._leave(life)
                continue
            late = life.overdue(event.now)
            if late:
                finish = Reason.DEADLINE
            elif token == STOP and life.arrived.stop_token_ids:
                finish = Reason.STOP_TOKEN
            elif token == EOS and life.arrived.eos_token_ids:
                finish = Reason.EOS
            elif life.generated + 1 == life.arrived.max_new_tokens:
                finish = Reason.LENGTH
            else:
                finish = None
            self._outcomes.append((iteration, Outcome(claim, life.generated, None if late else token, finish)))
            if not late:
                life.generated, life.last_token = life.generated + 1, token
            if finish is not None:
                self._end(life)

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

    def _eligible(self) -> list[Life]:
        """Requests that wait for an iteration, by arrival."""
        return sorted((life for life in self.lives.values() if not life.running), key=lambda life: life.arrived.arrival)

    def _scheduled(self, batch: ScheduleBatch) -> None:
        """A batch was scheduled: was it the right one, and can the workers run it?"""
        assert self.formed
        assert not self.drained
        assert len(self.in_flight) < self.n_workers
        assert 0 < len(batch.members) <= self.max_bs
        assert batch.iteration == self.next_iteration
        self.next_iteration += 1
        self.stops[batch.stop] += 1
        self._check_selection(batch)
        assert len(batch.free_rows) == len(set(batch.free_rows))
        assert set(batch.free_rows) == self.freed
        for row in batch.free_rows:
            del self.rows[row]
        self.freed.clear()
        for member in batch.members:
            life = self.lives[member.claim]
            if member.phase is Phase.INITIATION:
                assert life.row is None
                assert member.row not in self.rows, "a row is given away before its request was freed"
                used = {block for stored in self.rows.values() for block in stored.blocks}
                assert len(set(member.blocks)) == len(member.blocks) == self._blocks(life)
                assert used.isdisjoint(member.blocks), "a block is given to two live requests"
                assert all(0 <= block < self.n_slots // self.block_size for block in member.blocks)
                assert member.length == life.arrived.input_tokens + life.arrived.generated
                assert member.token is None
                life.row = member.row
                self.rows[member.row] = Stored(member.claim, member.blocks, member.length)
            else:
                stored = self.rows[member.row]
                assert stored.claim == member.claim
                assert member.length - 1 == stored.tokens, "an increment leaves a hole, or writes a position twice"
                assert member.token == life.last_token
                assert member.token is not None
                assert member.blocks == ()
                stored.tokens += 1
            assert self.rows[member.row].tokens <= len(self.rows[member.row].blocks) * self.block_size
            assert not life.running
            life.running = True
            life.iterations += 1
        assert batch.reserved == self.reserved <= self.n_slots
        self.in_flight.append((batch.iteration, tuple(member.claim for member in batch.members)))

    def _check_selection(self, batch: ScheduleBatch) -> None:
        """FCFS: whoever was passed over found the batch full, or (INITIATION alone) the slots taken."""
        eligible = self._eligible()
        chosen = {member.claim for member in batch.members}
        assert len(chosen) == len(batch.members), "a request is twice in a batch"
        in_order = [life.arrived.claim for life in eligible if life.arrived.claim in chosen]
        assert [member.claim for member in batch.members] == in_order
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
            assert batch.stop is Stop.BATCH_FULL
        else:
            assert batch.stop is (Stop.SLOTS if len(eligible) > taken else Stop.POOL)

    def _settled(self) -> None:
        """After every event."""
        assert len(self.in_flight) <= self.n_workers
        assert self.core.n_scheduled == len(self.in_flight)
        assert {request.claim for request in self.core.requests} == set(self.lives)
        if self.formed:
            assert self.core.slots.reserved == self.reserved
            assert self.core.slots.n_slots == self.n_slots
        waiting = self._eligible()
        if self.formed and not self.drained and len(self.in_flight) < self.n_workers and waiting:
            head = waiting[0]
            assert all(life.row is None for life in waiting), "an INCREMENT request waits and a worker idles"
            assert self._blocks(head) * self.block_size > self.n_slots - self.reserved, "the head fits and waits"
        lives = sorted(self.lives.values(), key=lambda life: life.arrived.arrival)
        for n, earlier in enumerate(lives):
            for later in lives[n + 1 :]:
                if earlier.since <= later.since:
                    assert earlier.iterations >= later.iterations, "iteration-level FCFS is broken"
        room = self.core.room()
        if self.formed and not self.drained:
            taken = sum(self._blocks(life) for life in self.lives.values() if life.row is None) * self.block_size
            assert room.slots == max(0, self.n_slots - self.reserved - taken)
            assert room.requests == max(0, self.max_bs * self.n_workers - len(self.lives))
        else:
            assert room == Room(0, 0)
        assert violations(self.core) == []

    def audit(self) -> None:
        """The record alone, from the first event: each claim ends exactly once, and its tokens have no hole."""
        next_index: dict[int, int] = {}  # of the claims that live
        arrived: dict[int, Arrival] = {}
        for event, actions in self.record:
            if isinstance(event, Arrived):
                fresh = {arrival.claim: arrival for arrival in event.requests if arrival.claim not in arrived}
                arrived |= fresh
                next_index |= {claim: arrival.generated for claim, arrival in fresh.items()}
            if isinstance(event, Cancelled):
                for claim in event.claims:
                    next_index.pop(claim, None)
            for action in actions:
                if isinstance(action, Commit):
                    for claim, base, token, finish in action.outcomes:
                        assert next_index[claim] == base
                        next_index[claim] += token is not None
                        assert next_index[claim] <= arrived[claim].max_new_tokens
                        if finish is not None:
                            del next_index[claim]
                elif isinstance(action, GiveBack):
                    for claim, _ in action.requests:
                        del next_index[claim]
                else:
                    assert {member.claim for member in action.members} <= set(next_index)
        assert not next_index, "a request never ended"


def storm(draw: random.Random, steps: int, *, drains: bool = True) -> World:
    """A world after a random sequence of events, not yet quiet."""
    world = World(max_bs=draw.randint(1, 5), n_workers=draw.randint(1, 4), block_size=draw.choice((1, 4, 16)))
    largest = world.block_size * draw.randint(2, 12) + draw.randrange(world.block_size)
    calm = draw.choice((0.0, 0.02))  # how often the engine is lost
    impatient = draw.choice((0.0, 0.3))
    world.form(largest)

    def asked() -> Asked:
        total = draw.randint(2, max(2, largest + (draw.random() < 0.05)))
        inputs = draw.randint(1, total - 1)
        patience = draw.uniform(0, 3) if draw.random() < impatient else None
        return Asked(inputs, total - inputs, draw.random() < 0.5, draw.random() < 0.5, patience)

    for _ in range(steps):
        luck = draw.random()
        if not world.formed and luck < 0.5:
            world.form(largest, draw.randint(1, 3))
        elif luck < 0.5:
            if world.in_flight:
                world.back(*[draw.choice((EOS, STOP, *range(WORD, 12))) for _ in range(world.max_bs)])
        elif luck < 0.7:
            if len(world.lives) < 12:
                world.arrive(*[asked() for _ in range(draw.randint(1, 3))])
        elif luck < 0.8:
            world.cancel(*draw.sample(range(max(1, world._claims - 9), world._claims + 3), 2))
        elif luck < 0.88:
            world.tick(draw.uniform(0, 0.5))
        elif luck < 0.91:
            world.detour(asked(), draw.randint(0, 3))
        elif luck < 0.96:
            if world.queue:
                world.again(draw.randrange(len(world.queue)))
        elif luck < 0.98:
            if world.lives:
                world.echo(draw.randrange(len(world.lives)))
        elif luck < 0.98 + calm:
            world.lose()
        elif drains and draw.random() < 0.02:
            world.drain()
    return world
