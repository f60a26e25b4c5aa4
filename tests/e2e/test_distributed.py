"""Engines of several processes: order, pipeline, tokens and recovery of whole stacks (paper sections 4.1, 4.2)."""

import asyncio
import itertools
import os
import random
import signal
from collections.abc import Iterable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_shape, make_timed
from e2e import kill_rounds, token_grid
from properties import first
from reference import Reference
from stacks import Running, generation, running

from orca_lab.timeline import label, letters, planes, read_run, shares
from orca_scheduler.core.core import Arrived, BatchReturned
from orca_scheduler.core.request import Arrival
from orca_scheduler.master.journal import CoreStep, Line, scheduled

STAGE = 0.02  # seconds of a stage's compute
WINDOW = 24  # iterations


async def ids(stack: Running, prompt: list[int], count: int, accepted: asyncio.Event, **fields: Any) -> list[int]:
    """Runs a request. Returns its tokens."""
    got = list[int]()
    async for response in stack.stub.Generate(generation(prompt, count, ignore_eos=True, **fields)):
        if response.HasField("accepted"):
            accepted.set()
        got += [token.token_id for token in response.tokens]
    return got


async def start_together(stack: Running, asked: Iterable[tuple[list[int], int]]) -> list[asyncio.Task[list[int]]]:
    """Sends prompts, with the number of tokens to make, while the scheduler is frozen, so that it then finds all of
    them in the queue, in order."""
    scheduler = next(p["pid"] for p in stack.processes() if p["role"] == "scheduler")
    os.kill(scheduler, signal.SIGSTOP)
    try:
        tasks = []
        for prompt, count in asked:
            accepted = asyncio.Event()
            tasks.append(asyncio.create_task(ids(stack, prompt, count, accepted)))
            await asyncio.wait_for(accepted.wait(), 60)
    finally:
        os.kill(scheduler, signal.SIGCONT)
    return tasks


def batches(journal: list[Line]) -> list[str]:
    """The scheduled batches, with a letter for each request."""
    found = list(scheduled(journal))
    names = letters(member.claim for batch in found for member in batch.members)
    return ["".join(names[member.claim] for member in batch.members) for batch in found]


@pytest.mark.parametrize("run_ahead", [0, 1])
async def test_figure_8a(tmp_path: Path, run_ahead: int) -> None:
    """Three stages, max_bs 2: AB, CD, EF, AB; control runs ahead of data; the pipeline is full."""
    tokens = 24
    model = make_timed(tmp_path / "model", seconds=STAGE)
    async with running(tmp_path / "run", model, pp=3, max_batch_size=2, run_ahead=run_ahead) as stack:
        tasks = await start_together(stack, [([n + 1] * 3, tokens) for n in range(6)])
        assert [len(made) for made in await asyncio.gather(*tasks)] == [tokens] * 6
        await stack.until(lambda: len(batches(stack.journal())) >= 3 * tokens)
        journal = stack.journal()
    assert batches(journal) == ["AB", "CD", "EF"] * tokens

    life = read_run(tmp_path / "run").last
    assert life is not None
    assert len(life.iterations) == 3 * tokens
    names = letters(member.claim for iteration in life.iterations for member in iteration.members)
    assert [label(iteration, names) for iteration in life.iterations[:4]] == ["AB", "CD", "EF", "AB"]
    # Pre-send: the control message reaches the last stage before the first stage has computed; and stages work at the
    # same time. Where one waited for the other, no iteration could show either. Beside other work nearly all show both;
    # `orca timeline` prints the exact numbers of a run.
    early = sum(i.times[2, 0].received < i.times[0, 0].computed for i in life.iterations)
    beside = sum(b.times[0, 0].started < a.times[2, 0].computed for a, b in pairwise(life.iterations))
    print(f"pre-sent: {early}, beside the one before: {beside} of {len(life.iterations)} iterations")
    assert min(early, beside) > 0.5 * len(life.iterations)
    assert in_flight(journal) == {3 + run_ahead}
    full = life.iterations[3:-3]
    windows = [
        shares(life, (first.times[0, 0].started, last.times[0, 0].started))
        for first, last in zip(full, full[WINDOW:], strict=False)
    ]
    for share in itertools.chain(*windows):
        assert share.busy + share.upstream + share.scheduler + share.no_work == pytest.approx(1, abs=1e-6)
    waiting = [max(share.upstream + share.scheduler for share in window) for window in windows]
    print(f"waiting: {min(waiting):.1%} to {max(waiting):.1%}, in the mean {sum(waiting) / len(waiting):.1%}")
    print(f"control, first to last stage: p50 {planes(life).whole_way[0]:.4f} s, p99 {planes(life).whole_way[1]:.4f} s")


