"""Spans of the scheduler: a request's wait in the queue and its stay on the engine, and each iteration."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import Link, Span, StatusCode, Tracer

from orca.v1 import worker_pb2 as pb
from orca_common.telemetry import carrier_of, context_of

from ..core.core import ScheduleBatch
from .output import Held

if TYPE_CHECKING:
    from orca_common.span_ids import SpanIds

GIVEN_BACK, SILENT = "given back", "its master fell silent"
HANDED_OVER = "another engine goes on with it"
# Ends of a stay that are no end of an answer.
FAILED = {GIVEN_BACK, SILENT, "DEADLINE", "INTERNAL", "NOT_FINITE", "STUCK"}


class Tracing:
    """`orca.queue` and `orca.engine` under the request's span; `orca.iteration` links to all its members.

    Moments that the pool has told are Redis's TIME in microseconds. Queue and stay begin and end by that clock alone:
    together they last as long as the client's timings say, however the clocks of two machines differ.
    """

    def __init__(self, tracer: Tracer, ids: "SpanIds", engine: str, term: int, silent_term: int | None) -> None:
        """silent_term: of the master before, if it fell silent. A term's number is the moment of the pool at which it
        began (docs/pool.md, "Numbers")."""
        self._tracer, self._ids, self._engine = tracer, ids, engine
        self._term, self._silent_term = term, silent_term
        self._stays: dict[int, Span] = {}  # claim -> orca.engine
        self._iterations: dict[int, Span] = {}

    def claimed(self, held: Held) -> None:
        """The request left the queue for this engine: the one span ends where the other begins."""
        claimed = held.claimed
        self._start("orca.queue", held, claimed.queued_at).end(claimed.taken_at * 1000)
        self._stays[claimed.claim] = self._start_stay(held, self._term)

    def taken_over(self, held: Held) -> None:
        """The request was this engine's before the term began. A master that fell silent has not reported its stay."""
        if self._silent_term is not None:
            stay = self._start_stay(held, self._silent_term)
            _tell(stay, SILENT)
            stay.end(self._term * 1000)
        self._stays[held.claimed.claim] = stay = self._start_stay(held, self._term)
        stay.set_attribute("orca.taken_over", True)

    def _start_stay(self, held: Held, term: int) -> Span:
        """A stay in a term. The next master knows its id, so that iterations of a master that died link to a stay."""
        claimed = held.claimed
        with self._ids.next_is(claimed.claim, term):
            return self._start("orca.engine", held, max(claimed.taken_at, term))

    def _start(self, name: str, held: Held, moment: int) -> Span:
        # The client's own id, as the endpoint's spans have it: that of the pool names the tenant, too.
        attributes = {"orca.request_id": held.record.request_id, "orca.engine": self._engine}
        return self._tracer.start_span(
            name, context_of(held.record.trace), attributes=attributes, start_time=moment * 1000
        )

    def scheduled(self, action: ScheduleBatch, slots: int, epoch: int, policy: str) -> dict[str, str]:
        """An iteration begins. Returns the context for the ranks; an empty one where no member is sampled."""
        stays = [(m, stay) for m in action.members if (stay := self._sampled(m.claim)) is not None]
        if not stays:
            return {}
        span = self._tracer.start_span(
            "orca.iteration",
            context=trace.set_span_in_context(trace.INVALID_SPAN),
            links=[
                Link(stay.get_span_context(), {"orca.row": m.row, "orca.start": m.start, "orca.count": m.count})
                for m, stay in stays
            ],
            attributes={
                "orca.engine": self._engine,
                "orca.epoch": epoch,
                "orca.iteration": action.iteration,
                "orca.batch_size": len(action.members),
                "orca.members": [f"row {m.row} {m.phase} from {m.start} count {m.count}" for m in action.members],
                "orca.slots.reserved": action.reserved,
                "orca.slots.free": slots - action.reserved,
                "orca.policy": policy,
                "orca.selection.stop": action.stop,
                "orca.positions": action.positions,
                "orca.preempted": len(action.preempted),
            },
        )
        self._iterations[action.iteration] = span
        for member, stay in stays:
            stay.add_link(span.get_span_context())  # so that a viewer finds the iteration from the request
            stay.add_event(
                "iteration",
                {"orca.iteration": action.iteration, "phase": member.phase.value, "batch": len(action.members)},
            )
        return carrier_of(span)

    def _sampled(self, claim: int) -> Span | None:
        """The stay of a request whose spans are exported as they are. (Those of others may be, once it has ended.)"""
        stay = self._stays.get(claim)
        return stay if stay is not None and stay.get_span_context().trace_flags.sampled else None

    def returned(self, report: pb.IterationReport) -> None:
        """An iteration's tokens are back."""
        span = self._iterations.pop(report.number, None)
        if span is not None:
            span.end()

    def lost(self) -> None:
        """Ends the spans of the iterations in flight, which will not return."""
        for span in self._iterations.values():
            span.set_attribute("orca.end", "lost")
            span.set_status(StatusCode.ERROR, "its engine was lost")
            span.end()
        self._iterations.clear()

    def ends(self, claim: int, reason: str) -> None:
        """The core has ended a request. Its stay lasts until the pool has that."""
        stay = self._stays.get(claim)
        if stay is not None:
            stay.add_event("ended")
            _tell(stay, reason)

    def committed(self, claims: Iterable[int], moment: int) -> None:
        """The pool has the ends of these requests since a moment."""
        for claim in claims:
            stay = self._stays.pop(claim, None)
            if stay is not None:
                stay.end(moment * 1000)

    def ended(self, claims: Iterable[int], reason: str, moment: int | None = None) -> None:
        """Requests left the engine, at the pool's moment where that is known."""
        for claim in claims:
            stay = self._stays.pop(claim, None)
            if stay is not None:
                _tell(stay, reason)
                stay.end(None if moment is None else moment * 1000)

    def left(self) -> None:
        """The term is over. The requests are still the engine's, which has another master now."""
        self.lost()
        self.ended(list(self._stays), "handed over")


def _tell(stay: Span, reason: str) -> None:
    """Says why a stay ends."""
    stay.set_attribute("orca.end", reason)
    if reason in FAILED:
        stay.set_status(StatusCode.ERROR, reason)
