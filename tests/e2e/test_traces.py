"""A request can be followed from its client to the ranks: an OTLP collector gets its spans, correctly linked."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from checkpoints import make_timed
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from stacks import generation, running

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OTHER = "1af7651916cd43dd8448eb211c80319c"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps every span."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    async def Export(  # noqa: N802 the service's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.aio.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    server, kept = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield kept, f"http://127.0.0.1:{port}"
    await server.stop(1)


async def test_a_request_can_be_followed(tmp_path: Path, collector: tuple[Collector, str]) -> None:
    kept, address = collector
    model = make_timed(tmp_path / "model", seconds=0.0)
    async with running(tmp_path / "run", model, environment={"OTEL_EXPORTER_OTLP_ENDPOINT": address}) as stack:
        metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        call = stack.stub.Generate(generation([1, 2, 3], 5, request_id="traced"), metadata=metadata)
        assert sum([len(response.tokens) async for response in call]) == 5
        unsampled = (("traceparent", f"00-{OTHER}-{PARENT}-00"),)
        call = stack.stub.Generate(generation([1, 2, 3], 5), metadata=unsampled)
        assert sum([len(response.tokens) async for response in call]) == 5
    assert OTHER not in {span.trace_id.hex() for span in kept.spans}, "its caller does not want its spans"
    # The stack has ended, so every process has sent its spans.
    (request,) = kept.named("orca.request")
    assert request.trace_id.hex() == TRACE
    assert request.parent_span_id.hex() == PARENT
    (queue,), (stay,), (submit,) = kept.named("orca.queue"), kept.named("orca.engine"), kept.named("orca.submit")
    for span in (request, submit, queue, stay):
        assert text(span, "orca.request_id") == "traced", "one key for a request's id"
        assert "orca.request" not in {attribute.key for attribute in span.attributes}
        assert span.status.code == Status.STATUS_CODE_UNSET
    assert submit.parent_span_id == request.span_id
    assert submit.start_time_unix_nano == request.start_time_unix_nano
    assert text(request, "rpc.method") == "orca.v1.Orca/Generate"
    for span in (queue, stay):
        assert span.trace_id == request.trace_id
        assert span.parent_span_id == request.span_id
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    iterations = kept.named("orca.iteration")
    assert len(iterations) == 5
    assert [event.name for event in stay.events] == ["iteration"] * 5 + ["ended"]
    assert all(link.span_id == stay.span_id for span in iterations for link in span.links)
    (first, *others) = sorted(iterations, key=lambda span: span.start_time_unix_nano)
    (link,) = first.links
    assert {a.key: a.value.int_value for a in link.attributes} == {"orca.row": 0, "orca.start": 0, "orca.count": 3}
    assert {a.value.int_value for span in others for a in span.links[0].attributes if a.key == "orca.count"} == {1}
    stages = kept.named("orca.stage")
    parts = [span for span in kept.spans if span.name.startswith("orca.stage.")]
    assert {span.parent_span_id for span in parts} == {span.span_id for span in stages}
    assert {span.name for span in parts} <= {f"orca.stage.{part}" for part in ("control", "wait", "compute", "send")}
    assert {span.parent_span_id for span in stages} == {span.span_id for span in iterations}


async def test_a_recovery_can_be_followed(tmp_path: Path, collector: tuple[Collector, str]) -> None:
    """The master is killed, then the rank. The trace tells on which engine the request was, and why it left."""
    kept, address = collector
    model = make_timed(tmp_path / "model", seconds=0.05)
    # What has ended is sent at once: a killed process takes along what it had open, and nothing else.
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_BSP_SCHEDULE_DELAY": "1"}
    async with running(tmp_path / "run", model, environment=environment) as stack:
        seen: list[int] = []
        stream = asyncio.create_task(stack.tokens([1, 2, 3], 80, seen.append))
        for role, moment in (("scheduler", 5), ("rank", 40)):
            await stack.until(lambda moment=moment: len(seen) >= moment)
            os.kill(next(p["pid"] for p in stack.processes() if p["role"] == role), signal.SIGKILL)
        assert len(await stream) == 80
    ends = {text(span, "orca.end"): span for span in kept.named("orca.engine")}
    assert ends.keys() == {"its master fell silent", "given back", "LENGTH"}
    first, taken_over, again = ends["its master fell silent"], ends["given back"], ends["LENGTH"]
    assert first.end_time_unix_nano == taken_over.start_time_unix_nano
    links = {link.span_id for span in kept.named("orca.iteration") for link in span.links}
    assert links == {span.span_id for span in ends.values()}, "the killed master's iterations link to a stay"
    assert "orca.taken_over" in {attribute.key for attribute in taken_over.attributes}
    (request,) = kept.named("orca.request")
    assert {span.trace_id for span in (*ends.values(), *kept.named("orca.queue"))} == {request.trace_id}
    first_queue, second_queue = sorted(kept.named("orca.queue"), key=lambda span: span.start_time_unix_nano)
    chain = (first_queue, first, taken_over, second_queue, again)
    moments = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in chain]
    assert all(end == begin for (_, end), (begin, _) in pairwise(moments)), "its whole time, without a gap"
    assert {text(span, "orca.end") for span in kept.named("orca.iteration")} == {"", "lost"}
    for span in kept.spans:
        failed = text(span, "orca.end") in {"its master fell silent", "given back", "lost"}
        assert (span.status.code == Status.STATUS_CODE_ERROR) == failed, span.name


def text(span: Span, key: str) -> str:
    """The text of a span's attribute; empty when the span does not have it."""
    return next((a.value.string_value for a in span.attributes if a.key == key), "")
