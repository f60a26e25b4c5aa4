"""FasterTransformer's manner on the events and actions of the scheduler's core: pure, simulated, and on real ranks."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import make_shape
from reference import Known, Reference
from worker.engines import BLOCK_SIZE, Master, in_process

from orca.v1 import worker_pb2 as pb
from orca_common.checkpoint import read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_lab.baseline.attention import batching
from orca_lab.baseline.engine import BatchCore, WholeBatches, slots_for
from orca_lab.baseline.selections import any_policy
from orca_lab.baseline.simulated import Batched, simulate_requests
from orca_lab.cost import Constant
from orca_lab.record import Recorder
from orca_lab.replay import first_difference
from orca_lab.sequence import compare
from orca_lab.simulator import Delays, Engine, Ran, Simulation
from orca_lab.workload import AT_ONCE, POISSON, Lengths, Seeds, drawn
from orca_local.stack import DEMO_MODEL
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
from orca_scheduler.core.request import Arrival, Reason
from orca_scheduler.ranks.members import initiation, put_members
from orca_worker.iteration.model import Compute
from orca_worker.partition import SINGLE, Types
from orca_worker.stage.stage import Stage

LONGEST = 24
I_THINK, I_LOVE = Arrival(1, 1, 2, 9, eos_token_ids=(0,)), Arrival(2, 2, 2, 9, eos_token_ids=(0,))  # Figure 3


def formed(max_bs: int, mbs: int, longest: int = LONGEST, delay: float = 0.0) -> BatchCore:
    core = BatchCore(max_bs, BLOCK_SIZE, WholeBatches(mbs=mbs, longest=longest, delay=delay))
    assert core.step(EngineReady(0.0, slots_for(max_bs, longest, BLOCK_SIZE), 1)) == []
    return core


def batches(actions: Sequence[Action]) -> list[ScheduleBatch]:
    return [action for action in actions if isinstance(action, ScheduleBatch)]


def run(core: Core, actions: Sequence[Action], made: dict[int, list[int]]) -> Iterator[list[Action]]:
    """Answers batches in their order until none is left: each request's tokens in turn, then 7, of dead rows too."""
    waiting, rest = batches(actions), {claim: iter(tokens) for claim, tokens in made.items()}
    while waiting:
        batch = waiting.pop(0)
        tokens = tuple((next(rest[member.claim], 7),) for member in batch.members if member.outputs)
        came = core.step(BatchReturned(1.0, batch.iteration, tokens))
        waiting += batches(came)
        if not core.in_flight:
            assert violations(core) == []
        yield came


def test_figure_3() -> None:
    """Four iterations of two rows, two of them dead, and "you" returns only with "great"."""
    core = formed(2, 2)
    actions = core.step(Arrived(0.0, (I_THINK, I_LOVE)))
    steps = list(run(core, actions, {1: [11, 12, 13, 0], 2: [21, 0]}))
    ran = [*batches(actions), *(batch for step in steps for batch in batches(step))]
    assert [len(batch.members) for batch in ran] == [2, 2, 2, 2]
    assert [len(step) for step in steps] == [1, 1, 1, 1]
    assert steps[-1] == [
        Commit(
            None,
            (
                *(Outcome(1, n, token, None) for n, token in enumerate((11, 12, 13))),
                Outcome(1, 3, 0, Reason.EOS),
                *(Outcome(2, 0, 21, None), Outcome(2, 1, 0, Reason.EOS)),
            ),
        )
    ]
    dead = [member for batch in ran[2:] for member in batch.members if member.claim == 2]
    assert [(member.start, member.token) for member in dead] == [(3, 0), (4, 7)]


def test_figure_8b() -> None:
    """Microbatches AB and CD: each begins again when its tokens are back; the next batch when both have ended."""
    core = formed(4, 2)
    actions = core.step(Arrived(0.0, tuple(Arrival(n, n, 5, 3) for n in range(1, 7))))
    order = [batch for step in (actions, *run(core, actions, {n: [] for n in range(1, 7)})) for batch in batches(step)]
    assert [tuple(member.claim for member in batch.members) for batch in order] == [
        *[(1, 2), (3, 4)] * 3,
        *[(5, 6)] * 3,
    ]
    assert core.requests == ()


