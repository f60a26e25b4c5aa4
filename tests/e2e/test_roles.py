"""Prompts on one engine and increments on another: the tokens are transformers', a decode engine initiates nothing, and
a rank of either side may die or stand still at any moment."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_gpt2
from e2e.kill_rounds import NEW_TOKENS, check_journals, make_model
from e2e.test_metrics import scrape
from e2e.test_tokens import compared
from reference import Reference
from stacks import running

from orca_chaos.pool_check import leftovers
from orca_scheduler.core.core import HandOver, Pull, Pulled
from orca_scheduler.core.request import Phase
from orca_scheduler.explain.explanation import Kind, explain
from orca_scheduler.explain.history import History
from orca_scheduler.master.journal import CoreStep, Line, read, scheduled

ROLES, BLOCK = "prefill=1,decode=1", 4


def lines(run: Path, engine: str) -> Iterator[Line]:
    for path in sorted(run.glob(f"journal-{engine}-*.jsonl")):
        yield from read(path)


def actions(run: Path, engine: str) -> list[Any]:
    return [action for line in lines(run, engine) if isinstance(line, CoreStep) for action in line.actions]


def initiations(run: Path, engine: str) -> int:
    return sum(member.phase is Phase.INITIATION for batch in scheduled(lines(run, engine)) for member in batch.members)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), pytest.param(2, 1, marks=pytest.mark.long)])
async def test_tokens_equal_transformers(tmp_path: Path, tp: int, pp: int) -> None:
    """60 requests that arrive at random, most of them together."""
    model = make_gpt2(tmp_path / "model", heads=4, layers=3, hidden=24, vocab=211, positions=96, seed=11)
    numbers = {"roles": ROLES, "tp": tp, "pp": pp, "block_size": BLOCK, "max_batch_size": 3, "slots": 512}
    run = tmp_path / "run"
    assert await compared(run, model, 211, **numbers) == []
    check_journals(run)
    assert initiations(run, "engine-1") == 0
    handed = [one for action in actions(run, "engine-0") if isinstance(action, HandOver) for one in action.requests]
    pulls = [action for action in actions(run, "engine-1") if isinstance(action, Pull)]
    ends = [line.event for line in lines(run, "engine-1") if isinstance(line, CoreStep)]
    assert len(handed) == len(pulls) > 50, "one token needs no other engine"
    assert [end.done for end in ends if isinstance(end, Pulled)] == [True] * len(pulls)
    assert sorted(one.positions for one in handed) == sorted(pull.positions for pull in pulls)


async def test_bytes_are_whole_blocks(tmp_path: Path) -> None:
    model = make_gpt2(tmp_path / "model", heads=4, layers=3, hidden=24, vocab=211, positions=96, seed=11)
    async with running(tmp_path / "run", model, roles=ROLES, block_size=BLOCK, max_batch_size=3) as stack:
        prompts = [[n % 211 for n in range(length)] for length in (1, 4, 5, 19, 40)]
        answers = await asyncio.gather(*(stack.tokens(prompt, 6) for prompt in prompts))
        reference = Reference(model)
        assert answers == [reference.greedy(prompt, 6) for prompt in prompts]
        found = await scrape(stack, "scheduler")
        blocks = sum(-(-len(prompt) // BLOCK) for prompt in prompts)
        assert found.value("orca_pulled_bytes_total", engine="engine-1") == blocks * 2 * 3 * 24 * 4 * BLOCK
        assert found.value("orca_pulls_total", engine="engine-1", outcome="done") == len(prompts)
        assert found.value("orca_handed_over_total", engine="engine-0") == len(prompts)
        assert found.value("orca_decode_initiations_total") == 0
    histories = {name: History(name) for name in ("engine-0", "engine-1")}
    for name, history in histories.items():
        history.take(lines(tmp_path / "run", name))
    for stay in histories["engine-1"].stays:
        story = explain(stay.request, histories.values(), None, 0)
        assert story is not None
        assert story.engines == ("engine-0", "engine-1")
        assert {Kind.RUN, Kind.PULL} <= {part.kind for part in story.parts}
        assert story.unseen == 0


TIMES = {2: [pytest.mark.timeout(200)], 40: [pytest.mark.long, pytest.mark.timeout(1800)]}


@pytest.mark.parametrize("rounds", [pytest.param(count, marks=marks) for count, marks in TIMES.items()])
async def test_a_rank_of_either_side_is_lost(tmp_path: Path, rounds: int) -> None:
    """A rank of the engine that prefills, or of the one that decodes, is killed or stopped at a random moment."""
    model, draw = make_model(tmp_path / "model"), random.Random(rounds)
    reference = Reference(model)
    run = tmp_path / "run"
    async with running(run, model, roles=ROLES, block_size=BLOCK, max_batch_size=2, slots=512) as stack:
        for n in range(rounds):
            ranks = {row["engine"]: row["pid"] for row in stack.processes() if row["role"] == "rank"}
            victim, kind = ranks[f"engine-{n % 2}"], (signal.SIGKILL, signal.SIGSTOP)[(n + n // 2) % 2]
            asked = list(islice(reference.random(draw, (1, 40), (NEW_TOKENS, NEW_TOKENS)), 8))
            seen = list[int]()
            streams = [asyncio.create_task(stack.tokens(prompt, NEW_TOKENS, seen.append)) for prompt, _ in asked]
            moment = draw.randint(0, 2 * NEW_TOKENS)
            await stack.until(lambda seen=seen, moment=moment: len(seen) >= moment)
            os.kill(victim, kind)
            got = await asyncio.wait_for(asyncio.gather(*streams), 120)
            assert got == [tokens for _, tokens in asked], f"round {n}: {kind.name} of engine-{n % 2}"
            await stack.until(lambda victim=victim: all(row["pid"] != victim for row in stack.processes()))
        redis, pool = stack.stack._redis, stack.stack._settings.model_dump()["pool"]
        assert redis is not None
        assert await leftovers(redis.url, pool, 2, 1) == []
    check_journals(run)
