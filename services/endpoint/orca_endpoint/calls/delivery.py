"""The endpoint's incarnation in the pool, and its delivery stream: packets in, packets to calls out.

See docs/design.md, "The request pool". A call that may have missed a packet attaches again and reads all its tokens
from the pool. All calls do so after a missed packet number. They also do so, under a new incarnation, after a reconnect
to Redis and when a renewal answers another registration number.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol

from orca_common.errors import Unavailable
from orca_pool import records
from orca_pool.leases import GAP_SECONDS, RENEW_SECONDS
from orca_pool.outage import Outage
from orca_pool.pool import Pool
from orca_pool.records import Packet
from orca_pool.retry import RETRY_SECONDS, reached

log = logging.getLogger(__name__)

UNREADY = 2.0  # seconds without an answer of the pool after which the endpoint is not ready
READ_WAIT = 0.5  # seconds that a read waits
# Seconds that a detach is tried. After that the old registration is swept, which detaches the call.
DETACH_PATIENCE = 60.0
# Detaches that are sent at the same time. An outage leaves thousands behind, and calls must find a turn beside them.
DETACHES = 16

# An attach that was refused so has changed nothing, though its attempt is a newer one.
NEVER_ATTACHED = (records.Refusal.FEWER_TOKENS, records.Refusal.OTHER_TOKENS)


class Grace(NamedTuple):
    """The time for which a request lives on without a listener: the larger of both, in seconds."""

    seconds: float | None = None  # None: the detach grace that the request was submitted with
    at_least: float = 0.0


class Listener(Protocol):
    """A call's interface to delivery."""

    @property
    def request_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    def put(self, packet: Packet) -> None:
        """News of this call's request."""

    def resync(self) -> None:
        """Packets may be missing: attach again."""

    def wake(self) -> None:
        """Look again at whether the endpoint is leaving."""