def test_longer_prompts_are_fed_on() -> None:
    core = formed(2, 2)
    actions = core.step(Arrived(0.0, (Arrival(1, 1, 3, 2), Arrival(2, 2, 5, 2))))
    ran = [*batches(actions), *(b for step in run(core, actions, {1: [5, 6], 2: [8, 9]}) for b in batches(step))]
    parts = [[(member.start, member.count, member.outputs, member.token) for member in batch.members] for batch in ran]
    assert parts == [
        [(0, 3, 1, None), (0, 3, 0, None)],
        [(3, 1, 1, 5), (3, 1, 0, None)],
        [(4, 1, 1, 6), (4, 1, 1, None)],  # the first one is dead
        [(5, 1, 1, 7), (5, 1, 1, 8)],
    ]


def test_rows_are_dense_and_allocated_beforehand() -> None:
    core = formed(2, 1, longest=9)
    actions = core.step(Arrived(0.0, (Arrival(1, 1, 1, 1), Arrival(2, 2, 1, 1))))
    assert [member.new_blocks for batch in batches(actions) for member in batch.members] == [(0, 1, 2), (3, 4, 5)]
    with pytest.raises(FailedPrecondition, match="2 sequences of 9 tokens need 24; the engine's memory has 20"):
        BatchCore(2, BLOCK_SIZE, WholeBatches(mbs=1, longest=9)).step(EngineReady(0.0, 20, 1))


def test_what_ends_otherwise() -> None:
    """A batch takes along what is cancelled or makes no token; a queue gives up what is late; a loss returns all."""
    core = formed(3, 3)
    late = Arrival(9, 9, 2, 2, deadline=5.0)
    [first] = batches(core.step(Arrived(0.0, tuple(Arrival(n, n, 2, 3) for n in (1, 2, 3)))))
    assert core.step(Arrived(0.0, (Arrival(4, 4, 2, 2), late, Arrival(5, 5, 2, 2)))) == []
    assert core.room() == Room(0, 0)
    assert core.step(Tick(6.0)) == [Commit(None, (Outcome(9, 0, None, Reason.DEADLINE),))]
    assert core.step(Cancelled(6.0, (1, 4, 77))) == []
    assert core.room() == Room(2, 48)
    [second] = batches(core.step(BatchReturned(7.0, first.iteration, ((7,), (), (7,)))))
    assert [member.token for member in second.members] == [7, 0, 7]
    ends = core.step(BatchReturned(7.0, second.iteration, ((7,), (7,), (8,))))
    [last] = core.step(BatchReturned(8.0, batches(ends)[0].iteration, ((7,), (7,), (9,))))[1:]
    assert last == Commit(
        None,
        (
            Outcome(2, 0, None, Reason.NOT_FINITE),
            *(Outcome(3, 0, 7, None), Outcome(3, 1, 8, None), Outcome(3, 2, 9, Reason.LENGTH)),
        ),
    )
    assert core.step(Arrived(8.0, (Arrival(6, 6, 2, 2),))) == []
    assert core.step(EngineLost(9.0)) == [GiveBack(((5, True), (6, False)))]
    assert core.step(Arrived(9.0, (Arrival(6, 6, 2, 2),))) == [GiveBack(((6, False),))]


def test_a_drain_lets_the_batch_end() -> None:
    core = formed(1, 1)
    actions = core.step(Arrived(0.0, (Arrival(1, 1, 2, 2), Arrival(2, 2, 2, 2))))
    assert core.step(Drain(0.5)) == []
    *_, end = run(core, actions, {1: []})
    assert [type(action) for action in end] == [Commit]
    assert core.step(Arrived(2.0, (Arrival(3, 3, 2, 2),))) == []
    assert core.step(EngineLost(3.0)) == [GiveBack(((2, False), (3, False)))]


