"""What goes wrong around an endpoint: packets, its registration, Redis. Each index is still shown exactly once."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import grpc
import httpx2 as httpx
import pytest
from endpoint.harness import (
    World,
    collect,
    generation,
    ids_of,
    lose_entry,
    make_model,
    make_tokenizer,
    read,
    serving,
    until,
    world,
)
from google.protobuf.duration_pb2 import Duration
from loops import OwnThreadLoop
from redis.asyncio import Redis
from servers import RedisServer, redis_server
from tokenizers import decoders

from orca.v1 import orca_pb2 as pb
from orca_endpoint.calls.call import Call
from orca_endpoint.calls.delivery import DETACHES, Delivery, Grace
from orca_pool.pool import Pool
from orca_pool.records import Attached, Claimed, Committed, Reason, Refusal
from orca_pool.records import Delivery as Entry
from orca_pool.wire import ADDRESS

CODE = grpc.StatusCode


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server for one test, which freezes or kills it."""
    with redis_server() as server:
        yield server


@pytest.fixture
async def own(server: RedisServer, model: Path) -> AsyncIterator[World]:
    async with world(server.url, model, pool_patience=1.0) as started:
        yield started


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A connection that goes past the pool's operations."""
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


async def listen(redis: Redis, orca: World, request: Claimed, attempt: int, endpoint: str) -> None:
    """Whom the next commit tells of a request. The number of the listeners moves, as the pool's own changes move it."""
    listener = ADDRESS.pack(attempt, len(request.request_id)) + f"{request.request_id}{endpoint}".encode()
    await redis.hset(f"orca:{{{orca.name}}}:listeners:engine-0", str(request.claim), listener)
    await redis.hincrby(f"orca:{{{orca.name}}}:engine:engine-0", "listeners", 1)


async def forget(redis: Redis, orca: World, request_id: str, count: int) -> None:
    """Leaves only `count` tokens, as a Redis does that lost its last second."""
    key = f"orca:{{{orca.name}}}:tokens:{request_id}"
    raw: bytes = await redis.execute_command("GETRANGE", key, 0, count * 16 - 1, NEVER_DECODE=True)  # type: ignore[assignment]
    await redis.set(key, raw)


async def test_a_missed_packet(orca: World, redis: Redis) -> None:
    """A packet of another call shows a hole in the numbers. Then every call reads its tokens from the pool."""
    endpoint, attempt = orca.serving.app.delivery.incarnation, 5
    call, other = (
        orca.stub.Generate(generation(max_new_tokens=3, request_id=name, attempt=attempt)) for name in ("a", "b")
    )
    claimed = [await orca.engine.claim() for _ in range(2)]
    request, neighbour = sorted(claimed, key=lambda r: r.request_id)
    await orca.engine.commit(request, 0, [10])
    seen = await read(call, 2)
    await listen(redis, orca, request, 1, "")
    await orca.engine.commit(request, 1, [11])  # nobody hears it
    await listen(redis, orca, request, attempt, endpoint)
    await lose_entry(redis, orca.name, endpoint)
    await orca.engine.commit(neighbour, 0, [20])
    seen += await read(call, 1)
    await orca.engine.commit(request, 2, [12], Reason.LENGTH)
    assert ids_of([*seen, *await collect(call)]) == [10, 11, 12]
    await orca.engine.commit(neighbour, 1, [21, 22], Reason.LENGTH)
    assert ids_of(await collect(other)) == [20, 21, 22]


async def test_packets_of_another_attempt(orca: World, redis: Redis) -> None:
    """Two calls of one request on one endpoint: the packets go to the newer one alone."""
    call = orca.stub.Generate(generation(max_new_tokens=2, request_id="a", attempt=5))
    request = await orca.engine.claim()
    await read(call, 1)
    delivery = orca.serving.app.delivery
    (listener,) = delivery._calls["a"]
    assert isinstance(listener, Call)
    endpoint, before = delivery.incarnation, delivery._last
    await listen(redis, orca, request, 6, endpoint)
    await orca.engine.commit(request, 0, [10])
    await until(lambda: delivery._last > before)
    assert (listener.buffered, listener.output_tokens) == (0, 0)
    await listen(redis, orca, request, 5, endpoint)
    await orca.engine.commit(request, 1, [11], Reason.LENGTH)
    assert ids_of(await collect(call)) == [10, 11]


