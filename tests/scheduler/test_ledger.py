"""In which order the ledger asks a real pool: nothing overtakes what must come before, and nothing is forgotten."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from servers import RedisServer, redis_server

from orca.v1 import worker_pb2 as pb
from orca.v1.pool_pb2 import PoolRequest
from orca_common.errors import Unavailable
from orca_pool.pool import Pool
from orca_pool.records import NO_LOAD, Attached, CommittedToken, EngineInfo, Reason
from orca_pool.wire import pack_tokens
from orca_scheduler.core.core import Room
from orca_scheduler.lifecycle.events import Claimed, Opened, PoolAway, PoolBack
from orca_scheduler.master.adapters import EngineAdapters
from orca_scheduler.master.ledger import Ledger, News

NAMES = count()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


class Gated(Pool):
    """A pool whose operations can be held up. `begun` names those that were asked for, in their order."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(url, name)
        self.begun: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.away = 0  # so many commits are done, and their answers lost

    async def _gate(self, name: str) -> None:
        self.begun.append(name)
        if name in self.gates:
            await self.gates[name].wait()

    async def commit(self, *args: Any, **options: Any) -> Any:
        await self._gate("commit")
        if self.away:
            self.away -= 1
            raise Unavailable("no answer")
        return await super().commit(*args, **options)

    async def give_back(self, *args: Any, **options: Any) -> None:
        await self._gate("give_back")
        await super().give_back(*args, **options)

    async def release(self, *args: Any, **options: Any) -> None:
        await self._gate("release")
        await super().release(*args, **options)


class Books:
    """The ledger of an engine that has claimed one request, and has no room for more."""

    def __init__(self, pool: Gated, ledger: Ledger, claim: int, news: asyncio.Queue[News]) -> None:
        self.pool, self.ledger, self.claim, self.made, self.news = pool, ledger, claim, 0, news

    def iterate(self, end: Reason | None = None) -> None:
        """The request gets a token, and perhaps its end."""
        self.ledger.outputs.append(self.claim, pack_tokens([CommittedToken(self.made, -0.5, self.made)]), end)
        self.made += 1
        self.ledger.committable()

    async def committed(self) -> int:
        answer = await self.pool.attach("r", endpoint="e", attempt=1)
        assert isinstance(answer, Attached)
        return len(answer.tokens)

    async def waits(self) -> bool:
        answer = await self.pool.attach("r", endpoint="e", attempt=1)
        return isinstance(answer, Attached) and answer.position == 1


@asynccontextmanager
async def books(server: RedisServer) -> AsyncIterator[Books]:
    news: asyncio.Queue[News] = asyncio.Queue()
    room = [Room(1, 9)]
    async with Gated(server.url, f"ledger{next(NAMES)}") as pool:
        await pool.renew_endpoint("e", register=True)
        term = await pool.acquire("g", "s", None)
        assert term is not None
        ledger = Ledger(pool, "g", "s", term, lambda: room[0], lambda: NO_LOAD, news.put_nowait, lambda *_: None)
        running = asyncio.create_task(ledger.run(False))
        assert isinstance(await news.get(), Opened)
        await ledger.formed(EngineInfo("g", 1, 1, 64, 0), 0)
        record = PoolRequest(max_new_tokens=8).SerializeToString()
        call = {"deadline_in": None, "detach_grace": 60.0, "endpoint": "e", "attempt": 1, "max_waiting": 8}
        assert isinstance(await pool.submit("r", record, "d", 9, 9, **call), Attached)
        claimed = await news.get()
        assert isinstance(claimed, Claimed)
        room[0] = Room(0, 0)
        ledger.admitted()
        try:
            yield Books(pool, ledger, claimed.claims[0], news)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_an_outage_is_told_once(server: RedisServer) -> None:
    async with books(server) as this:
        server.freeze()
        try:
            assert isinstance(await asyncio.wait_for(this.news.get(), 60), PoolAway)
            for _ in range(2):  # for longer than the next renewal waits
                with pytest.raises(Unavailable):
                    await this.committed()
        finally:
            server.thaw()
        assert isinstance(await asyncio.wait_for(this.news.get(), 60), PoolBack)


async def test_a_give_back_comes_after_the_tokens(server: RedisServer) -> None:
    """Otherwise the next engine would make them again."""
    async with books(server) as this:
        this.pool.gates["commit"] = asyncio.Event()
        this.iterate()
        await until(lambda: "commit" in this.pool.begun)
        giving = asyncio.create_task(this.ledger.give_back({this.claim: False}))
        await asyncio.wait([giving], timeout=0.05)
        assert "give_back" not in this.pool.begun
        this.pool.gates["commit"].set()
        await giving
        assert await this.committed() == 1
        assert await this.waits()


async def test_a_release_comes_after_the_give_backs(server: RedisServer) -> None:
    """After it the pool takes nothing from this term: the request would stay claimed until the engine has a master."""
    async with books(server) as this:
        this.pool.gates["give_back"] = asyncio.Event()
        giving = asyncio.create_task(this.ledger.give_back({this.claim: False}))
        await until(lambda: "give_back" in this.pool.begun)
        releasing = asyncio.create_task(this.ledger.release(retire=False))
        await asyncio.wait([releasing], timeout=0.05)
        assert "release" not in this.pool.begun
        this.pool.gates["give_back"].set()
        await asyncio.gather(giving, releasing)
        assert await this.waits()


