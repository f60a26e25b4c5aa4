"""One host's forms and chats that take long, while another host asks for small ones: callers have turns."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from endpoint.harness import generation, make_model
from hostile.stage import Endpoint, endpoint, engine, hostile
from servers import redis_server
from tool_templates import HERMES

from orca.v1 import orca_pb2 as pb
from orca.v1.orca_pb2_grpc import OrcaStub

SECONDS = 6.0
QUIET = 0.1  # seconds that a call may take all the same, by the quantile below
DEADLINE = 30.0
CALLS = 20  # honest calls at least

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


def small_form(n: int) -> pb.GenerateRequest:
    return generation(max_new_tokens=1, regex=f"a{{{n}}}")


def small_chat(n: int) -> pb.GenerateRequest:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=f"pool {n}")])
    return pb.GenerateRequest(chat=chat, max_new_tokens=1)


SMALL: dict[str, Callable[[int], pb.GenerateRequest]] = {"forms": small_form, "chats": small_chat}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Endpoint]:
    """An endpoint process with default settings, and an engine that answers all its requests."""
    model = make_model(Path(tmp_path_factory.mktemp("checkpoint")) / "tiny")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": HERMES}))
    with redis_server() as redis:
        async with (
            engine(redis.url, "turns"),
            endpoint({"redis_url": redis.url, "pool": "turns", "model": model}) as one,
        ):
            yield one


@pytest.mark.parametrize("attack", SMALL)
async def test_small_work_of_another_host(started: Endpoint, attack: str) -> None:
    """No call is refused, and the slowest of twenty takes at most twice as long as on a quiet endpoint."""
    fresh = itertools.count(1)

    async def honest(seconds: float) -> float:
        """The time within which 95 % of the calls ended."""
        took = list[float]()
        async with grpc.aio.insecure_channel(started.addresses["grpc"]) as channel:
            end = time.monotonic() + seconds
            while time.monotonic() < end or len(took) < CALLS:
                began = time.monotonic()
                request = SMALL[attack](next(fresh))
                assert [event async for event in OrcaStub(channel).Generate(request, timeout=DEADLINE)]
                took.append(time.monotonic() - began)
        return sorted(took)[int(0.95 * len(took))]

    await honest(0.1)  # the processes are started
    quiet = await honest(2.0)
    started.forget_peak()
    before, attacking = started.resident, asyncio.create_task(hostile(attack, started.addresses["grpc"], SECONDS))
    attacked = await honest(SECONDS - 1)
    said = await attacking
    grown = started.peak - before
    print(f"p95 {1000 * quiet:.0f} ms alone, {1000 * attacked:.0f} ms beside {said}; {grown:.0f} MB more")
    assert attacked < max(2 * quiet, QUIET)
    assert len(said["answers"]) == 1, "its own are answered, in their turns"