async def test_declared_dead(orca: World, caplog: pytest.LogCaptureFixture) -> None:
    """An endpoint whose registration is gone takes a new incarnation, and its calls go on. Its new stream is counted
    from the start, so nothing seems to be missed."""
    delivery = orca.serving.app.delivery
    call = orca.stub.Generate(generation(max_new_tokens=3))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10])
    seen = await read(call, 2)
    old = delivery.incarnation
    await orca.pool.leave_endpoint(old)
    await orca.engine.commit(request, 1, [11])  # nobody hears it
    submitted = orca.stub.Generate(generation(max_new_tokens=1, request_id="meanwhile"))
    await until(lambda: delivery.incarnation != old)
    await orca.engine.commit(request, 2, [12], Reason.LENGTH)
    assert ids_of([*seen, *await collect(call)]) == [10, 11, 12]
    await orca.engine.answer(await orca.engine.claim(), [20])
    assert ids_of(await collect(submitted)) == [20]
    assert "packets were missed" not in caplog.messages


async def test_what_is_read_of_an_old_incarnation_does_not_count(orca: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers would stand for those of the new stream, whose first entries nobody would read then."""
    delivery, pool = orca.serving.app.delivery, orca.serving.app._pool
    old, has_read, may_go = delivery.incarnation, asyncio.Event(), asyncio.Event()
    real, cursors = pool.read, dict[str, bytes | None]()

    async def late(incarnation: str, cursor: bytes | None, *, wait: float) -> list[Entry]:
        cursors.setdefault(incarnation, cursor)
        entries = await real(incarnation, cursor, wait=wait)
        if incarnation == old and entries:
            has_read.set()
            with suppress(asyncio.CancelledError):  # the answer was there when the read was ended
                await may_go.wait()
        return entries

    monkeypatch.setattr(pool, "read", late)
    await until(lambda: old in cursors)
    call = orca.stub.Generate(generation(max_new_tokens=2))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10])
    async with asyncio.timeout(10):
        await has_read.wait()
    await orca.pool.leave_endpoint(old)
    await until(lambda: delivery.incarnation != old and delivery.registered)
    may_go.set()
    await until(lambda: delivery.incarnation in cursors)
    assert cursors[delivery.incarnation] is None
    await orca.engine.commit(request, 1, [11], Reason.LENGTH)
    assert ids_of(await collect(call)) == [10, 11]


async def test_the_stream_of_an_old_incarnation_is_left_at_once(
    server: RedisServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes on it any more. A read that waited there for its whole time was half a second of a pause."""
    monkeypatch.setattr("orca_endpoint.calls.delivery.READ_WAIT", 3600)
    async with world(server.url, model) as own:
        delivery = own.serving.app.delivery
        call = own.stub.Generate(generation(max_new_tokens=2))
        request = await own.engine.claim()
        await own.engine.commit(request, 0, [10])
        seen = await read(call, 2)
        old = delivery.incarnation
        await own.pool.leave_endpoint(old)
        await until(lambda: delivery.incarnation != old and delivery.registered)
        await own.engine.commit(request, 1, [11], Reason.LENGTH)
        assert ids_of([*seen, *await collect(call)]) == [10, 11]


async def test_redis_dies_in_the_middle(own: World, server: RedisServer) -> None:
    """Nothing is shown while Redis is away. The streams go on when it is back, and each index comes once."""
    calls = [own.stub.Generate(generation(max_new_tokens=4, request_id=f"r-{n}")) for n in range(3)]
    requests = [await own.engine.claim() for _ in calls]
    for request in requests:
        await own.engine.commit(request, 0, [10, 11])
    seen = [await read(call, 3) for call in calls]
    old = own.serving.app.delivery.incarnation
    server.kill()
    refused = own.stub.Generate(generation(request_id="refused"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(refused)
    assert caught.value.code() is CODE.UNAVAILABLE
    server.restart()
    for request in requests:
        await own.engine.commit(request, 2, [12, 13], Reason.LENGTH)
    for call, first in zip(calls, seen, strict=True):
        assert ids_of([*first, *await collect(call)]) == [10, 11, 12, 13]
    await until(lambda: own.serving.app.delivery.incarnation != old and own.serving.app.delivery.registered)
    assert await own.pool.renew_endpoint(old) is None, "its registration went with the new one's coming"


async def test_the_renewal_that_connects_again_takes_a_new_incarnation(server: RedisServer) -> None:
    """At once: the streams stand still until it has one."""
    async with Pool(server.url, "again") as pool:
        delivery = Delivery(pool)
        await delivery._renew()
        old = delivery.incarnation
        server.restart()
        await delivery._renew()
        assert delivery.incarnation != old


async def test_an_endpoint_registers_as_soon_as_redis_answers(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not with the next renewal, whether that or a read finds out: the streams stand still until then."""
    monkeypatch.setattr("orca_endpoint.calls.delivery.RENEW_SECONDS", 3600)
    server.kill()
    async with Pool(server.url, "again") as pool:
        delivery = Delivery(pool)
        working = [asyncio.create_task(delivery.renew())]
        await until(lambda: delivery._outage._since is not None, 30)
        server.restart()
        await until(lambda: delivery.registered, 30)
        working.append(asyncio.create_task(delivery.read()))
        await until(lambda: delivery.registered and delivery._generation == pool.generation, 30)
        old = delivery.incarnation
        server.restart()
        await until(lambda: delivery.registered and delivery.incarnation != old, 30)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)


async def test_detaches_of_an_outage_leave_room_for_calls(
    own: World, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each submit that was not answered leaves a detach behind, which is sent until Redis is back."""
    pool = own.serving.app._pool
    detach, tried = pool.detach, set[str]()

    async def noted(request_id: str, **more: Any) -> None:
        tried.add(request_id)
        await detach(request_id, **more)

    monkeypatch.setattr(pool, "detach", noted)
    server.kill()
    calls = [collect(own.stub.Generate(generation())) for _ in range(3 * DETACHES)]
    assert {type(end) for end in await asyncio.gather(*calls, return_exceptions=True)} == {grpc.aio.AioRpcError}
    await until(lambda: len(tried) >= DETACHES)
    assert len(tried) == DETACHES
    server.restart()
    await own.serving.quiet()
    assert len(tried) == 3 * DETACHES


async def test_a_new_call_waits_for_redis(server: RedisServer, model: Path) -> None:
    """It waits as long as its patience lasts. The endpoint is not ready meanwhile."""
    async with world(server.url, model, pool_patience=30.0) as own:
        server.freeze()
        call = own.stub.Generate(generation(max_new_tokens=1))
        await until(lambda: own.serving.app.endpoint.not_ready() == "the request pool does not answer")
        assert own.serving.app.delivery.count == 1
        server.thaw()
        await own.engine.answer(await own.engine.claim(), [10])
        assert ids_of(await collect(call)) == [10]
        await until(lambda: own.serving.app.endpoint.not_ready() is None)


async def test_tokens_that_redis_lost(orca: World, redis: Redis) -> None:
    """The pool has fewer tokens than were shown: the call waits, and goes on when they were made again."""
    call = orca.stub.Generate(generation(max_new_tokens=5, request_id="rolled"))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10, 11, 12])
    seen = await read(call, 4)
    await forget(redis, orca, "rolled", 1)
    old = orca.serving.app.delivery.incarnation
    await orca.pool.leave_endpoint(old)  # so that its calls attach again
    await until(lambda: orca.serving.app.delivery.incarnation != old)
    (listener,) = orca.serving.app.delivery._calls["rolled"]
    assert isinstance(listener, Call)
    await until(lambda: listener._healing > 0)
    await orca.engine.commit(request, 1, [11, 12])
    await orca.engine.commit(request, 3, [13])
    seen += await read(call, 1)
    await until(lambda: listener._healing == 0)  # what is lost later has its own time for healing
    await orca.engine.commit(request, 4, [14], Reason.LENGTH)
    assert ids_of([*seen, *await collect(call)]) == [10, 11, 12, 13, 14]


async def test_an_outage_leaves_tokens_their_time_for_healing(
    orca: World, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis lost tokens, and is away for longer than a call waits for them: none could be made meanwhile."""
    monkeypatch.setattr("orca_endpoint.calls.call.HEALING", 0.5)
    call = orca.stub.Generate(generation(max_new_tokens=4, request_id="healing"))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10, 11, 12])
    seen = await read(call, 4)
    pool, looks = orca.serving.app._pool, 0
    attach = pool.attach

    async def away(*args: Any, **names: Any) -> Attached | Refusal:
        nonlocal looks
        looks += 1
        if looks == 2:
            await asyncio.sleep(0.6)
        answer = await attach(*args, **names)
        if looks == 2:
            await orca.engine.commit(request, 1, [11, 12])
            await orca.engine.commit(request, 3, [13], Reason.LENGTH)
        return answer

    monkeypatch.setattr(pool, "attach", away)
    await forget(redis, orca, "healing", 1)
    await orca.pool.leave_endpoint(orca.serving.app.delivery.incarnation)  # so that its calls attach again
    assert ids_of([*seen, *await collect(call)]) == [10, 11, 12, 13]
    assert looks >= 3


@pytest.mark.usefixtures("punctual")
async def test_tokens_that_stay_lost(orca: World, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """DATA_LOSS after the time for healing. The request ends too: nobody would read its tokens."""
    monkeypatch.setattr("orca_endpoint.calls.call.HEALING", 0.5)
    call = orca.stub.Generate(generation(request_id="lost", detach_grace=Duration(seconds=60)))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10, 11, 12])
    await read(call, 4)
    await forget(redis, orca, "lost", 1)
    await orca.pool.leave_endpoint(orca.serving.app.delivery.incarnation)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    assert caught.value.code() is CODE.DATA_LOSS
    await orca.serving.quiet()
    assert await orca.engine.commit(request, 1, [11]) == Committed.GONE


async def test_tokens_that_healed_otherwise(orca: World, redis: Redis) -> None:
    """The tokens that were made again are not those that were shown: DATA_LOSS."""
    call = orca.stub.Generate(generation(max_new_tokens=4, request_id="other"))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10, 11, 12])
    await read(call, 4)
    await forget(redis, orca, "other", 1)
    await orca.engine.commit(request, 1, [99, 98, 97], Reason.LENGTH)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    assert caught.value.code() is CODE.DATA_LOSS


async def test_a_failed_endpoint_does_not_wait_for_its_streams(orca: World, redis: Redis) -> None:
    """A bug ends the reader of packets: nobody would deliver. The drain ends the streams, and their requests go on."""
    async with serving(orca.redis_url, orca.name, orca.model, drain_seconds=3600) as failing:
        call = failing.stub.Generate(generation(max_new_tokens=2, request_id="undelivered"))
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, [10])
        seen = await read(call, 2)
        stream = f"orca:{{{orca.name}}}:delivery:{failing.app.delivery.incarnation}"
        await redis.xadd(stream, {"not": "an entry"})
        with pytest.raises(ValueError, match="unpack"):
            await failing.app.run()
        async with asyncio.timeout(30):
            await failing.app.drain()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() is CODE.UNAVAILABLE
        assert await orca.engine.commit(request, 1, [11], Reason.LENGTH) == Committed.OK
    rest = await collect(orca.stub.Resume(pb.ResumeRequest(request_id="undelivered", from_index=1)))
    assert ids_of([*seen, *rest]) == [10, 11]


def test_readiness_is_asked_from_another_thread(redis_url: str, model: Path) -> None:
    """As the status port asks. Only the loop's own thread may ask the loop for its time."""

    async def ask() -> str | None:
        async with world(redis_url, model) as own:
            return await asyncio.to_thread(own.serving.app.endpoint.not_ready)

    with asyncio.Runner(loop_factory=OwnThreadLoop) as runner:
        assert runner.run(ask()) is None


async def test_a_resume_that_breaks_while_it_attaches_keeps_the_grace(
    orca: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has not seen the request's detach grace yet. The pool knows it."""
    first = orca.stub.Generate(generation(max_new_tokens=2, request_id="broken", detach_grace=Duration(seconds=20)))
    request = await orca.engine.claim()
    pool = orca.serving.app._pool
    attach, attached, answer = pool.attach, asyncio.Event(), asyncio.Event()

    async def late(*args: Any, **names: Any) -> Attached | Refusal:
        done = await attach(*args, **names)
        attached.set()
        await answer.wait()
        return done

    monkeypatch.setattr(pool, "attach", late)
    second = orca.stub.Resume(pb.ResumeRequest(request_id="broken", attempt=1 << 52))
    await asyncio.wait_for(attached.wait(), 10)
    second.cancel()
    await until(lambda: orca.serving.app.delivery.count == 0)  # the first call ended by the second's attach
    answer.set()
    await orca.serving.quiet()
    monkeypatch.undo()
    third = orca.stub.Resume(pb.ResumeRequest(request_id="broken", attempt=(1 << 52) + 1))
    assert await orca.engine.commit(request, 0, [10, 11], Reason.LENGTH) == Committed.OK
    assert ids_of(await collect(third)) == [10, 11]
    with pytest.raises(grpc.aio.AioRpcError, match="newer call"):
        await collect(first)


async def test_a_call_that_attaches_again_reads_only_what_it_lacks(
    orca: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storm of attaches costs what was missed, not what the streams hold."""
    pool, answers = orca.serving.app._pool, list[Attached | Refusal]()
    attach = pool.attach

    async def noted(*args: Any, **names: Any) -> Attached | Refusal:
        answers.append(await attach(*args, **names))
        return answers[-1]

    monkeypatch.setattr(pool, "attach", noted)
    call = orca.stub.Generate(generation(max_new_tokens=4, request_id="long"))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10, 11, 12])
    seen = await read(call, 4)
    old = orca.serving.app.delivery.incarnation
    await orca.pool.leave_endpoint(old)
    await orca.engine.commit(request, 3, [13], Reason.LENGTH)  # nobody hears it
    assert ids_of([*seen, *await collect(call)]) == [10, 11, 12, 13]
    (answer,) = (answer for answer in answers if isinstance(answer, Attached))
    assert (answer.first, [token.token_id for token in answer.tokens]) == (3, [13])


@pytest.mark.parametrize("reason", [Reason.LENGTH, Reason.STOP])
@pytest.mark.parametrize("from_index", [0, 2])
async def test_a_call_whose_tokens_were_evicted_does_not_spin(
    orca: World, redis: Redis, monkeypatch: pytest.MonkeyPatch, reason: Reason, from_index: int
) -> None:
    """A Redis that evicts keys took the tokens of a request that has ended. Its calls end in DATA_LOSS after a few
    looks: one that had shown all but the end, and one that comes later."""
    monkeypatch.setattr("orca_endpoint.calls.call.HEALING", 0.5)
    pool, attaches = orca.serving.app._pool, 0
    attach = pool.attach

    async def counted(*args: Any, **names: Any) -> Attached | Refusal:
        nonlocal attaches
        attaches += 1
        return await attach(*args, **names)

    monkeypatch.setattr(pool, "attach", counted)
    listening = orca.stub.Generate(generation(request_id="evicted"))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10, 11, 12])
    await read(listening, 4)
    keys = f"orca:{{{orca.name}}}:"
    await redis.hset(f"{keys}request:evicted", mapping={"state": "ended", "reason": int(reason), "final": 3})
    await redis.delete(f"{keys}tokens:evicted")
    await orca.pool.leave_endpoint(orca.serving.app.delivery.incarnation)  # so that its calls attach again
    with pytest.raises(grpc.aio.AioRpcError) as first:
        await collect(listening)
    later = orca.stub.Resume(pb.ResumeRequest(request_id="evicted", from_index=from_index, attempt=1 << 52))
    with pytest.raises(grpc.aio.AioRpcError) as second:
        await collect(later)
    assert [first.value.code(), second.value.code()] == [CODE.DATA_LOSS] * 2
    assert attaches < 20


async def test_a_call_that_ends_while_the_endpoint_is_late_has_a_longer_grace(own: World, server: RedisServer) -> None:
    """Its client may have left because of it."""
    call = own.stub.Generate(generation(max_new_tokens=2, request_id="late"))
    request = await own.engine.claim()
    await own.engine.commit(request, 0, [10])
    await read(call, 2)
    server.freeze()
    await until(own.serving.app.delivery.own_fault)
    assert not own.serving.app.delivery.leaving
    call.cancel()
    await until(lambda: own.serving.app.delivery.count == 0)
    server.thaw()
    await own.serving.quiet()
    assert await own.engine.commit(request, 1, [11], Reason.LENGTH) == Committed.OK
    assert ids_of(await collect(own.stub.Resume(pb.ResumeRequest(request_id="late")))) == [10, 11]


@pytest.mark.usefixtures("punctual")
async def test_a_call_that_breaks_while_its_stop_is_recorded_detaches(
    orca: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whether the pool has recorded it. Without a detach the request would run to its last token."""
    recording = asyncio.Event()

    async def never(*_: Any) -> str:
        recording.set()
        await asyncio.Event().wait()
        raise AssertionError("cancelled before")

    monkeypatch.setattr(orca.serving.app._pool, "finish_at", never)
    vocabulary = orca.serving.app.vocabulary
    assert vocabulary is not None
    call = orca.stub.Generate(generation(request_id="stopping", stop=["pool"]))
    request = await orca.engine.claim()
    ids = vocabulary.encode("the pool")
    await orca.engine.commit(request, 0, ids)
    await asyncio.wait_for(recording.wait(), 10)
    call.cancel()
    await until(lambda: orca.serving.app.delivery.count == 0)
    await orca.serving.quiet()
    assert await orca.engine.commit(request, len(ids), [20]) == Committed.GONE


async def test_an_endpoint_leaves_while_a_stop_waits_for_tokens_that_redis_lost(
    orca: World, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client resumes elsewhere at once, and does not wait here until the tokens are made again."""
    monkeypatch.setattr("orca_endpoint.calls.call.HEALING_STEP", 0.01)
    async with serving(orca.redis_url, orca.name, orca.model) as leaving:
        pool = leaving.app._pool
        asked, may_go, ahead = asyncio.Event(), asyncio.Event(), asyncio.Event()
        finish_at = pool.finish_at

        async def noted(*args: Any) -> str:
            asked.set()
            await may_go.wait()
            said = await finish_at(*args)
            if said == "ahead":
                ahead.set()
            return said

        monkeypatch.setattr(pool, "finish_at", noted)
        vocabulary = leaving.app.vocabulary
        assert vocabulary is not None
        call = leaving.stub.Generate(
            generation(request_id="stopping", stop=["pool"], detach_grace=Duration(seconds=60))
        )
        request = await orca.engine.claim()
        ids = vocabulary.encode("the pool")
        await orca.engine.commit(request, 0, ids)
        async with asyncio.timeout(10):
            await asked.wait()
            await forget(redis, orca, "stopping", 1)
            may_go.set()
            await ahead.wait()
        leaving.app.delivery.end_calls()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() is CODE.UNAVAILABLE


async def test_a_detach_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old registration is swept by then, which detaches its calls."""
    monkeypatch.setattr("orca_endpoint.calls.delivery.DETACH_PATIENCE", 0.1)
    async with Pool("redis://127.0.0.1:9", "away") as pool:
        delivery = Delivery(pool)
        answered = asyncio.get_running_loop().create_future()
        answered.set_result(None)
        delivery.detach("r", 1, Grace(), answered)
        await delivery.settled(10)
        assert not delivery._background


async def test_what_was_read_is_deleted(orca: World, redis: Redis) -> None:
    """Else the stream would grow to its bound, and 1,000 endpoints' streams with it."""
    delivery = orca.serving.app.delivery
    call = orca.stub.Generate(generation(max_new_tokens=2))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10])
    await read(call, 2)
    stream = f"orca:{{{orca.name}}}:delivery:{delivery.incarnation}"
    async with asyncio.timeout(10):
        while await redis.xlen(stream):
            await asyncio.sleep(0.02)
    await orca.engine.commit(request, 1, [11], Reason.LENGTH)
    assert ids_of(await collect(call)) == [11]


@pytest.mark.usefixtures("punctual")
@pytest.mark.parametrize("refused", [True, False])
async def test_a_call_that_leaves_during_its_attach_detaches_after_the_answer(
    orca: World, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """The pool may refuse the attach. A detach of its attempt would then end the stream that has the request. An attach
    that took the request over is detached, and without a grace the request then ends."""
    pool, delivery = orca.serving.app._pool, orca.serving.app.delivery
    attach, asked, may_go = pool.attach, asyncio.Event(), asyncio.Event()

    async def late(*args: Any, **options: Any) -> Attached | Refusal:
        asked.set()
        await may_go.wait()
        return await attach(*args, **options)

    call = orca.stub.Generate(generation(max_new_tokens=2, request_id="one", attempt=1))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10])
    seen = await read(call, 2)
    monkeypatch.setattr(pool, "attach", late)
    digest = b"x" * 20 if refused else b""
    leaving = orca.stub.Resume(pb.ResumeRequest(request_id="one", from_index=1, digest=digest, attempt=2))
    await asyncio.wait_for(asked.wait(), 10)
    leaving.cancel()
    await until(lambda: delivery.count == 1)
    may_go.set()
    await delivery.settled(10)
    if refused:
        await orca.engine.commit(request, 1, [11], Reason.LENGTH)
        assert ids_of([*seen, *await collect(call)]) == [10, 11]
    else:
        async with asyncio.timeout(10):
            while await orca.engine.commit(request, 1, []) != Committed.GONE:
                await asyncio.sleep(0.05)


async def test_packets_that_overtake_the_answer_of_an_attach_are_kept(
    orca: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token may come while the attach is answered. Nothing would come after it that shows the gap."""
    pool, delivery = orca.serving.app._pool, orca.serving.app.delivery
    attach, attached, may_go = pool.attach, asyncio.Event(), asyncio.Event()

    async def late(*args: Any, **options: Any) -> Attached | Refusal:
        answer = await attach(*args, **options)
        attached.set()
        await may_go.wait()
        return answer

    asked = generation(max_new_tokens=2, request_id="one", attempt=1, detach_grace=Duration(seconds=60))
    first = orca.stub.Generate(asked)
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10])
    await read(first, 2)
    first.cancel()
    await until(lambda: delivery.count == 0)
    monkeypatch.setattr(pool, "attach", late)
    call = orca.stub.Resume(pb.ResumeRequest(request_id="one", attempt=2))
    await asyncio.wait_for(attached.wait(), 10)
    await orca.engine.commit(request, 1, [11], Reason.LENGTH)
    await until(lambda: any(cast(Call, one).buffered for (one,) in delivery._calls.values()))
    may_go.set()
    assert ids_of(await asyncio.wait_for(collect(call), 10)) == [10, 11]


async def test_a_panic_of_the_tokenizer_library_ends_the_call_with_a_status(redis_url: str, tmp_path: Path) -> None:
    """At both doors. The panic is no Exception; without care the caller would hear nothing of it."""
    tokenizer = make_tokenizer()
    tokenizer.decoder = decoders.Strip("t", 0, 5)
    tokenizer.save(str(make_model(tmp_path / "tiny") / "tokenizer.json"))
    ids = tokenizer.encode("t").ids[:1]
    async with world(redis_url, tmp_path / "tiny") as orca, orca.background(lambda record: ids * 3):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(orca.stub.Generate(generation()))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "tokenizer" in (caught.value.details() or "")
        async with httpx.AsyncClient(base_url=orca.serving.http) as http:
            answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": [1]})
        assert answer.status_code == 500