async def test_tokens_join_and_first_tokens_and_ends_do_not_wait(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orca_scheduler.master.ledger.TOGETHER", 3600.0)
    async with books(server) as this:
        this.iterate()
        await this.ledger.give_back({})  # returns when everything is committed
        this.iterate()
        this.iterate()
        assert await this.committed() == 1, "the first token went at once, and the next ones wait for others"
        this.iterate(Reason.LENGTH)
        await until(lambda: len(this.pool.begun) == 2)
        async with asyncio.timeout(10):
            while await this.committed() < 4:
                await asyncio.sleep(0.01)
        assert this.pool.begun == ["commit", "commit"], "the end took along what waited"


async def test_tokens_that_joined_go_without_another_one(server: RedisServer) -> None:
    async with books(server) as this:
        this.iterate()
        await this.ledger.give_back({})
        this.iterate()
        async with asyncio.timeout(10):
            while await this.committed() < 2:
                await asyncio.sleep(0.01)


async def test_tokens_that_come_during_a_commit_wait_for_others_too(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit takes as long as an iteration of a fast model: otherwise each token would have its own."""
    monkeypatch.setattr("orca_scheduler.master.ledger.TOGETHER", 3600.0)
    async with books(server) as this:
        this.pool.gates["commit"] = asyncio.Event()
        this.iterate()
        await until(lambda: "commit" in this.pool.begun)
        this.iterate()
        this.iterate()
        this.pool.gates["commit"].set()
        await until(lambda: not this.ledger._commit_sent)
        assert this.pool.begun == ["commit"]
        await this.ledger.give_back({this.claim: False})
        assert this.pool.begun == ["commit", "commit", "give_back"], "what comes after the tokens does not wait"
        assert await this.committed() == 3


async def test_a_request_that_is_handed_over_waits_for_no_other(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where its token is not its first one, as after a recovery."""
    monkeypatch.setattr("orca_scheduler.master.ledger.TOGETHER", 3600.0)
    async with books(server) as this:
        this.iterate()
        await this.ledger.give_back({})
        this.iterate()
        this.ledger.hand_over(this.claim, b"there")
        await until(lambda: len(this.pool.begun) == 2)


async def test_a_wake_without_rows_is_no_commit(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next token would wait for it."""
    monkeypatch.setattr("orca_scheduler.master.ledger.TOGETHER", 0.0)
    async with books(server) as this:
        this.iterate()
        await this.ledger.give_back({})
        monkeypatch.setattr("orca_scheduler.master.ledger.TOGETHER", 3600.0)
        this.ledger.committable()  # an iteration of requests that are gone
        await this.ledger.give_back({})
        assert this.pool.begun == ["commit"]
        this.iterate()
        await until(lambda: len(this.pool.begun) == 2)


async def test_rows_of_a_commit_without_an_answer_are_sent_again(server: RedisServer) -> None:
    """Also when the request makes no token meanwhile."""
    async with books(server) as this:
        this.pool.away = 1
        this.iterate()
        await this.ledger.give_back({})  # returns when everything is committed
        assert await this.committed() == 1


async def test_tokens_that_redis_lost_are_sent_again_at_once(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orca_scheduler.master.ledger.TOGETHER", 3600.0)
    async with books(server) as this:
        this.iterate()
        await this.ledger.give_back({})
        await this.pool._link.command("DEL", f"{this.pool._keys.prefix}tokens:r")
        this.iterate(Reason.LENGTH)
        async with asyncio.timeout(10):
            while await this.committed() < 2:
                await asyncio.sleep(0.01)


async def test_an_engine_has_the_adapters_that_all_its_ranks_have(server: RedisServer) -> None:
    """Another fingerprint, an error, no answer, and an answer to an earlier table count as not having it."""
    sent: asyncio.Queue[pb.AdapterTable] = asyncio.Queue()
    async with Pool(server.url, f"ledger{next(NAMES)}") as pool, asyncio.timeout(10):
        term = await pool.acquire("g", "s", None)
        assert term is not None
        await pool.renew("g", "s", term, form=EngineInfo("g", 1, 2, 64, 0))
        engine = EngineAdapters(pool, "g", "s", term, 2, sent.put_nowait)
        following = asyncio.create_task(engine.follow())
        a, b, c = [await pool.load_adapter(name, f"/{name}") for name in "abc"]

        def answer(rank: int, table: pb.AdapterTable, **prints: str) -> None:
            held = [pb.AdapterHeld(id=i, fingerprint=prints[i[0]]) for i in (a, b) if i[0] in prints]
            held.append(pb.AdapterHeld(id=c, error="adapter c: no"))
            engine.answered(rank, pb.AdaptersHeld(number=table.number, adapters=held))

        async def said() -> list[str]:
            return [(await pool.adapters(0, adapter)).engines["g"] for adapter in (a, b, c)]

        engine.changed((await pool.adapters()).version)
        engine.running()
        first = await sent.get()
        assert {entry.id for entry in first.entries} == {a, b, c}
        answer(0, first, a="p", b="p")
        assert await said() == ["", "", ""], "a rank has not answered"
        answer(1, first, a="p", b="q")
        while not engine.has:
            await asyncio.sleep(0)
        while "" in (found := await said()):
            await asyncio.sleep(0)
        assert found == ["+p", "-the ranks of an engine read other files of it", "-adapter c: no"]
        assert engine.has == {a}

        engine.lost()
        engine.running()
        assert not engine.has
        again = await sent.get()
        answer(0, first, a="p", b="p")
        answer(1, first, a="p", b="p")
        assert again.number > first.number
        answer(0, again, b="p")
        answer(1, again, b="p")
        while engine.has != {b}:
            await asyncio.sleep(0)
        following.cancel()
