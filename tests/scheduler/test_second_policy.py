"""The seam of policies, proven by a second one: this file alone has it, and it runs through core, wire, ranks and pool.

Shortest prompt first, parts of 16 positions, blocks on demand; where they run out, the last request starts again later.
Requests that begin alike have the blocks of their beginning together. Short ones run up to three drafts.

As a script it is a scheduler process that knows the policy.
"""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orca_common.block_keys import keys_of, root_of
from orca_common.checkpoint import Checkpoint
from orca_common.protocol import GROWN, OUTPUTS, PARTS, SHARED
from orca_scheduler.app import main
from orca_scheduler.core.core import Arrived, BatchReturned, Commit, Core, EngineReady, GiveBack, ScheduleBatch
from orca_scheduler.core.invariants import violations
from orca_scheduler.core.memory import Memory
from orca_scheduler.core.on_demand import OnDemand
from orca_scheduler.core.request import Arrival, Request
from orca_scheduler.core.selection import Limits, Plan, Stop
from orca_scheduler.core.sets import POLICIES, policy_named
from orca_scheduler.master.journal import CoreStep, replay, scheduled

PART = 16


class Shortest:
    name = "shortest"
    needs = frozenset((PARTS, OUTPUTS, SHARED, GROWN))
    reserves_output = False
    positions = seconds = None
    prefix = "shared"
    drafts = "ngram"

    def order(self, request: Request) -> tuple[float, ...]:
        return request.arrived.input_tokens, request.arrived.arrival

    def memory(self, n_slots: int, block_size: int) -> OnDemand:
        return OnDemand(n_slots, block_size)

    def drafts_of(self, request: Request, count: int) -> int:
        """How many it runs behind its next `count` positions. None of a long one, which is to run on for a while."""
        settled = count == request.remaining and request.row is not None and not request.running
        if not settled or request.arrived.input_tokens > 100:
            return 0
        return max(0, min(3, request.offered, request.arrived.max_tokens - request.known - 1))

    def plan(self, ready: Iterable[Request], live: Sequence[Request], limits: Limits, memory: Memory) -> Plan:
        assert isinstance(memory, OnDemand)
        waiting, free = list(ready), memory.free
        batch: list[tuple[Request, int]] = []
        preempt: list[Request] = []
        drafts: dict[int, int] = {}
        while waiting and len(batch) < limits.max_bs:
            request = waiting.pop(0)
            count = min(request.remaining, PART)
            guessed = self.drafts_of(request, count)
            need = memory.need(request, count + guessed)
            for last in [other for other in reversed(waiting) if other.row is not None and not other.running]:
                if need <= free:
                    break
                waiting.remove(last)
                preempt.append(last)
                free += sum(memory.gains([last.row])) if last.row is not None else 0
            if preempt and request.row is None:
                break  # what it would begin with may be gone
            if need > free:
                break
            free -= need
            batch.append((request, count))
            if guessed:
                drafts[request.claim] = guessed
        return Plan(tuple(batch), Stop.POOL, tuple(preempt), drafts) if batch else Plan((), Stop.SLOTS)

    def violations(self, requests: Sequence[Request], memory: Memory) -> list[str]:
        prompts = [request.arrived.input_tokens for request in requests]
        return [] if prompts == sorted(prompts) else [f"prompts of {prompts} tokens are not in their order"]