def in_flight(journal: list[Line]) -> set[int]:
    """How many iterations were on their way when one came back, but for those that end the run."""
    begun, counts = 0, list[int]()
    for line in journal:
        if isinstance(line, CoreStep):
            if isinstance(line.event, BatchReturned):
                counts.append(begun)
                begun -= 1
            begun += len(list(scheduled([line])))
    return {*counts[: -len(counts) // 4]}


CASES = [
    token_grid.Case("demo", 1, 2, max_bs=8, policy="balanced,positions=12,drafts=ngram", slots=300),
    token_grid.Case("t5", 2, 2, run_ahead=1),
    token_grid.Case("odd", 3, 2, 1),
    token_grid.Case("llama", 2, 2, run_ahead=1, kernels="device-loop"),
]


@pytest.mark.parametrize("case", first(1, CASES), ids=str)
async def test_tokens(tmp_path: Path, case: token_grid.Case) -> None:
    """Parts and drafts; in `make fuzz` also an encoder, the layout of Figure 6 with uneven shards, and a GPU's loop.

    What families differ in is below the wire: `tests/worker` holds their tokens. `make stacks` runs the grid.
    """
    await token_grid.check(case, tmp_path, 1)


async def test_slots_for_a_third_of_the_requests(tmp_path: Path) -> None:
    """Sixty requests at once, prompts in parts, blocks on demand: their tokens are right, whoever gave up its slots."""
    model = make_shape(tmp_path / "model", "llama, 2 K/V heads", max_position_embeddings=96)
    asked = list(islice(Reference(model).random(random.Random(2), (1, 16), (40, 50)), 60))
    slots = sum(len(prompt) + len(tokens) for prompt, tokens in asked) // 3
    numbers: dict[str, Any] = {"pp": 2, "max_batch_size": 60, "policy": "balanced,positions=80", "slots": slots}
    async with running(tmp_path / "run", model, dtype="float32", block_size=4, **numbers) as stack:
        tasks = await start_together(stack, [(prompt, len(tokens)) for prompt, tokens in asked])
        got = await asyncio.gather(*tasks)
        preempted = sum(len(batch.preempted) for batch in scheduled(stack.journal()))
    assert got == [tokens for _, tokens in asked]
    print(f"{preempted} gave up their slots")
    assert preempted >= 20


async def test_an_urgent_request_takes_the_place_of_a_low_one(tmp_path: Path) -> None:
    """The engine is full of long requests: one of them pauses with its slots, goes on, and all tokens are right."""
    model = make_shape(tmp_path / "model", "llama, 2 K/V heads", max_position_embeddings=4096)
    asked = list(islice(Reference(model).random(random.Random(2), (4, 8), (60, 60)), 4))
    [(prompt, tokens)] = islice(Reference(model).random(random.Random(9), (4, 8), (5, 5)), 1)
    # Without drafts: a long answer of random weights repeats itself. The low ones would go on for 3,000 tokens.
    numbers: dict[str, Any] = {"pp": 2, "max_batch_size": 2, "slots": 16000, "policy": "paper"}
    async with running(tmp_path / "run", model, dtype="float32", block_size=4, **numbers) as stack:
        came = [list[int]() for _ in asked]
        work = (stack.tokens(one, 3000, got.append, priority="low") for (one, _), got in zip(asked, came, strict=True))
        low = [asyncio.create_task(one) for one in work]
        await stack.until(lambda: all(len(got) > 4 for got in came))
        assert await stack.tokens(prompt, len(tokens), priority="urgent") == tokens
        assert not any(task.done() for task in low)
        await stack.until(lambda: all(len(got) >= 60 for got in came))
        for task in low:
            task.cancel()
        await asyncio.wait(low)
    for (_, tokens), got in zip(asked, came, strict=True):
        assert got[:60] == tokens[: len(got)]


async def test_two_engines_share_a_pool(tmp_path: Path) -> None:
    """Requests leave the queue oldest first, whichever engine takes them."""
    model = make_timed(tmp_path / "model", seconds=0.01)
    async with running(tmp_path / "run", model, pp=2, engines=2, max_batch_size=2) as stack:
        tasks = await start_together(stack, [([n + 1] * 3, 10) for n in range(24)])
        assert [len(made) for made in await asyncio.gather(*tasks)] == [10] * 24
        engines = {p["engine"] for p in stack.processes() if p["role"] == "rank"}
        journal = stack.journal()
    assert engines == {"engine-0", "engine-1"}
    assert all(any(life.iterations for life in read_run(tmp_path / "run", engine).lives) for engine in engines)
    arrivals = {arrival.claim: arrival.arrival for line in journal for arrival in arrived(line)}
    assert len(arrivals) == 24
    assert [arrivals[claim] for claim in sorted(arrivals)] == sorted(arrivals.values())


def arrived(line: Line) -> tuple[Arrival, ...]:
    """The requests that arrived at a core in this line of a journal."""
    return line.event.requests if isinstance(line, CoreStep) and isinstance(line.event, Arrived) else ()


async def test_a_new_master_keeps_the_epoch(tmp_path: Path) -> None:
    """The scheduler dies under load. Its successor finds all ranks at the same iteration and continues with them."""
    model = kill_rounds.make_model(tmp_path / "model")
    async with running(tmp_path / "run", model, pp=2, schedulers=2, max_batch_size=2) as stack:
        lab = kill_rounds.Rounds(stack, model, random.Random(5))
        before = lab.ranks()
        await lab.load(lambda: kill_master(stack))
        assert lab.ranks() == before, "ranks live on"
        formed = [note["formed"] for note in kill_rounds.notes(stack.journal()) if "formed" in note]
    assert len(formed) >= 2
    assert len(set(formed)) == 1, "one epoch for both masters"


def kill_master(stack: Running) -> None:
    """Kills the scheduler that masters the engine, which its log tells."""
    logs = {n: (stack.run_dir / "logs" / f"scheduler-{n}.log").read_text() for n in range(2)}
    master = next(n for n, text in logs.items() if "engine formed" in text)
    pids = [p["pid"] for p in stack.processes() if p["role"] == "scheduler"]
    os.kill(pids[master], signal.SIGKILL)
