"""One call: the stream of one request to one client, each index exactly once (docs/design.md, "The request pool").

This is the part that talks to the pool and waits. A call attaches (its first operation may be a submit), takes packets,
attaches again whenever packets may be missing, and detaches. The transcript decides what the client is shown.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from orca_common.errors import Cancelled, DataLoss, DeadlineExceeded, ErrorReason, OrcaError, Unavailable
from orca_pool.keys import scoped
from orca_pool.leases import DETACH_FLOOR_SECONDS
from orca_pool.pool import Pool
from orca_pool.records import Attached, Busy, Finish, Packet, QueueLimits, Reason, Refusal, Times, Turn
from orca_pool.retry import reached

from ..requests.arrivals import Arrivals
from ..requests.forms import LeftOut
from ..requests.validation import Work
from .delivery import Delivery, Grace
from .events import Event, Finished
from .line import Outcome, current_line
from .metrics import Meter
from .refusals import busy_error, refusal_error
from .span import RequestSpan
from .transcript import Transcript

HEALING = 8.0  # seconds that a call waits until tokens that Redis lost are made again, outages aside
HEALING_STEP = 0.3  # seconds between looks at them
DEADLINE_NEAR = 0.05  # seconds: a call that its client ends so shortly before its deadline ends because of it
TOGETHER = 256  # events that are shown in one piece: orca.proto's bound, and 0.5 ms of the loop at most

# Ends that are not this endpoint's fault: the client left, was done, or its deadline passed.
NOT_OUR_FAULT = (Cancelled, DeadlineExceeded, asyncio.CancelledError, type(None))


@dataclass(frozen=True)
class CallLimits:
    """The bounds of one call's cost to its endpoint."""

    pool_patience: float  # seconds that a new call waits for an absent pool
    buffer: int  # tokens kept for a client that does not read


@dataclass(frozen=True)
class Submission:
    """A new request on its way into the pool."""

    work: Work
    upfront: int  # slots that must be free for it to begin
    keys: bytes  # of its prompt's blocks, as `Pool.submit` takes them
    deadline: float | None  # a moment of the loop's clock
    max_waiting: int  # requests in the queue above which the pool refuses
    limits: QueueLimits
    payer: str  # whose request it is: a tenant, or a host without API keys
    turn: Turn
    arrivals: Arrivals  # those that it is submitted with

    async def send(self, pool: Pool, request_id: str, incarnation: str) -> Attached | Refusal | Busy:
        """Submits the request under its id in the pool, and attaches its call. May be sent again: the id is known."""
        record, deadline = self.work.record, self.deadline
        return await pool.submit(
            request_id,
            record.SerializeToString(),
            self.work.body_digest,
            self.work.max_tokens,
            self.upfront,
            deadline_in=None if deadline is None else max(deadline - asyncio.get_running_loop().time(), 0.001),
            detach_grace=record.detach_grace,
            endpoint=incarnation,
            attempt=self.work.attempt,
            max_waiting=self.max_waiting,
            new_tokens=record.max_new_tokens,
            tenant=self.payer,
            turn=self.turn,
            keys=self.keys,
            adapter=record.sampling.adapter,
            limits=self.limits,
        )


