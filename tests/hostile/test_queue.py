"""One host leaves requests in the queue for an hour, while another host asks: there is a place for it."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from endpoint.harness import generation, make_model
from hostile.stage import Endpoint, endpoint, engine, hostile
from servers import redis_server

from orca.v1.orca_pb2_grpc import OrcaStub

SECONDS = 6.0
WAITING = 1000  # max_waiting: a quarter of the default, for an attack that is as much shorter
QUIET = 0.1  # seconds until a request is accepted, all the same
DEADLINE = 10.0

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Endpoint]:
    """An endpoint process, and an engine that is busy with something else."""
    model = make_model(Path(tmp_path_factory.mktemp("checkpoint")) / "tiny")
    settings = {"pool": "queue", "model": model, "max_waiting": WAITING}
    with redis_server() as redis:
        async with engine(redis.url, "queue", busy=True), endpoint({"redis_url": redis.url, **settings}) as one:
            yield one


async def test_another_host_finds_a_place(started: Endpoint) -> None:
    """The host that leaves its requests has at most half of the queue, and learns so."""
    took, positions = list[float](), list[int]()

    async def honest(seconds: float) -> float:
        """Asks and leaves, again and again. The time within which 95 % of the requests were accepted."""
        took.clear()
        async with grpc.aio.insecure_channel(started.addresses["grpc"]) as channel:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                began = time.monotonic()
                call = OrcaStub(channel).Generate(generation(max_new_tokens=1), timeout=DEADLINE)
                first = await call.read()
                took.append(time.monotonic() - began)
                positions.append(first.accepted.queue_position)
                call.cancel()
        return sorted(took)[int(0.95 * len(took))]

    quiet = await honest(2.0)
    attacking = asyncio.create_task(hostile("queue", started.addresses["grpc"], SECONDS))
    attacked = await honest(SECONDS - 1)
    said = await attacking
    print(f"p95 {1000 * quiet:.0f} ms alone, {1000 * attacked:.0f} ms beside {said}; {max(positions)} before it")
    assert attacked < max(2 * quiet, QUIET)
    assert WAITING / 2 - 50 < max(positions) <= WAITING / 2 + 50, "its half is full, and no more"
    assert said["answers"]["status 8"], "RESOURCE_EXHAUSTED"
