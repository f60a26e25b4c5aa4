"""The seam of policies, proven by a second one: this file alone has it, and it runs through core, wire, ranks and pool.

Shortest prompt first, parts of 16 positions, blocks on demand; where they run out, the last request starts again later.

As a script it is a scheduler process that knows the policy.
"""

import random
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import pytest

from orca_scheduler.app import main
from orca_scheduler.core import Arrived, BatchReturned, Commit, Core, EngineReady, GiveBack, ScheduleBatch
from orca_scheduler.invariants import violations
from orca_scheduler.journal import CoreStep, replay, scheduled
from orca_scheduler.memory import Memory, Slots
from orca_scheduler.policy import POLICIES, policy_named
from orca_scheduler.request import Arrival, Request
from orca_scheduler.selection import Limits, Plan, Stop

PART = 16


class OnDemand(Slots):
    """A row gets blocks for the positions that it is about to run."""

    def need(self, request: Request, count: int) -> int:
        blocks = -(-(request.computed + count) // self.block_size)
        return (blocks - self.blocks(request)) * self.block_size

    def blocks(self, request: Request) -> int:
        return len(self.rows()[request.row]) if request.row is not None else 0


class Shortest:
    name = "shortest"
    reserves_output = False

    def order(self, request: Request) -> tuple[float, ...]:
        return request.arrived.input_tokens, request.arrived.arrival

    def memory(self, n_slots: int, block_size: int) -> OnDemand:
        return OnDemand(n_slots, block_size)

    def plan(self, ready: Iterable[Request], limits: Limits, memory: Memory) -> Plan:
        assert isinstance(memory, OnDemand)
        waiting, free = list(ready), memory.free
        batch: list[tuple[Request, int]] = []
        preempt: list[Request] = []
        while waiting and len(batch) < limits.max_bs:
            request = waiting.pop(0)
            count = min(request.remaining, PART)
            need = memory.need(request, count)
            for last in [other for other in reversed(waiting) if other.row is not None and not other.running]:
                if need <= free:
                    break
                waiting.remove(last)
                preempt.append(last)
                free += memory.blocks(last) * memory.block_size
            if need > free:
                break
            free -= need
            batch.append((request, count))
        return Plan(tuple(batch), Stop.POOL, tuple(preempt)) if batch else Plan((), Stop.SLOTS)

    def violations(self, requests: Sequence[Request], memory: Memory) -> list[str]:
        prompts = [request.arrived.input_tokens for request in requests]
        return [] if prompts == sorted(prompts) else [f"prompts of {prompts} tokens are not in their order"]


SHORTEST = Shortest()

if __name__ == "__main__":
    POLICIES[SHORTEST.name] = SHORTEST
    main()


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"policy: there is no 'shortest'; there are: paper"):
        policy_named("shortest")


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_whatever_is_preempted(seed: int, run_ahead: int) -> None:
    """The core with little memory: each position is computed once after each admission, and each token comes once."""
    draw = random.Random(seed)
    core = Core(draw.randint(1, 4), draw.randint(1, 3), 4, run_ahead, SHORTEST)
    asked = [Arrival(n, n, draw.randint(1, 60), draw.randint(1, 20)) for n in range(1, 9)]
    core.step(EngineReady(0.0, max(one.max_tokens for one in asked) + 4 + draw.randint(0, 60), 1))
    made, computed, admissions = dict.fromkeys(range(1, 9), 0), dict.fromkeys(range(1, 9), 0), 0
    actions = core.step(Arrived(0.0, tuple(asked)))
    while core.in_flight or actions:
        for action in actions:
            match action:
                case ScheduleBatch():
                    for n, member in enumerate(action.members):
                        if n < action.admitted:
                            computed[member.claim], admissions = 0, admissions + 1
                        assert member.start == computed[member.claim], "a hole, or a position twice"
                        assert member.count <= PART
                        computed[member.claim] += member.count
                case Commit():
                    for claim, index, _, _ in action.outcomes:
                        assert index == made[claim]
                        made[claim] += 1
                case GiveBack():
                    raise AssertionError("a request went back")
        assert violations(core) == []
        if not core.in_flight:
            break
        flight = core.in_flight[0]
        actions = core.step(BatchReturned(0.0, flight.iteration, (7,) * sum(flight.samples)))
    assert made == {one.claim: one.max_new_tokens for one in asked}
    assert core.memory.reserved == 0
    assert admissions >= 8


async def test_it_runs_through_core_wire_ranks_and_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of a GPT-2, tokens of transformers, and slots for about a third of the requests."""
    from checkpoints import make_gpt2
    from reference import Reference
    from scheduler.live import World
    from servers import redis_server

    from orca_pool.pool import Pool

    model = make_gpt2(tmp_path / "model", heads=2, layers=2, hidden=16, vocab=97, positions=96, seed=5)
    known = list(islice(Reference(model).random(random.Random(3), (1, 70), (2, 20)), 10))
    with redis_server() as redis:
        async with Pool(redis.url, "live", patience=20) as pool:
            this = World(tmp_path, model, redis, pool)
            try:
                for _ in range(2):
                    await this.supervisor()
                settings = {"pp": 2, "slots": 160, "block_size": 4, "policy": "shortest"}
                scheduler = await this.scheduler(script=Path(__file__), **settings)
                await this.formed("engine-0")
                (info,) = await pool.engine_infos()
                assert info.policy == "shortest"
                for n, one in enumerate(known):
                    await this.submit(f"r{n}", one.prompt, len(one.tokens))
                for n, one in enumerate(known):
                    assert await this.tokens(f"r{n}") == one.tokens
            except BaseException:
                for log in sorted(tmp_path.glob("*/log")):
                    print(f"---- {log.parent.name}\n{log.read_text()[-4000:]}")
                raise
            finally:
                await this.close()
    ((_, lines),) = scheduler.journals().items()
    members = [member for batch in scheduled(lines) for member in batch.members]
    assert any(not member.samples for member in members), "no prompt ran in parts"
    assert any(member.start and member.new_blocks for member in members), "no row grew"
    began = [member.claim for batch in scheduled(lines) for member in batch.members[: batch.admitted]]
    assert len(began) > len(set(began)), "no request was preempted"
    (path,) = scheduler.folder.glob("journal-*.jsonl")
    with pytest.raises(ValueError, match="there is no 'shortest'"):
        list(replay(path))
    monkeypatch.setitem(POLICIES, "shortest", SHORTEST)
    steps = [(step, again) for step, again in replay(path) if isinstance(step, CoreStep)]
    assert steps
    assert all(step.actions == tuple(again) for step, again in steps)