class Call:
    """Serves one stream. An asynchronous context manager: iterate `pieces()` inside.

    Leaving it detaches a request that goes on: the pool then ends the request after its detach grace. With a
    `submission` the first operation submits the request; without one the request must be known. tenant: whose API key
    came with the call; empty without keys. deadline: the call's, a moment of the loop's clock. interval: tokens that
    are waited for after the first one, so that they come together (`stream_interval`).
    """

    def __init__(
        self,
        pool: Pool,
        delivery: Delivery,
        limits: CallLimits,
        transcript: Transcript,
        *,
        attempt: int,
        meter: Meter,
        tenant: str = "",
        submission: Submission | None = None,
        deadline: float | None = None,
        span: RequestSpan | None = None,
        interval: int = 1,
    ) -> None:
        self.request_id, self.attempt, self.tenant = scoped(tenant, transcript.request_id), attempt, tenant
        self.buffered = 0  # tokens in the inbox
        self._pool, self._delivery, self._limits, self._transcript = pool, delivery, limits, transcript
        self._submission, self._deadline, self._span = submission, deadline, span
        self._interval, self._meter = min(interval, limits.buffer), meter
        self.outcome: Outcome | None = None
        self.first_token: float | None = None  # when it came, on the clock of `time.monotonic`
        self._inbox: deque[Packet] = deque()
        self._must_attach = True
        self._refused = False  # the pool holds no call of ours
        self.unknown = False  # the pool did not know the request
        self._healing = 0.0  # seconds that it has waited for tokens that Redis lost
        self._waiter: asyncio.Future[None] | None = None
        self._operation: asyncio.Future[Attached | Refusal | Busy] | None = None  # the last submit or attach
        self._loop = asyncio.get_running_loop()
        self._line = current_line()
        self._place = 0 if self._line is None else self._line.add(self)

    # -- for the line and the span of the call
    @property
    def accepted(self) -> bool:
        return self._transcript.accepted

    @property
    def carrier(self) -> Mapping[str, str]:
        """The trace context of the request."""
        if self._submission is not None and not self.accepted:
            return self._submission.work.record.trace
        return self._transcript.record.trace

    @property
    def prompt_tokens(self) -> int:
        if self._submission is not None and not self.accepted:
            return len(self._submission.work.record.prompt_ids)
        return self._transcript.prompt_tokens

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt of a call that has not submitted its request yet."""
        assert self._submission is not None
        return self._submission.work.record.prompt_ids

    @property
    def left_out(self) -> Sequence[LeftOut]:
        """The parts of schemas that its answer is not held to, before it is submitted."""
        assert self._submission is not None
        return self._submission.work.left_out

    @property
    def characters_before(self) -> int:
        """Counts the characters of the text that earlier calls have shown to the client, from its first token on."""
        return self._transcript.characters_before

    @property
    def output_tokens(self) -> int:
        return self._transcript.count

    @property
    def times(self) -> Times | None:
        """The times of a request that has ended, as far as the pool has told them."""
        return self._transcript.times

    # -- the delivery's side
    def put(self, packet: Packet) -> None:
        """News of this call's request."""
        self._inbox.append(packet)
        self.buffered += len(packet.tokens)
        if self.buffered > self._limits.buffer and self.buffered > self._transcript.count:
            # The client reads too slowly: drop the buffer and read again from the pool. The bound grows with the
            # stream, so each token is read about twice at most.
            self.resync()
        elif self._waiter is not None and self._due(packet):
            self.wake()

    def resync(self) -> None:
        """Packets may be missing: attach again, and read from the pool what the transcript lacks."""
        self._must_attach = True
        self._drop_inbox()
        self.wake()

    def wake(self) -> None:
        """Lets a waiting call look again at what it waits for."""
        waiter, self._waiter = self._waiter, None  # it is woken once
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- the door's side
    async def __aenter__(self) -> Self:
        self._delivery.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._delivery.remove(self)
        self._report(error)
        if self._operation is None or self._refused or self._transcript.next == "end":
            return  # there is nothing to detach
        self._delivery.detach(self.request_id, self.attempt, self._grace(error), self._operation)

    def label(self, attributes: Mapping[str, str | list[str]]) -> None:
        """Attributes of the call's span that its door knows."""
        if self._span is not None:
            self._span.label(attributes)

    def drop(self, error: BaseException) -> None:
        """Ends a call that is never entered, because of another call's error."""
        self._report(error)

    async def pieces(self) -> AsyncIterator[list[Event]]:
        """Accepted, each token from `from_index` on, Finished, in lists: what is there together comes together.

        A client that is slower than its engine gets longer lists, so each token costs less. Raises the OrcaError that
        ends the stream otherwise, after the events before it.
        """
        transcript = self._transcript
        piece: list[Event] = []
        while True:
            if self._leaving():
                raise leaving_error()
            attached: Attached | None = None
            if self._must_attach:
                attached = await self._attach()
                if attached is None:
                    continue
                events: Iterator[Event] = transcript.answer(attached)
            elif self._inbox and (piece or self._due(self._inbox[-1])):
                packet = self._inbox.popleft()
                self.buffered -= len(packet.tokens)
                events = transcript.packet(packet)
            else:
                await self._news()
                continue
            try:
                for event in events:
                    piece.append(event)
                    if len(piece) == TOGETHER:
                        yield piece
                        piece = []
            except OrcaError:
                self._count(attached)
                if piece:
                    yield piece
                raise
            self._count(attached)
            more = transcript.next == "packet" and self._inbox and not self._must_attach
            if piece and not more:
                yield piece
                piece = []
            match transcript.next:
                case "packet":
                    self._healing = 0.0
                case "attach":
                    self._must_attach = True
                case "heal":
                    await self._wait_for_healing()
                case "stop":
                    yield [await self._record_stop()]
                    return
                case "end":
                    return

    def _count(self, attached: Attached | None) -> None:
        """Counts the tokens that have come, in the answer of an attach or else in a packet."""
        transcript = self._transcript
        if attached is not None:
            self._meter.answered(attached, transcript.prompt_tokens, transcript.count)
        else:
            self._meter.came(transcript.count)
        if self.first_token is None and transcript.count:
            self.first_token = time.monotonic()

    # -- attaching
    async def _attach(self) -> Attached | None:
        """Attaches; the first time with a submission submits. None: try again later.

        Raises the error of a refusal, and Unavailable when a new call's patience is over.
        """
        self._must_attach = False
        self._drop_inbox()  # the answer holds all of it
        payer = ""
        if self._submission is not None:
            payer = self._submission.payer
            await self._submission.arrivals.together()
        give_up = None if self._transcript.accepted else self._loop.time() + self._limits.pool_patience
        while True:
            incarnation = self._delivery.incarnation
            answer = await reached(self._attach_once, give_up=give_up, leaving=self._leaving)
            if answer is not Refusal.UNREGISTERED:
                break
            if self._leaving() or (give_up is not None and self._loop.time() > give_up):
                raise Unavailable(
                    "this endpoint could not register with the request pool in time", reason=ErrorReason.POOL_AWAY
                )
            await self._delivery.another(incarnation)
        if isinstance(answer, Attached):
            self._refused = self.unknown = False
            self._submission = None  # a long prompt needs memory, and the pool has it
            if self._span is not None:
                self._span.accepted()
            return answer
        if isinstance(answer, Busy):
            self._refused = True
            raise busy_error(answer, self.tenant, payer)
        if answer is Refusal.UNKNOWN and (self._transcript.accepted or self._transcript.resumes):
            self.unknown = True
            await self._wait_for_healing()
            return None
        self._refused = True
        if answer is Refusal.OTHER_TOKENS:
            raise self._transcript.unseen()
        if answer is Refusal.FEWER_TOKENS:
            await self._wait_for_healing()
            return None
        raise await self._refusal(answer)

    async def _attach_once(self) -> Attached | Refusal | Busy:
        """One submit or attach. It runs to its end even when this call is cancelled: the detach comes after it."""
        if not self._delivery.registered:
            return Refusal.UNREGISTERED
        incarnation = self._delivery.incarnation
        if self._submission is not None and not self._transcript.accepted:
            work = self._submission.send(self._pool, self.request_id, incarnation)
        else:
            known, last = self._transcript.count, self._transcript.last
            seen, digest = self._transcript.unproven
            work = self._pool.attach(
                self.request_id,
                endpoint=incarnation,
                attempt=self.attempt,
                known=known,
                last=last,
                seen=seen,
                digest=digest,
            )
        self._operation = asyncio.ensure_future(work)
        return await asyncio.shield(self._operation)

    async def _refusal(self, refusal: Refusal) -> OrcaError:
        max_tokens = largest = 0
        if refusal is Refusal.NEVER_FITS and self._submission is not None:
            identity = await self._pool.identity()
            max_tokens, largest = self._submission.work.max_tokens, identity.slots if identity is not None else 0
        return refusal_error(refusal, self._transcript.request_id, max_tokens, largest)

    # -- waiting
    def _due(self, newest: Packet) -> bool:
        """Whether what is in the inbox is shown now. With stop strings it always is: the engine runs until one is
        found."""
        if self.buffered >= self._interval or newest.finish is not None:
            return True
        return not self._transcript.count or bool(self._transcript.record.stop)

    async def _news(self) -> None:
        """Waits for a packet, a resync or the endpoint's leaving."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def _wait_for_healing(self) -> None:
        """Waits some time for tokens that Redis lost; then the call attaches again. Raises DataLoss after `HEALING`."""
        if self._healing >= HEALING:
            raise self._transcript.lost(self.unknown)
        self._healing += HEALING_STEP
        await asyncio.sleep(HEALING_STEP)
        self._must_attach = True

    def _leaving(self) -> bool:
        """Whether this call ends because its endpoint leaves. A client whose request has a detach grace will come back,
        so its call is handed over to another endpoint; the others are waited for."""
        delivery = self._delivery
        return delivery.leaving or (delivery.handing_over and self._transcript.record.detach_grace > 0)

    def _drop_inbox(self) -> None:
        self._inbox.clear()
        self.buffered = 0

    # -- the end
    async def _record_stop(self) -> Finished:
        """Records the end that a stop string makes in the pool; only then may the client see it."""
        last, digest = self._transcript.count - 1, self._transcript.digest()
        while True:
            if self._leaving():
                raise leaving_error()
            said = await reached(
                lambda: self._pool.finish_at(self.request_id, last, Reason.STOP, digest), leaving=self._leaving
            )
            if said == "ok":
                finished = self._transcript.stopped()
                ended = await self._ended()
                if ended is None:
                    return finished
                self._transcript.times = ended.times
                return finished._replace(times=ended.times, cached_tokens=ended.cached_tokens)
            if said == "other":
                raise self._transcript.changed()
            await self._wait_for_healing()  # 'ahead': Redis lost tokens

    async def _ended(self) -> Finish | None:
        """The end of a request that a stop string has ended, as the pool tells it; None when it does not now."""
        try:
            answer = await self._attach_once()
        except Unavailable:
            return None
        return answer.finish if isinstance(answer, Attached) else None

    def _grace(self, error: BaseException | None) -> Grace:
        """How long the request that this call leaves may live on. The pool knows its own detach grace, which a
        call that never was attached has not seen."""
        if isinstance(error, DataLoss):
            return Grace(0.0)
        own_fault = self._delivery.own_fault() or not isinstance(error, NOT_OUR_FAULT)
        return Grace(at_least=DETACH_FLOOR_SECONDS if own_fault else 0.0)

    def _report(self, error: BaseException | None) -> None:
        """Decides how the call has ended, counts it, and ends its spans."""
        transcript, deadline = self._transcript, self._deadline
        overdue = deadline is not None and self._loop.time() >= deadline - DEADLINE_NEAR
        self.outcome = Outcome(error, transcript.finished, overdue)
        self._meter.ended(self.outcome, transcript.finished, transcript.times, transcript.accepted)
        if self._span is not None:
            self._span.ended(self.outcome, error, self.prompt_tokens, transcript.count)
        if self._line is not None:
            self._line.release(self._place)
            self._line = None


def leaving_error() -> Unavailable:
    """The error of a call that its endpoint ends."""
    return Unavailable(
        "this endpoint is leaving; resume the request at another one", reason=ErrorReason.ENDPOINT_LEAVING
    )
