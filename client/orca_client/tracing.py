"""A span of the client for each request, and the W3C context that goes with each of its calls."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .errors import OrcaError
from .events import Finished

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

Metadata = tuple[tuple[str, str], ...]


class Trace:
    """The trace of one request: one span from its first call to its end, whatever calls it takes.

    The span is a child of the caller's current one. Without a tracer there is no span, and only the caller's own
    metadata goes with the calls.
    """

    def __init__(
        self, tracer: "Tracer | None", name: str, request_id: str, metadata: Sequence[tuple[str, str]]
    ) -> None:
        """metadata: goes with every call of the request, beside the client's own."""
        self.metadata: Metadata = tuple(metadata)
        self._span = None
        if tracer is not None:
            from opentelemetry.propagate import inject
            from opentelemetry.trace import SpanKind, set_span_in_context

            self._span = tracer.start_span(name, kind=SpanKind.CLIENT, attributes={"orca.request_id": request_id})
            headers: dict[str, str] = {}
            inject(headers, set_span_in_context(self._span))
            self.metadata += tuple(headers.items())

    def end(self, tokens: int, finished: Finished | None, error: OrcaError | None) -> None:
        """The request has ended for this client: with Finished, with an error, or else because it was left."""
        span, self._span = self._span, None
        if span is None:
            return
        from opentelemetry.trace import StatusCode

        reason = finished.reason if finished else error.reason if error else "LEFT"
        span.set_attributes({"orca.tokens": tokens, "orca.reason": reason})
        if error is not None:
            span.set_status(StatusCode.ERROR, str(error))
        span.end()
