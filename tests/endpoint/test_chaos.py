"""Streams over two endpoints that lose their registrations and packets, with clients that come and go, by seeds.

Each client gets every index once, each with the right token.
"""

import asyncio
import random

import grpc
import pytest
from endpoint.harness import Engine, Serving, World, collect, lose_entry, serving, until
from google.protobuf.duration_pb2 import Duration
from redis.asyncio import Redis

from orca.v1 import orca_pb2 as pb
from orca_pool.records import Claimed, Committed, Reason

LENGTH, CLIENTS = 40, 8


def token(name: str, index: int) -> int:
    return 1 + (sum(name.encode()) * 31 + index * 17) % 500


async def client(name: str, endpoints: list[Serving], rng: random.Random) -> list[int]:
    """A client that leaves now and then, and resumes at any endpoint."""
    seen: list[int] = []
    accepted, attempt = False, 0
    while True:
        stub, attempt = rng.choice(endpoints).stub, attempt + 1
        if accepted:
            call = stub.Resume(pb.ResumeRequest(request_id=name, from_index=len(seen), attempt=attempt))
        else:
            request = pb.GenerateRequest(
                request_id=name,
                token_ids=pb.TokenIds(ids=[1]),
                max_new_tokens=LENGTH,
                detach_grace=Duration(seconds=60),
                attempt=attempt,
            )
            call = stub.Generate(request)
        patience = rng.choice([3, 10, 1000])  # responses until it leaves
        try:
            while isinstance(response := await call.read(), pb.GenerateResponse):
                accepted = True
                for token in response.tokens:
                    assert token.index == len(seen)
                    seen.append(token.token_id)
                if response.HasField("finished"):
                    assert response.finished.output_tokens == LENGTH
                    return seen
                patience -= 1
                if not patience:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the test is ending, whether or not the client just left
                raise


async def generate(engine: Engine, request: Claimed, rng: random.Random) -> None:
    done = 0
    while done < LENGTH:
        count = min(rng.randint(1, 3), LENGTH - done)
        ids = [token(request.request_id, n) for n in range(done, done + count)]
        done += count
        answer = await engine.commit(request, done - count, ids, Reason.LENGTH if done == LENGTH else None)
        assert answer == Committed.OK
        await asyncio.sleep(rng.random() * 0.02)


async def faults(orca: World, endpoints: list[Serving], redis: Redis, rng: random.Random) -> None:
    prefix = f"orca:{{{orca.name}}}:"
    while True:
        incarnation = rng.choice(endpoints).app.delivery.incarnation
        match rng.randrange(3):
            case 0:
                await orca.pool.leave_endpoint(incarnation)
            case 1:  # a packet that nobody got
                await lose_entry(redis, orca.name, incarnation)
            case 2:
                await redis.xtrim(f"{prefix}delivery:{incarnation}", maxlen=0)
        await asyncio.sleep(rng.random() * 0.2)


@pytest.mark.parametrize("seed", range(4))
async def test_every_index_once(orca: World, seed: int) -> None:
    rng = random.Random(seed)
    names = [f"client-{n}" for n in range(CLIENTS)]
    async with (
        serving(orca.redis_url, orca.name, orca.model, call_buffer=8) as other,
        Redis.from_url(orca.redis_url, socket_timeout=None) as redis,  # with one, a cancellation may be swallowed
    ):
        endpoints = [orca.serving, other]
        disturbing = asyncio.create_task(faults(orca, endpoints, redis, rng))
        try:
            async with asyncio.timeout(120), asyncio.TaskGroup() as group:
                clients = [group.create_task(client(name, endpoints, rng)) for name in names]
                for _ in names:
                    group.create_task(generate(orca.engine, await orca.engine.claim(), rng))
        finally:
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
        for name, task in zip(names, clients, strict=True):
            assert task.result() == [token(name, n) for n in range(LENGTH)]
        await until(lambda: not other.app.delivery.count and not orca.serving.app.delivery.count)
        again = await collect(orca.stub.Resume(pb.ResumeRequest(request_id=names[0], from_index=LENGTH, attempt=10**6)))
        assert again[-1].finished.output_tokens == LENGTH
