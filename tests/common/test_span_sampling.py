"""Which spans a collector gets: by request, with iterations of the sampled ones, and all slow or failed requests."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, StatusCode, TraceFlags, set_span_in_context

from orca_common import span_sampling
from orca_common.span_sampling import ByRequest, KeepSlowOrFailed

MS = 1_000_000


class Traced:
    """A service whose exported spans are kept."""

    def __init__(self, share: float, slow: float = 0.0) -> None:
        self._kept = InMemorySpanExporter()
        provider = TracerProvider(sampler=ByRequest(share))
        provider.add_span_processor(KeepSlowOrFailed(SimpleSpanProcessor(self._kept), slow))
        self.tracer = provider.get_tracer("test")

    def span(self, name: str, parent: Span | None = None, begin: int = 1) -> Span:
        context = set_span_in_context(parent if parent is not None else trace.INVALID_SPAN)
        return self.tracer.start_span(name, context, start_time=begin)

    @property
    def exported(self) -> tuple[ReadableSpan, ...]:
        return self._kept.get_finished_spans()

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.exported]


def caller(sampled: bool, trace_id: int = 7) -> Span:
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return NonRecordingSpan(SpanContext(trace_id, 9, is_remote=True, trace_flags=flags))


def request(traced: Traced, parent: Span | None = None, took: int = 1 * MS, status: StatusCode = StatusCode.OK) -> Span:
    """One request's spans at an endpoint."""
    whole = traced.span("orca.request", parent)
    traced.span("orca.submit", whole).end(2)
    whole.set_status(status)
    whole.end(1 + took)
    return whole


@pytest.mark.parametrize(("share", "count"), [(1.0, 400), (0.0, 0)])
def test_a_share_of_the_requests(share: float, count: int) -> None:
    traced = Traced(share)
    for _ in range(200):
        request(traced)
    assert len(traced.exported) == count


def test_all_services_draw_alike() -> None:
    """A request has all its spans, or none: the second service follows the first one's flag, whatever its own share."""
    endpoint, scheduler = Traced(0.5), Traced(1.0)
    for _ in range(200):
        whole = request(endpoint)
        remote = NonRecordingSpan(whole.get_span_context())
        scheduler.span("orca.engine", remote).end(2)
    drawn = {span.get_span_context().trace_id for span in endpoint.exported if span.get_span_context()}
    assert 50 < len(drawn) < 150
    assert len(endpoint.exported) == 2 * len(drawn)
    assert {span.get_span_context().trace_id for span in scheduler.exported if span.get_span_context()} == drawn


def test_a_caller_decides() -> None:
    traced = Traced(0.0)
    request(traced, caller(True))
    assert traced.names == ["orca.submit", "orca.request"]
    another = Traced(1.0)
    request(another, caller(False))
    assert another.names == []


def test_an_iteration_is_exported_with_one_of_its_requests() -> None:
    traced = Traced(1.0)
    yes, no = traced.span("orca.engine", caller(True, 7)), traced.span("orca.engine", caller(False, 8))
    for number, stays in enumerate(((yes, no), (no,), (yes,))):
        links = [Link(stay.get_span_context()) for stay in stays]
        attributes = {"number": number}
        context = set_span_in_context(trace.INVALID_SPAN)
        traced.tracer.start_span("orca.iteration", context, links=links, attributes=attributes).end()
    assert [(span.attributes or {})["number"] for span in traced.exported] == [0, 2]


def test_slow_and_failed_requests_are_kept() -> None:
    traced = Traced(0.0, slow=0.01)
    request(traced)
    slow = request(traced, took=10 * MS)
    failed = request(traced, status=StatusCode.ERROR)
    assert traced.names == ["orca.submit", "orca.request"] * 2
    assert [span.get_span_context().span_id for span in traced.exported[1::2] if span.get_span_context()] == [
        slow.get_span_context().span_id,
        failed.get_span_context().span_id,
    ]
    submit, whole = traced.exported[:2]
    assert submit.parent is not None
    assert whole.get_span_context() is not None
    assert submit.parent.span_id == slow.get_span_context().span_id
    assert all(span.get_span_context().trace_flags.sampled for span in traced.exported if span.get_span_context())


def test_a_request_that_was_given_back_goes_on() -> None:
    """Its endpoint has no failure to export, and the stay alone would have no parent."""
    traced = Traced(0.0)
    stay = traced.span("orca.engine", caller(False))
    stay.set_attribute("orca.end", "given back")
    stay.set_status(StatusCode.ERROR)
    stay.end(2)
    assert traced.names == []


def test_no_more_than_so_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_sampling, "WAITING", 2)
    traced = Traced(0.0, slow=1e-9)
    wholes = [traced.span("orca.request") for _ in range(4)]
    for whole in wholes:
        traced.span("orca.submit", whole).end(2)
    for whole in wholes:
        whole.end(3)
    assert traced.names.count("orca.request") == 4
    assert traced.names.count("orca.submit") == 2
