"""The spans of a request's stay at an engine: when they begin and end, and how they say why."""

import time

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from orca.v1.pool_pb2 import PoolRequest
from orca_pool.records import Claimed
from orca_scheduler.master.output import Held
from orca_scheduler.master.tracing import Tracing


def tracing() -> tuple[Tracing, InMemorySpanExporter]:
    """Spans of the requests 1 and 2, which were submitted a second ago and claimed now."""
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    found = Tracing(provider.get_tracer("test"), "engine-0", "paper")
    for claim in (1, 2):
        claimed = Claimed(f"r{claim}", claim, claim, b"", [], 0, None, time.time_ns() // 1000 - 1_000_000)
        found.claimed(Held(claimed, PoolRequest(request_id=f"r{claim}"), None, bytearray(), 0))
    return found, kept


def test_a_stay_begins_as_the_queue_ends_and_lasts_until_the_pool_has_its_end() -> None:
    traced, kept = tracing()
    queue, other = kept.get_finished_spans()
    assert {queue.name, other.name} == {"orca.queue"}
    traced.ends(1, "LENGTH")
    assert len(kept.get_finished_spans()) == 2, "not before the pool has it"
    traced.committed([1, 3])
    *_, stay = kept.get_finished_spans()
    assert (stay.name, stay.start_time) == ("orca.engine", queue.end_time)
    assert stay.attributes is not None
    assert (stay.attributes["orca.end"], stay.status.status_code) == ("LENGTH", StatusCode.UNSET)
    (event,) = stay.events
    assert (event.name, stay.end_time is not None and event.timestamp <= stay.end_time) == ("ended", True)


def test_a_request_that_failed_says_so() -> None:
    traced, kept = tracing()
    traced.ends(1, "NOT_FINITE")
    traced.committed([1])
    assert kept.get_finished_spans()[-1].status.status_code is StatusCode.ERROR


def test_requests_that_stay_at_an_engine_are_handed_over() -> None:
    """Otherwise the spans of an orderly restart would never be sent."""
    traced, kept = tracing()
    traced.left()
    ends = [span.attributes and span.attributes["orca.end"] for span in kept.get_finished_spans()[2:]]
    assert ends == ["handed over", "handed over"]
