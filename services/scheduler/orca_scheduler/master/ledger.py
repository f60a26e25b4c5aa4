"""The ledger of an engine: all that its master does with the request pool in one term (docs/pool.md).

Four loops run beside the master's: one renews the lease, one claims requests, one commits tokens, one hears hints. What
they find out is posted to the master's inbox.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from orca_common.errors import Unavailable
from orca_common.priorities import Priority
from orca_pool.leases import RENEW_SECONDS
from orca_pool.pool import LET_GO, Pool
from orca_pool.records import ClaimAnswer, CommitRow, EngineInfo, EngineLoad, Renewed
from orca_pool.records import Claimed as PoolClaim
from orca_pool.retry import RETRY_SECONDS, reached

from ..core.core import Room
from ..lifecycle.events import Claimed, LeaseLost, Opened, Orphaned, PoolAway, PoolBack
from .output import Outputs, new_tokens

T = TypeVar("T")
log = logging.getLogger(__name__)
RESERVE = 1 << 17  # iteration numbers reserved ahead: more than a minute of the fastest model
MAX_BEHIND = 256  # iterations without an answered commit: then the engine waits for the pool
TOGETHER = 0.005  # seconds: tokens that follow one commit of an engine so soon share the next one
HINT_WAIT = 5.0  # seconds that a read of the hints waits: an idle engine asks no more than its renewals


class Deposed(Exception):
    """The lease is another's, or was released: nothing more may be done in this term."""


class CaughtUp:
    """News for the inbox: the pool may have caught up. Try the reports again that were held back."""


class HandedOn:
    """News for the inbox: the pool has handed these claims over, at a moment of Redis's TIME in microseconds."""

    def __init__(self, claims: tuple[int, ...], moment: int) -> None:
        self.claims, self.moment = claims, moment


class Unneeded:
    """News for the inbox: the keys and values of these claims, which were handed over, are not needed any more."""

    def __init__(self, claims: tuple[int, ...]) -> None:
        self.claims = claims


class EndedElsewhere:
    """News for the inbox: these claims were cancelled, have expired, met a stop string, or are another engine's."""

    def __init__(self, claims: tuple[int, ...]) -> None:
        self.claims = claims


News = Opened | Claimed | Orphaned | LeaseLost | PoolAway | PoolBack | CaughtUp | EndedElsewhere | HandedOn | Unneeded