def test_a_batch_that_is_not_full_waits_for_its_tick() -> None:
    core = formed(2, 2, delay=0.5)
    assert core.step(Arrived(1.0, (Arrival(1, 1, 2, 1),))) == []
    assert (core.tick_at, core.room()) == (1.5, Room(1, LONGEST))
    assert core.step(Tick(1.25)) == []  # that of a deadline
    assert core.tick_at == 1.5
    [begun] = batches(core.step(Tick(1.5)))
    assert (begun.admitted, core.tick_at) == (1, None)
    assert core.step(Arrived(1.6, (Arrival(2, 2, 2, 1),))) == []
    assert core.tick_at is None  # the engine is not free
    assert batches(core.step(BatchReturned(2.5, begun.iteration, ((7,),)))) != []  # it has waited for 0.5 s by now
    core = formed(2, 2, delay=0.5)
    core.step(Arrived(1.0, (Arrival(1, 1, 2, 1),)))
    [begun] = batches(core.step(Arrived(1.2, (Arrival(2, 2, 2, 1),))))
    assert (begun.admitted, core.tick_at) == (2, None)  # it is full
    core = formed(2, 2, delay=0.5)
    core.step(Arrived(1.0, (Arrival(1, 1, 2, 1),)))
    core.step(Cancelled(1.1, (1,)))
    assert core.tick_at is None
    core.step(Arrived(1.2, (Arrival(2, 2, 2, 1),)))
    assert core.step(EngineLost(1.3)) == [GiveBack(((2, False),))]
    assert core.tick_at is None


@pytest.mark.parametrize("seed", range(20))
def test_a_queue_delay_in_virtual_time(tmp_path: Path, seed: int) -> None:
    """A batch begins when the engine is free and the batch is full, or its oldest request has been there for the delay:
    no sooner and no later. The journal replays; both simulations serve the same while all requests find room."""
    chance = random.Random(seed)
    max_bs, delay, seconds = chance.randint(1, 5), chance.choice((0.0, 0.3, 1.0, 5.0)), chance.choice((0.05, 0.4))
    workload = drawn(Lengths((2, 2), (1, 6)), POISSON, chance.uniform(0.3, 4), 40, Seeds.of(seed))
    policy = any_policy(f"request-level,mbs={max_bs},longest=24,delay={delay}")
    engine = Engine(Constant(seconds), slots_for(max_bs, 24, 16), max_bs, policy)
    recorder, there = Recorder(tmp_path, [engine], workload), list[float]()  # when the engine got each request

    def listener(number: int, event: Event, actions: Sequence[Action]) -> None:
        recorder.listener(number, event, actions)
        if isinstance(event, Arrived):
            there.extend(event.now for _ in event.requests)

    served = Simulation([engine], Delays(ahead=False), listener).run(workload).requests
    recorder.close()
    assert first_difference(recorder.paths[0]) is None
    assert compare(recorder.paths[0]).different == 0
    first, free = 0, 0.0
    while first < len(served):
        began, last = served[first].began, min(first + max_bs, len(served)) - 1
        size = sum(one.began == began for one in served[first:])
        due = there[first] + delay
        full = there[last] if last == first + max_bs - 1 else due
        assert began == pytest.approx(max(free, min(due, full)))
        assert size == min(max_bs, sum(moment <= began for moment in there[first:]))
        first, free = first + size, served[first].ended
    if there != [one.asked.at for one in served]:
        return  # some waited in the pool, while as many as a batch holds waited here
    again = simulate_requests(Constant(seconds), max_bs, max_bs, workload, delay).requests
    assert [one.began for one in again] == pytest.approx([one.began for one in served])
    assert [one.ended for one in again] == pytest.approx([one.ended for one in served])


def test_a_core_goes_on_from_its_state() -> None:
    """A journal's file begins with it."""
    chance, core = random.Random(3), formed(4, 2, delay=2.0)
    events: list[Event] = [
        Arrived(0.0, (Arrival(9, 9, 3, 4),)),
        Arrived(1.0, tuple(Arrival(n, n, chance.randint(1, 9), 4) for n in range(1, 9))),
    ]
    for event in events:
        again = BatchCore(4, BLOCK_SIZE, core.policy)
        again.restore(core.state())
        actions = core.step(event)
        assert again.step(event) == actions
        assert (again.state(), again.tick_at) == (core.state(), core.tick_at)
        if core.in_flight:
            number, _, outputs = core.in_flight[0]
            events.append(BatchReturned(1.0, number, ((7,),) * sum(outputs)))
    assert len(events) > 40


