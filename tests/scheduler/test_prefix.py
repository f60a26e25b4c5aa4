"""Which requests begin behind which blocks: against a plain dictionary of what was computed, and in conversations."""

import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import pytest

from orca_common.block_keys import Chain, key_of, keys_of, root_of
from orca_scheduler.core.core import Arrived, BatchReturned, Cancelled, Core, EngineReady, Member, ScheduleBatch
from orca_scheduler.core.memory import Slots
from orca_scheduler.core.on_demand import OnDemand
from orca_scheduler.core.prefix import Index
from orca_scheduler.core.request import Arrival, Phase, Request
from orca_scheduler.core.sets import FirstCome, policy_named

WORD = 7
Beginning = tuple[str | int, ...]  # a tenant, and tokens


def asked(claim: int, tenant: str, prompt: Sequence[int], new: int, block: int) -> tuple[Arrival, Chain]:
    """A request, and the keys of what it makes."""
    root = root_of(tenant)
    chain = Chain(root, block)
    return Arrival(claim, claim, len(prompt), new, prefix=(root, *chain.extend(prompt))), chain


def serve(core: Core, arrival: Arrival, chain: Chain | None = None) -> int:
    """Runs a request to its end, alone. Returns where it began."""
    actions, start = core.step(Arrived(0.0, (arrival,))), -1
    while core.in_flight:
        (batch,) = [action for action in actions if isinstance(action, ScheduleBatch)]
        start = batch.members[0].start if start < 0 else start
        made = tuple((WORD,) for member in batch.members if member.outputs)
        keys = tuple((arrival.claim, key) for key in chain.extend([WORD] * len(made))) if chain else ()
        actions = core.step(BatchReturned(0.0, batch.iteration, made, keys=keys))
    assert not core.requests
    return start


