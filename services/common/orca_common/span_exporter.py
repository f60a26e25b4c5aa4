"""Sends spans to an OTLP collector. A collector that is away costs a line in the log, and nothing else."""

import logging
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)

PROTOCOLS = ("grpc", "http/protobuf")
# Loggers of the SDK that tell of each failed try, of each lost batch, and of each full queue.
NOISY = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
)


def exporter_of(protocol: str) -> SpanExporter:
    """The SDK's exporter for one of `PROTOCOLS`. OpenTelemetry's own variables decide where spans go, and how."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        return OverGrpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    return OverHttp()


class PatientExporter(SpanExporter):
    """Says once that the collector is away, and once that it is back. Spans of the meantime are dropped."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        """endpoint: only for the log."""
        self.away = False  # whether the last try has failed
        self._exporter, self._to, self._ended = exporter, endpoint, False
        self._quiet = _Quiet()
        for name in NOISY:
            logging.getLogger(name).addFilter(self._quiet)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if self._ended:
            return result
        away = result is not SpanExportResult.SUCCESS
        if away and not self.away:
            log.warning("the collector of traces is away", extra={"endpoint": self._to, "why": self._quiet.last})
        elif self.away and not away:
            log.info("the collector of traces is back", extra={"endpoint": self._to})
        self.away = away
        return result

    def shutdown(self) -> None:
        """Ends a try that is under way. Nothing more is sent."""
        self._ended = True
        self._exporter.shutdown()


class _Quiet(logging.Filter):
    """Keeps the SDK's messages out of the log, and remembers the last one."""

    last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.last = record.getMessage()
        return False
