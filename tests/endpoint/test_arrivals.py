"""Requests that arrive together are submitted together, and nobody waits for one that is not there."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from endpoint.harness import World, generation

from orca_endpoint.requests import arrivals
from orca_endpoint.requests.arrivals import ENOUGH, Arrivals


class Submissions:
    """Requests that come through `Arrivals`. together: names by the turn of the loop in which they went on."""

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self.together: list[list[str]] = []
        self._turn: asyncio.Handle | None = None

    async def submit(self, name: str, valid: Callable[[], Awaitable[object]]) -> None:
        with self.arrivals.coming():
            await valid()
        await self.arrivals.together()
        if self._turn is None:
            self.together.append([])
            self._turn = asyncio.get_running_loop().call_soon(self._turned)
        self.together[-1].append(name)

    def _turned(self) -> None:
        self._turn = None


async def turn() -> None:
    await asyncio.sleep(0)


async def test_one_alone_waits_for_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[float] = []
    loop, seen = asyncio.get_running_loop(), Submissions()
    monkeypatch.setattr(loop, "call_later", lambda seconds, *rest: timers.append(seconds))
    await seen.submit("a", turn)
    assert seen.together == [["a"]]
    assert not timers


async def test_those_that_come_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when each is known only after the one before it is ready, as gRPC tells of them."""
    monkeypatch.setattr(arrivals, "PATIENCE", 60.0)
    seen, tasks = Submissions(), list[asyncio.Task[None]]()

    async def another() -> None:
        await turn()
        if len(tasks) < 9:
            asyncio.get_running_loop().call_soon(come)

    def come() -> None:
        tasks.append(asyncio.create_task(seen.submit(f"r{len(tasks)}", another)))

    come()
    while not seen.together:
        await turn()
    await asyncio.gather(*tasks)
    assert seen.together == [[f"r{n}" for n in range(9)]]


async def test_enough_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "PATIENCE", 60.0)
    seen, never = Submissions(), asyncio.Event()
    slow = asyncio.create_task(seen.submit("slow", never.wait))
    async with asyncio.timeout(10):
        await asyncio.gather(*(seen.submit(f"r{n}", turn) for n in range(ENOUGH)))
    assert list(map(len, seen.together)) == [ENOUGH]
    slow.cancel()


async def test_a_slow_one_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "PATIENCE", 0.001)
    seen, never = Submissions(), asyncio.Event()
    slow = asyncio.create_task(seen.submit("slow", never.wait))
    await turn()
    async with asyncio.timeout(10):
        await seen.submit("a", turn)
        monkeypatch.setattr(arrivals, "PATIENCE", 60.0)
        await seen.submit("b", turn)
    never.set()
    await slow
    assert seen.together == [["a"], ["b"], ["slow"]]


async def test_one_that_is_refused_or_leaves_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "PATIENCE", 60.0)
    seen, never = Submissions(), asyncio.Event()
    waits = asyncio.create_task(seen.submit("waits", never.wait))
    await turn()
    leaves = asyncio.create_task(seen.submit("leaves", turn))
    stays = asyncio.create_task(seen.submit("stays", turn))
    for _ in range(5):
        await turn()
    assert not seen.together
    leaves.cancel()  # it is ready, and waits for the one that is being read
    waits.cancel()
    async with asyncio.timeout(10):
        await stays
    assert seen.together == [["stays"]]


async def test_a_burst_shares_scripts(orca: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through gRPC, which tells of one call after the other."""
    monkeypatch.setattr(arrivals, "PATIENCE", 10.0)
    scripts: list[int] = []
    pool = orca.serving.app.endpoint._pool
    run = pool._run

    async def counted(script: str, *args: Any, **more: Any) -> Any:
        if script == "submit":
            scripts.append(len(args))
        return await run(script, *args, **more)

    monkeypatch.setattr(pool, "_run", counted)
    streams = [orca.stub.Generate(generation([1, 2, 3], 1)) for _ in range(16)]
    for stream in streams:
        assert (await anext(aiter(stream))).accepted.request_id
    assert len(scripts) < len(streams)