class Plain:
    """A dictionary of beginnings that were computed, in the order in which they were used last, the longest first."""

    def __init__(self, n_blocks: int, block: int) -> None:
        self.n_blocks, self.block = n_blocks, block
        self.kept = OrderedDict[Beginning, None]()

    def serve(self, tenant: str, prompt: Sequence[int], new: int) -> int:
        """Returns where a request begins that is alone."""
        text = (tenant, *prompt, *[WORD] * (new - 1))  # the last token is never computed
        full = [text[: 1 + n] for n in range(self.block, len(text), self.block)]
        found = 0
        while found < (len(prompt) - 1) // self.block and full[found] in self.kept:
            found += 1
        for beginning in full[:found]:
            del self.kept[beginning]
        reserved = -(-(len(prompt) + new) // self.block)
        while len(self.kept) > self.n_blocks - reserved:
            self.kept.popitem(last=False)
        for beginning in reversed(full):
            self.kept.pop(beginning, None)
            self.kept[beginning] = None
        return found * self.block


@pytest.mark.parametrize("n_blocks", [400, 23, 12])
@pytest.mark.parametrize("block", [1, 4, 16])
def test_a_plain_dictionary_finds_the_same(block: int, n_blocks: int) -> None:
    draw = random.Random(f"{block} {n_blocks}")
    core, plain = Core(4, 1, block, policy=policy_named("prefix=tenant")), Plain(n_blocks, block)
    core.step(EngineReady(0.0, n_blocks * block, 1))
    texts, begun = [[draw.randrange(5)] for _ in range(3)], list[int]()
    for claim in range(1, 400):
        tenant, old = draw.choice("ab"), draw.choice(texts)
        prompt = [*old[: draw.randint(1, len(old))], *(draw.randrange(5) for _ in range(draw.randint(0, 2 * block)))]
        prompt = prompt[: 9 * block]
        new = draw.randint(1, 3 * block)
        begun.append(serve(core, *asked(claim, tenant, prompt, new, block)))
        assert begun[-1] == plain.serve(tenant, prompt, new)
        texts.append([*prompt, *[WORD] * new])
        assert core.memory.free == n_blocks * block
    assert sum(begun) > 200


@pytest.mark.parametrize("policy", ["prefix=tenant", "balanced,prefix=tenant", "balanced,prefix=shared,drafts=ngram"])
def test_forty_conversations(policy: str) -> None:
    """System 96, user 40, answer 40, block 16, six turns: 320 positions of prompts are computed, 416 in the first."""
    core = Core(8, 1, 16, policy=policy_named(policy))
    core.step(EngineReady(0.0, 40_000, 1))
    draw, computed, claim = random.Random(1), list[int](), 0
    system = [draw.randrange(100) for _ in range(96)]
    for _ in range(40):
        text, sums = list(system), 0
        for _ in range(6):
            text += [draw.randrange(100) for _ in range(40)]
            claim += 1
            sums += len(text) - serve(core, *asked(claim, "one", text, 40, 16))
            text += [WORD] * 40
        computed.append(sums)
    assert computed == [416] + [320] * 39


def test_two_tenants_never_share() -> None:
    core = Core(8, 1, 4, policy=policy_named("prefix=tenant"))
    core.step(EngineReady(0.0, 400, 1))
    prompt = list(range(40))
    assert [serve(core, *asked(n, tenant, prompt, 4, 4)) for n, tenant in enumerate("aabab", 1)] == [0, 36, 0, 36, 36]


def test_nothing_is_kept_over_a_formation_nor_by_a_policy_without_it() -> None:
    for policy, behind in (("prefix=tenant", 36), ("paper", 0)):
        core, prompt = Core(8, 1, 4, policy=policy_named(policy)), list(range(40))
        core.step(EngineReady(0.0, 400, 1))
        arrivals = [asked(n, "a", prompt, 4, 4)[0] if behind else Arrival(n, n, 40, 4) for n in range(1, 4)]
        assert [serve(core, one) for one in arrivals[:2]] == [0, behind]
        core.step(EngineReady(0.0, 400, 100))
        assert serve(core, arrivals[2]) == 0


@pytest.mark.parametrize("end", ["not finite", "cancelled", "late"])
def test_what_was_not_finite_is_not_used_again(end: str) -> None:
    """Nor where its request has ended by something else meanwhile."""
    core = Core(8, 1, 4, policy=policy_named("prefix=tenant"))
    core.step(EngineReady(0.0, 400, 1))
    (batch,) = core.step(Arrived(0.0, (replace(asked(1, "a", range(40), 4, 4)[0], deadline=1.0),)))
    assert isinstance(batch, ScheduleBatch)
    if end == "cancelled":
        core.step(Cancelled(0.0, (1,)))
    core.step(BatchReturned(1.0 if end == "late" else 0.0, batch.iteration, ((),)))
    assert serve(core, *asked(2, "a", range(40), 4, 4)) == 0
    assert serve(core, *asked(3, "a", range(40), 4, 4)) == 36


def test_a_request_that_begins_with_its_last_position_is_in_its_initiation() -> None:
    member = Member(1, 0, 16, 1, outputs=1, new_blocks=(0, 1), token=None, shared=1)
    assert [member.phase, member._replace(shared=0).phase] == [Phase.INITIATION, Phase.INCREMENT]


def test_requests_of_one_batch_begin_apart_and_the_next_one_behind_them() -> None:
    core = Core(8, 1, 4, policy=policy_named("prefix=tenant"))
    core.step(EngineReady(0.0, 400, 1))
    (batch,) = core.step(Arrived(0.0, tuple(asked(n, "a", range(40), 4, 4)[0] for n in (1, 2))))
    assert isinstance(batch, ScheduleBatch)
    assert [member.start for member in batch.members] == [0, 0]
    core.step(Arrived(0.0, (asked(3, "a", range(44), 4, 4)[0],)))
    batch, *_ = core.step(BatchReturned(0.0, batch.iteration, ((WORD,), (WORD,))))
    assert isinstance(batch, ScheduleBatch)
    assert [(member.claim, member.start, member.shared) for member in batch.members[:1]] == [(3, 40, 10)]
    assert core.memory.rows()[2][:10] == core.memory.rows()[1][:10]


def test_of_two_that_computed_the_same_each_ones_end_is_found() -> None:
    core = Core(8, 1, 4, policy=policy_named("prefix=tenant"))
    core.step(EngineReady(0.0, 100, 1))
    texts = [[*range(8), *[20 + n] * 9] for n in range(2)]
    actions = core.step(Arrived(0.0, tuple(asked(n, "a", text, 4, 4)[0] for n, text in enumerate(texts))))
    while core.in_flight:
        (batch,) = [action for action in actions if isinstance(action, ScheduleBatch)]
        actions = core.step(BatchReturned(0.0, batch.iteration, ((WORD,),) * len(batch.members)))
    assert [serve(core, *asked(2 + n, "a", [*text, 1], 4, 4)) for n, text in enumerate(texts)] == [16, 16]


def test_a_beginning_goes_last() -> None:
    """Rows (1, 2) and (0, 3) begin alike; block 1 stands for both beginnings, and block 0 goes with its row."""
    index = Index()
    for keys, row in ((["k"], [0]), (["k", "l"], [1, 2]), (["m"], [3])):
        assert index.put(keys, row) == []
        same(index)
    assert [index.let_go(block) for block in (2, 1, 3, 0)] == [True, True, True, False]
    assert index.longest(["root", "k", "l"]) == [1, 2]
    assert [index.evict() for _ in range(3)] == [2, 3, 1]
    assert index.state() == Index().state()


def test_a_block_whose_key_another_one_stood_for_is_restored() -> None:
    """Blocks 0 and 1 have the same key. Block 1 stood for it, and has made room; a row still has block 0."""
    index = Index()
    for block in (0, 1):
        index.put(["k"], [block])
    assert index.let_go(1)
    same(index)
    assert index.evict() == 1
    assert index.longest(["root", "k"]) == []
    same(index)


def same(index: Index) -> None:
    """The index that is restored from its state, through JSON, is the same one."""
    other = Index()
    other.restore(json.loads(json.dumps(index.state())))
    assert (other.blocks, other.keys, list(other.unused)) == (index.blocks, index.keys, list(index.unused))


def test_slots_of_a_request_that_begins_in_the_same_batch_do_not_become_free() -> None:
    memory = OnDemand(100, 4)
    one, other = (Request.of(asked(n, "a", range(12), 4, 4)[0], True) for n in range(2))
    one.row = memory.admit([one])[0].row
    one.computed, one.filled = 12, memory.fill(one, 12)
    other.computed = memory.match(other)
    assert other.computed == 8
    assert list(memory.gains([one.row])) == [12]
    assert list(memory.gains([one.row], [other])) == [4]
    one.in_flight = 0
    assert memory.victims(Request.of(Arrival(9, 0, 1, 1), True), 5, [one], [other]) == {}
    assert memory.victims(Request.of(Arrival(9, 0, 1, 1), True), 4, [one], [other]) == {one: 4}


def test_the_state_goes_through_a_journal() -> None:
    core = Core(8, 1, 4, policy=FirstCome(prefix="tenant"))
    core.step(EngineReady(0.0, 400, 1))
    serve(core, *asked(1, "a", range(40), 4, 4))
    arrival, chain = asked(2, "a", range(43), 4, 4)
    core.step(Arrived(0.0, (arrival,)))
    again = Core(8, 1, 4, policy=FirstCome(prefix="tenant"))
    again.restore(core.state())
    [key] = chain.extend([WORD])
    for one in (core, again):
        actions = one.step(BatchReturned(0.0, one.in_flight[0].iteration, ((WORD,),), keys=((2, key),)))
        assert [request.keys for request in one.requests] == [list(keys_of(root_of("a"), [*range(43), WORD], 4))]
        assert actions
    assert again.state() == core.state()


def test_a_key_stands_for_all_that_comes_before() -> None:
    root = root_of("a")
    one = keys_of(root, range(9), 4)
    assert one == (root, key_of(root, range(4)), key_of(one[1], range(4, 8)))
    assert len({*one, *keys_of(root_of("b"), range(9), 4), *keys_of(root, [9, *range(1, 9)], 4)[1:]}) == 8


def test_room_is_the_same_before_a_row_is_released_and_after() -> None:
    """A request that waits begins behind blocks of the row that leaves: they are no room for others."""
    memory = Slots(80, 4)
    one, other = (Request.of(asked(n, "a", range(12), 4, 4)[0], True) for n in range(2))
    one.row = memory.admit([one])[0].row
    assert one.row is not None
    one.computed, one.filled = 12, memory.fill(one, 12)
    other.computed = memory.match(other)
    assert other.computed == 8
    before = memory.room([other], [one.row])
    memory.release(one.row)
    assert before == memory.room([other]) == 80 - 16


@pytest.mark.parametrize("block", [1, 3, 16])
def test_a_chain_has_the_keys_of_the_whole_text_however_it_grows(block: int) -> None:
    draw, root = random.Random(block), root_of("a")
    for _ in range(50):
        text, chain, keys = list[int](), Chain(root, block), [root]
        for _ in range(draw.randint(1, 20)):
            more = [draw.randrange(1 << 31) for _ in range(draw.choice((0, 1, 1, 1, 5, 40)))]
            text += more
            keys += chain.extend(more)
            assert tuple(keys) == keys_of(root, text, block)