if __name__ == "__main__":
    POLICIES[Shortest.name] = Shortest()
    main()


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError,
        match=r"policy: there is no 'shortest'; there are: auto, balanced, even, paper, split-fuse, stall-free",
    ):
        policy_named("shortest")


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("seed", range(60))
def test_every_request_ends_whatever_is_preempted(seed: int, run_ahead: int) -> None:
    """The core with little memory: after each admission each position is computed once, or again behind wrong drafts;
    each token comes once, and is the right one."""
    draw = random.Random(seed)
    common, lengths = [draw.randrange(97) for _ in range(60)], draw.sample(range(1, 61), 8)
    prompts = [[*common[: n // 2], *(draw.randrange(97) for _ in range(n - n // 2))] for n in lengths]
    streams = {n: [draw.randrange(97) for _ in range(20)] for n in lengths}
    asked = [
        Arrival(n, n, len(prompt), draw.randint(1, 20), prefix=keys_of(root_of(""), prompt, 4))
        for n, prompt in enumerate(prompts, 1)
    ]
    core = Core(draw.randint(1, 4), draw.randint(1, 3), 4, run_ahead, Shortest())
    core.step(EngineReady(0.0, max(one.max_tokens for one in asked) + 4 + draw.randint(0, 60), 1))
    made = {one.claim: list[int]() for one in asked}
    flying: list[ScheduleBatch] = []
    computed, admissions, shared = dict.fromkeys(made, 0), 0, 0
    actions = core.step(Arrived(0.0, tuple(asked)))
    while core.in_flight or actions:
        for action in actions:
            match action:
                case ScheduleBatch():
                    flying.append(action)
                    for n, member in enumerate(action.members):
                        if n < action.admitted:
                            assert member.start == member.shared * 4
                            computed[member.claim], admissions = member.start, admissions + 1
                            shared += member.shared
                        assert member.start == computed[member.claim], "a hole, or a position twice"
                        assert member.count - member.drafts <= PART
                        computed[member.claim] += member.count
                case Commit():
                    for claim, index, token, _ in action.outcomes:
                        assert index == len(made[claim])
                        assert token is not None
                        made[claim].append(token)
                case GiveBack():
                    raise AssertionError("a request went back")
        assert violations(core) == []
        if not core.in_flight:
            break
        back = list[tuple[int, ...]]()
        oldest = flying.pop(0)
        for member in oldest.members:
            if member.outputs:  # what a rank does: the tokens, as far as the drafts are right
                at = member.start + member.count - member.drafts - asked[member.claim - 1].input_tokens
                right = 0
                while right < member.drafts and draw.random() < 0.8:
                    right += 1
                back.append(tuple(streams[asked[member.claim - 1].input_tokens][at : at + right + 1]))
                computed[member.claim] -= member.drafts - right
        offered = tuple(draw.randint(0, 5) for _ in back)
        actions = core.step(BatchReturned(0.0, oldest.iteration, tuple(back), offered=offered))
    assert made == {one.claim: streams[one.input_tokens][: one.max_new_tokens] for one in asked}
    assert core.memory.reserved == 0
    assert admissions >= 8


async def test_it_runs_through_core_wire_ranks_and_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of a GPT-2, tokens of transformers. A request that begins like a long one shares its blocks, and the
    long one gives up its row for shorter ones."""
    from checkpoints import make_gpt2
    from reference import Reference
    from scheduler.live import World
    from servers import redis_server

    from orca_pool.pool import Pool

    model = make_gpt2(tmp_path / "model", heads=2, layers=2, hidden=16, vocab=97, positions=640, seed=5)
    known = requests_of(Reference(model))
    with redis_server() as redis:
        async with Pool(redis.url, "live", patience=20) as pool:
            this = World(tmp_path, model, redis, pool)
            try:
                for _ in range(2):
                    await this.supervisor()
                settings = {"pp": 2, "slots": 636, "block_size": 4, "policy": "shortest"}
                scheduler = await this.scheduler(script=Path(__file__), **settings)
                await this.formed("engine-0")
                (info,) = await pool.engine_infos()
                assert info.policy == "shortest"
                for n, (prompt, tokens) in enumerate(known):
                    await this.submit(f"r{n}", prompt, len(tokens))
                    if n < 2:  # the long one runs, then what begins like it, then those that take its blocks

                        async def begun() -> bool:
                            return all(await this.progress())

                        await this.until(begun)
                for n, (_, tokens) in enumerate(known):
                    assert await this.tokens(f"r{n}") == tokens
            except BaseException:
                for log in sorted(tmp_path.glob("*/log")):
                    print(f"---- {log.parent.name}\n{log.read_text()[-4000:]}")
                raise
            finally:
                await this.close()
    ((_, lines),) = scheduler.journals().items()
    batches = list(scheduled(lines))
    members = [member for batch in batches for member in batch.members]
    assert any(not member.outputs for member in members), "no prompt ran in parts"
    assert any(member.start and member.new_blocks for member in members), "no row grew"
    assert any(member.shared for member in members), "no blocks were shared"
    began = [member.claim for batch in batches for member in batch.members[: batch.admitted]]
    assert len(began) > len(set(began)), "no request was preempted"
    makers = {batch.iteration: [member for member in batch.members if member.outputs] for batch in batches}
    returned = [line.event for line in lines if isinstance(line, CoreStep) and isinstance(line.event, BatchReturned)]
    made = [pair for event in returned for pair in zip(makers[event.iteration], event.made, strict=True)]
    assert any(len(tokens) > 1 for _, tokens in made), "no draft was right"
    assert any(member.outputs > len(tokens) for member, tokens in made), "none was wrong"
    (path,) = scheduler.folder.glob("journal-*.jsonl")
    with pytest.raises(ValueError, match="there is no 'shortest'"):
        list(replay(path))
    monkeypatch.setitem(POLICIES, "shortest", Shortest())
    steps = [(step, again) for step, again in replay(path) if isinstance(step, CoreStep)]
    assert steps
    assert all(step.actions == tuple(again) for step, again in steps)


async def test_a_model_that_cannot_do_what_a_policy_needs(tmp_path: Path) -> None:
    """The engine does not form, and says why. A part of a prompt would end an encoder's rank."""
    from encoder_decoders import make_t5
    from scheduler.live import World
    from servers import redis_server

    from orca_pool.pool import Pool

    model = make_t5(tmp_path / "model", seed=1)
    with redis_server() as redis:
        async with Pool(redis.url, "live", patience=20) as pool:
            this = World(tmp_path, model, redis, pool)
            try:
                await this.supervisor()
                scheduler = await this.scheduler(script=Path(__file__), slots=160, policy="shortest")
                await this.until(lambda: scheduler.events("engine cannot form"))
            finally:
                await this.close()
    why = scheduler.events("engine cannot form")[0]["why"]
    assert why.endswith(
        "policy: shortest needs grown and keyed and outputs and parts, which ranks of this model cannot do"
    )


@pytest.mark.parametrize(
    ("config", "can"),
    [
        ({}, ("parts", "outputs", "keyed", "grown", "handed")),
        ({"orca_prefix_lm": True}, ("outputs", "grown")),
        ({"model_type": "t5"}, ()),
        ({"model_type": "marian"}, ()),
    ],
)
def test_what_ranks_can_do(config: dict[str, Any], can: tuple[str, ...]) -> None:
    checkpoint = Checkpoint(Path(), "m", config, config.get("model_type", "gpt2"), 9, 9, (), "")
    assert checkpoint.can == can


def requests_of(model: Any) -> list[tuple[list[int], list[int]]]:
    """Prompts of different lengths and their answers: a long one, one that begins like it, and shorter ones."""
    draw = random.Random(3)
    long = [draw.randrange(97) for _ in range(200)]
    prompts = [long, [*long, 1, 2, 3], *([draw.randrange(97) for _ in range(n)] for n in range(6, 18))]
    return [(prompt, model.greedy(prompt, most)) for prompt, most in zip(prompts, [430, 20, *[60] * 12], strict=True)]
