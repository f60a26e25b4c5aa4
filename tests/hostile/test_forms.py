"""One host's forms that take long to compile or to follow, while another host asks for small ones."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from endpoint.harness import generation, make_model
from hostile.stage import Endpoint, endpoint, engine, hostile
from servers import redis_server
from stacks import Running, running
from worker.test_forms import json_model

from orca.v1.orca_pb2_grpc import OrcaStub

SECONDS = 6.0
QUIET = 0.1  # seconds that a form may take all the same, by the quantile below
DEADLINE = 10.0
CALLS = 20  # honest calls at least

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Endpoint]:
    """An endpoint process with default settings, and an engine that answers all its requests."""
    model = make_model(Path(tmp_path_factory.mktemp("checkpoint")) / "tiny")
    with redis_server() as redis:
        async with (
            engine(redis.url, "forms"),
            endpoint({"redis_url": redis.url, "pool": "forms", "model": model}) as one,
        ):
            yield one


async def test_small_forms_of_another_host(started: Endpoint) -> None:
    """None is refused, and the slowest of twenty takes at most twice as long as on a quiet endpoint."""
    fresh = itertools.count(1)

    async def honest(seconds: float) -> float:
        """The time within which 95 % of the calls ended."""
        took = list[float]()
        async with grpc.aio.insecure_channel(started.addresses["grpc"]) as channel:
            end = time.monotonic() + seconds
            while time.monotonic() < end or len(took) < CALLS:
                began = time.monotonic()
                request = generation(max_new_tokens=1, regex=f"a{{{next(fresh)}}}")
                assert [event async for event in OrcaStub(channel).Generate(request, timeout=DEADLINE)]
                took.append(time.monotonic() - began)
        return sorted(took)[int(0.95 * len(took))]

    await honest(0.1)  # the processes are started
    quiet = await honest(2.0)
    attacking = asyncio.create_task(hostile("forms", started.addresses["grpc"], SECONDS))
    attacked = await honest(SECONDS - 1)
    said = await attacking
    print(f"p95 {1000 * quiet:.0f} ms alone, {1000 * attacked:.0f} ms beside {said}")
    assert attacked < max(2 * quiet, QUIET)
    assert set(said["answers"]) == {"status 0"}, "its own forms are compiled, in their turns"


async def test_answers_beside_forms_that_are_hard_to_follow(tmp_path: Path) -> None:
    """They take at most twice as long as beside as many forms that are easy, and no rank is lost."""

    async def honest(this: Running, seconds: float) -> float:
        """The time within which 95 % of the answers ended, with a form and without."""
        took, numbers, end = list[float](), itertools.count(), time.monotonic() + seconds
        while time.monotonic() < end or len(took) < CALLS:
            form: dict[str, Any] = {"regex": "[ab]{20}"} if next(numbers) % 2 else {"ignore_eos": True}
            began = time.monotonic()
            answer = await this.stub.GenerateText(generation(max_new_tokens=20, **form), timeout=DEADLINE)
            assert len(answer.token_ids) == 20
            took.append(time.monotonic() - began)
        return sorted(took)[int(0.95 * len(took))]

    async with running(tmp_path / "run", json_model(tmp_path / "model"), slots=8192, max_batch_size=32) as this:
        processes = [(one["role"], one["pid"]) for one in this.processes()]
        await honest(this, 0.1)
        took, answers = {"no attack": await honest(this, 2.0)}, dict[str, int]()
        for attack in ("easy-forms", "hard-forms"):
            attacking = asyncio.create_task(hostile(attack, this.grpc, 2 * SECONDS))
            took[attack] = await honest(this, 2 * SECONDS - 1)
            answers = (await attacking)["answers"]
        print({name: f"p95 {1000 * one:.0f} ms" for name, one in took.items()}, answers)
        assert took["hard-forms"] < max(2 * took["easy-forms"], QUIET)
        assert [(one["role"], one["pid"]) for one in this.processes()] == processes
        assert set(answers) <= {"status 0", "status 9"}, "some are too hard: FAILED_PRECONDITION"
