"""The policies that serve who came first, in all their combinations: what each promises, over random arrivals, losses,
cancellations and late ends. The checks look at batches and at books of their own, as ranks and clients would keep them.
"""

import random
from collections import deque
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import PART, examples

from orca_common.block_keys import Chain, root_of
from orca_common.protocol import GROWN, OUTPUTS, PARTS, SHARED
from orca_scheduler.core.core import (
    Action,
    Adopted,
    Arrived,
    BatchReturned,
    Cancelled,
    Commit,
    Core,
    EngineLost,
    EngineReady,
    Event,
    GiveBack,
    Measured,
    Member,
    ScheduleBatch,
)
from orca_scheduler.core.drafting import MOST, PAUSE, POSITIONS
from orca_scheduler.core.fills import FILLS, IN_PARTS, first_come
from orca_scheduler.core.invariants import violations
from orca_scheduler.core.memory import Slots
from orca_scheduler.core.on_demand import PREEMPTIONS, SPARE, OnDemand
from orca_scheduler.core.policy import limits_of
from orca_scheduler.core.request import Arrival, Phase, Request
from orca_scheduler.core.selection import Limits, Stop, select
from orca_scheduler.core.sets import DRAFTS, MEMORIES, PAPER, POLICIES, PREFIXES, FirstCome, fitting, policy_named

