"""Engines that run one phase alone: a core that hands over and one that goes on, with a queue between them, under
random events; and the roles that are refused."""

import random
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from properties import examples
from pydantic import ValidationError

from orca_common.block_keys import Chain, keys_of, root_of
from orca_common.errors import FailedPrecondition
from orca_common.protocol import GROWN, OUTPUTS, PARTS, SHARED
from orca_local.settings import ServeSettings
from orca_scheduler.core.core import (
    Action,
    Arrived,
    BatchReturned,
    BeginHere,
    Cancelled,
    Commit,
    Core,
    EngineLost,
    EngineReady,
    Event,
    GiveBack,
    HandOver,
    LetGo,
    Pull,
    Pulled,
    ScheduleBatch,
)
from orca_scheduler.core.fills import FILLS, IN_PARTS
from orca_scheduler.core.invariants import violations
from orca_scheduler.core.memory import Slots
from orca_scheduler.core.request import Arrival, Phase
from orca_scheduler.core.roles import Role, Roles
from orca_scheduler.core.sets import MEMORIES, PAPER, FirstCome, fitting
from orca_scheduler.explain.history import History
from orca_scheduler.lifecycle.lifecycle import Lifecycle
from orca_scheduler.lifecycle.places import Shape
from orca_scheduler.master.journal import Journal, read, replay
from orca_scheduler.master.master import check_needs
from orca_scheduler.settings import SchedulerSettings

EOS, WORD = 0, 7
ALIKE = 24  # tokens with which all prompts begin


@dataclass
class Asked:
    """A request as the queue knows it."""

    inputs: int
    new: int
    made: int = 0
    at: str = "waiting"  # or the engine that has it, "handed" or "ended"
    claim: int = 0
    kept: tuple[str, int] | None = None  # who has its keys and values for another engine, by claim there


@dataclass
class Engine:
    """A core with a role, and its ranks' books: who may have which block."""

    core: Core
    journal: Journal | None = None
    flights: deque[ScheduleBatch] = field(default_factory=deque[ScheduleBatch])
    pulls: dict[int, Pull] = field(default_factory=dict[int, Pull])  # under way, by claim
    blocks: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])  # of each row at the ranks
    texts: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # of full blocks, up to the block's end
    numbers: int = 0  # the last iteration's


