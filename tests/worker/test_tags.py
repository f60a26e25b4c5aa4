"""Requests that begin behind others' blocks, on a rank: their tokens are transformers', and a block that is not what a
row's tokens say is found before anything is computed."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from checkpoints import make_gpt2
from properties import covering
from reference import Reference
from scheduler import test_policies as policies
from worker.driver import make_stage

from orca.v1 import worker_pb2
from orca_common.block_keys import Chain, keys_of, root_of
from orca_common.errors import FailedPrecondition
from orca_scheduler.core.core import Action, Arrived, BatchReturned, Core, EngineReady, Event, Member, ScheduleBatch
from orca_scheduler.core.request import Arrival
from orca_scheduler.core.sets import policy_named
from orca_scheduler.ranks.members import put_members
from orca_worker.iteration.kv import KVManager
from orca_worker.stage.stage import Stage

VOCAB = 97


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gpt2(tmp_path_factory.mktemp("m"), heads=2, layers=2, hidden=16, vocab=VOCAB, positions=160, seed=5)


class Asked(NamedTuple):
    tenant: str
    prompt: list[int]
    made: list[int]
    chain: Chain


class Engine:
    """A core and its rank."""

    def __init__(self, stage: Stage, slots: int, block: int, policy: str, max_bs: int = 4) -> None:
        self.stage, self.block, self.core = stage, block, Core(max_bs, 1, block, policy=policy_named(policy))
        self.kv: KVManager = stage._kv
        self.asked: dict[int, Asked] = {}
        self.shared = 0
        self.core.step(EngineReady(0.0, slots, 1))

    def arrive(self, *wanted: tuple[str, list[int], int]) -> list[Action]:
        arrivals = list[Arrival]()
        for tenant, prompt, new in wanted:
            claim = len(self.asked) + 1
            root = root_of(tenant)
            self.asked[claim] = asked = Asked(tenant, prompt, [], Chain(root, self.block))
            arrivals.append(Arrival(claim, claim, len(prompt), new, prefix=(root, *asked.chain.extend(prompt))))
        return self.core.step(Arrived(0.0, tuple(arrivals)))

    def message(self, batch: ScheduleBatch) -> worker_pb2.Iteration:
        message = worker_pb2.Iteration(number=batch.iteration, free_rows=batch.free_rows)
        for member in batch.members[: batch.admitted]:
            tenant, prompt, made, _ = self.asked[member.claim]
            message.admissions.add(
                row=member.row,
                claim=member.claim,
                token_ids=[*prompt, *made],
                generated=len(made),
                computed=member.start,
                root=bytes.fromhex(root_of(tenant)),
            )
            self.shared += member.shared
        put_members(message, batch.members)
        return message

    def run(self, actions: list[Action], run: Callable[[worker_pb2.Iteration], Any]) -> list[Action]:
        """Runs the batch that the core asks for. Returns what it wants next."""
        (batch,) = [action for action in actions if isinstance(action, ScheduleBatch)]
        output = run(self.message(batch))
        makers = [member.claim for member in batch.members if member.outputs]
        tokens = iter(output.token_ids)
        made = [tuple(next(tokens) for _ in range(n)) for n in output.made or [1] * len(makers)]
        keys = list[tuple[int, str]]()
        for claim, new in zip(makers, made, strict=True):
            self.asked[claim].made.extend(new)
            keys += [(claim, key) for key in self.asked[claim].chain.extend(new)]
        return self.core.step(BatchReturned(0.0, batch.iteration, tuple(made), keys=tuple(keys)))

    def finish(self, actions: list[Action]) -> None:
        while self.core.in_flight:
            actions = self.run(actions, self.stage.run)


def turns(reference: Reference, draw: random.Random, count: int) -> list[tuple[str, list[int], int]]:
    """Prompts that begin as others did and went on, of two tenants."""
    texts, wanted = [[draw.randrange(VOCAB)]], list[tuple[str, list[int], int]]()
    for _ in range(count):
        old = draw.choice(texts[-6:])
        prompt = [*old[: draw.randint(1, len(old))], *(draw.randrange(VOCAB) for _ in range(draw.randint(1, 9)))][-100:]
        wanted.append((draw.choice("aab"), prompt, draw.randint(1, 20)))
        texts.append([*prompt, *reference.greedy(prompt, wanted[-1][2])])
    return wanted


WAYS = ((1, "prefix=tenant"), (4, "prefix=tenant,kv=on-demand"), (16, "balanced,positions=9,prefix=tenant"))


@pytest.mark.parametrize(("kernels", "way"), covering(("auto", "torch"), WAYS, strength=1))
def test_tokens_are_right_while_blocks_come_and_go(folder: Path, kernels: str, way: tuple[int, str]) -> None:
    block, policy = way
    reference, draw = Reference(folder), random.Random(block)
    wanted = turns(reference, draw, 60)
    slots = 320
    engine = Engine(make_stage(folder, slots, block, kernels=kernels), slots, block, policy)
    actions = list[Action]()
    while wanted or engine.core.in_flight:
        if wanted and len(engine.core.requests) < 4:
            actions += engine.arrive(wanted.pop(0))
        if engine.core.in_flight and (draw.random() < 0.7 or not wanted):
            actions = engine.run(actions, engine.stage.run)
    for tenant, prompt, made, _ in engine.asked.values():
        assert made == reference.greedy(prompt, len(made)), tenant
        assert made
    assert engine.shared > 10, "few began behind others"


class Ranked(policies.Engine):
    """A core under random events, and what two of its ranks keep of it: one knows all tokens, another one those of
    admissions and of iterations alone."""

    kvs: tuple[KVManager, KVManager] | None = None

    def step(self, event: Event) -> None:
        if isinstance(event, EngineReady):
            event = replace(event, n_slots=event.n_slots + self.draw.choice((0, 0, 7)) * self.block)
            self.kvs = self.kvs or (KVManager(None), KVManager(None))
            for kv in self.kvs:
                kv.allocate(event.n_slots, self.block)
        super().step(event)

    def run(self, life: policies.Life, member: Member) -> None:
        super().run(life, member)
        tenant, *prompt = self.texts[life.arrived.arrival]
        given = [*prompt, *[policies.WORD] * life.generated]
        row, start, end = member.row, member.start, member.start + member.count
        tokens = np.array([*given, *[policies.WORD] * end][start:end])
        tokens[member.count - member.drafts :] = self.drafts(member)
        assert self.kvs is not None
        for kv, hidden in zip(self.kvs, (0, -1), strict=True):
            if member.start == member.shared * self.block and row not in kv.tags.texts:
                kv.tags.begin(row, root_of(str(tenant)), given)
            if member.new_blocks:
                kv.grow(row, list(member.new_blocks), member.shared)
            kv.check([row])
            if self.run_ahead and hidden:
                tokens[max(len(prompt) + life.arrived.generated - start, 0) :] = hidden
            elif self.run_ahead and end > len(given) and self.draw.random() < 0.1:
                tokens[-1] = 5  # of a run-ahead whose request waits for its form: it runs again
            kv.ran(np.array([row]), [start], [member.count], [member.outputs], tokens)

    def scheduled(self, batch: ScheduleBatch) -> None:
        if not self.flights or batch.iteration > self.flights[-1].iteration:
            for kv in self.kvs or ():
                kv.free(batch.free_rows)
        super().scheduled(batch)


@pytest.mark.parametrize("drafts", policies.DRAFTS)
@pytest.mark.parametrize("kv", policies.MEMORIES)
@pytest.mark.parametrize("fill", policies.FILLS)
def test_no_rank_that_is_well_gets_a_verdict(fill: str, kv: str, drafts: str) -> None:
    """Batches in a pipeline, a run-ahead, parts, drafts that are wrong, forms that wait, cancellations, losses."""
    shared = 0
    for seed in range(3):
        engine = policies.storm(f"{fill} {kv} {drafts} {seed}", fill, kv, drafts, "tenant", of=Ranked)
        engine.quiesce()
        shared += engine.shared
    assert shared


def damage(engine: Engine, message: worker_pb2.Iteration, draw: random.Random) -> Callable[[], None] | None:
    """Changes the rank's tables or tags under this iteration. Returns what takes the change back; None: nothing was
    changed."""
    kv, tags = engine.kv, engine.kv.tags._of
    begins = {admission.row for admission in message.admissions}
    shared = [block for growth in message.growths for block in list(growth.blocks)[: growth.shared]]
    rows = [row for row in message.rows if row not in begins]
    kind = draw.choice(("stale", "swapped", "foreign", "tag", "tag swapped", "shared"))
    if kind == "shared":
        if not shared:
            return None
        block = draw.choice(shared)
        old = tags[block].copy()
        tags[block] = tags[draw.randrange(len(tags))] if draw.random() < 0.5 else old + np.uint64(1)
        return None if (tags[block] == old).all() else lambda: tags.__setitem__(block, old)
    if not rows:
        return None
    row = draw.choice(rows)
    held = int(kv._capacity[row]) // kv.block_size
    i, table = draw.randrange(held), kv._table[row].copy()
    mine = table[:held].tolist()
    if kind in ("tag", "tag swapped"):
        one, other = mine[i], draw.randrange(len(tags))
        before = tags.copy()
        if kind == "tag":
            tags[one, draw.randrange(2)] ^= np.uint64(1 << draw.randrange(64))
        else:
            tags[[one, other]] = tags[[other, one]]
        return None if (before[one] == tags[one]).all() else lambda: tags.__setitem__(slice(None), before)
    elsewhere = {
        "stale": sorted(set(range(kv.n_blocks)) - kv._owners.keys()),
        "swapped": mine,
        "foreign": sorted(set(kv._owners) - set(mine)),
    }[kind]
    if not elsewhere:
        return None
    other = draw.choice(elsewhere)
    if (tags[other] == tags[mine[i]]).all():
        return None
    if kind == "swapped":
        kv._table[row, mine.index(other)] = mine[i]
    kv._table[row, i] = other
    return lambda: kv._table.__setitem__((row, slice(len(table))), table)  # it may have grown meanwhile


def found(folder: Path, wanted: int, seed: int) -> int:
    """Damages iterations. Returns how often; each time the rank refuses it, and the next try is right."""
    reference, draw, slots, block = Reference(folder), random.Random(seed), 320, 4
    engine = Engine(make_stage(folder, slots, block), slots, block, "prefix=tenant")
    verdicts = 0

    def run(message: worker_pb2.Iteration) -> Any:
        nonlocal verdicts
        for _ in range(8):
            if (mend := damage(engine, message, draw)) is not None:
                with pytest.raises(FailedPrecondition, match="has the keys and values of other tokens than the row's"):
                    engine.stage.run(message)
                mend()
                verdicts += 1
        return engine.stage.run(message)

    actions = list[Action]()
    waiting = turns(reference, draw, 30)
    answers = {tuple(prompt): reference.greedy(prompt, new) for _, prompt, new in waiting}
    while verdicts < wanted:
        while len(engine.core.requests) < 4:
            tenant, prompt, new = draw.choice(waiting)
            actions += engine.arrive((tenant, prompt, new))
        actions = engine.run(actions, run)
    for _, prompt, made, _ in engine.asked.values():
        assert made == answers[tuple(prompt)][: len(made)]
    assert engine.shared > 20
    return verdicts


def test_a_block_that_is_not_what_a_rows_tokens_say(folder: Path) -> None:
    assert found(folder, 400, 1) >= 400


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
def test_ten_thousand_blocks_that_are_not(folder: Path, seed: int) -> None:
    assert found(folder, 1000, seed) >= 1000


def test_a_foreign_root_finds_nothing(folder: Path) -> None:
    """A scheduler that gave one tenant's blocks to another would get a verdict, not a token."""
    engine = Engine(make_stage(folder, 320, 4), 320, 4, "prefix=tenant")
    prompt = list(range(20))
    engine.finish(engine.arrive(("a", prompt, 4)))
    actions = engine.arrive(("a", prompt, 4))

    def for_another(message: worker_pb2.Iteration) -> Any:
        assert message.growths[0].shared == 4
        message.admissions[0].root = bytes.fromhex(root_of("b"))
        return engine.stage.run(message)

    with pytest.raises(FailedPrecondition, match="block 0 has the keys and values of other tokens"):
        engine.run(actions, for_another)


