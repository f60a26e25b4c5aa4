"""Which spans are exported: a request's, all of them or none, and those of slow and failed requests in any case.

The first span of a request draws by its trace id, and every process below it follows its flag. An iteration is exported
when one of its requests is. The spans of a request that was not drawn are recorded all the same, without its
iterations, and wait in each process until its last span ends: then they are exported if it took long, or failed. The
endpoint's span begins first, and fails where the scheduler's does, so no exported span lacks its parent, but where the
pool's last answer alone made the scheduler's too long.
"""

from collections import OrderedDict
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode, TraceFlags, TraceState, get_current_span
from opentelemetry.util.types import Attributes

LAST = frozenset(["orca.request", "orca.resume", "orca.engine"])  # a request's last span in its process
WAITING = 4096  # requests whose spans wait; the oldest goes
GOES_ON = frozenset(["given back", "its master fell silent"])  # ends of a stay after which the request goes on
SECOND = 1e9  # nanoseconds


class ByRequest(Sampler):
    """Samples a share of the requests, and the iterations of these."""

    def __init__(self, share: float) -> None:
        self._share = TraceIdRatioBased(share)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        parent = get_current_span(parent_context).get_span_context()
        if links:  # an iteration links to its requests
            sampled = any(link.context.trace_flags.sampled for link in links)
        elif parent.is_valid:
            sampled = parent.trace_flags.sampled
        else:
            drawn = self._share.should_sample(parent_context, trace_id, name)
            sampled = drawn.decision is Decision.RECORD_AND_SAMPLE
        decision = Decision.RECORD_AND_SAMPLE if sampled else Decision.RECORD_ONLY
        return SamplingResult(decision, attributes, parent.trace_state if parent.is_valid else trace_state)

    def get_description(self) -> str:
        return f"ByRequest({self._share.rate})"


class KeepSlowOrFailed(SpanProcessor):
    """Passes on the spans that are sampled, and later those of requests that turn out slow or failed."""

    def __init__(self, sending: SpanProcessor, slow: float) -> None:
        """slow: seconds; 0: no request is too slow."""
        self._sending, self._slow = sending, slow
        self._waiting: OrderedDict[int, list[ReadableSpan]] = OrderedDict()  # by trace id

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self._sending.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        assert context is not None, "an ended span has a context"
        if context.trace_flags.sampled:
            self._sending.on_end(span)
            return
        spans = self._waiting.setdefault(context.trace_id, [])
        spans.append(span)
        if span.name in LAST:
            del self._waiting[context.trace_id]
            if self._to_be_kept(spans):
                for one in spans:
                    self._sending.on_end(sampled(one))
        elif len(self._waiting) > WAITING:
            self._waiting.popitem(last=False)

    def _to_be_kept(self, spans: Sequence[ReadableSpan]) -> bool:
        last = spans[-1]
        goes_on = (last.attributes or {}).get("orca.end") in GOES_ON
        if last.status.status_code is StatusCode.ERROR and not goes_on:
            return True
        took = max(span.end_time or 0 for span in spans) - min(span.start_time or 0 for span in spans)
        return self._slow > 0 and took >= self._slow * SECOND

    def shutdown(self) -> None:
        self._sending.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._sending.force_flush(timeout_millis)


def sampled(span: ReadableSpan) -> ReadableSpan:
    """Returns the same span with the flag that exporters ask for."""
    context = span.get_span_context()
    assert context is not None, "an ended span has a context"
    flagged = SpanContext(
        context.trace_id, context.span_id, context.is_remote, TraceFlags(TraceFlags.SAMPLED), context.trace_state
    )
    return ReadableSpan(
        span.name,
        flagged,
        span.parent,
        span.resource,
        span.attributes,
        span.events,
        span.links,
        span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