class Ledger:
    """One term's books. `post` takes news for the master, who alone drops what the core may still know; `room` tells
    how much may be claimed, `load` how loaded the engine is. `committed` takes the seconds that a commit took, the
    tokens that the pool has since, the claims that it has ended, and when, by Redis's TIME in microseconds. `yielding`
    tells who would give way to requests of a higher class, as `Pool.claim` takes it; `adapters` takes, at each renewal,
    the version of their table."""

    def __init__(
        self,
        pool: Pool,
        engine: str,
        owner: str,
        term: int,
        room: Callable[[], Room],
        load: Callable[[], EngineLoad],
        post: Callable[[News], None],
        committed: Callable[[float, int, list[int], int], None],
        yielding: Callable[[], Sequence[tuple[int, int]]] = tuple,
        adapters: Callable[[int], None] = lambda version: None,
    ) -> None:
        self._pool, self._engine, self._owner, self._term = pool, engine, owner, term
        self._room, self._load, self._post, self._committed = room, load, post, committed
        self._yielding, self._adapters = yielding, adapters
        self._loop = asyncio.get_running_loop()  # to ask for it is a system call, in Python 3.11
        self.outputs = Outputs()
        self.epoch = self.iteration = 0  # of the engine, the highest known
        self._last_claim = self._reserved = self._uncommitted = 0
        self._commit_sent = False  # a commit with rows was sent and is not answered
        self._engine_slots, self._weights = 0, ""  # of the engine as it formed last
        self._needs = 0  # slots that the first request of the queue needs, as the pool told last; 0: it hints
        self._claim_sent = False  # a claim was sent and is not answered
        self._finishing = False  # the pool knows that the engine begins nothing more
        self.nothing_left = False  # .. and had nothing that the engine alone can go on with
        self._claims_version, self._claims_generation = "", -1  # of the claims that the last renewal told
        self._unheard = False  # the pool has given this engine requests, and the answer was lost
        self._orphans: dict[int, str] = {}  # claims that the pool counts as ours, and their requests
        self._returning = 0  # give-backs that the pool has not answered
        self._master_waits = False
        self._claimer, self._committer, self._answered = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._commit_due = 0.0  # before then tokens alone wait for others, on the loop's clock
        self._joining: asyncio.TimerHandle | None = None  # until then
        self._all_returned = asyncio.Event()
        self._all_returned.set()
        self._admitted = asyncio.Event()  # the core knows what was claimed last: `room` is right again

    @property
    def _now(self) -> float:
        return self._loop.time()

    async def run(self, taken_over: bool) -> None:
        """Reads the books, posts Opened, and keeps them. Ends when the lease is lost, which it posts."""
        try:
            await self._open(taken_over)
            async with asyncio.TaskGroup() as tasks:
                for loop in (self._renewing(), self._claiming(), self._committing(), self._reading_hints()):
                    tasks.create_task(loop)
        except* Deposed as deposed:
            self._post(LeaseLost(self._now, str(deposed.exceptions[0])))

    async def _open(self, taken_over: bool) -> None:
        async def look() -> ClaimAnswer | None:
            await self._renew()
            return await self._holding()

        held = self._still_ours(await reached(look))
        self._last_claim = held.last_claim
        self.iteration = self._reserved  # every number up to it may have been used
        claims = self._take(held.requests)
        self._post(Opened(self._now, self.epoch, claims, taken_over))

    def _take(self, requests: Iterable[PoolClaim]) -> tuple[int, ...]:
        """Holds claimed requests. Returns the claims of those that can be run; the others end with the next commit."""
        readable = tuple(claimed.claim for claimed in requests if self.outputs.add(claimed, self._now))
        if self.outputs.dirty:
            self._committer.set()
        return readable

    def _still_ours(self, answer: T | None) -> T:
        """The pool answers None to a term that has ended. Raises Deposed."""
        if answer is None:
            raise Deposed("the lease is no longer this term's")
        return answer

    # -- what the master asks for

    async def new_epoch(self, above: int) -> int:
        """A new epoch, in the pool's books before any rank hears of it. Raises Deposed."""

        async def number() -> int:
            epoch = max(await self._pool.number(self.epoch), above + 1)
            await self._renew(epoch=epoch)
            return epoch

        return await reached(number)

    async def formed(self, info: EngineInfo, above: int) -> int:
        """The engine may claim from now on, and use iteration numbers from the answer on. Raises Deposed."""
        self.iteration = first = max(self.iteration, above) + 1
        self._weights = info.weights
        await reached(lambda: self._renew(form=info, reserve=first + RESERVE))
        self._engine_slots = info.slots
        self._claimer.set()
        return first

    async def confirm(self) -> None:
        """Returns when the pool says that the lease is still this term's: it may have been lost long ago. Raises
        Deposed."""
        await reached(self._renew)

    async def expect(self, seconds: float) -> None:
        """Has what is tied to the engine's weights wait for these, whatever weights it forms with next."""
        await reached(lambda: self._pool.expect(self._engine, self._owner, self._term, seconds))

    def admitted(self) -> None:
        """The core knows what was claimed last, or it was given back."""
        self._admitted.set()

    def claimable(self) -> None:
        """The core may have got room."""
        if self._needs:
            room = self._room()
            if room.requests and room.slots >= self._needs:
                self._claimer.set()

    def committable(self) -> None:
        """One iteration's outcomes were appended to the outputs."""
        self._uncommitted += 1
        self._commit_when_due()

    def hand_over(self, claim: int, handed: bytes) -> None:
        """The request is another engine's with the next commit. handed: where its keys and values are."""
        self.outputs.hand_over(claim, handed)
        self._commit_when_due()

    def _commit_when_due(self) -> None:
        """First tokens, ends and hand-overs go to the pool at once. Tokens that follow a commit within TOGETHER wait
        for each other."""
        if self.outputs.pressing or self._now >= self._commit_due:
            self._committer.set()
        elif self._joining is None:
            self._joining = self._loop.call_at(self._commit_due, self._committer.set)

    def used(self, iteration: int) -> None:
        """An iteration's number is given to the ranks: it is used, whatever becomes of them."""
        self.iteration = max(self.iteration, iteration)

    def keeps_up(self, iteration: int) -> bool:
        """Whether the pool keeps enough of what was made, and has reserved the numbers after `iteration`. If not,
        CaughtUp is posted after its next answer."""
        up = self._uncommitted <= MAX_BEHIND and iteration + MAX_BEHIND <= self._reserved
        self._master_waits = not up
        return up

    async def pulled(self, claim: int) -> None:
        """The engine has the keys and values of a request that another one has begun. Where the pool is away, the other
        engine lets go of them when their time is over."""
        held = self.outputs.held.get(claim)
        if held is not None:
            with suppress(Unavailable):
                await self._pool.pulled(self._engine, self._owner, self._term, held.claimed.request_id, claim)

    async def give_back(self, rows: dict[int, bool]) -> int | None:
        """Returns requests to the queue after their tokens were committed. Rows: claim -> was it RUNNING at a loss.

        Returns the moment, as Redis's TIME in microseconds. None: the pool had nothing to do, or the lease is lost.
        """
        held, moment = self.outputs.held, None
        self._returning += 1
        self._all_returned.clear()
        try:
            await self._flush()
            named = {held[claim].claimed.request_id: (claim, lost) for claim, lost in rows.items() if claim in held}
            named |= {self._orphans[claim]: (claim, lost) for claim, lost in rows.items() if claim in self._orphans}
            if named:
                moment = await reached(lambda: self._pool.give_back(self._engine, self._owner, self._term, named))
            for claim in rows:
                self.outputs.drop(claim)
                self._orphans.pop(claim, None)
            return moment
        finally:
            self._returning -= 1
            if not self._returning:
                self._all_returned.set()

    async def release(self, retire: bool) -> None:
        """The orderly end of a term: the next master finds everything committed. Retiring deletes the engine's keys."""
        await self._flush()
        await self._all_returned.wait()
        end = self._pool.retire if retire else self._pool.release
        await reached(lambda: end(self._engine, self._owner, self._term))

    async def _flush(self) -> None:
        """Returns when everything is committed."""
        while self._uncommitted or self.outputs.dirty or self._commit_sent:
            await self._next_answer()

    async def _next_answer(self) -> None:
        """Returns after the pool's next answer to a commit or a renewal."""
        self._answered.clear()
        self._committer.set()
        await self._answered.wait()

    # -- the loops

    async def _renew(
        self, *, epoch: int | None = None, reserve: int | None = None, form: EngineInfo | None = None
    ) -> Renewed:
        # A Redis that came back may have forgotten something: then the claims are told again in any case.
        known = self._claims_version if self._claims_generation == self._pool.generation else ""
        load = self._load()
        renewed = self._still_ours(
            await self._pool.renew(
                self._engine,
                self._owner,
                self._term,
                epoch=epoch,
                reserve=reserve,
                form=form,
                weights=self._weights,
                known=known,
                load=load,
            )
        )
        if load.finishing != self._finishing:
            self._finishing, self.nothing_left = load.finishing, False
            self._claimer.set()
        self._adapters(renewed.adapters)
        self.epoch = max(self.epoch, renewed.epoch)
        self._reserved = renewed.reserved  # may shrink when Redis lost writes: then the numbers are reserved again
        self._pool_answered()
        return renewed

    def _pool_answered(self) -> None:
        self._answered.set()
        if self._master_waits:
            self._master_waits = False
            self._post(CaughtUp())

    async def _renewing(self) -> None:
        """Keeps the lease, reserves iteration numbers ahead, and reconciles what is held with the pool's books."""
        away = False
        while True:
            before, have, generation = set(self.outputs.held), self._last_claim, self._pool.generation
            ahead = self.iteration + RESERVE
            try:
                renewed = await self._renew(reserve=ahead if ahead - self._reserved > RESERVE // 2 else None)
            except Unavailable:
                if not away:
                    away = True
                    self._post(PoolAway(self._now))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if away:
                away = False
                self._post(PoolBack(self._now))
            if renewed.claims is not None:
                self._reconcile(renewed.claims, before, have)
                if set(renewed.claims.values()) <= self.outputs.held.keys() | self._orphans.keys():  # else look again
                    self._claims_version, self._claims_generation = renewed.version, generation
            self._hear_needs(renewed.needs)
            if self._finishing and not self.nothing_left:
                self._claimer.set()  # what it alone could go on with may have ended, of which no hint tells
            if renewed.needs and any(priority != Priority.URGENT for priority, _ in self._yielding()):
                self._claimer.set()  # it may come before those, and a hint may have been lost
            if renewed.last_claim > self._last_claim and not self._claim_sent:
                self._unheard = True  # the engine may not be formed, and then it would not claim again
                self._claimer.set()
            await asyncio.sleep(RENEW_SECONDS)

    def _reconcile(self, claims: dict[str, int], before: set[int], have: int) -> None:
        """Compares the pool's books with what was held, and heard of, when the renewal was sent."""
        self._adopt(
            {
                claim: name
                for name, claim in claims.items()
                if claim <= have and claim not in before and claim not in self.outputs.held
            }
        )
        self._forget(before - set(claims.values()))

    def _adopt(self, orphans: dict[int, str]) -> None:
        """Gives orphaned claims back to the queue: the pool counts them as this engine's, and no master holds them."""
        fresh = {claim: name for claim, name in orphans.items() if claim not in self._orphans}
        if fresh:
            log.warning("orphaned claims", extra={"engine": self._engine, "requests": list(fresh.values())})
            self._orphans |= fresh
            self._post(Orphaned(self._now, tuple(fresh)))

    def _hear_needs(self, slots: int) -> None:
        """Notes the slots that the first request of the queue needs."""
        if slots:
            self._needs = slots
            self.claimable()

    async def _claiming(self) -> None:
        """Takes the oldest requests that fit: after a hint, and when the core has room for what the pool said waits."""
        while True:
            await self._claimer.wait()
            self._claimer.clear()
            room, finishing = self._room(), self._finishing
            yielding = self._yielding() if not room.requests and room.slots else ()
            may_claim = bool(room.slots and (room.requests or yielding))  # not while the engine is not formed
            if not may_claim:
                self._needs = max(self._needs, 1)  # this may have been a hint
                if not self._unheard:
                    continue
            try:
                answer = self._still_ours(await (self._claim(room, yielding) if may_claim else self._holding()))
            except Unavailable:
                await asyncio.sleep(RETRY_SECONDS)
                self._claimer.set()
                continue
            new = [claimed for claimed in answer.requests if claimed.claim > self._last_claim]
            self._last_claim, self._unheard = answer.last_claim, False
            self._needs = answer.needs
            claims = self._take(new)
            self.nothing_left = may_claim and finishing and not self._needs
            if claims:
                self._admitted.clear()
                self._post(Claimed(self._now, claims))
                await self._admitted.wait()
            elif self.nothing_left:
                self._post(CaughtUp())

    async def _claim(self, room: Room, yielding: Sequence[tuple[int, int]]) -> ClaimAnswer | None:
        self._claim_sent = True
        try:
            return await self._pool.claim(
                self._engine,
                self._owner,
                self._term,
                self._last_claim,
                count=room.requests,
                slots=room.slots,
                total=self._engine_slots,
                yielding=yielding,
            )
        finally:
            self._claim_sent = False

    async def _holding(self) -> ClaimAnswer | None:
        return await self._pool.holding(self._engine, self._owner, self._term)

    async def _committing(self) -> None:
        """One commit at a time; what returns meanwhile joins the next one."""
        while True:
            await self._committer.wait()
            self._committer.clear()
            if self._joining is not None:
                self._joining.cancel()
                self._joining = None
            behind, rows = self._uncommitted, self.outputs.take()
            if rows:
                self._commit_due = self._now + TOGETHER
            if await self._commit(rows):
                self._uncommitted -= behind
                self._pool_answered()
            else:
                self._committer.set()

    async def _commit(self, rows: list[CommitRow]) -> bool:
        """Whether the pool has answered."""
        if not rows:
            return True
        self._commit_sent, began = True, self._now
        try:
            answer = self._still_ours(await self._pool.commit(self._engine, self._owner, self._term, rows))
        except Unavailable:
            self.outputs.unanswered(rows)
            self._commit_sent = False
            await asyncio.sleep(RETRY_SECONDS)
            return False
        self._commit_sent = False
        gone, ended, handed = self.outputs.answered(rows, answer.rows)
        self._committed(self._now - began, new_tokens(rows, answer.rows), ended, answer.ended_at)
        self._hear_needs(answer.needs)
        if gone:
            self._post(EndedElsewhere(tuple(gone)))
        if handed:
            self._post(HandedOn(tuple(handed), answer.ended_at))
        if self.outputs.dirty:
            self._commit_when_due()
        return True

    async def _reading_hints(self) -> None:
        """Hints from the pool: requests wait, or one ended early."""
        cursor: bytes | None = None
        while True:
            try:
                cursor, hints = await self._pool.hints(self._engine, cursor, wait=HINT_WAIT)
            except Unavailable:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if not hints:
                continue  # a hint that was lost comes with the next renewal
            ended = {hint for hint in hints if hint}
            unneeded = tuple(int(hint.removeprefix(LET_GO)) for hint in ended if hint.startswith(LET_GO))
            if unneeded:
                self._post(Unneeded(unneeded))
            held = self.outputs.held
            self._forget({c for c in held if held[c].claimed.request_id in ended} if ended else set())
            self._claimer.set()

    def _forget(self, claims: Iterable[int]) -> None:
        """These claims ended elsewhere. Of those that are being handed over the commit tells."""
        held = self.outputs.held
        gone = tuple(claim for claim in claims if claim in held and not held[claim].handed)
        if gone:
            self._post(EndedElsewhere(gone))
