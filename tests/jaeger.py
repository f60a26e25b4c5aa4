"""The real Jaeger: one of its own for a test, and what its query API says of a request's trace.

    with jaeger() as (otlp, query): ...           # the program `jaeger`, on PATH or of the cluster's, on free ports
    followed = follow(query, TRACE, {(0, 0), (1, 0)}, iterations=5)

`follow` needs only the address of a query API, so it serves a Jaeger in a cluster as well.
"""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from orca_local.embedded_pool import keep_port

# `tests/kubernetes` keeps what it has built for its cluster there; its Jaeger runs as it is, too.
BUILT = Path.home() / ".cache/orca-cluster/bin/jaeger"
PROGRAM = shutil.which("jaeger") or (str(BUILT) if BUILT.exists() else None)

SECONDS = 60  # within which it answers

CONFIG = """
service:
  extensions: [jaeger_storage, jaeger_query]
  pipelines:
    traces: {{receivers: [otlp], exporters: [jaeger_storage_exporter]}}
  telemetry:
    metrics: {{level: none}}
extensions:
  jaeger_storage:
    backends:
      memory: {{memory: {{max_traces: 10000}}}}
  jaeger_query:
    storage: {{traces: memory}}
    http: {{endpoint: "127.0.0.1:{http}"}}
    grpc: {{endpoint: "127.0.0.1:{grpc}"}}
receivers:
  otlp:
    protocols:
      grpc: {{endpoint: "127.0.0.1:{otlp}"}}
exporters:
  jaeger_storage_exporter: {{trace_storage: memory}}
"""


@dataclass(frozen=True)
class Span:
    """A span as Jaeger's query API tells it."""

    trace_id: str
    span_id: str
    name: str
    service: str
    parent: str | None  # id of a span of the same trace
    links: tuple[tuple[str, str], ...]  # trace and span ids
    start: int  # microseconds
    duration: int
    tags: dict[str, Any]
    events: tuple[dict[str, Any], ...]
    resource: dict[str, Any]

    @property
    def end(self) -> int:
        return self.start + self.duration


