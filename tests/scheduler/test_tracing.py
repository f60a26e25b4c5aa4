"""The spans of a request's stay at an engine: when they begin and end, and how they say why."""

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from orca.v1.pool_pb2 import PoolRequest
from orca_common.span_ids import SpanIds
from orca_pool.records import Claimed
from orca_scheduler.master.output import Held
from orca_scheduler.master.tracing import Tracing

SUBMITTED = 1_700_000_000_000_000  # by a Redis whose clock is years behind this machine's


def tracing(term: int = SUBMITTED, silent_term: int | None = None) -> tuple[Tracing, InMemorySpanExporter]:
    """Spans of the requests 1 and 2, which came into the queue again after 2 s and were claimed after 3 s."""
    ids = SpanIds()
    kept, provider = InMemorySpanExporter(), TracerProvider(id_generator=ids)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    found = Tracing(provider.get_tracer("test"), ids, "engine-0", term, silent_term)
    for claim in (1, 2):
        found.claimed(held(claim))
    return found, kept


def held(claim: int) -> Held:
    moments = (SUBMITTED, SUBMITTED + 2_000_000, SUBMITTED + 3_000_000)
    claimed = Claimed(f"r{claim}", claim, claim, 3, b"", [], 0, None, *moments)
    return Held(claimed, PoolRequest(request_id=f"r{claim}"), None, bytearray(), 0)


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def test_a_stay_begins_as_the_queue_ends_and_lasts_until_the_pool_has_its_end() -> None:
    traced, kept = tracing()
    queue, other = kept.get_finished_spans()
    assert {queue.name, other.name} == {"orca.queue"}
    assert (queue.start_time, queue.end_time) == ((SUBMITTED + 2_000_000) * 1000, (SUBMITTED + 3_000_000) * 1000)
    traced.ends(1, "LENGTH")
    assert len(kept.get_finished_spans()) == 2, "not before the pool has it"
    traced.committed([1, 3], SUBMITTED + 5_000_000)
    *_, stay = kept.get_finished_spans()
    assert (stay.name, stay.start_time) == ("orca.engine", queue.end_time)
    assert stay.end_time == (SUBMITTED + 5_000_000) * 1000
    assert stay.attributes is not None
    assert (stay.attributes["orca.end"], stay.status.status_code) == ("LENGTH", StatusCode.UNSET)
    assert [event.name for event in stay.events] == ["ended"]


def test_a_request_that_is_given_back_leaves_when_the_pool_has_it_again() -> None:
    traced, kept = tracing()
    traced.ended([1], "given back", SUBMITTED + 4_000_000)
    assert kept.get_finished_spans()[-1].end_time == (SUBMITTED + 4_000_000) * 1000


def test_a_request_that_another_master_claimed_stays_here_since_this_term_began() -> None:
    traced, kept = tracing(SUBMITTED + 3_500_000)
    traced.taken_over(held(3))
    traced.committed([3], SUBMITTED + 5_000_000)
    stay = kept.get_finished_spans()[-1]
    assert stay.attributes is not None
    assert (stay.start_time, stay.attributes["orca.taken_over"]) == ((SUBMITTED + 3_500_000) * 1000, True)


def test_the_next_master_tells_the_stay_of_one_that_died() -> None:
    """With its id, to which iterations link that were sent before. Both stays follow each other."""
    died, kept = tracing()
    died.left()
    theirs = kept.get_finished_spans()[2]
    term = SUBMITTED + 3_500_000
    traced, kept = tracing(term, silent_term=SUBMITTED)
    traced.taken_over(held(1))
    traced.committed([1], SUBMITTED + 5_000_000)
    *_, before, stay = kept.get_finished_spans()
    assert before.attributes is not None
    assert before.attributes["orca.end"] == "its master fell silent"
    assert (before.start_time, before.end_time) == ((SUBMITTED + 3_000_000) * 1000, term * 1000)
    assert (stay.start_time, stay.end_time) == (term * 1000, (SUBMITTED + 5_000_000) * 1000)
    assert id_of(before) == id_of(theirs) != id_of(stay)


def test_a_request_that_failed_says_so() -> None:
    traced, kept = tracing()
    traced.ends(1, "NOT_FINITE")
    traced.committed([1], SUBMITTED + 5_000_000)
    assert kept.get_finished_spans()[-1].status.status_code is StatusCode.ERROR


def test_requests_that_stay_at_an_engine_are_handed_over() -> None:
    """Otherwise the spans of an orderly restart would never be sent."""
    traced, kept = tracing()
    traced.left()
    ends = [span.attributes and span.attributes["orca.end"] for span in kept.get_finished_spans()[2:]]
    assert ends == ["handed over", "handed over"]