def test_a_foreign_adapter_finds_nothing(folder: Path) -> None:
    """A scheduler that gave the model's blocks to an adapter would get a verdict, too."""
    engine = Engine(make_stage(folder, 320, 4), 320, 4, "prefix=tenant")
    prompt = list(range(20))
    engine.finish(engine.arrive(("a", prompt, 4)))
    actions = engine.arrive(("a", prompt, 4))

    def for_an_adapter(message: worker_pb2.Iteration) -> Any:
        message.admissions[0].sampling.adapter = "b"
        return engine.stage.run(message)

    with pytest.raises(FailedPrecondition, match="block 0 has the keys and values of other tokens"):
        engine.run(actions, for_an_adapter)


@pytest.mark.parametrize(("shared", "computed"), [(0, 16), (3, 16), (4, 12), (4, 0), (0, 1)])
@pytest.mark.parametrize("keyed", [True, False])
def test_a_row_begins_right_behind_the_keys_and_values_that_it_has(
    folder: Path, shared: int, computed: int, keyed: bool
) -> None:
    """Otherwise it would attend to blocks in which nothing was computed, or write over those of others."""
    engine = Engine(make_stage(folder, 320, 4), 320, 4, "prefix=tenant")
    prompt = list(range(20))
    engine.finish(engine.arrive(("a", prompt, 4)))
    actions = engine.arrive(("a", prompt, 4))

    def elsewhere(message: worker_pb2.Iteration) -> Any:
        (growth,), (admission,) = message.growths, message.admissions
        growth.blocks[:] = [*growth.blocks[:shared], *range(40, 46 - shared)]
        growth.shared = shared
        admission.computed = message.starts[0] = computed
        message.counts[0] = 20 - computed
        if not keyed:
            admission.root = b""
        return engine.stage.run(message)

    problem = (
        f"begins at position {computed}, behind {shared} blocks of 4" if keyed or not shared else "no tokens for them"
    )
    with pytest.raises(FailedPrecondition, match=problem):
        engine.run(actions, elsewhere)