@pytest.mark.parametrize(("max_bs", "mbs", "stages"), [(1, 1, 1), (4, 2, 2), (8, 8, 1), (6, 2, 3)])
def test_simulated_as_the_closed_form(tmp_path: Path, max_bs: int, mbs: int, stages: int) -> None:
    """The simulator drives it to the same times as `Batched`, and its journal replays."""
    cost, workload = Constant(0.25, stages), drawn(Lengths((2, 12), (1, 9)), AT_ONCE, 1, 2 * max_bs, Seeds.of(4))
    policy = any_policy(f"request-level,mbs={mbs},longest=24")
    engine, ran = Engine(cost, slots_for(max_bs, 24, 16), max_bs, policy), list[Ran]()
    recorder = Recorder(tmp_path, [engine], workload)
    result = Simulation([engine], Delays(ahead=False), recorder.listener, ran.append).run(workload)
    recorder.close()
    sizes = [(one.input_tokens, one.output_tokens) for one in workload]
    alone = [Batched(cost, mbs).run(sizes[at : at + max_bs])[0] for at in (0, max_bs)]
    assert [one.ended for one in result.requests] == [alone[0]] * max_bs + [sum(alone)] * max_bs
    assert {len(one.batch.members) for one in ran} == {mbs}
    assert first_difference(recorder.paths[0]) is None


def test_a_wrong_name_is_refused() -> None:
    for policy in (WholeBatches(mbs=3, longest=9), WholeBatches(mbs=3, longest=9, delay=0.05)):
        assert any_policy(policy.name) == policy
    assert WholeBatches(mbs=3, longest=9).name == "request-level,mbs=3,longest=9"
    wrong = ("mbs=0,longest=2", "mbs=2,longest=2,x=3", *(f"mbs=2,longest=2,delay={d}" for d in ("-1", "inf", "nan")))
    for text in ("request-level", *(f"request-level,{one}" for one in wrong)):
        with pytest.raises(ValueError, match="is not as in request-level,mbs=4,longest=1024"):
            any_policy(text)


# -- on real ranks


@pytest.fixture(scope="module")
def known() -> list[Known]:
    """40 requests of mixed lengths, with transformers' tokens."""
    chance = random.Random(5)
    asked = [([chance.randrange(90) for _ in range(chance.randint(1, 24))], chance.randint(1, 8)) for _ in range(40)]
    return list(Reference(DEMO_MODEL).known(asked))


async def serve(master: Master, core: Core, known: Sequence[Known]) -> list[list[int]]:
    """Drives the ranks by a core, as an engine master does. Returns the tokens that were committed."""
    loop = asyncio.get_running_loop()
    flight: list[tuple[int, asyncio.Future[pb.IterationReport]]] = []
    tokens: list[list[int]] = [[] for _ in known]

    async def step(event: Event) -> None:
        for action in core.step(event):
            match action:
                case ScheduleBatch():
                    message = pb.Iteration(
                        term=master.term, epoch=master.epoch, number=action.iteration, free_rows=action.free_rows
                    )
                    for member in action.members[: action.admitted]:
                        prompt = known[member.claim - 1].prompt
                        message.admissions.add(row=member.row, claim=member.claim, token_ids=prompt)
                    put_members(message, action.members)
                    master.waiting[action.iteration] = loop.create_future()
                    flight.append((action.iteration, master.waiting[action.iteration]))
                    await master.lanes[0].write(pb.ControlMessage(iteration=message))
                case Commit():
                    for claim, base, token, _ in action.outcomes:
                        assert token is not None
                        assert base == len(tokens[claim - 1])
                        tokens[claim - 1].append(token)
                case GiveBack():
                    raise AssertionError("nothing is lost here")

    await step(EngineReady(0.0, master.slots, master.number + 1))
    arrivals = [Arrival(n, n, len(one.prompt), len(one.tokens)) for n, one in enumerate(known, 1)]
    await step(Arrived(0.0, tuple(arrivals)))
    while flight:
        master.number, report = flight.pop(0)
        await step(BatchReturned(0.0, master.number, tuple((token,) for token in (await report).token_ids)))
    assert violations(core) == []
    return tokens


