"""Messages are read in turns: what comes unseen takes no more memory than the turns allow."""

import asyncio
from pathlib import Path

import http2
import pytest
from endpoint.harness import World, collect, generation, ids_of, until, world
from http2 import Http2

from orca_common.errors import DeadlineExceeded, ResourceExhausted
from orca_endpoint.grpc import turns
from orca_endpoint.grpc.turns import SHARE, Turns
from orca_endpoint.requests.limits import Refusals

PATH, HEALTH = "/orca.v1.Orca/Generate", "/grpc.health.v1.Health/Check"
DECLARED = (1 << 20) + 5  # bytes of the message that a hostile client begins
WINDOW = 65_535


async def hold(queue: Turns, peer: str, taken: list[str], seconds: float = 60.0) -> None:
    """Takes a turn for a message that never comes."""
    async with queue.turn(peer, seconds):
        taken.append(peer)
        await asyncio.Event().wait()


async def test_a_peer_has_a_share_of_the_turns() -> None:
    """However many messages it begins, others are read."""
    queue, taken = Turns(2 * SHARE, Refusals()), list[str]()
    async with asyncio.TaskGroup() as tasks:
        held = [tasks.create_task(hold(queue, "hostile", taken)) for _ in range(50)]
        await until(lambda: len(taken) == 2)
        for _ in range(3):  # nor does it get what another one gives back
            async with queue.turn("other", 60.0):
                await asyncio.sleep(0)
                assert taken == ["hostile"] * 2
        for task in held:
            task.cancel()
    assert not queue._used
    assert not queue._waiting


async def test_hosts_take_turns_and_their_calls_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with many calls that wait delays another host by one of them, and none of its own is overtaken."""
    monkeypatch.setattr(turns, "UNHURRIED", 600.0)
    queue, taken = Turns(SHARE, Refusals()), list[str]()
    go = asyncio.Semaphore(0)

    async def read(host: str, name: str) -> None:
        async with queue.turn(host, 60.0):
            taken.append(name)
            await go.acquire()

    async with asyncio.TaskGroup() as tasks:
        for n in range(SHARE):  # these have all turns
            tasks.create_task(read(f"other-{n}", f"other-{n}"))
        await until(lambda: len(taken) == SHARE)
        for host in ("busy", "busy", "busy", "rare", "rare"):
            tasks.create_task(read(host, f"{host}-{sum(map(len, queue._waiting.values()))}"))
            waiting = sum(map(len, queue._waiting.values()))
            await until(lambda before=waiting: sum(map(len, queue._waiting.values())) > before)
        while len(taken) < SHARE + 5:
            go.release()
            await asyncio.sleep(0)
        for _ in taken:
            go.release()
    assert taken[SHARE:] == ["busy-0", "rare-3", "busy-1", "rare-4", "busy-2"]


async def test_a_slow_message_gives_way_when_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each that waits; nobody gives way while nobody waits."""
    monkeypatch.setattr(turns, "UNHURRIED", 0.01)
    queue, taken = Turns(SHARE, Refusals()), list[str]()
    holding = [asyncio.create_task(hold(queue, f"peer-{n}", taken)) for n in range(SHARE)]
    await until(lambda: len(taken) == SHARE)
    looks = asyncio.get_running_loop().time() + 0.1
    await until(lambda: asyncio.get_running_loop().time() > looks)
    assert not any(task.done() for task in holding)
    async with queue.turn("other", 60.0):
        ended = [task for task in holding if task.done()]
        assert len(ended) == 1
        with pytest.raises(ResourceExhausted, match="others wait to be read"):
            await ended[0]
    for task in holding:
        task.cancel()
    await asyncio.gather(*holding, return_exceptions=True)
    assert not queue._used
    assert not queue._waiting


async def test_nobody_gives_way_to_a_call_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is cancelled while it waits counts no more."""
    monkeypatch.setattr(turns, "UNHURRIED", 600.0)
    queue, taken = Turns(SHARE, Refusals()), list[str]()
    holding = [asyncio.create_task(hold(queue, f"peer-{n}", taken)) for n in range(SHARE)]
    await until(lambda: len(taken) == SHARE)
    leaving = asyncio.create_task(hold(queue, "other", taken))
    await until(lambda: bool(queue._waiting))
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    monkeypatch.setattr(turns, "UNHURRIED", 0.0)  # all of them are slow now
    queue._look_again()
    for _ in range(10):  # an end is a few turns of the loop
        await asyncio.sleep(0)
    assert not queue._waiting
    assert not any(task.done() for task in holding)
    for task in holding:
        task.cancel()
    await asyncio.gather(*holding, return_exceptions=True)


async def test_the_wait_for_a_turn_is_bounded() -> None:
    queue, taken = Turns(SHARE, Refusals()), list[str]()
    holding = asyncio.create_task(hold(queue, "peer", taken))
    await until(lambda: bool(taken))
    with pytest.raises(DeadlineExceeded, match=r"did not come within 0\.02 s"):
        await hold(queue, "peer", taken, 0.02)
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding


@pytest.mark.parametrize("path", [PATH, HEALTH])
async def test_unread_messages_get_no_more_than_their_first_window(
    redis_url: str, model: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile client begins forty messages of 1 MB, and sends all but the end of each as soon as it may."""
    monkeypatch.setattr(turns, "UNHURRIED", 0.1)
    bounds = {"max_body_bytes": SHARE << 22, "body_seconds": 600.0}
    async with world(redis_url, model, **bounds) as orca, Http2.connected(orca.serving.addresses["grpc"]) as client:
        sent, window, most = dict.fromkeys(range(1, 81, 2), 0), dict.fromkeys(range(1, 81, 2), WINDOW), 0
        for stream in sent:
            client.write(http2.frame(http2.HEADERS, http2.END_HEADERS, stream, http2.call(path)))
            client.write(http2.frame(http2.DATA, 0, stream, http2.message(b"")[:1] + DECLARED.to_bytes(4)))

        async def play() -> None:
            nonlocal most
            async for frame in client.frames():
                if frame.kind == http2.HEADERS and frame.flags & http2.END_STREAM:
                    del sent[frame.stream]
                elif frame.kind == http2.WINDOW_UPDATE and frame.stream in sent:
                    window[frame.stream] += int.from_bytes(frame.payload)
                    while (size := min(window[frame.stream], DECLARED - 100 - sent[frame.stream], 16_000)) > 0:
                        client.write(http2.frame(http2.DATA, 0, frame.stream, bytes(size)))
                        sent[frame.stream] += size
                        window[frame.stream] -= size
                    most = max(most, sum(size > 2 * WINDOW for size in sent.values()))

        playing = asyncio.create_task(play())
        await until(lambda: max(sent.values()) >= DECLARED - 100)
        await honest(orca)
        await until(lambda: len(sent) <= 30)
        await honest(orca)
        playing.cancel()
        assert 1 <= most <= 2, "one has its turn; the status of the one before may come after"


async def honest(orca: World) -> None:
    """A call of the same host. It has its turn as soon as one gives way."""
    call = orca.stub.Generate(generation(max_new_tokens=1))
    await orca.engine.answer(await orca.engine.claim(), [10])
    assert ids_of(await collect(call)) == [10]
