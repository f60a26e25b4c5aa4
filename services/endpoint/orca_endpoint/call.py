"""One call: the stream of one request to one client, every index exactly once (DESIGN section 4, "Delivering").

The protocol is `Endpoint.serve` of `reference/pool_model.py`: attach, then packets; after any doubt attach again;
tokens are matched and detokenized from 0, whatever index the client asks for; fewer tokens than were shown means that
Redis lost some, which heals, or the call ends with DATA_LOSS.
"""

import asyncio
import hashlib
import logging
import math
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from opentelemetry.trace import Span

from orca.v1.pool_pb2 import PoolRequest
from orca_common.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    NotFound,
    OrcaError,
    ResourceExhausted,
    Unavailable,
)
from orca_common.telemetry import trace_id_of
from orca_pool.pool import Pool
from orca_pool.records import Attached, Finish, Packet, Reason, Refusal, Times

from .delivery import RETRY, Delivery
from .text import TextStream, Vocabulary
from .validation import Work

HEALING = 8.0  # seconds that a call waits for tokens that Redis lost to be made again
HEALING_STEP = 0.3
OWN_GRACE = 30.0  # least detach grace, in seconds, of a call that the endpoint ends
RETRY_AFTER = 1.0  # seconds, for a client that found the queue full

T = TypeVar("T")

log = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client closed its stream: nobody hears an answer."""


# A call that ends so was ended by its client, or by the request's own deadline.
CLIENTS_END = (ClientGone, DeadlineExceeded, asyncio.CancelledError, type(None))


class AcceptedEvent(NamedTuple):
    request_id: str
    input_tokens: int
    queue_position: int


class TokenEvent(NamedTuple):
    at: int  # its index in the stream
    token_id: int
    text: str
    logprob: float | None
    iteration: int
    engine: str


class FinishedEvent(NamedTuple):
    reason: Reason
    output_tokens: int
    text: str
    times: Times | None


Event = AcceptedEvent | TokenEvent | FinishedEvent


@dataclass(frozen=True)
class Patience:
    """What a call may cost this endpoint."""

    first: float  # seconds that a new call waits for an absent pool
    buffer: int  # tokens kept for a client that does not read


class Call:
    """An asynchronous context manager; iterate `events()` inside. Leaving it detaches a request that goes on.

    `work` for Generate; for Resume `from_index` and the `digest` of what the client has seen.
    """

    def __init__(
        self,
        pool: Pool,
        delivery: Delivery,
        vocabulary: Vocabulary | None,
        patience: Patience,
        *,
        request_id: str,
        attempt: int,
        start: Callable[[str], Awaitable[Attached | Refusal]],
        need: int = 0,
        span: Span | None = None,
        grace: float | None = None,
        from_index: int = 0,
        digest: bytes = b"",
    ) -> None:
        self.request_id, self.attempt = request_id, attempt
        self._pool, self._delivery, self._vocabulary, self._patience = pool, delivery, vocabulary, patience
        self._start = start  # the first operation: submit or attach, with an incarnation
        self._from, self._digest = from_index, digest
        self._need = need  # slots
        self._span = span
        self._grace = grace  # None: as the record says
        self.record = PoolRequest()  # the pool's, from the first attach on
        self._text = TextStream(None, ())
        self._ids = array("I")  # every token from 0
        self._inbox: deque[Packet] = deque()
        self.buffered = 0  # tokens in the inbox
        self._dirty = True
        self._accepted = self._ended = False
        self._finished: Reason | None = None  # shown to the client
        self._healing: float | None = None  # until when
        self._waiter: asyncio.Future[None] | None = None
        self._operation: asyncio.Future[Attached | Refusal] | None = None  # the last submit or attach
        self._loop = asyncio.get_running_loop()

    @classmethod
    def generate(
        cls,
        pool: Pool,
        delivery: Delivery,
        vocabulary: Vocabulary | None,
        patience: Patience,
        work: Work,
        deadline: float | None,
        max_waiting: int,
        span: Span | None = None,
    ) -> Self:
        """A call that submits. `deadline` is a moment of the loop's clock."""
        record, loop = work.record, asyncio.get_running_loop()
        raw = record.SerializeToString()

        def submit(incarnation: str) -> Awaitable[Attached | Refusal]:
            return pool.submit(
                record.request_id,
                raw,
                work.body_digest,
                work.need,
                deadline_in=None if deadline is None else max(deadline - loop.time(), 0.001),
                detach_grace=record.detach_grace,
                endpoint=incarnation,
                attempt=work.attempt,
                max_waiting=max_waiting,
            )

        return cls(
            pool,
            delivery,
            vocabulary,
            patience,
            request_id=record.request_id,
            attempt=work.attempt,
            start=submit,
            need=work.need,
            span=span,
            grace=record.detach_grace,
        )

    @classmethod
    def resume(
        cls,
        pool: Pool,
        delivery: Delivery,
        vocabulary: Vocabulary | None,
        patience: Patience,
        request_id: str,
        attempt: int,
        from_index: int,
        digest: bytes,
        span: Span | None = None,
    ) -> Self:
        """A call that attaches to a known request."""

        def attach(incarnation: str) -> Awaitable[Attached | Refusal]:
            return pool.attach(request_id, endpoint=incarnation, attempt=attempt)

        return cls(
            pool,
            delivery,
            vocabulary,
            patience,
            request_id=request_id,
            attempt=attempt,
            start=attach,
            span=span,
            from_index=from_index,
            digest=digest,
        )

    # -- the delivery's side
    def put(self, packet: Packet) -> None:
        self._inbox.append(packet)
        self.buffered += len(packet.tokens)
        if self.buffered > max(self._patience.buffer, len(self._ids)):
            # Its client does not read: what we drop is read again from the pool, with all tokens before it. As many
            # may wait before that, so that a slow client's token is read some two times, however long its stream.
            self.doubt()
        elif self._waiter is not None:
            self.wake()

    def doubt(self) -> None:
        self._dirty = True
        self._inbox.clear()
        self.buffered = 0
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the door's side
    async def __aenter__(self) -> Self:
        self._delivery.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._delivery.remove(self)
        reason = self._reason(error)
        if self._span is not None:
            self._span.set_attributes({"orca.tokens": len(self._ids), "orca.reason": reason})
            self._span.end()
        trace_id = trace_id_of(self.record.trace)
        log.info(
            "call ended",
            extra={"request": self.request_id, "trace": trace_id, "tokens": len(self._ids), "reason": reason},
        )
        if self._ended or self._operation is None:
            return
        grace = self.record.detach_grace if self._grace is None else self._grace
        if isinstance(error, DataLoss):
            grace = 0.0
        elif self._delivery.own_fault() or not isinstance(error, CLIENTS_END):
            grace = max(grace, OWN_GRACE)
        self._delivery.detach(self.request_id, self.attempt, grace, self._operation)

    def _reason(self, error: BaseException | None) -> str:
        if isinstance(error, OrcaError):
            return error.code.name
        return self._finished.name if self._finished is not None else "CLIENT_GONE"

    async def events(self) -> AsyncIterator[Event]:
        """Accepted, each token from `from_index` on, Finished. Raises OrcaError where the stream ends otherwise."""
        while not self._ended:
            if self._delivery.leaving:
                raise Unavailable("this endpoint is leaving; resume the request at another one")
            if self._dirty:
                attached = await self._attach()
                if attached is None:
                    continue
                if not self._accepted:
                    self._accepted = True
                    before = max(attached.position - 1, 0)
                    yield AcceptedEvent(self.request_id, len(self.record.prompt_ids), before)
                if self._lost(attached):
                    await asyncio.sleep(HEALING_STEP)
                    self._dirty = True
                    continue
                packets = packets_of(self.request_id, self.attempt, attached)
            elif self._inbox:
                packet = self._inbox.popleft()
                self.buffered -= len(packet.tokens)
                packets = (packet,)
            else:
                await self._news()
                continue
            for packet in packets:
                for event in self._tokens(packet):
                    yield event
                if self._ended:  # a stop string
                    yield await self._stopped()
                    return
                if packet.finish is not None and not self._dirty:
                    finished = self._finish(packet.finish)
                    if finished is not None:
                        yield finished
                        return

    async def _news(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # -- attaching
    async def _attach(self) -> Attached | None:
        """Attaches (first: submits). None: the pool does not know our incarnation, or not (yet) the request again."""
        incarnation = self._delivery.incarnation
        self._dirty = False
        self._inbox.clear()  # all of it is in the answer
        self.buffered = 0
        give_up = None if self._accepted else self._loop.time() + self._patience.first
        while True:
            answer = await self._patiently(self._attach_once, give_up)
            if answer is not Refusal.UNREGISTERED:
                break
            if self._delivery.leaving or (give_up is not None and self._loop.time() > give_up):
                raise Unavailable("this endpoint could not register with the request pool in time")
            await self._delivery.another(incarnation)
            incarnation = self._delivery.incarnation
        if isinstance(answer, Refusal):
            await self._refused(answer)
            await asyncio.sleep(HEALING_STEP)
            return None
        if not self._accepted:
            self.record = PoolRequest.FromString(answer.record)
            self._text = TextStream(self._vocabulary, self.record.stop)
        return answer

    async def _attach_once(self) -> Attached | Refusal:
        """One submit or attach. It runs to its end even when this call is cancelled: the detach comes after it."""
        incarnation = self._delivery.incarnation
        if not self._delivery.registered:
            return Refusal.UNREGISTERED
        if self._accepted:
            work = self._pool.attach(self.request_id, endpoint=incarnation, attempt=self.attempt)
        else:
            work = self._start(incarnation)
        self._operation = asyncio.ensure_future(work)
        return await asyncio.shield(self._operation)

    async def _patiently(self, operation: Callable[[], Awaitable[T]], give_up: float | None) -> T:
        """Tries an operation until Redis answers; nothing is shown meanwhile."""
        while True:
            try:
                return await operation()
            except Unavailable:
                if give_up is not None and self._loop.time() > give_up:
                    raise
                if self._delivery.leaving:
                    raise
                await asyncio.sleep(RETRY)

    async def _refused(self, refusal: Refusal) -> None:
        """Raises what a refusal means; returns where the pool may yet heal."""
        if refusal is Refusal.UNKNOWN and self._accepted:
            self._heal()
            self._dirty = True
            return
        self._ended = True  # the pool knows no call of ours: there is nothing to detach
        name = self.request_id
        match refusal:
            case Refusal.STALE:
                raise Aborted(f"request {name}: a newer call has taken over")
            case Refusal.UNKNOWN:
                raise NotFound(f"request {name} is not known; it may have ended long ago")
            case Refusal.OTHER_BODY:
                raise AlreadyExists(f"request_id: {name} is in use by a request with another body")
            case Refusal.FULL:
                raise ResourceExhausted("the queue is full; try again later", RETRY_AFTER)
            case Refusal.NEVER_FITS:
                raise FailedPrecondition(await self._never_fits())
            case Refusal.NO_ENGINE:
                raise Unavailable("no engine has formed yet; try again later")
            case _:
                raise AssertionError(f"unexpected refusal {refusal!r}")

    async def _never_fits(self) -> str:
        identity = await self._pool.identity()
        slots = identity.slots if identity is not None else 0
        return (
            f"request {self.request_id} needs {self._need} slots (input tokens + max_new_tokens); "
            f"the largest engine has {slots}"
        )

    def _lost(self, attached: Attached) -> bool:
        """Whether Redis holds fewer tokens than were shown, so that the call must wait. Raises DataLoss."""
        if len(attached.tokens) < max(len(self._ids), self._from):
            if attached.finish is not None and attached.finish.reason is not Reason.STOP:
                raise DataLoss(f"request {self.request_id}: it ended with fewer tokens than were shown")
            self._heal()
            return True
        self._healing = None
        if self._digest:
            seen = array("I", (token.token_id for token in attached.tokens[: self._from]))
            if digest_of(seen) != self._digest:
                raise DataLoss(f"request {self.request_id}: its first {self._from} tokens are not those that were seen")
            self._digest = b""
        return False

    def _heal(self) -> None:
        now = self._loop.time()
        if self._healing is None:
            self._healing = now + HEALING
        if now > self._healing:
            raise DataLoss(f"request {self.request_id}: the pool lost tokens that were shown")

    # -- showing
    def _tokens(self, packet: Packet) -> Iterator[TokenEvent]:
        """The events of a packet's new tokens. Sets `_dirty` at a gap and `_ended` after a stop string."""
        ids, known = self._ids, len(self._ids)
        if packet.first > known:
            self._dirty = True
            return
        skip = known - packet.first
        if skip and any(token.token_id != i for token, i in zip(packet.tokens, ids[packet.first :], strict=False)):
            raise DataLoss(f"request {self.request_id}: tokens that were shown have changed")
        logprobs = self.record.logprobs
        for token_id, logprob, iteration in packet.tokens[skip:] if skip else packet.tokens:
            index = len(ids)
            ids.append(token_id)
            text, stopped = self._text.push(token_id)
            if index >= self._from:
                shown = logprob if logprobs and not math.isnan(logprob) else None
                yield TokenEvent(index, token_id, text, shown, iteration, packet.engine)
            if stopped:
                self._ended = True
                return

    def _finish(self, finish: Finish) -> FinishedEvent | None:
        """The end of the stream: an event or an error. None: not all its tokens are here (the call is dirty then)."""
        if finish.reason is Reason.ABORTED:
            self._ended = True
            raise Aborted(f"request {self.request_id}: a newer call has taken over")
        if finish.output_tokens != len(self._ids):
            self._dirty = True
            return None
        self._ended = True
        if finish.reason <= Reason.CANCELLED:
            self._finished = finish.reason
            return FinishedEvent(finish.reason, finish.output_tokens, self._text.flush(), finish.times)
        raise self._error_of(finish.reason)

    def _error_of(self, reason: Reason) -> OrcaError:
        name = self.request_id
        match reason:
            case Reason.DEADLINE:
                return DeadlineExceeded(f"request {name}: its deadline has passed")
            case Reason.DETACHED:
                return Cancelled(f"request {name} was ended: its client had left, and its detach grace is over")
            case Reason.NEVER_FITS:
                return FailedPrecondition(f"request {name} needs more slots than any engine has")
            case _:
                trace = trace_id_of(self.record.trace)
                return Internal(f"request {name}: engines were lost with it again and again", trace)

    async def _stopped(self) -> FinishedEvent:
        """Records the end that a stop string makes, before it is shown."""
        index, digest = len(self._ids) - 1, digest_of(self._ids)
        self._ended = False  # until the pool says so
        while True:
            if self._delivery.leaving:
                raise Unavailable("this endpoint is leaving; resume the request at another one")
            said = await self._patiently(
                lambda: self._pool.finish_at(self.request_id, index, Reason.STOP, digest), None
            )
            if said == "ok":
                break
            if said == "other":
                raise DataLoss(f"request {self.request_id}: tokens that were shown have changed")
            self._heal()  # ahead: Redis lost tokens
            await asyncio.sleep(HEALING_STEP)
        self._ended, self._finished = True, Reason.STOP
        return FinishedEvent(Reason.STOP, index + 1, "", await self._times())

    async def _times(self) -> Times | None:
        """The times of a request that finish_at ended."""
        try:
            answer = await self._attach_once()
        except Unavailable:
            return None
        return answer.finish.times if isinstance(answer, Attached) and answer.finish else None


def packets_of(request_id: str, attempt: int, attached: Attached) -> list[Packet]:
    """An attach's answer as packets, one for each engine that made a part of it."""
    starts = [*(first for first, _ in attached.engines), len(attached.tokens)]
    packets = [
        Packet(request_id, attempt, first, engine, attached.tokens[first:end], None)
        for (first, engine), end in zip(attached.engines, starts[1:], strict=True)
        if end > first
    ]
    return [*packets, Packet(request_id, attempt, len(attached.tokens), "", [], attached.finish)]


def digest_of(ids: "array[int]") -> bytes:
    """SHA-1 of token ids, each as 4 bytes little-endian (the order of every machine that this runs on)."""
    return hashlib.sha1(ids.tobytes()).digest()