class World:
    """Two engines and the queue between them."""

    def __init__(self, draw: random.Random, fill: str, kv: str, tmp_path: Path, auto: bool = False) -> None:
        self.draw, self.claims, self.now = draw, 0, 0.0
        self.here = set[int]()  # claims that the decoding engine computes, because their pull failed
        self.asked: dict[int, Asked] = {}  # by arrival
        self.by_claim: dict[int, int] = {}
        self.recomputed = self.pulled = self.failed = 0
        max_bs, workers, block = draw.randint(1, 4), draw.randint(1, 3), draw.choice((1, 4, 16))
        positions = max_bs + draw.randint(1, 20) if fill in IN_PARTS else None
        if auto:
            fitted = fitting((PARTS, GROWN, SHARED, OUTPUTS), max_bs, 0)
            policy = mixed = replace(fitted, positions=positions)
        else:
            policy, mixed = FirstCome(fill, kv, positions), FirstCome(kv=kv)
        self.auto, self.block, self.shared, self.drafts = auto, block, 0, 0
        self.chains: dict[int, Chain] = {}  # by claim: the keys of its blocks
        self.right: dict[int, bool] = {}  # by claim: whether the drafts that were offered last are all right, or wrong
        self.slots = (32 if auto else 60) + draw.choice((block, 60))
        self.engines = {
            "p": Engine(Core(max_bs, workers, block, 0, policy, Role.PREFILL)),
            "d": Engine(Core(max_bs, workers, block, 0, mixed, Role.DECODE)),
        }
        for name, engine in self.engines.items():
            path = tmp_path / f"journal-engine-{int(name == 'd')}-{self.draw.randrange(10**9)}.jsonl"
            engine.journal = Journal(path, engine.core, Lifecycle("e", Shape(1, 1, 1, block), None))
            self.step(name, EngineReady(self.now, self.slots, 1))

    def arrive(self) -> None:
        total = self.draw.randint(2, min(40, self.slots))
        inputs = self.draw.randint(1, total - 1)
        self.asked[len(self.asked) + 1] = Asked(inputs, total - inputs)

    def claim(self, name: str) -> None:
        """Takes the first request that the engine may have."""
        wanted = "waiting" if name == "p" else "handed"
        core = self.engines[name].core
        first = next((n for n, one in sorted(self.asked.items()) if one.at == wanted), None)
        if first is None or not core.room().requests:
            return
        one = self.asked[first]
        need = core.policy.reserves_output * one.new + one.inputs + one.made
        if core.room().slots < need and not (self.auto and self.draw.random() < 0.3):  # there was more as it was asked
            return
        self.claims += 1
        one.at, one.claim, self.by_claim[self.claims] = name, self.claims, first
        elsewhere = one.inputs + one.made - 1 if name == "d" else 0
        prefix = ()
        if self.auto:
            chain = self.chains[self.claims] = Chain(root_of("all"), self.block)
            prefix = root_of("all"), *chain.extend(self.text(first, one.inputs + one.made))
        arrival = Arrival(
            *(self.claims, first, one.inputs, one.new, one.made, (EOS,)),
            prefix=prefix,
            elsewhere=elsewhere,
        )
        self.step(name, Arrived(self.now, (arrival,)))

    def text(self, arrival: int, count: int) -> list[int]:
        """The first tokens of a request. All prompts begin alike."""
        inputs = min(self.asked[arrival].inputs, count)
        return [n if n < ALIKE else 100 * arrival + n for n in range(inputs)] + [WORD] * (count - inputs)

    def back(self, name: str) -> None:
        engine = self.engines[name]
        if engine.flights:
            batch = engine.flights.popleft()
            ends = EOS if self.draw.random() < 0.05 else WORD
            members = [member for member in batch.members if member.outputs]
            right = [member.drafts * self.right.get(member.claim, False) for member in members]
            made = tuple((*[WORD] * count, ends) for count in right)
            offered, keys = list[int](), list[tuple[int, str]]()
            for n, member in enumerate(members if self.auto else ()):
                self.right[member.claim] = self.draw.random() < 0.5
                offered.append(self.draw.randint(0, 8))
                keys += [(member.claim, key) for key in self.chains[member.claim].extend(made[n])]
            back = BatchReturned(self.now, batch.iteration, made, offered=tuple(offered), keys=tuple(keys))
            self.step(name, back)

    def pull(self, done: bool | None = None) -> None:
        """The oldest pull ends, now and then in vain."""
        engine = self.engines["d"]
        if engine.pulls:
            claim = next(iter(engine.pulls))
            pull = engine.pulls.pop(claim)
            done = self.draw.random() < 0.8 if done is None else done
            self.pulled, self.failed = self.pulled + done, self.failed + (not done)
            if done and pull.row in engine.blocks:
                self.fill(engine, pull.row, claim, pull.positions)
            if done and claim in self.by_claim:
                self.let_go(self.asked[self.by_claim[claim]])
            self.step("d", Pulled(self.now, claim, done))

    def let_go(self, one: Asked) -> None:
        if one.kept is not None:
            name, claim = one.kept
            one.kept = None
            self.step(name, LetGo(self.now, (claim,)))

    def cancel(self) -> None:
        live = [one for one in self.asked.values() if one.at != "ended"]
        if live:
            one = self.draw.choice(live)
            name, one.at = one.at, "ended"
            self.let_go(one)
            if name in self.engines:
                self.step(name, Cancelled(self.now, (one.claim,)))

    def lose(self, name: str) -> None:
        """An engine forms anew; what it had handed over begins again."""
        engine = self.engines[name]
        engine.flights.clear()
        engine.pulls.clear()
        engine.blocks.clear()
        engine.texts.clear()
        self.step(name, EngineLost(self.now))
        for one in self.asked.values():
            if one.kept is not None and one.kept[0] == name:
                one.kept = None
                if one.at == "handed":
                    one.at = "waiting"
        self.step(name, EngineReady(self.now, self.slots, engine.numbers + 1))

    def step(self, name: str, event: Event) -> None:
        engine = self.engines[name]
        actions = engine.core.step(event)
        assert engine.journal is not None
        engine.journal.core_step(event, actions)
        self.here |= {claim for action in actions if isinstance(action, BeginHere) for claim in action.claims}
        for action in actions:
            self.take(name, engine, action)
        assert violations(engine.core) == []
        assert engine.core.yielding() == []

    def take(self, name: str, engine: Engine, action: Action) -> None:
        match action:
            case ScheduleBatch():
                self.numbered(engine, action.iteration, action.free_rows)
                engine.flights.append(action)
                for member in action.members:
                    new, size = bool(member.new_blocks) and (member.shared > 0 or not member.start), self.block
                    self.grow(engine, member.row, member.new_blocks, new, member.shared)
                    assert not member.shared or member.start == member.shared * size
                    for n, block in enumerate(member.new_blocks[: member.shared], 1):
                        text = self.text(self.by_claim[member.claim], n * size)
                        assert engine.texts[block] == text, "it begins behind another text"
                    computed = member.start + member.count - member.drafts
                    self.fill(engine, member.row, member.claim, computed)
                    self.shared, self.drafts = self.shared + member.shared, self.drafts + member.drafts
                    assert member.claim not in engine.pulls, "a request ran before its blocks were there"
                    if name == "d":
                        self.recomputed += member.phase is Phase.INITIATION and member.claim not in self.here
            case Pull():
                self.numbered(engine, action.iteration, action.free_rows)
                self.grow(engine, action.row, action.blocks, new=True)
                assert len(action.blocks) * self.block > action.positions > 0
                engine.pulls[action.claim] = action
            case Commit():
                for claim, base, token, finish in action.outcomes:
                    one = self.asked[self.by_claim[claim]]
                    if one.claim != claim or one.at != name:
                        continue  # it ended elsewhere
                    assert base == one.made
                    one.made += token is not None
                    if finish is not None:
                        one.at = "ended"
            case HandOver():
                for claim, row, positions in action.requests:
                    one = self.asked[self.by_claim[claim]]
                    assert name == "p"
                    assert engine.core.memory.rows()[row]
                    if one.claim == claim and one.at == name:
                        assert positions == one.inputs + one.made - 1
                        one.at, one.kept = "handed", (name, claim)
                    else:
                        self.step(name, LetGo(self.now, (claim,)))
            case BeginHere():
                assert name == "d"
                for claim in action.claims:
                    assert claim not in engine.pulls
                    self.let_go(self.asked[self.by_claim[claim]])
            case GiveBack():
                for claim, _ in action.requests:
                    one = self.asked[self.by_claim[claim]]
                    if one.claim == claim and one.at == name:
                        one.at = "waiting"
                        self.let_go(one)

    def numbered(self, engine: Engine, iteration: int, free_rows: tuple[int, ...]) -> None:
        assert iteration == engine.numbers + 1 or not engine.numbers or iteration > engine.numbers
        engine.numbers = iteration
        for row in free_rows:
            del engine.blocks[row]

    def grow(self, engine: Engine, row: int, blocks: tuple[int, ...], new: bool, shared: int = 0) -> None:
        """As the ranks do: a block is one row's, until they know that the row is free."""
        assert not new or row not in engine.blocks
        taken = {block for held in engine.blocks.values() for block in held}
        assert taken.isdisjoint(blocks[shared:]), "a block of another row, which the ranks do not know to be free"
        engine.blocks[row] = (*engine.blocks.get(row, ()), *blocks)
        for block in blocks[shared:]:
            engine.texts.pop(block, None)

    def fill(self, engine: Engine, row: int, claim: int, positions: int) -> None:
        """A row has keys and values up to this position."""
        for n, block in enumerate(engine.blocks[row][: positions // self.block], 1):
            engine.texts[block] = self.text(self.by_claim[claim], n * self.block)

    def quiesce(self) -> None:
        for _ in range(20_000):
            if all(one.at == "ended" for one in self.asked.values()):
                break
            for name in self.engines:
                self.claim(name)
                self.back(name)
            self.pull(done=True)
        assert all(one.at == "ended" for one in self.asked.values()), "a request never ended"
        for name, engine in self.engines.items():
            while engine.flights:
                self.back(name)
        while self.engines["d"].pulls:
            self.pull()
        for one in self.asked.values():
            self.let_go(one)
        for engine in self.engines.values():
            assert engine.core.memory.reserved == 0, "slots are left"
            assert engine.core.kept == ()
            assert engine.journal is not None
            engine.journal.close()


def play(world: World) -> None:
    """Lets 150 things happen, and then all requests end."""
    draw = world.draw
    for _ in range(150):
        world.now += 0.25
        luck = draw.random()
        if luck < 0.25:
            world.arrive()
        elif luck < 0.5:
            world.claim(draw.choice("pd"))
        elif luck < 0.8:
            world.back(draw.choice("pd"))
        elif luck < 0.92:
            world.pull()
        elif luck < 0.97:
            world.cancel()
        elif luck < 0.985:
            world.lose(draw.choice("pd"))
    world.quiesce()


def check_replays(folder: Path) -> None:
    for path in folder.glob("*.jsonl"):
        for recorded, again in replay(path):
            assert recorded.actions == tuple(again)


@pytest.mark.parametrize("kv", sorted(MEMORIES))
@pytest.mark.parametrize("fill", sorted(FILLS))
def test_storms(fill: str, kv: str, tmp_path: Path) -> None:
    """Everything ends, no slot is left, and the core that decodes initiates nothing that it has not preempted."""
    pulled = failed = here = 0
    for seed in range(examples(80)):
        world = World(random.Random(f"{fill} {kv} {seed}"), fill, kv, tmp_path)
        play(world)
        assert kv == "on-demand" or not world.recomputed
        pulled, failed, here = pulled + world.pulled, failed + world.failed, here + len(world.here)
    assert here > 5
    assert pulled > 100
    assert failed > 5
    check_replays(tmp_path)


def test_storms_of_the_default(tmp_path: Path) -> None:
    """The same by `auto`, whose engines share beginnings and draft: no row begins behind another text."""
    worlds = list[World]()
    for seed in range(examples(80)):
        worlds.append(World(random.Random(seed), "stall-free", "", tmp_path, auto=True))
        play(worlds[-1])
    assert sum(world.shared for world in worlds) > 100
    assert sum(world.drafts for world in worlds) > 100
    assert sum(world.pulled for world in worlds) > 100
    check_replays(tmp_path)


def test_a_state_with_what_was_handed_over_is_restored(tmp_path: Path) -> None:
    core = Core(2, 1, 4, role=Role.PREFILL)
    core.step(EngineReady(0.0, 64, 1))
    core.step(Arrived(0.0, (Arrival(1, 1, 5, 9),)))
    [commit, handed] = core.step(BatchReturned(0.0, 1, ((WORD,),)))
    assert isinstance(commit, Commit)
    assert isinstance(handed, HandOver)
    assert handed.requests == ((1, 0, 5),)
    again = Core(2, 1, 4, role=Role.PREFILL)
    again.restore(core.state())
    for one in (core, again):
        assert one.room().slots == 64 - 16
        assert one.step(LetGo(0.0, (1,))) == []
        assert one.room().slots == 64
        assert isinstance(one.memory, Slots)


@pytest.mark.parametrize("fill", sorted(FILLS))
def test_a_pull_holds_up_no_prompt_that_is_computed_beside_it(fill: str) -> None:
    """As after pulls that failed: one is tried, and may take 10 s."""
    policy = FirstCome(fill, positions=64 if fill in IN_PARTS else None)
    core = Core(8, 1, 4, policy=policy, role=Role.DECODE)
    core.step(EngineReady(0.0, 1024, 1))
    [pull] = core.step(Arrived(0.0, (Arrival(1, 1, 20, 9, 1, elsewhere=20),)))
    assert isinstance(pull, Pull)
    [batch] = core.step(Arrived(0.0, (Arrival(2, 2, 20, 9, 1),)))
    assert isinstance(batch, ScheduleBatch)
    assert [(member.claim, member.count, member.outputs) for member in batch.members] == [(2, 21, 1)]


def test_a_request_that_is_to_be_pulled_begins_behind_no_blocks_of_others() -> None:
    """So it waits for room for all of it, and what is left is counted so."""
    core = Core(8, 1, 4, policy=FirstCome(kv="on-demand", prefix="tenant"), role=Role.DECODE)
    core.step(EngineReady(0.0, 44, 1))
    text = [*range(20), WORD]
    keys = keys_of(root_of("all"), text, 4)
    one, other = (Arrival(n, n, 20, 9, 1, prefix=keys, elsewhere=20) for n in (1, 2))
    core.step(Arrived(0.0, (one,)))
    [batch] = core.step(Pulled(0.0, 1, True))
    assert isinstance(batch, ScheduleBatch)
    assert core.step(Arrived(0.0, (other,))) == []
    core.step(BatchReturned(0.0, batch.iteration, ((WORD,),)))
    assert (core.memory.free, core.room().slots) == (20, 0)


def began_here(actions: list[Action]) -> list[BeginHere]:
    return [action for action in actions if isinstance(action, BeginHere)]


def test_pulls_that_always_fail_are_tried_once_a_request_and_then_not_for_a_while(tmp_path: Path) -> None:
    """Each request whose pull fails is computed by the engine that pulled. After three of them no pull is tried, until
    a pause is over; and a pull that is done ends the row of failures."""
    core = Core(8, 1, 4, role=Role.DECODE)
    path = tmp_path / "journal-engine-0-1.jsonl"
    journal, claims = Journal(path, core, Lifecycle("e", Shape(1, 1, 1, 4), None)), iter(range(1, 100))

    def step(event: Event) -> list[Action]:
        actions = core.step(event)
        journal.core_step(event, actions)
        assert violations(core) == []
        for batch in [action for action in actions if isinstance(action, ScheduleBatch)]:
            actions += step(BatchReturned(event.now, batch.iteration, ((EOS,),) * len(batch.members)))
        return actions

    def came(now: float) -> tuple[int, list[Action]]:
        claim = next(claims)
        return claim, step(Arrived(now, (Arrival(claim, claim, 5, 9, 1, (EOS,), elsewhere=5),)))

    step(EngineReady(0.0, 400, 1))
    for now in (1.0, 2.0, 3.0):
        claim, actions = came(now)
        assert [type(action) for action in actions] == [Pull]
        actions = step(Pulled(now, claim, done=False))
        assert began_here(actions) == [BeginHere((claim,), tried=True)]
        [batch] = [action for action in actions if isinstance(action, ScheduleBatch)]
        assert [(one.claim, one.start, one.count) for one in batch.members] == [(claim, 0, 6)]
    claim, actions = came(12.9)
    assert began_here(actions) == [BeginHere((claim,), tried=False)]
    assert not [action for action in actions if isinstance(action, Pull)]
    again = Core(8, 1, 4, role=Role.DECODE)
    again.restore(core.state())
    assert again.failed_pulls == 3
    claim, actions = came(13.0)
    assert [type(action) for action in actions] == [Pull], "the pause is over"
    step(Pulled(13.5, claim, done=False))
    assert began_here(came(14.0)[1]), "and begins again with the next failure"
    claim, _ = came(23.5)
    step(Pulled(23.6, claim, done=True))
    assert core.failed_pulls == 0
    claim, _ = came(24.0)
    step(Pulled(24.1, claim, done=False))
    assert [type(action) for action in came(24.2)[1]] == [Pull]
    journal.close()
    assert all(recorded.actions == tuple(actions) for recorded, actions in replay(path))
    history = History("engine-0")
    history.take(read(path))
    assert history.states[-1].room == core.room().slots


def test_after_a_pause_one_pull_is_tried_and_the_others_wait_for_none() -> None:
    core, claims = Core(16, 1, 4, role=Role.DECODE), iter(range(1, 100))

    def came(now: float, count: int) -> list[Action]:
        arrivals = (Arrival(claim, claim, 5, 9, 1, (EOS,), elsewhere=5) for claim in islice(claims, count))
        return core.step(Arrived(now, tuple(arrivals)))

    def pulled(actions: list[Action]) -> list[int]:
        return [action.claim for action in actions if isinstance(action, Pull)]

    core.step(EngineReady(0.0, 4000, 1))
    assert pulled(came(1.0, 5)) == [1, 2, 3, 4, 5]
    ends = [core.step(Pulled(now, claim, done=False)) for claim, now in enumerate((2.0, 2.0, 2.0, 4.0, 4.0), 1)]
    assert began_here(ends[-1]) == [BeginHere((5,), tried=True)]
    assert core.pull_at == 12.0, "it began with the third failure"
    for now, trying in ((12.0, 6), (24.0, 12)):
        actions = came(now, 4)
        assert pulled(actions) == [trying]
        assert began_here(actions) == [BeginHere((trying + 1, trying + 2, trying + 3), tried=False)]
        actions = came(now + 1, 1)
        assert (pulled(actions), began_here(actions)) == ([], [BeginHere((trying + 4,), tried=False)])
        core.step(Pulled(now + 1.5, trying, done=False))
        assert core.pull_at == now + 11.5
        assert began_here(came(now + 2, 1)) == [BeginHere((trying + 5,), tried=False)]
    assert pulled(came(36.0, 2)) == [18]
    core.step(Pulled(36.1, 18, done=True))
    assert pulled(came(36.2, 3)) == [20, 21, 22]


def test_a_request_that_is_cancelled_while_it_is_handed_over_leaves_no_slots(tmp_path: Path) -> None:
    """Neither in the core nor in its history."""
    core, path = Core(2, 1, 4, role=Role.PREFILL), tmp_path / "journal-engine-0-1.jsonl"
    journal = Journal(path, core, Lifecycle("e", Shape(1, 1, 1, 4), None))
    for event in (
        EngineReady(0.0, 64, 1),
        Arrived(0.0, (Arrival(1, 1, 5, 9),)),
        BatchReturned(1.0, 1, ((WORD,),)),
        Cancelled(2.0, (1,)),
    ):
        journal.core_step(event, core.step(event))
    journal.close()
    history = History("engine-0")
    history.take(read(path))
    assert history.states[-1].room == core.room().slots == 64


def test_a_loss_while_keys_and_values_are_pulled_counts() -> None:
    """The pull may be what the ranks died of. One that waits for its slots has not reached them."""
    core = Core(2, 1, 4, role=Role.DECODE)
    core.step(EngineReady(0.0, 16, 1))
    [pull] = core.step(Arrived(0.0, tuple(Arrival(n, n, 5, 9, 1, elsewhere=5) for n in (1, 2))))
    assert isinstance(pull, Pull)
    assert core.step(EngineLost(1.0)) == [GiveBack(((1, True), (2, False)))]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize(
    ("can", "lacking"),
    [
        (("parts", "outputs", "keyed", "grown"), "handed"),  # a rank of the release before
        (("outputs", "grown"), "handed and keyed"),
    ],
)
def test_ranks_that_cannot_change_engines_are_refused(role: Role, can: tuple[str, ...], lacking: str) -> None:
    with pytest.raises(FailedPrecondition, match=f"roles: {role} needs {lacking}, which ranks of this model, or of"):
        check_needs(PAPER, can, role)
    check_needs(PAPER, can)
    check_needs(PAPER, (*can, "keyed", "handed"), role)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("prefill=1", "no engine that goes on with what was begun: decode must be 1 or more"),
        ("decode=2", "no engine that computes prompts"),
        ("prefill=0,decode=1", "no engine that computes prompts"),
        ("prefill=1,decode=-1", "'decode=-1'"),
        ("prefill=1,decode=1,decode=2", "decode stands twice"),
        ("split", "is not mixed"),
    ],
)
def test_roles_that_cannot_be_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match="roles: ") as error:
        Roles.parse(text)
    assert why in str(error.value)


def test_roles_are_those_of_the_engines() -> None:
    roles = Roles.parse("prefill=2,decode=1")
    assert [roles.of(f"engine-{n}") for n in range(4)] == [Role.PREFILL, Role.PREFILL, Role.DECODE, None]
    assert {Roles.parse(text).of("engine-7") for text in ("", "mixed")} == {Role.MIXED}
    assert str(roles) == "prefill=2,decode=1"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"roles": "prefill=1,decode=1", "run_ahead": 1}, "needs run_ahead=0"),
        ({"roles": "prefill=1"}, "decode must be 1 or more"),
        ({"roles": "prefill=1,decode=1", "worker_statefulset": "w", "workers": None, "max_engines": 3}, "max_engines"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        SchedulerSettings(**dict[str, Any](workers="a:1") | settings)


def test_a_stack_has_as_many_engines_as_roles() -> None:
    assert ServeSettings(roles="prefill=1,decode=2").engines == 3
    assert ServeSettings(roles="mixed", engines=4).engines == 4
    with pytest.raises(ValidationError, match="are 3 engines, and engines is 2"):
        ServeSettings(roles="prefill=1,decode=2", engines=2)
