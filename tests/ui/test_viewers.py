"""Browsers that look: each message is encoded once, one that lags gets the newest picture, and nothing grows."""

import asyncio
import json
from typing import Any

import pytest

from orca_ui import viewers as module
from orca_ui.viewers import BEHIND, Viewers


class Browser:
    """One connection of ASGI that takes messages only when it is let."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.may = asyncio.Semaphore(0)
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] != "http.response.body" or not message["body"]:
            return
        await self.may.acquire()
        for event in message["body"].decode().split("\n\n"):
            if event:
                self.got.append(json.loads(event.removeprefix("data: ")))


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_a_lagging_browser_gets_the_newest_and_the_others_every_change() -> None:
    now = 0
    viewers = Viewers(10, lambda: {"whole": True, "at": now})
    quick, slow = Browser(), Browser()
    tasks = [asyncio.create_task(viewers({}, one.receive, one.send)) for one in (quick, slow)]
    for _ in range(1000):
        quick.may.release()
    slow.may.release()
    await until(lambda: quick.got and slow.got)
    for now in range(1, 5 * BEHIND):
        viewers.publish({"at": now})
        await until(lambda now=now: quick.got[-1]["at"] == now)
    assert quick.got == [{"whole": True, "at": 0}, *({"at": n} for n in range(1, 5 * BEHIND))]
    assert len(slow.got) == 1
    for _ in range(1000):
        slow.may.release()
    await until(lambda: slow.got[-1]["at"] == now)
    late = slow.got[1:]
    assert {"whole": True, "at": now} in late
    assert len(late) <= BEHIND + 2, "it was not sent what it had missed"
    for one in (quick, slow):
        one.left.set()
    await asyncio.gather(*tasks)
    assert len(viewers) == 0


async def test_a_hundred_browsers_cost_one_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[dict[str, Any]] = []

    def counting(picture: dict[str, Any]) -> bytes:
        encoded.append(picture)
        return b"data: " + json.dumps(picture).encode() + b"\n\n"

    monkeypatch.setattr(module, "event_of", counting)
    viewers = Viewers(100, lambda: {"whole": True})
    browsers = [Browser() for _ in range(100)]
    for one in browsers:
        for _ in range(10):
            one.may.release()
    tasks = [asyncio.create_task(viewers({}, one.receive, one.send)) for one in browsers]
    await until(lambda: all(one.got for one in browsers))
    assert viewers.full
    viewers.publish({"change": 1})
    await until(lambda: all(len(one.got) == 2 for one in browsers))
    assert encoded == [{"whole": True}, {"change": 1}]
    viewers.close()
    await asyncio.gather(*tasks)
    viewers.publish({"change": 2})
    assert len(encoded) == 2, "without a browser nothing is encoded"