EOS, WORD = 0, 7
COMBINATIONS = [*product(FILLS, MEMORIES, DRAFTS, PREFIXES[:2])]
# Two of each eight, every choice one way and the other: all pairs, and all triples of memory, drafts and prefixes.
COVERING = [one for n, one in enumerate(COMBINATIONS) if n % 8 in (n // 8 % 4, 7 - n // 8 % 4)]


@dataclass
class Life:
    """A request at the engine, as the checks know it."""

    arrived: Arrival
    generated: int
    computed: int = 0
    row: int | None = None
    blocks: int = 0
    initiated: int | None = None  # iteration in which its initiation ended
    flying: int = 0
    preemptions: int = 0
    ended: bool = False
    table: tuple[int, ...] = ()  # its blocks


class Engine:
    """A core under random events."""

    def __init__(self, draw: random.Random, fill: str, kv: str, drafts: str = "off", prefix: str = "off") -> None:
        self.draw = draw
        self.max_bs, self.n_workers, self.block = draw.randint(1, 5), draw.randint(1, 4), draw.choice((1, 4, 16))
        self.run_ahead = draw.randint(0, 1) if drafts == "off" else 0
        self.positions = self.max_bs + draw.randint(1, 20) if fill in IN_PARTS else None
        self.policy = FirstCome(fill, kv, self.positions, prefix=prefix, drafts=drafts)
        self.core = Core(self.max_bs, self.n_workers, self.block, self.run_ahead, self.policy)
        self.largest = draw.randint(2, 60)
        self.lives: dict[int, Life] = {}
        self.flights: deque[ScheduleBatch] = deque()
        self.claims = self.preemptions = self.parts = self.right = self.wrong = 0
        self.queue: list[Arrival] = []  # given back
        self.tokens: dict[int, int] = {}  # by arrival: tokens committed
        self.texts: dict[int, list[int]] = {}  # by arrival: a number for its tenant, and the tokens of its prompt
        self.chains: dict[int, Chain] = {}  # by claim: the keys of its blocks
        self.offered: dict[int, tuple[int, ...]] = {}  # by claim: tokens that may follow its last one
        self.slots: dict[
            int, tuple[int, ...]
        ] = {}  # of ranks: the tokens up to its own for which each one was computed
        self.shared = 0
        self.waited: set[int] = set()  # claims that waited for their forms' work: their last position ran again
        self.step(EngineReady(0.0, self.largest + self.block + draw.choice((0, 10, 60)), 1))

    def arrive(self, count: int, most: int | None = None) -> None:
        asked = list[Arrival]()
        for _ in range(count):
            self.claims += 1
            if self.queue and self.draw.random() < 0.5:
                old = self.queue.pop(self.draw.randrange(len(self.queue)))
                asked.append(self.arrival(old.arrival, old.input_tokens, old.max_new_tokens))
                continue
            total = self.draw.randint(2, most or self.largest)
            inputs = self.draw.randint(1, total - 1)
            self.tokens[self.claims] = 0
            asked.append(self.arrival(self.claims, inputs, total - inputs))
        self.lives |= {one.claim: Life(one, one.generated) for one in asked}
        self.step(Arrived(0.0, tuple(asked)))

    def arrival(self, arrival: int, inputs: int, new: int) -> Arrival:
        """A request that begins as others do, or as another one went on."""
        if arrival not in self.texts:
            alike = self.draw.choice([*self.texts.values(), [self.draw.randrange(2)]])
            like = [*alike, *[WORD] * self.draw.randrange(8)][: self.draw.randint(1, 1 + inputs)]
            self.texts[arrival] = [*like, *(self.draw.randrange(8, 10) for _ in range(1 + inputs - len(like)))]
        generated, (tenant, *prompt) = self.tokens[arrival], self.texts[arrival]
        prefix = ()
        if self.policy.prefix != "off":
            root = root_of(str(tenant))
            chain = self.chains[self.claims] = Chain(root, self.block)
            prefix = root, *chain.extend([*prompt, *[WORD] * generated])
        return Arrival(self.claims, arrival, inputs, new, generated, (EOS,), prefix=prefix)

    def back(self, ends: float = 0.05, waits: float = 0.0) -> None:
        """The oldest batch returns, with an EOS now and then; some that make a token wait for their forms' work."""
        batch = self.flights[0]
        makers = [member for member in batch.members if member.outputs]
        waiting = tuple(n for n in range(len(makers)) if self.draw.random() < waits)
        self.waited.update(makers[n].claim for n in waiting)
        made = [() if n in waiting else self.made(member, ends) for n, member in enumerate(makers)]
        offers = [self.offer() for _ in makers] if self.policy.drafts != "off" else []
        keys = list[tuple[int, str]]()
        for n, (member, tokens) in enumerate(zip(makers, made, strict=True)):
            if offers and tokens:
                self.offered[member.claim] = offers[n]
            if self.chains and not self.run_ahead:
                keys += [(member.claim, key) for key in self.chains[member.claim].extend(tokens)]
        offered = tuple(map(len, offers))
        self.step(BatchReturned(0.0, batch.iteration, tuple(made), (), waiting, offered, tuple(keys)))

    def offer(self) -> tuple[int, ...]:
        """Drafts, of which each is right with a probability of three quarters."""
        return tuple(WORD + (self.draw.random() < 0.25) for _ in range(self.draw.randint(0, MOST)))

    def made(self, member: Member, ends: float) -> tuple[int, ...]:
        """The tokens of a member, as far as its drafts are right."""
        drafts, right = self.drafts(member), 0
        while right < len(drafts) and drafts[right] == WORD:
            right += 1
        self.right, self.wrong = self.right + right, self.wrong + len(drafts) - right
        if (life := self.lives.get(member.claim)) is not None:
            life.computed -= len(drafts) - right
        return (WORD,) * right + (EOS if self.draw.random() < ends else WORD,)

    def drafts(self, member: Member) -> tuple[int, ...]:
        """As the master has them."""
        drafts = self.offered.get(member.claim, ())[: member.drafts]
        assert len(drafts) == member.drafts
        return drafts

    def cancel(self) -> None:
        if self.lives:
            claim = self.draw.choice(sorted(self.lives))
            self.lives[claim].ended = True
            self.step(Cancelled(0.0, (claim,)))

    def lose(self) -> None:
        self.step(EngineLost(0.0))
        assert all(life.ended for life in self.lives.values()), "a request was lost with its engine"
        self.lives.clear()
        self.step(EngineReady(0.0, self.core.block_size * 4 + self.largest, self.core._iteration + 1))

    def step(self, event: Event) -> None:
        actions = self.core.step(event)
        for batch in actions:  # as a master sends them: before the tokens of this event are where admissions come from
            for member in batch.members[: batch.admitted] if isinstance(batch, ScheduleBatch) else ():
                life = self.lives[member.claim]
                assert member.start + member.count <= life.arrived.input_tokens + life.generated
        if isinstance(event, BatchReturned):
            for member in self.flights.popleft().members:
                if member.claim in self.lives:
                    self.lives[member.claim].flying -= 1
        if isinstance(event, EngineLost):
            self.flights.clear()
            self.slots.clear()
        for action in [*(a for a in actions if not isinstance(a, ScheduleBatch)), *actions]:
            self.take(action, event)
        assert violations(self.core) == []
        self.lives = {claim: life for claim, life in self.lives.items() if not life.ended or life.flying}

    def take(self, action: Action, event: Event) -> None:
        match action:
            case Commit():
                for claim, base, token, finish in action.outcomes:
                    if claim not in self.lives or self.lives[claim].ended:
                        continue  # seen already
                    life = self.lives[claim]
                    if base != life.generated or token is None:
                        continue
                    life.generated += 1
                    self.tokens[life.arrived.arrival] += 1
                    if finish is not None:
                        life.ended = True
            case GiveBack():
                for claim, _ in action.requests:
                    if (life := self.lives.pop(claim, None)) is not None:
                        self.queue.append(life.arrived)
            case ScheduleBatch():
                self.scheduled(action)

    def scheduled(self, batch: ScheduleBatch) -> None:
        if self.flights and batch.iteration <= self.flights[-1].iteration:
            return
        self.flights.append(batch)
        for claim in batch.preempted:
            life = self.lives[claim]
            assert not life.flying, "a RUNNING request was preempted"
            begun = [other.arrived.arrival for other in self.lives.values() if other.row is not None]
            assert life.arrived.arrival != min(begun), "the oldest was preempted"
            assert life.row in batch.free_rows
            life.preemptions, life.row, life.computed, life.initiated, life.blocks = (
                life.preemptions + 1,
                None,
                0,
                None,
                0,
            )
            life.table = ()
            assert life.preemptions <= PREEMPTIONS
            self.preemptions += 1
        positions = sum(member.count for member in batch.members)
        assert positions <= (self.positions or 1 << 30)
        if any(member.drafts for member in batch.members):
            assert positions <= POSITIONS
        for n, member in enumerate(batch.members):
            life = self.lives[member.claim]
            assert (life.row is None) == (n < batch.admitted)
            if n < batch.admitted:
                assert member.start == member.shared * self.block
                life.computed, self.shared = member.start, self.shared + member.shared
            back = 1 + self.run_ahead + MOST if life.arrived.claim in self.waited else 0
            assert life.computed - back <= member.start <= life.computed, "a hole, or a position twice"
            assert not member.outputs or member.start + member.count >= life.arrived.input_tokens + life.generated
            self.parts += not member.outputs
            life.row, life.computed, life.flying = member.row, member.start + member.count, life.flying + 1
            life.blocks += len(member.new_blocks)
            life.table += member.new_blocks
            self.run(life, member)
            if member.outputs and life.initiated is None:
                life.initiated = batch.iteration
        self.in_order(batch)
        held = [life for life in self.lives.values() if life.row is not None and (life.flying or not life.ended)]
        assert batch.reserved == len({block for life in held for block in life.table}) * self.block

    def run(self, life: Life, member: Member) -> None:
        """As ranks do: positions read the slots before them, which must be those of the same tenant's same tokens."""
        text = [*self.texts[life.arrived.arrival], *[WORD] * (self.largest + MOST)]
        end = member.start + member.count
        text[1 + end - member.drafts : 1 + end] = self.drafts(member)
        for position in range(end):
            slot = life.table[position // self.block] * self.block + position % self.block
            if position < member.start:
                assert self.slots[slot] == tuple(text[: 2 + position]), "another's keys and values"
            self.slots[slot] = tuple(text[: 2 + position])

    def in_order(self, batch: ScheduleBatch) -> None:
        """Whom the batch left out."""
        mine = {member.claim for member in batch.members}
        out = [life for life in self.lives.values() if not life.flying and not life.ended]
        placed = sorted(self.lives.values(), key=lambda life: life.arrived.arrival)[: self.max_bs * self.n_workers]
        increments = [life for life in out if life.initiated is not None and life in placed]  # others gave way
        if self.positions is not None and self.policy.kv == "reserve":
            assert not increments or len(mine) == self.max_bs, "an increment was left out, and max_bs was not full"
        if self.policy.fill == "even":
            running = [life for life in self.lives.values() if life.row is not None]
            assert len(mine) <= -(-(len(running) + len(out)) // self.n_workers)

    def quiesce(self) -> None:
        steps = 0
        while self.core.requests:
            assert self.core.in_flight, f"claims {sorted(self.lives)} are alive and nothing runs: a deadlock"
            self.back(ends=0.0)
            steps += 1
            assert steps < 20_000, "iterations return and requests do not advance"
        while self.core.in_flight:
            self.back()
        assert self.core.memory.reserved == 0


def storm(
    seed: Any, fill: str, kv: str, drafts: str, prefix: str = "off", steps: int = 120, of: type[Engine] | None = None
) -> Engine:
    """of: the kind of engine."""
    draw = random.Random(seed)
    engine = (of or Engine)(draw, fill, kv, drafts, prefix)
    waits = draw.choice((0.0, 0.0, 0.1))
    for _ in range(steps):
        luck = draw.random()
        if luck < 0.6:
            if engine.flights:
                engine.back(waits=waits)
        elif luck < 0.85:
            if len(engine.lives) < 14:
                engine.arrive(draw.randint(1, 4))
        elif luck < 0.95:
            engine.cancel()
        elif luck < 0.97:
            engine.lose()
    return engine


@pytest.mark.parametrize(("fill", "kv", "drafts", "prefix"), COVERING if PART > 1 else COMBINATIONS)
def test_storms(fill: str, kv: str, drafts: str, prefix: str) -> None:
    """Everything ends, and every promise is kept on the way."""
    engines = [storm(f"{fill} {kv} {seed}", fill, kv, drafts, prefix) for seed in range(examples(80))]
    for engine in engines:
        engine.quiesce()
    assert (sum(engine.parts for engine in engines) > 100) == (fill in IN_PARTS)
    assert (sum(engine.preemptions for engine in engines) > 15) == (kv == "on-demand")
    found = sum(engine.right for engine in engines), sum(engine.wrong for engine in engines)
    assert (min(found) > 50) == (max(found) > 0) == (drafts == "ngram")
    assert (sum(engine.shared for engine in engines) > 50) == (prefix == "tenant")


@pytest.mark.parametrize("fill", sorted(IN_PARTS))
@pytest.mark.parametrize("seed", range(40))
def test_of_two_prompts_the_earlier_one_ends_its_initiation_no_later(seed: int, fill: str) -> None:
    draw = random.Random(seed)
    engine = Engine(draw, fill, "reserve")
    n_workers = engine.n_workers + engine.run_ahead
    ended: dict[int, int] = {}
    for _ in range(120):
        if draw.random() < 0.3 and len(engine.lives) < 14:
            engine.arrive(draw.randint(1, 3))
        elif engine.flights:
            engine.back()
        ended |= {claim: life.initiated for claim, life in engine.lives.items() if life.initiated is not None}
    early = [(a, b) for a, b in combinations(sorted(ended), 2) if ended[b] < ended[a]]
    if fill == "stall-free" or n_workers == 1:
        assert early == []
    assert len(ended) >= 7


def test_split_fuse_uses_what_stall_free_keeps_back() -> None:
    """Two batches in flight. While a part of the first prompt is in one, the other has all its positions of the second
    prompt, or all but its last one."""
    counts = dict[str, list[tuple[int, int, int]]]()
    for name in sorted(IN_PARTS):
        core = Core(2, 2, 1, policy=FirstCome(name, positions=10))
        core.step(EngineReady(0.0, 100, 1))
        actions = core.step(Arrived(0.0, (Arrival(1, 1, 25, 1), Arrival(2, 2, 8, 1))))
        counts[name] = [
            (m.claim, m.count, m.outputs) for a in actions if isinstance(a, ScheduleBatch) for m in a.members
        ]
    assert counts == {"split-fuse": [(1, 10, 0), (2, 8, 1)], "stall-free": [(1, 10, 0), (2, 7, 0)]}


REQUESTS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 30), st.booleans(), st.booleans()), min_size=1, max_size=12
)


@settings(max_examples=examples(300), database=None)
@given(sizes=REQUESTS, max_bs=st.integers(1, 6), free=st.integers(0, 120), block=st.sampled_from((1, 4, 16)))
def test_where_rows_have_all_their_slots_first_come_is_algorithm_1(
    sizes: list[tuple[int, int, bool, bool]], max_bs: int, free: int, block: int
) -> None:
    memory = Slots(free + sum(inputs + new + block for inputs, new, *_ in sizes), block)
    live = list[Request]()
    for n, (inputs, new, begun, _) in enumerate(sizes):
        request = Request.of(Arrival(n, n, inputs, new), True)
        if begun:
            request.row = memory.admit([request])[0].row
            request.computed, request.known, request.initiated = inputs, inputs + 1, True
        live.append(request)
    short = memory.free - free  # so that not all fit
    if short > 0:
        memory.grow(memory.new_row(), short // block * block)
    ready = [request for request, (*_, here) in zip(live, sizes, strict=True) if here]
    assert first_come(ready, live, Limits(max_bs), memory) == select(ready, Limits(max_bs), memory)


def test_batches_of_a_pipeline_are_alike() -> None:
    """Twelve requests, three batches in flight, `max_bs` 8: the paper's loop has batches of 8 and 4, `even` of 4."""
    sizes = dict[str, list[int]]()
    for name in ("paper", "even"):
        core = Core(8, 3, 1, policy=policy_named(name))
        core.step(EngineReady(0.0, 1000, 1))
        actions = core.step(Arrived(0.0, tuple(Arrival(n, n, 4, 8) for n in range(1, 13))))
        batches = [action for action in actions if isinstance(action, ScheduleBatch)]
        sizes[name] = [len(batch.members) for batch in batches]
    assert sizes == {"paper": [8, 4], "even": [4, 4, 4]}
    assert batches[0].stop == Stop.SHARE


def test_slots_are_kept_free_for_those_that_run() -> None:
    """A request may not begin in the last twentieth of the slots while another runs."""
    core = Core(4, 1, 1, policy=policy_named("kv=on-demand"))
    core.step(EngineReady(0.0, 100, 1))
    spare = int(100 * SPARE)
    core.step(Arrived(0.0, (Arrival(1, 1, 50, 40),)))
    core.step(Arrived(0.0, (Arrival(2, 2, 50 - spare, 4),)))

    def rows() -> set[int]:
        return {request.claim for request in core.requests if request.row is not None}

    core.step(BatchReturned(0.0, 1, ((WORD,),)))
    assert rows() == {1}
    core.step(Cancelled(0.0, (1,)))
    core.step(BatchReturned(0.0, 2, ((WORD,),)))
    assert rows() == {2}


def test_who_gives_up_slots() -> None:
    """The youngest ones that wait, as many as it takes; none where all have less than is lacking, nor a fourth time."""
    memory = OnDemand(100, 1)
    live = [Request.of(Arrival(n, n, 10, 5), True) for n in range(1, 6)]
    for request in live:
        request.row = memory.admit([request])[0].row
        request.computed = 10
    assert memory.victims(live[0], 15, live, []) == {live[4]: 10, live[3]: 10}
    live[4].in_flight = 1
    assert memory.victims(live[0], 15, live, []) == {live[3]: 10, live[2]: 10}
    live[3].preemptions = PREEMPTIONS
    assert memory.victims(live[0], 15, live, []) == {live[2]: 10, live[1]: 10}
    assert memory.victims(live[0], 21, live, []) == {}
    assert memory.victims(live[2], 1, live, []) == {}


def test_what_a_victim_frees_is_enough_for_the_next_request_too() -> None:
    """Two requests cross a block at once, and one victim has slots for both."""
    core = Core(8, 1, 1, policy=policy_named("kv=on-demand"))
    core.step(EngineReady(0.0, 31, 1))
    (batch,) = core.step(Arrived(0.0, tuple(Arrival(n, n, p, 30 - p) for n, p in enumerate((9, 9, 1, 8), 1))))
    while isinstance(batch, ScheduleBatch) and not batch.preempted:
        batch, *_ = core.step(BatchReturned(0.0, batch.iteration, ((WORD,),) * len(batch.members)))
    assert isinstance(batch, ScheduleBatch)
    assert batch.preempted == (4,)


@pytest.mark.parametrize(("n_workers", "run_ahead"), [(2, 0), (1, 1)])
def test_a_request_does_not_begin_again_in_the_step_that_preempts_it(n_workers: int, run_ahead: int) -> None:
    """The token that returned in that step is not yet where admissions come from."""
    core = Core(8, n_workers, 1, run_ahead, policy_named("kv=on-demand"))
    core.step(EngineReady(0.0, 30, 1))
    asked = tuple(Arrival(n, n, p, 30 - p) for n, p in enumerate((9, 9, 1, 8), 1))
    flying = deque(a for a in core.step(Arrived(0.0, asked)) if isinstance(a, ScheduleBatch))
    preempted = 0
    for _ in range(200):
        if not flying:
            break
        batch = flying.popleft()
        actions = core.step(BatchReturned(0.0, batch.iteration, ((WORD,),) * len(batch.members)))
        batches = [action for action in actions if isinstance(action, ScheduleBatch)]
        gave = {claim for one in batches for claim in one.preempted}
        began = {member.claim for one in batches for member in one.members[: one.admitted]}
        assert not gave & began
        preempted += len(gave)
        flying.extend(batches)
    assert preempted
    assert not core.requests


def iterations_of(policy: str, asked: list[tuple[int, int, int]], n_slots: int) -> tuple[int, int, float]:
    """Runs requests (input tokens, new tokens declared, new tokens used) to their ends, 256 at once.

    Returns iterations, preemptions, and recomputed tokens over all.
    """
    core = Core(256, 1, 16, policy=policy_named(policy))
    core.step(EngineReady(0.0, n_slots, 1))
    arrivals = tuple(Arrival(n, n, i, declared, 0, (EOS,)) for n, (i, declared, _) in enumerate(asked, 1))
    batches = [a for a in core.step(Arrived(0.0, arrivals)) if isinstance(a, ScheduleBatch)]
    made, iterations, preempted, again, computed = dict.fromkeys(range(1, len(asked) + 1), 0), 0, 0, 0, 0
    while batches:
        (batch,) = batches
        iterations, preempted = iterations + 1, preempted + len(batch.preempted)
        tokens = list[tuple[int, ...]]()
        for n, member in enumerate(batch.members):
            computed += member.count
            again += member.count if n < batch.admitted and made[member.claim] else 0
            made[member.claim] += 1
            tokens.append((EOS if made[member.claim] == asked[member.claim - 1][2] else WORD,))
        actions = core.step(BatchReturned(0.0, batch.iteration, tuple(tokens)))
        batches = [action for action in actions if isinstance(action, ScheduleBatch)]
    assert made == {n: used for n, (*_, used) in enumerate(asked, 1)}
    return iterations, preempted, again / computed


def test_blocks_on_demand_need_fewer_iterations() -> None:
    """300 queued requests and 4,096 slots. Against a reservation: at most 0.95 of its iterations where requests declare
    what they use, at most 0.45 where they declare 512, at most 3 % of all tokens computed again."""
    draw = random.Random(1)
    lengths = [(draw.randint(32, 512), draw.randint(1, 128)) for _ in range(300)]
    exact = [(inputs, used, used) for inputs, used in lengths]
    declared = [(inputs, 512, used) for inputs, used in lengths]
    for asked, most in ((exact, 0.95), (declared, 0.45)):
        reserve, *_ = iterations_of("paper", asked, 4096)
        iterations, _, again = iterations_of("kv=on-demand", asked, 4096)
        assert iterations <= most * reserve
        assert again <= 0.03


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("shortest", r"there is no 'shortest'; there are: auto, balanced, even, paper, split-fuse, stall-free"),
        ("auto,drafts=off", r"'auto,drafts=off': auto stands alone .*; sets that are known before are balanced, even,"),
        ("fill=greedy", r"fill=greedy is not there; there are: paper, even, stall-free, split-fuse"),
        ("drafts=model", r"drafts=model is not there; there are: off, ngram"),
        ("kv=swap", r"kv=swap is not there; there are: reserve, on-demand"),
        ("paper,positions=64", r"positions=64 is for split-fuse and stall-free: fill=paper cuts no prompt"),
        ("stall-free,positions=0", r"positions=0 must be a whole number from 1 to"),
        ("stall-free,positions=auto:", r"positions=auto: must be a whole number .*, or auto: and milliseconds"),
        ("paper,positions=auto:50", r"positions=256 is for split-fuse and stall-free"),
        ("stall-free,positions=many", r"positions=many must be a whole number"),
        ("stall-free,positions=9,positions=9", r"positions stands twice"),
        ("balanced,budget=9", r"'budget=9' is no part of balanced: fill=, kv=, positions=, prefix=, drafts="),
        ("balanced,9", r"'9' is no part of balanced"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^policy: {sentence}"):
        policy_named(text)


def test_increments_may_not_use_all_positions() -> None:
    with pytest.raises(ValueError, match=r"policy: positions=8 must be above max_batch_size, 8"):
        Limits(8, 1, policy_named("stall-free,positions=8").positions)


@pytest.mark.parametrize(
    "policy",
    [
        *POLICIES.values(),
        FirstCome("split-fuse", "on-demand", 99),
        FirstCome("stall-free", positions=256, seconds=0.05),
        FirstCome(drafts="ngram"),
        FirstCome(kv="on-demand", prefix="shared"),
    ],
)
def test_its_name_finds_it_again(policy: FirstCome) -> None:
    assert policy_named(policy.name) == policy


WORDS = (PARTS, GROWN, SHARED, OUTPUTS)


@pytest.mark.parametrize("can", [can for count in range(5) for can in combinations(WORDS, count)])
def test_auto_takes_what_the_model_can_do(can: tuple[str, ...]) -> None:
    for max_bs, run_ahead in product((1, 8, 64, 100, 4096), (0, 1)):
        policy = fitting(can, max_bs, run_ahead)
        assert policy.needs == set(can) - ({OUTPUTS} if run_ahead else set())
        assert limits_of(policy, max_bs, 2).max_bs == max_bs  # the two go together
        assert policy_named(policy.name) == policy
    if not can:
        assert fitting(can, 8, 0) == PAPER


def test_an_adopted_policy_is_as_one_that_was_there_from_the_beginning() -> None:
    text = "balanced,positions=8,prefix=tenant"
    adopting, other = Core(4, 1, 4), Core(4, 1, 4, policy=policy_named(text))
    assert adopting.step(Adopted(0.0, text)) == []
    for event in (EngineReady(0.0, 64, 1), Arrived(0.0, (Arrival(1, 1, 20, 4), Arrival(2, 2, 3, 4)))):
        assert adopting.step(event) == other.step(event)
    assert adopting.state() == other.state()
    assert [len(flight.requests) for flight in adopting.in_flight] == [1]  # a part of one prompt; in the paper both run
    with pytest.raises(AssertionError, match="one policy from its formation on"):
        adopting.step(Adopted(1.0, "paper"))


@pytest.mark.parametrize("fill", sorted(IN_PARTS))
def test_a_prompt_that_has_the_place_of_one_that_ends_holds_up_no_increment(fill: str) -> None:
    """Each has a place: that of the one that ends, which is still in flight, is the third one's."""
    core = Core(1, 2, 1, policy=policy_named(f"fill={fill},positions=8"))
    core.step(EngineReady(0.0, 1000, 1))
    core.step(Arrived(0.0, (Arrival(1, 20, 3, 9),)))
    core.step(Arrived(0.0, (Arrival(2, 10, 3, 1),)))
    assert core.room().requests == 1
    core.step(Arrived(0.0, (Arrival(3, 5, 3, 5),)))
    batch, *_ = core.step(BatchReturned(0.0, 1, ((WORD,),)))
    assert isinstance(batch, ScheduleBatch)
    assert [(member.claim, member.count) for member in batch.members] == [(1, 1)]
    batch, *_ = core.step(BatchReturned(0.0, 2, ((WORD,),)))
    assert isinstance(batch, ScheduleBatch)
    assert [(member.claim, member.count) for member in batch.members] == [(3, 3)]


def test_measured_positions() -> None:
    """They are the bound of the next iteration, and never of increments alone; the state has them."""
    core = Core(2, 1, 1, policy=policy_named("stall-free,positions=auto:50"))
    core.step(EngineReady(0.0, 1000, 1))
    counts = list[int]()
    events = [Measured(0.0, 20), Arrived(0.0, (Arrival(1, 1, 400, 5),)), Measured(0.0, 1)]
    for event in [*events, BatchReturned(0.0, 1, ()), Measured(0.0, 50), BatchReturned(0.0, 2, ())]:
        batches = [action for action in core.step(event) if isinstance(action, ScheduleBatch)]
        counts += [member.count for batch in batches for member in batch.members]
    assert counts == [20, 3, 50]
    again = Core(2, 1, 1, policy=policy_named("stall-free,positions=auto:50"))
    again.restore(core.state())
    assert again.limits == core.limits
    assert Core(300, 1, 1, policy=policy_named("stall-free,positions=auto:50")).limits.positions == 301


def test_drafts_follow_what_was_right() -> None:
    """All right: twice as many, up to MOST. All wrong: half as many, then none for PAUSE tokens."""
    core = Core(1, 1, 1, policy=policy_named("drafts=ngram"))
    core.step(EngineReady(0.0, 1000, 1))
    (batch,) = core.step(Arrived(0.0, (Arrival(1, 1, 10, 200),)))
    depths = list[int]()
    for _ in range(30):
        assert isinstance(batch, ScheduleBatch)
        depths.append(batch.members[0].drafts)
        made = (WORD,) * (1 + depths[-1]) if len(depths) < 5 else (WORD,)
        batch, *_ = core.step(BatchReturned(0.0, batch.iteration, (made,), offered=(MOST,)))
    assert depths[:12] == [0, 4, 8, 8, 8, 4, 2, 1, 0, 0, 0, 0]
    assert depths[7:24] == [1, *[0] * (PAUSE - 1), 1]


@pytest.mark.parametrize(
    ("max_bs", "kv", "new", "most"),
    [
        (40, "reserve", 60, 0),
        (6, "reserve", 60, 24),
        (8, "reserve", 60, 24),
        (1, "reserve", 3, 1),
        (1, "on-demand", 60, 3),
    ],
)
def test_no_draft_where_it_would_not_pay_or_has_no_place(max_bs: int, kv: str, new: int, most: int) -> None:
    """Not in a large batch, nor for the last token, nor where a row would need a block for it."""
    core = Core(max_bs, 1, 4, policy=policy_named(f"kv={kv},drafts=ngram"))
    core.step(EngineReady(0.0, 10_000, 1))
    (batch,) = core.step(Arrived(0.0, tuple(Arrival(n, n, 4, new) for n in range(1, max_bs + 1))))
    assert isinstance(batch, ScheduleBatch)
    back = BatchReturned(0.0, batch.iteration, ((WORD,),) * max_bs, offered=(MOST,) * max_bs)
    batch, *_ = core.step(back)
    assert isinstance(batch, ScheduleBatch)
    assert sum(member.drafts for member in batch.members) == most
    made = tuple((WORD,) * member.outputs for member in batch.members)
    batch, *_ = core.step(BatchReturned(0.0, batch.iteration, made))  # no new drafts: old ones do not come again
    assert not isinstance(batch, ScheduleBatch) or not any(member.drafts for member in batch.members)


def test_names() -> None:
    assert (
        policy_named("stall-free,positions=auto:50").name
        == "fill=stall-free,kv=reserve,positions=auto:50,prefix=off,drafts=off"
    )
    assert (
        policy_named("balanced,positions=128").name
        == "fill=stall-free,kv=on-demand,positions=128,prefix=off,drafts=off"
    )
    assert policy_named("kv=reserve").name == "paper"
    assert policy_named("fill=stall-free") == policy_named("stall-free")
    assert policy_named("balanced,fill=even") == FirstCome("even", "on-demand")
    assert policy_named(policy_named("stall-free,positions=auto:12345678").name).seconds == 12345.678


def test_drafts_are_no_initiation() -> None:
    assert Member(1, 0, 10, 5, 5, (), 3).phase is Phase.INCREMENT
