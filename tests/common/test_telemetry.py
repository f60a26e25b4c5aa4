"""Spans with and without a collector, each case in a process of its own: a process has one tracer provider."""

import json
import os
import socket
import subprocess
import sys
import threading
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from orca_common.telemetry import Telemetry

# Makes spans until the exporter has tried three batches, then closes, and prints what it knows.
PROGRAM = """
import json
from orca_common import logs, span_exporter, telemetry

logs.configure("test", "INFO")
tried = []
export = span_exporter.PatientExporter.export
span_exporter.PatientExporter.export = lambda self, spans: tried.append(export(self, spans))
traced = telemetry.Telemetry("orca-test", "host", "1")
while len(tried) < 3:
    for _ in range(600):  # more than a batch
        traced.tracer.start_span("one").end()
traced.close()
print(json.dumps(dict(telemetry.resource_of("orca-test", "host", "1").attributes)))
"""


def run(port: int, **variables: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The attributes of the resource, and the lines of the log."""
    environment = os.environ | {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "0.2",
        "OTEL_BSP_SCHEDULE_DELAY": "10",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout), [json.loads(line) for line in done.stderr.splitlines()]


def test_an_absent_collector_costs_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        _, lines = run(taken.getsockname()[1])
    (line,) = lines
    assert line["event"] == "the collector of traces is away"
    assert "UNAVAILABLE" in line["why"] or "DEADLINE_EXCEEDED" in line["why"]


def test_a_frozen_collector_costs_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # it accepts connections, and never answers
        _, lines = run(frozen.getsockname()[1])
    assert [line["event"] for line in lines] == ["the collector of traces is away"]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans = 0
        self.attributes: dict[str, str] = {}

    def Export(  # noqa: N802 the service's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for group in request.resource_spans:
            self.attributes = {a.key: a.value.string_value for a in group.resource.attributes}
            self.spans += sum(len(scope.spans) for scope in group.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


def test_a_collector_gets_the_pod_s_name() -> None:
    kept, server = Collector(), grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        more = {"OTEL_EXPORTER_OTLP_TIMEOUT": "30", "OTEL_RESOURCE_ATTRIBUTES": "k8s.pod.name=orca-worker-3"}
        attributes, lines = run(port, **more)
    finally:
        server.stop(None).wait()
    assert not lines
    assert kept.spans > 0
    assert kept.attributes == attributes
    assert attributes["service.name"] == "orca-test"
    assert attributes["service.instance.id"] == "orca-worker-3/1"
    assert attributes["k8s.pod.name"] == "orca-worker-3"


def test_a_collector_that_speaks_http() -> None:
    """OTEL_EXPORTER_OTLP_PROTOCOL decides; what the program's spans were arrives at /v1/traces."""
    bodies: list[tuple[str, bytes]] = []

    class Door(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        variables = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_TIMEOUT": "30"}
        _, lines = run(server.server_port, **variables)
        server.shutdown()
    assert not lines
    assert {path for path, _ in bodies} == {"/v1/traces"}
    got = trace_service_pb2.ExportTraceServiceRequest.FromString(bodies[0][1])
    assert got.resource_spans[0].scope_spans[0].spans[0].name == "one"


def test_a_protocol_that_is_not_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(SystemExit, match=r"OTEL_EXPORTER_OTLP_PROTOCOL: is 'http/json'; Orca speaks grpc and http"):
        Telemetry("orca-test")


def test_an_instance_that_is_given_is_kept() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        attributes, _ = run(taken.getsockname()[1], OTEL_RESOURCE_ATTRIBUTES="service.instance.id=a,k8s.pod.name=b")
    assert attributes["service.instance.id"] == "a/1"