@pytest.mark.parametrize("by_torch", [False, True], ids=["kernels", "torch"])
@pytest.mark.parametrize(
    ("tp", "pp", "requests"),
    [
        *((1, 1, 16), (2, 1, 8), (1, 2, 8)),
        *(pytest.param(*cut, 40, marks=pytest.mark.long) for cut in ((1, 1), (2, 1), (1, 2))),
    ],
)
async def test_tokens_are_those_of_transformers(
    known: list[Known], tp: int, pp: int, requests: int, by_torch: bool
) -> None:
    """Attention by our kernels, or batched by torch: then a block has the room of a longest sequence."""
    longest = 32
    block_size, load = (longest, batching) if by_torch else (BLOCK_SIZE, None)
    async with in_process(DEMO_MODEL, tp, pp, slots=8 * longest, load=load) as (master, ranks):
        for max_bs, mbs in ((1, 1), (4, 2), (8, 8)):
            formed = await master.form(block_size=block_size)
            assert len(formed) == len(ranks)
            core = BatchCore(max_bs, block_size, WholeBatches(mbs=mbs, longest=longest))
            asked = known[:requests]
            assert await serve(master, core, asked) == [one.tokens for one in asked], (max_bs, mbs)


def test_torch_batches_one_position_alone(tmp_path: Path) -> None:
    """It refuses other shapes than GPT's, and rows that do not stand at one position."""
    compute, types = Compute(1), Types.of("float32")
    llama = read_checkpoint(make_shape(tmp_path, "llama, 3 heads"))
    with pytest.raises(FailedPrecondition, match="attention: torch batches that of GPT's shape"):
        batching(llama, types, compute)(SINGLE)
    demo = read_checkpoint(DEMO_MODEL)
    stage = Stage(demo, types, torch.device("cpu"), 64, compute, batching(demo, types, compute))
    stage.form(32)
    stage.allocate(64, 32)
    iteration = pb.Iteration(number=1)
    for row, prompt in enumerate(([1, 2], [3, 4, 5])):
        iteration.admissions.add(row=row, claim=row + 1, token_ids=prompt)
    put_members(iteration, [initiation(0, 2, [0]), initiation(1, 3, [1])])
    with pytest.raises(FailedPrecondition, match="attention: torch batches rows of one position"):
        stage.run(iteration)


def test_torch_attends_to_whole_prompts_of_a_long_batch() -> None:
    """The compiled kernels run a batch in pieces of 512 tokens, and cut a prompt where one ends."""
    demo, compute, types = read_checkpoint(DEMO_MODEL), Compute(1), Types.of("float32")
    iteration = pb.Iteration(number=1)
    for row in range(3):
        iteration.admissions.add(row=row, claim=row + 1, token_ids=range(row + 1, row + 201))
    put_members(iteration, [initiation(row, 200, [row]) for row in range(3)])
    made = list[list[int]]()
    for load in (None, batching(demo, types, compute)):
        stage = Stage(demo, types, torch.device("cpu"), 768, compute, load)
        stage.form(256)
        stage.allocate(768, 256)
        made.append(list(stage.run(iteration).token_ids))
    assert len(made[0]) == 3
    assert made[0] == made[1]


@pytest.mark.parametrize("name", ["batchmaker", "batchmaker-strict"])
async def test_batchmakers_tokens_are_those_of_transformers(known: list[Known], name: str) -> None:
    async with in_process(DEMO_MODEL, 1, 1, slots=400) as (master, _):
        core = Core(8, 1, BLOCK_SIZE, policy=any_policy(name))
        assert await serve(master, core, known) == [one.tokens for one in known]