@pytest.mark.parametrize(
    ("root", "problem"),
    [(b"", "4 blocks with keys and values, and no tokens for them"), (b"1234", "a root of 4 bytes, not 16")],
)
def test_roots_that_cannot_be(folder: Path, root: bytes, problem: str) -> None:
    engine = Engine(make_stage(folder, 320, 4), 320, 4, "prefix=tenant")
    engine.finish(engine.arrive(("a", list(range(20)), 4)))

    def without(message: worker_pb2.Iteration) -> Any:
        message.admissions[0].root = root
        return engine.stage.run(message)

    with pytest.raises(FailedPrecondition, match=problem):
        engine.run(engine.arrive(("a", list(range(20)), 4)), without)


def test_rows_without_keys_stand_beside_those_that_have_some() -> None:
    """In any order, and beyond the last one with keys."""
    kv = KVManager(None)
    kv.allocate(400, 4)
    for row in range(60, 68):
        if row in (61, 62):
            kv.tags.begin(row, root_of("a"), range(6))
        kv.grow(row, [row, row + 10] if row != 62 else [row])
    for rows in (range(60, 68), [62, 60, 66, 64], [62, 61], [67, 66], [61], [64, 99, 61], [99], [100_000, 62]):
        kv.check(rows)
        old = kv._table[62, 0]
        kv._table[62, 0] = 61
        if 62 in rows:
            with pytest.raises(FailedPrecondition, match="row 62: block 61 has the keys and values of other tokens"):
                kv.check(rows)
        else:
            kv.check(rows)
        kv._table[62, 0] = old