@dataclass(frozen=True)
class Followed:
    """A request's trace, and the traces of the iterations that it links to."""

    request: Span
    queue: tuple[Span, ...]
    engine: tuple[Span, ...]  # its stays on engines
    iterations: tuple[Span, ...]
    stages: tuple[Span, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        return (self.request, *self.queue, *self.engine, *self.iterations, *self.stages)


def trace(query: str, trace_id: str) -> list[Span]:
    """All spans of a trace that Jaeger has by now. `query`: such as "http://127.0.0.1:16686"."""
    try:
        with urllib.request.urlopen(f"{query}/api/traces/{trace_id}", timeout=10) as answer:
            found = json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return []
            raise
    return [_span(span, whole["processes"]) for whole in found for span in whole["spans"]]


def spans_of(query: str, service: str) -> list[Span]:
    """All spans of the traces in which a service has one."""
    hour = 3_600_000_000
    now = time.time_ns() // 1000
    wanted = f"service={service}&limit=10000&start={now - hour}&end={now + hour}"
    with urllib.request.urlopen(f"{query}/api/traces?{wanted}", timeout=60) as answer:
        found = json.load(answer)["data"]
    return [_span(span, whole["processes"]) for whole in found for span in whole["spans"]]


def follow(
    query: str,
    trace_id: str,
    ranks: set[tuple[int, int]],
    *,
    iterations: int,
    parent: str | None = None,
    seconds: float = 30.0,
) -> Followed:
    """Follows a request from its trace id to the ranks, and asserts that nothing is missing or points nowhere.

    ranks: (stage, tensor rank) of each rank of its engine. iterations: how many it took part in, at least. parent: the
    span id of the client's traceparent. Waits, because services send their spans some seconds late.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _followed(query, trace_id, ranks, iterations, parent)
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _followed(query: str, trace_id: str, ranks: set[tuple[int, int]], iterations: int, parent: str | None) -> Followed:
    spans = trace(query, trace_id)
    own = {span.span_id: span for span in spans}
    requests = [span for span in spans if span.name == "orca.request"]
    assert len(requests) == 1, f"trace {trace_id} has {len(requests)} spans orca.request"
    request = requests[0]
    assert request.service == "orca-endpoint"
    assert parent is None or request.parent == parent, f"orca.request is below {request.parent}"
    for span in spans:
        if span is not request:
            assert span.parent in own, f"{span.name} is below {span.parent}, which is no span of its trace"
    queue, stays = _named(spans, "orca.queue"), _named(spans, "orca.engine")
    assert queue, "no orca.queue"
    assert stays, "no orca.engine"
    for span in (*queue, *stays):
        assert (span.service, span.parent) == ("orca-scheduler", request.span_id)
    linked = dict.fromkeys(link for stay in stays for link in stay.links)
    assert len(linked) >= iterations, f"orca.engine links to {len(linked)} iterations, {iterations} were expected"
    rounds: list[Span] = []
    stages: list[Span] = []
    for other, span_id in linked:
        found = {span.span_id: span for span in trace(query, other)}
        assert span_id in found, f"orca.engine links to span {span_id} of trace {other}, which is not there"
        iteration = found[span_id]
        assert (iteration.name, iteration.service, iteration.parent) == ("orca.iteration", "orca-scheduler", None)
        assert any((trace_id, stay.span_id) in iteration.links for stay in stays), "an iteration does not link back"
        below = [span for span in found.values() if span.parent == span_id]
        at = {(span.tags["orca.stage"], span.tags["orca.tensor_rank"]) for span in below}
        assert at == ranks, f"iteration {iteration.tags['orca.iteration']} has spans of the ranks {sorted(at)}"
        assert {(span.name, span.service) for span in below} == {("orca.stage", "orca-worker")}
        rounds.append(iteration)
        stages += below
    return Followed(request, queue, stays, tuple(rounds), tuple(stages))


@contextmanager
def jaeger() -> Iterator[tuple[str, str]]:
    """Runs the program `jaeger`, keeping traces in memory. Gives its OTLP endpoint and the address of its query API."""
    assert PROGRAM is not None
    with TemporaryDirectory(prefix="orca-jaeger-") as folder, ExitStack() as kept:
        ports = {name: kept.enter_context(keep_port()).getsockname()[1] for name in ("otlp", "http", "grpc")}
        process = _started(PROGRAM, Path(folder), ports)
        try:
            yield f"http://127.0.0.1:{ports['otlp']}", f"http://127.0.0.1:{ports['http']}"
        finally:
            process.terminate()
            process.wait()


def _started(program: str, folder: Path, ports: dict[str, int]) -> subprocess.Popen[bytes]:
    """Starts Jaeger. Skips the test where it does not start, with the end of its log: that is no fault of what is
    tested."""
    log, config = folder / "log", folder / "jaeger.yaml"
    config.write_text(CONFIG.format(**ports))
    with log.open("wb") as output:
        process = subprocess.Popen([program, "--config", str(config)], stdout=output, stderr=output)
    until = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < until:
        if _answers(f"http://127.0.0.1:{ports['http']}"):
            return process
        time.sleep(0.05)
    process.kill()
    process.wait()
    pytest.skip(f"Jaeger does not start here: {log.read_text()[-500:]}")


def _answers(query: str) -> bool:
    try:
        with urllib.request.urlopen(f"{query}/api/services", timeout=5):
            return True
    except OSError:
        return False


def _named(spans: list[Span], name: str) -> tuple[Span, ...]:
    return tuple(span for span in spans if span.name == name)


def _span(found: dict[str, Any], processes: dict[str, Any]) -> Span:
    process = processes[found["processID"]]
    references = found["references"]
    parents = [r["spanID"] for r in references if r["refType"] == "CHILD_OF" and r["traceID"] == found["traceID"]]
    return Span(
        trace_id=found["traceID"],
        span_id=found["spanID"],
        name=found["operationName"],
        service=process["serviceName"],
        parent=parents[0] if parents else None,
        links=tuple((r["traceID"], r["spanID"]) for r in references if r["refType"] == "FOLLOWS_FROM"),
        start=found["startTime"],
        duration=found["duration"],
        tags=_tags(found["tags"]),
        events=tuple({"at": log["timestamp"], **_tags(log["fields"])} for log in found["logs"]),
        resource=_tags(process["tags"]),
    )


def _tags(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {tag["key"]: tag["value"] for tag in found}