class Delivery:
    """Keeps the endpoint registered, reads its stream, and gives each packet to the call that it is addressed to.

    clock: tells seconds, in any thread. new_name: makes a name that no endpoint ever had, for an incarnation.
    """

    def __init__(
        self,
        pool: Pool,
        clock: Callable[[], float] = time.monotonic,
        new_name: Callable[[], str] = lambda: f"ep-{secrets.token_hex(8)}",
    ) -> None:
        self._pool, self._clock, self._new_name = pool, clock, new_name
        self.incarnation = new_name()
        self.leaving = False  # calls end UNAVAILABLE
        self.handing_over = False  # calls whose clients will come back end UNAVAILABLE
        self._calls: dict[str, list[Listener]] = {}
        self._count = 0
        self._number: int | None = None  # of our registration
        self._generation = 0  # of the connection to Redis that the registration was made on
        self._last = 0  # number of the last entry that was read
        self._cursor: bytes | None = None
        self._reading: asyncio.Timeout | None = None  # of the read that is under way
        self._hurry = asyncio.Event()  # renew now
        self._changed = asyncio.Event()  # set and replaced at each registration
        self._loop = asyncio.get_running_loop()
        self._outage = Outage(clock)
        self._old: str | None = None  # the incarnation before this one
        # Moments of that clock: another thread asks `on_time`, and must not ask the loop for its time.
        self._renewed = clock()  # the last answer of the pool
        self._late_until = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._background: set[asyncio.Task[None]] = set()
        self._detaching = asyncio.Semaphore(DETACHES)
        self._renewing = asyncio.Lock()
        self._left = False

    # -- what calls use
    @property
    def count(self) -> int:
        """Calls that are open."""
        return self._count

    @property
    def registered(self) -> bool:
        return self._number is not None

    def on_time(self) -> bool:
        """Whether the endpoint is registered and the pool answered lately. Callable from any thread."""
        return self.registered and self._clock() - self._renewed < UNREADY

    def add(self, call: Listener) -> None:
        """From now on the call gets its packets. Comes before the call's attach is sent."""
        self._calls.setdefault(call.request_id, []).append(call)
        self._count += 1
        self._idle.clear()

    def remove(self, call: Listener) -> None:
        """The call gets no more packets."""
        calls = self._calls[call.request_id]
        calls.remove(call)
        if not calls:
            del self._calls[call.request_id]
        self._count -= 1
        if not self._count:
            self._idle.set()

    def own_fault(self) -> bool:
        """Whether this endpoint may be why a call ends now: the endpoint is leaving, or its loop was late."""
        now = self._clock()
        return self.leaving or now < self._late_until or now - self._renewed > GAP_SECONDS

    async def another(self, incarnation: str) -> None:
        """Waits, for two renewals at most, until the endpoint is registered under another incarnation than this one."""
        if self.incarnation != incarnation and self.registered:
            return
        self._hurry.set()
        changed = self._changed
        try:
            async with asyncio.timeout(2 * RENEW_SECONDS):
                await changed.wait()
        except TimeoutError:
            return  # the caller tries again, and has its own bound

    def detach(self, request_id: str, attempt: int, grace: Grace, after: "asyncio.Future[Any]") -> None:
        """Detaches a call in the background, once the call's last operation (`after`) has ended."""
        self._spawn(self._detach(request_id, attempt, grace, after))

    async def _detach(self, request_id: str, attempt: int, grace: Grace, after: "asyncio.Future[Any]") -> None:
        await asyncio.wait([after])
        if not after.cancelled() and after.exception() is None and after.result() in NEVER_ATTACHED:
            return  # a detach of this attempt would end the stream that has the request by right
        try:
            async with asyncio.timeout(DETACH_PATIENCE), self._detaching:
                await reached(
                    lambda: self._pool.detach(request_id, attempt=attempt, grace=grace.seconds, at_least=grace.at_least)
                )
        except TimeoutError:
            log.warning("detach given up", extra={"request": request_id})

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        """Runs work that outlives its call; `settled` waits for it."""
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("background work failed", exc_info=error)

    # -- the end
    async def idle(self) -> None:
        """Waits until no call is open."""
        await self._idle.wait()

    def end_calls(self) -> None:
        """Ends all calls UNAVAILABLE; their requests go on."""
        self.leaving = True
        for calls in self._calls.values():
            for call in calls:
                call.wake()

    async def hand_over(self, within: float) -> None:
        """Ends the calls UNAVAILABLE whose clients will come back, if another endpoint is there for them.

        They end, too, when the pool does not answer in this many seconds: they get no token here. Its password may have
        changed, and the next endpoints have the new one.
        """
        try:
            async with asyncio.timeout(within):
                others = await self._pool.hand_over(self.incarnation)
        except (TimeoutError, Unavailable) as error:
            log.warning("streams are handed over unasked", extra={"reason": str(error)})
            others = 1
        if others:
            self.handing_over = True
            for calls in self._calls.values():
                for call in calls:
                    call.wake()

    async def settled(self, timeout: float) -> None:
        """Waits until all detaches have been sent, for `timeout` seconds at most."""
        if self._background:
            await asyncio.wait(self._background, timeout=timeout)

    async def leave(self) -> None:
        """Removes the registration and the stream, and ends the renewals: one that came later would register again."""
        self._left = True
        async with self._renewing:
            await self._pool.leave_endpoint(self.incarnation)

    async def close(self) -> None:
        """Drops what still runs in the background."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # -- the registration
    async def renew(self) -> None:
        """Registers and renews, until the endpoint leaves."""
        while not self._left:
            self._hurry.clear()
            pause = RENEW_SECONDS
            try:
                async with self._renewing:
                    if not self._left:
                        await self._renew()
            except Unavailable as error:
                self._outage.away(error)
                self._note_lateness()
                pause = RETRY_SECONDS
            else:
                self._outage.back()
            try:
                async with asyncio.timeout(pause):
                    await self._hurry.wait()
                await asyncio.sleep(0.02)  # so that hurrying callers do not make it spin
            except TimeoutError:
                pass

    async def _renew(self) -> None:
        generation = self._pool.generation
        if self._number is not None:
            known = await self._pool.renew_endpoint(self.incarnation, read=self._last) == self._number
            generation = self._pool.generation  # this renewal may be the one that connected again
            if known and generation == self._generation:
                self._note_answer()
                return
            old, self.incarnation, self._number = self.incarnation, self._new_name(), None
            reason = "reconnected to Redis" if known else "was declared dead"
            log.warning("new incarnation", extra={"reason": reason, "old": old, "new": self.incarnation})
            self._old, self._last, self._cursor = old, 0, None
            if self._reading is not None:
                self._reading.reschedule(self._loop.time())  # nothing comes on the old stream any more
        self._number = await self._pool.renew_endpoint(self.incarnation, register=True, replaces=self._old)
        self._generation = generation
        self._note_answer()
        self._resync_all()
        self._changed.set()
        self._changed = asyncio.Event()

    def _note_answer(self) -> None:
        self._note_lateness()
        self._renewed = self._clock()

    def _note_lateness(self) -> None:
        now = self._clock()
        if now - self._renewed > GAP_SECONDS:
            self._late_until = now + 1.0

    # -- the stream
    async def read(self) -> None:
        """Reads the delivery stream and hands out its packets, for ever."""
        calls = self._calls
        while True:
            incarnation, entries = await reached(self._read)
            if self._pool.generation != self._generation:
                self._hurry.set()  # all calls wait for the new registration
            if incarnation != self.incarnation:
                continue  # the stream of an incarnation that is over: all calls attach again
            for entry in entries:
                if entry.number != self._last + 1:
                    log.warning("packets were missed", extra={"expected": self._last + 1, "got": entry.number})
                    self._resync_all()
                self._last, self._cursor = entry.number, entry.cursor
                for packet in entry.packets:
                    for call in calls.get(packet.request_id, ()):
                        if call.attempt == packet.attempt:
                            call.put(packet)

    async def _read(self) -> tuple[str, list[records.Delivery]]:
        """The next entries, and the incarnation whose stream they are from: none where that is over meanwhile."""
        incarnation = self.incarnation
        try:
            async with asyncio.timeout(None) as self._reading:
                return incarnation, await self._pool.read(incarnation, self._cursor, wait=READ_WAIT)
        except TimeoutError:
            return incarnation, []
        finally:
            self._reading = None

    def _resync_all(self) -> None:
        for calls in self._calls.values():
            for call in calls:
                call.resync()