def test_a_row_beyond_all_those_that_have_blocks_has_none_that_are_wrong() -> None:
    """`build_batch` says that it is not held. The tables grow in steps of their own."""
    kv = KVManager(None)
    kv.allocate(400, 4)
    for row, blocks in ((0, range(20, 21)), (40, range(20))):
        kv.tags.begin(row, root_of("a"), range(6))
        kv.grow(row, blocks)
    for rows in ([40, 70], [70], [70, 40, 79], range(35, 80)):
        kv.check(rows)


def test_a_token_that_is_not_known_here_ends_the_keys() -> None:
    """Of a row whose tokens stay on the device, only blocks of its input have keys."""
    kv = KVManager(None)
    kv.allocate(40, 4)
    kv.tags.begin(0, root_of("a"), range(6))
    kv.grow(0, [0, 1, 2, 3])
    kv.tags.ran(0, 0, list(range(6)), 0, kv._table[0])
    for n, tokens in enumerate([[-1], [-1], [5], [6], [7]], 6):
        kv.tags.ran(0, n, tokens, 0, kv._table[0])
    assert kv.tags.texts[0].filled == 1
    assert len(kv.tags.texts[0].keys) == 2


@pytest.mark.parametrize("block", [1, 3, 4, 16])
def test_rows_that_run_one_token_each_are_looked_at_together(block: int) -> None:
    """Beside rows with parts of prompts and drafts, tokens that are not known here, positions that run again, rows
    without keys: as if each row had been alone."""
    draw, rows, blocks = random.Random(block), 7, 60
    both = KVManager(None), KVManager(None)
    lengths = [draw.randint(1, 3 * block) for _ in range(rows)]
    for kv in both:
        kv.allocate(rows * blocks * block, block)
        for row, length in enumerate(lengths):
            if row != 3:
                kv.tags.begin(row, root_of("a"), range(length))
            kv.grow(row, range(row * blocks, (row + 1) * blocks))
    at = [0] * rows
    for _ in range(20 * block):
        starts, counts, outputs, tokens = list[int](), list[int](), list[int](), list[int]()
        for row in range(rows):
            part, again = max(lengths[row] - at[row], 0), min(at[row], draw.random() < 0.1)
            starts.append(at[row] - again)
            drafts = draw.randint(1, 3) if not part and draw.random() < 0.1 else 0
            counts.append(draw.randint(1, part) if part > 1 and draw.random() < 0.3 else 1 + drafts)
            outputs.append(1 + drafts)
            positions = range(starts[-1], starts[-1] + counts[-1])
            tokens += [n if n < lengths[row] or draw.random() < 0.99 else -1 for n in positions]
            at[row] = starts[-1] + counts[-1] - draw.randint(0, drafts)
        together, alone = both
        order = draw.sample(range(rows), rows)
        ends = np.cumsum(counts)
        parts = [np.array(tokens[ends[row] - counts[row] : ends[row]]) for row in order]
        begun, run, made = ([values[row] for row in order] for values in (starts, counts, outputs))
        together.ran(np.array(order), begun, run, made, np.concatenate(parts))
        for row, part in zip(order, parts, strict=True):
            if row != 3:
                alone.tags.ran(row, starts[row], part.tolist(), outputs[row] - 1, alone._table[row])
        assert (together.tags._of == alone.tags._of).all()
        assert (together.tags._wanted == alone.tags._wanted).all()
        for kv in both:
            kv.check(range(rows))
    for row, text in both[1].tags.texts.items():
        assert both[0].tags.texts[row].keys == text.keys
        assert both[0].tags.texts[row].filled == text.filled
    assert sum(text.filled for text in both[0].tags.texts.values()) > 20


@pytest.mark.parametrize(("block", "drafts"), covering((1, 3, 4, 16), range(8), strength=1))
def test_keys_are_those_of_the_tokens_whatever_the_drafts_were(block: int, drafts: int) -> None:
    draw = random.Random(f"{block} {drafts}")
    kv = KVManager(None)
    kv.allocate(240, block)
    text = [draw.randrange(VOCAB) for _ in range(120)]
    kv.tags.begin(0, root_of("a"), text[:7])
    kv.grow(0, range(-(-120 // block)))
    kv.tags.ran(0, 0, text[:7], 0, kv._table[0])
    at = final = 7
    while at < 100:
        right = draw.randint(0, drafts)
        guessed = [*text[at + 1 : at + 1 + right], *(draw.randrange(VOCAB) for _ in range(drafts - right))]
        kv.tags.ran(0, at, [text[at], *guessed], drafts, kv._table[0])
        final = at + 1
        known = keys_of(root_of("a"), text[:final], block)
        assert kv.tags.texts[0].keys[: len(known)] == list(known)
        assert kv.tags.texts[0].filled == final // block
        at += draw.randint(1, right + 1)
    assert list(chain(kv.tags.texts[0].keys)) == list(keys_of(root_of("a"), text[:final], block))
