"""Prompts on one engine and increments on another: the tokens are transformers', a decode engine initiates nothing, and
a rank of either side may die or stand still at any moment."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_gpt2
from e2e.kill_rounds import check_journals
from e2e.role_rounds import Harm, Moment, play
from e2e.test_metrics import scrape
from e2e.test_tokens import compared
from reference import Reference
from stacks import running

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


@pytest.mark.long
@pytest.mark.timeout(200)
async def test_a_rank_of_either_side_is_lost(tmp_path: Path) -> None:
    """Two of the rounds of `make distributed`: while a pull is under way, and a rank of each side."""
    harms = [Harm(Moment.IN, "engine-0", "rank", signal.SIGKILL), Harm(Moment.IN, "engine-1", "rank", signal.SIGSTOP)]
    await play(tmp_path, harms, seed=2)
