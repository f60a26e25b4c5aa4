"""The ledger of an engine: all that its master does with the request pool (DESIGN section 4).

Four tasks run beside the master's loop: the lease is renewed, requests are claimed, tokens are committed, hints are
heard. What they find out reaches the loop as events.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TypeVar

from orca_common.errors import Unavailable
from orca_pool.pool import Pool
from orca_pool.records import ClaimAnswer, Claimed, CommitRow, EngineInfo, Renewed

from .core import Cancelled, Event, Room
from .output import Outputs

T = TypeVar("T")
log = logging.getLogger(__name__)
RENEW_SECONDS = 0.4
RETRY_SECONDS = 0.2  # between attempts while Redis is away
RESERVE = 1 << 17  # iteration numbers reserved ahead: more than a minute of the fastest model
MAX_BEHIND = 256  # iterations without an answered commit: then the engine waits for the pool


async def reached(call: Callable[[], Awaitable[T]]) -> T:
    """What a call of the pool answers, made again until the pool can be reached."""
    while True:
        try:
            return await call()
        except Unavailable:
            await asyncio.sleep(RETRY_SECONDS)


class Deposed(Exception):
    """The lease is another's, or was released: nothing more may be done in this term."""


class Ledger:
    """One term's books. `arrived` and `tell` bring claimed requests and other news to the master, who alone drops what
    the core may still know."""

    def __init__(
        self,
        pool: Pool,
        engine: str,
        owner: str,
        term: int,
        block_size: int,
        room: Callable[[], Room],
        arrived: Callable[[list[Claimed]], Awaitable[None]],
        tell: Callable[[Event], Awaitable[None]],
    ) -> None:
        self._pool, self._engine, self._owner, self._term = pool, engine, owner, term
        self._block_size = block_size
        self._room, self._arrived, self._tell = room, arrived, tell
        self.outputs = Outputs()
        self.epoch = self.iteration = 0  # of the engine, the highest known
        self._have = self._reserved = self._behind = 0
        self._under_way = False  # a commit with rows was sent and is not answered
        self._total = 0  # slots of the formed engine; 0: nothing is claimed
        self._queued = 0  # requests that the last claim left in the queue; 1: perhaps some came while there was no room
        self._claimer, self._committer, self._answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def open(self) -> None:
        """Reads what the pool's books say of the engine. Raises Deposed."""

        async def look() -> ClaimAnswer | None:
            await self._renew()
            return await self._pool.holding(self._engine, self._owner, self._term)

        held = await reached(look)
        if held is None:
            raise Deposed("another scheduler took the engine")
        self._have = held.last_claim
        self.iteration = self._reserved  # every number up to it may have been used
        for claimed in held.requests:
            self.outputs.add(claimed, self._now)

    def parts(self) -> list[Coroutine[None, None, None]]:
        """The ledger's tasks. Each ends by Deposed alone."""
        return [self._renewing(), self._claiming(), self._committing(), self._hearing()]

    # -- what the master asks for

    async def new_epoch(self, above: int) -> int:
        """A fresh epoch, in the pool's books before any rank hears of it."""
        epoch = max(await self._pool.number(self.epoch), above + 1)
        await self._renew(epoch=epoch)
        return epoch

    async def formed(self, info: EngineInfo, first: int) -> None:
        """The engine may claim from now on, and use iteration numbers from `first` on."""
        self.iteration = max(self.iteration, first)
        await self._renew(form=info, reserve=self.iteration + RESERVE)
        self._total = info.slots
        self._claimer.set()

    def lost(self) -> None:
        """Nothing is claimed until it has formed again."""
        self._total = 0

    def claimable(self) -> None:
        """The core may have got room."""
        if self._queued:
            self._claimer.set()

    def committable(self) -> None:
        """One iteration's outcomes were appended to the outputs."""
        self._behind += 1
        self._committer.set()

    def used(self, iteration: int) -> None:
        """An iteration's number is given to the ranks: it is used, whatever becomes of them."""
        self.iteration = max(self.iteration, iteration)

    async def confirm(self) -> None:
        """Returns when the pool says that the lease is still this term's: one may have been deposed long ago, and late
        to hear of it. Raises Deposed."""
        await reached(self._renew)

    async def keep_up(self, iteration: int) -> None:
        """Returns when the pool keeps enough of what was made, and has reserved the numbers after `iteration`."""
        while self._behind > MAX_BEHIND or iteration + MAX_BEHIND > self._reserved:
            await self._next_answer()

    async def flush(self) -> None:
        """Returns when everything is committed."""
        while self._behind or self.outputs.dirty or self._under_way:
            await self._next_answer()

    async def _next_answer(self) -> None:
        """Returns after the next answer to a commit or a renewal."""
        self._answered.clear()
        self._committer.set()
        await self._answered.wait()

    async def give_back(self, rows: Mapping[int, bool]) -> None:
        """Returns requests to the queue, after their tokens were committed. Rows: claim -> was it RUNNING at a loss."""
        await self.flush()
        held = self.outputs.held
        named = {held[claim].claimed.request_id: (claim, lost) for claim, lost in rows.items() if claim in held}
        if named:
            await reached(lambda: self._pool.give_back(self._engine, self._owner, self._term, named))
        for claim in rows:
            self.outputs.drop(claim)

    async def release(self) -> None:
        """The orderly end of a term: the next master finds everything committed."""
        await self.flush()
        await reached(lambda: self._pool.release(self._engine, self._owner, self._term))
        raise Deposed("released")

    # -- tasks

    async def _renew(
        self, *, epoch: int | None = None, reserve: int | None = None, form: EngineInfo | None = None
    ) -> Renewed:
        renewed = await self._pool.renew(self._engine, self._owner, self._term, epoch=epoch, reserve=reserve, form=form)
        if renewed is None:
            raise Deposed("another scheduler took the engine")
        self.epoch = max(self.epoch, renewed.epoch)
        self._reserved = renewed.reserved  # a Redis that forgot is asked again
        self._answered.set()
        return renewed

    async def _renewing(self) -> None:
        """Keeps the lease, reserves iteration numbers ahead, and reconciles what is held with the pool's books."""
        while True:
            before, have = set(self.outputs.held), self._have
            ahead = self.iteration + RESERVE
            try:
                renewed = await self._renew(reserve=ahead if ahead - self._reserved > RESERVE // 2 else None)
                strange = {
                    name: (claim, False)
                    for name, claim in renewed.claims.items()
                    if claim <= have and claim not in before and claim not in self.outputs.held
                }
                if strange:
                    log.warning("claims of nobody", extra={"engine": self._engine, "requests": list(strange)})
                    await self._pool.give_back(self._engine, self._owner, self._term, strange)
            except Unavailable:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            await self._forget(before - set(renewed.claims.values()))
            await asyncio.sleep(RENEW_SECONDS)

    async def _claiming(self) -> None:
        """Takes the oldest requests that fit, whenever there may be some and the core has room."""
        while True:
            await self._claimer.wait()
            self._claimer.clear()
            room = self._room()
            if not (self._total and room.requests and room.slots):
                self._queued = max(1, self._queued)  # this may have been a hint: to be asked for when there is room
                continue
            try:
                answer = await self._pool.claim(
                    self._engine,
                    self._owner,
                    self._term,
                    self._have,
                    count=room.requests,
                    slots=room.slots,
                    total=self._total,
                    block_size=self._block_size,
                )
            except Unavailable:
                await asyncio.sleep(RETRY_SECONDS)
                self._claimer.set()
                continue
            if answer is None:
                raise Deposed("another scheduler took the engine")
            self._have, self._queued = answer.last_claim, answer.waiting
            for claimed in answer.requests:
                self.outputs.add(claimed, self._now)
            if answer.requests:
                await self._arrived(answer.requests)  # returns when the core knows them: `room` is right again

    async def _committing(self) -> None:
        """One commit at a time; what returns meanwhile joins the next."""
        while True:
            await self._committer.wait()
            self._committer.clear()
            behind, rows = self._behind, self.outputs.take()
            if await self._commit(rows):
                self._behind -= behind
            else:
                self._committer.set()
            self._answered.set()

    async def _commit(self, rows: list[CommitRow]) -> bool:
        if not rows:
            return True
        self._under_way = True
        try:
            answers = await self._pool.commit(self._engine, self._owner, self._term, rows)
        except Unavailable:
            self.outputs.unanswered(rows)
            self._under_way = False
            await asyncio.sleep(RETRY_SECONDS)
            return False
        self._under_way = False
        if answers is None:
            raise Deposed("another scheduler took the engine")
        gone = self.outputs.answered(rows, answers)
        if gone:
            await self._tell(Cancelled(self._now, tuple(gone)))
        if self.outputs.dirty:
            self._committer.set()
        return True

    async def _hearing(self) -> None:
        """Hints from the pool: requests wait, or one ended early."""
        cursor: bytes | None = None
        while True:
            try:
                cursor, hints = await self._pool.hints(self._engine, cursor, wait=1.0)
            except Unavailable:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            ended = {hint for hint in hints if hint}
            held = self.outputs.held
            await self._forget({c for c in held if held[c].claimed.request_id in ended} if ended else set())
            self._claimer.set()

    async def _forget(self, claims: set[int]) -> None:
        """These claims ended elsewhere."""
        gone = tuple(claim for claim in claims if claim in self.outputs.held)
        if gone:
            await self._tell(Cancelled(self._now, gone))
