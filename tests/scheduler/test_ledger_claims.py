"""Which requests the ledger asks the pool for, and which claims it knows of. Its loops run where a test starts them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from servers import RedisServer, redis_server

from orca.v1.pool_pb2 import PoolRequest
from orca_common.service import cancel
from orca_pool.pool import Pool
from orca_pool.records import NO_LOAD, Attached, EngineInfo
from orca_scheduler.core.core import Room
from orca_scheduler.lifecycle.events import Claimed, Opened, Orphaned
from orca_scheduler.master.ledger import Ledger, News

NAMES = count()
NONE, MUCH = Room(0, 0), Room(8, 64)
ENGINE = EngineInfo("g", 1, 1, 64, 0)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


class Books:
    """A ledger of engine `g`, the room that its core has, and what the ledger has posted since it opened."""

    def __init__(self, pool: Pool, term: int) -> None:
        self.pool, self.term = pool, term
        self.room, self.news = NONE, list[News]()
        self.ledger = Ledger(
            pool, "g", "s", term, lambda: self.room, lambda: NO_LOAD, self.news.append, lambda *_: None
        )

    async def submit(self, name: str) -> None:
        record = PoolRequest(request_id=name, max_new_tokens=8).SerializeToString()
        call = {"deadline_in": None, "detach_grace": 60.0, "endpoint": "e", "attempt": 1, "max_waiting": 8}
        assert isinstance(await self.pool.submit(name, record, "d", 9, 9, **call), Attached)

    async def claim_unheard(self, name: str) -> int:
        """The pool gives the engine a request, and the answer is lost. Its claim."""
        await self.submit(name)
        heard = self.ledger._last_claim
        answer = await self.pool.claim("g", "s", self.term, heard, count=1, slots=64, total=64)
        assert answer is not None
        return answer.last_claim

    def names(self, claimed: News) -> list[str]:
        assert isinstance(claimed, Claimed)
        return [self.ledger.outputs.held[claim].claimed.request_id for claim in claimed.claims]

    @asynccontextmanager
    async def running(self, *loops: Callable[[], Any]) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(loop()) for loop in loops]
        try:
            async with asyncio.timeout(10):
                yield
        finally:
            await cancel(*tasks)

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def books(server: RedisServer, held: Sequence[str] = (), reserved: int = 0) -> AsyncIterator[Books]:
    """The books of a new master. held: requests that the engine has claimed. reserved: iteration numbers."""
    async with Pool(server.url, f"claims{next(NAMES)}") as pool:
        await pool.renew_endpoint("e", register=True)
        term = await pool.acquire("g", "s", None)
        assert term is not None
        await pool.renew("g", "s", term, form=ENGINE, reserve=reserved or None)
        this = Books(pool, term)
        for name in held:
            await this.claim_unheard(name)
        await this.ledger._open(False)
        (opened,) = this.news
        assert isinstance(opened, Opened)
        assert len(opened.claims) == len(held)
        this.news.clear()
        yield this


async def test_a_new_master_claims_nothing_that_it_holds(server: RedisServer) -> None:
    """Else the core would get the requests of its predecessor twice, where an epoch is kept."""
    async with books(server, held=["a"]) as this, this.running(this.ledger._claiming):
        await this.submit("b")
        this.room = MUCH
        await this.ledger.formed(ENGINE, 0)
        await this.until(lambda: this.news)
        assert this.names(this.news[0]) == ["b"]


@pytest.mark.parametrize("room", [Room(1, 64), Room(8, 9)])
async def test_an_engine_that_was_full_asks_when_it_has_room(server: RedisServer, room: Room) -> None:
    """It took all there was, and that filled it. What comes when it is free again is hinted, no renewal needed."""
    async with books(server) as this, this.running(this.ledger._claiming):
        this.room = room
        await this.submit("a")
        await this.ledger.formed(ENGINE, 0)
        await this.until(lambda: this.news)
        this.room = NONE
        this.ledger.admitted()
        this.ledger.claimable()  # after each step of the core
        this.room = MUCH
        this.ledger.claimable()
        while not await this.pool._link.command("ZSCORE", f"{this.pool._keys.prefix}asking", "g"):
            await asyncio.sleep(0.01)


async def test_a_claim_without_an_answer_is_heard_of_without_room(server: RedisServer) -> None:
    """The engine is full, so it does not claim: a renewal tells that something was claimed. What the engine runs is
    not news again."""
    async with books(server, held=["a"]) as this:
        lost = await this.claim_unheard("b")
        async with this.running(this.ledger._renewing, this.ledger._claiming):
            await this.until(lambda: this.news)
            assert this.news[0] == Claimed(this.news[0].now, (lost,))  # type: ignore[union-attr]


async def test_claims_that_are_not_held_are_told_again(server: RedisServer) -> None:
    """The version of a set of claims is known when all of them are held, or on their way back."""
    async with books(server, held=["a"]) as this:
        ledger = this.ledger
        await this.claim_unheard("b")
        async with this.running(ledger._renewing):
            await this.until(lambda: ledger._unheard)
            assert ledger._claims_version == ""
        async with this.running(ledger._claiming, ledger._renewing):
            await this.until(lambda: ledger._claims_version)
        assert len(ledger.outputs.held) == 2


async def test_a_claim_that_comes_back_is_given_back_again(server: RedisServer) -> None:
    """A Redis that lost its last second has the claim again, after it was given back once in this term."""
    async with books(server, held=["a"]) as this:
        ((claim, _),) = this.ledger.outputs.held.items()
        this.ledger.outputs.drop(claim)
        for _ in range(2):
            this.ledger._reconcile({"a": claim}, set(), claim)
            this.ledger._reconcile({"a": claim}, set(), claim)  # a renewal later it is still on its way
            (orphaned,) = this.news
            assert isinstance(orphaned, Orphaned)
            assert orphaned.claims == (claim,)
            this.news.clear()
            await this.ledger.give_back({claim: False})


async def test_a_hint_without_room_is_remembered(server: RedisServer) -> None:
    """The pool hints once. The engine claims as soon as it has room, not at its next renewal."""
    async with books(server) as this, this.running(this.ledger._claiming):
        await this.ledger.formed(ENGINE, 0)  # which looks for requests at once, as a hint does
        await this.until(lambda: not this.ledger._claimer.is_set())
        await this.submit("a")
        this.room = MUCH
        this.ledger.claimable()
        await this.until(lambda: this.news)
        assert this.names(this.news[0]) == ["a"]


async def test_nothing_is_asked_for_that_does_not_fit(server: RedisServer) -> None:
    """Each empty claim would cost Redis as much as a full one."""
    async with books(server) as this:
        this.ledger._hear_needs(9)
        for room, fits in ((NONE, False), (Room(0, 64), False), (Room(1, 8), False), (Room(1, 9), True)):
            this.room = room
            this.ledger.claimable()
            assert this.ledger._claimer.is_set() == fits


async def test_iterations_of_a_new_master_begin_above_all_that_were_reserved(server: RedisServer) -> None:
    async with books(server, reserved=1000) as this:
        assert await this.ledger.formed(ENGINE, 7) == 1001


async def test_a_new_epoch_is_in_the_books_before_ranks_hear_of_it(server: RedisServer) -> None:
    """The next master must give a higher one, whatever becomes of this one."""
    async with books(server) as this:
        epoch = await this.ledger.new_epoch(5)
        renewed = await this.pool.renew("g", "s", this.term)
        assert renewed is not None
        assert renewed.epoch == epoch > 5
