"""Ranks freeze and die, and the pool goes away, under load: verdicts, and streams as they would have been."""

import asyncio
import os
import random
import re
import signal
from pathlib import Path

import grpc
import pytest
from checkpoints import make_timed
from scheduler.live import VOCAB, tokens_of, world
from scheduler.test_takeover import load
from stacks import Running, generation, running

from orca.v1 import orca_pb2 as pb
from orca_scheduler.core.core import BatchReturned
from orca_scheduler.master.journal import CoreStep

POISON = 255


async def test_a_frozen_rank_is_fenced(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1, schedulers=1, seconds=0.02, run_ahead=1) as this:
        before, pid = (await this.formed("engine-0"))["engine-0"], this.rank_pid(0)
        (scheduler,), (supervisor,) = this.schedulers, this.supervisors
        await load(this, 4, 60, seed=5)
        os.kill(pid, signal.SIGSTOP)
        await this.completed()
        (lost,) = scheduler.events("rank lost")
        pattern = (
            rf"stage 0 rank 0 of engine-0 at \S+ \(host \S+, pid {pid}, last iteration (\d+)\) has been silent for"
        )
        verdict = re.match(pattern, lost["verdict"])
        assert verdict, lost["verdict"]
        assert [e["rank_pid"] for e in supervisor.events(f"rank fenced: {lost['verdict']}")] == [pid]
        (ended,) = supervisor.events("rank ended")
        assert ended["status"] == -signal.SIGKILL
        after = await this.engine("engine-0")
        assert after["term"] == before["term"]
        assert int(after["epoch"]) > int(before["epoch"])
        (numbers,) = scheduler.iterations().values()
        assert int(verdict[1]) in numbers
        assert numbers == sorted(set(numbers))  # not even the one that was lost is used again
        assert [await this.losses(f"r{n}") for n in range(4)] == [1] * 4


async def test_a_rank_that_is_asked_to_end_loses_nothing(tmp_path: Path) -> None:
    """SIGTERM: the engine comes to rest first, so that nobody is RUNNING, and forms again with the successor."""
    async with world(tmp_path, engines=1, schedulers=1, seconds=0.02, run_ahead=1) as this:
        before, pid = (await this.formed("engine-0"))["engine-0"], this.rank_pid(0)
        (scheduler,), (supervisor,) = this.schedulers, this.supervisors
        await load(this, 4, 60, seed=9)
        os.kill(pid, signal.SIGTERM)
        await this.completed()
        lost = scheduler.events("rank lost")[0]
        assert f"pid {pid}" in lost["verdict"]
        assert lost["verdict"].endswith("is leaving")
        (ended,) = supervisor.events("rank ended")
        assert ended["status"] == 0
        after = await this.engine("engine-0")
        assert after["term"] == before["term"]
        assert int(after["epoch"]) > int(before["epoch"])
        assert [await this.losses(f"r{n}") for n in range(4)] == [0] * 4
        (journal,) = scheduler.journals().values()
        events = [line.event for line in journal if isinstance(line, CoreStep)]
        (numbers,) = scheduler.iterations().values()
        returned = [event.iteration for event in events if isinstance(event, BatchReturned)]
        assert returned == numbers, "all that was begun came back"


async def test_the_pool_freezes(tmp_path: Path) -> None:
    async with world(tmp_path, engines=2, schedulers=2, seconds=0.02) as this:
        before = await this.formed("engine-0", "engine-1")
        await load(this, 8, 100, seed=6)
        this.redis.freeze()
        for scheduler in this.schedulers:  # each gives up after 2 s
            await this.until(lambda scheduler=scheduler: len(scheduler.events("the request pool is away")) == 1)
        this.redis.thaw()
        await this.completed()
        after = await this.formed("engine-0", "engine-1")
        for name in before:  # nobody took anything from anybody
            assert [after[name][k] for k in ("owner", "term", "epoch")] == [
                before[name][k] for k in ("owner", "term", "epoch")
            ]
        assert [await this.losses(f"r{n}") for n in range(8)] == [0] * 8


async def test_the_pool_starts_again(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1, schedulers=1, seconds=0.02) as this:
        before = (await this.formed("engine-0"))["engine-0"]
        await load(this, 4, 60, seed=7)
        this.redis.restart()  # it knows no script any more
        await this.completed()
        after = await this.engine("engine-0")
        assert [after[k] for k in ("owner", "term", "epoch")] == [before[k] for k in ("owner", "term", "epoch")]
        assert [await this.losses(f"r{n}") for n in range(4)] == [0] * 4


def innocent(draw: random.Random, count: int) -> list[int]:
    """A prompt whose continuation holds no poison either."""
    while True:
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 8))]
        if POISON not in prompt + tokens_of(prompt, count):
            return prompt


async def tokens(stack: Running, request: pb.GenerateRequest) -> list[int]:
    return [token.token_id async for response in stack.stub.Generate(request) for token in response.tokens]


async def test_poison_ends_and_harms_nobody(tmp_path: Path) -> None:
    model = make_timed(tmp_path / "model", vocab=VOCAB, seconds=0.02, abort_on_token=POISON)
    draw = random.Random(8)
    prompts = [innocent(draw, 40) for _ in range(3)]
    async with running(tmp_path / "run", model, max_batch_size=4, broken=True) as stack:
        calls = [asyncio.create_task(tokens(stack, generation(prompt, 40))) for prompt in prompts]
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await tokens(stack, generation([1, POISON], 40))
        assert ended.value.code() is grpc.StatusCode.INTERNAL
        said = ended.value.details() or ""
        assert "again and again" in said
        assert re.search(r"\b[0-9a-f]{32}\b", said), said
        assert await asyncio.gather(*calls) == [tokens_of(prompt, 40) for prompt in prompts]
    log = (tmp_path / "run/logs/supervisor-0.log").read_text()
    assert log.count('"rank ended"') == 3
