"""OpenTelemetry: off unless `OTEL_EXPORTER_OTLP_ENDPOINT` is set, and cheap when off.

Spans carry the client's W3C context. It comes as gRPC or HTTP metadata, is kept in the pool's record, and reaches
scheduler and ranks in their control messages.
"""

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagate import extract, inject
from opentelemetry.trace import Span, Tracer, format_trace_id
from pydantic_settings import BaseSettings


class OtelSettings(BaseSettings):
    """The standard variables that decide whether anything is sent. OpenTelemetry's SDK reads the others."""

    otel_exporter_otlp_endpoint: str | None = None
    otel_exporter_otlp_traces_endpoint: str | None = None


class Telemetry:
    """A service's tracer. When nothing is exported, `enabled` is false, and callers make no spans."""

    def __init__(self, service: str, instance: str = "") -> None:
        settings = OtelSettings()
        self.enabled = bool(settings.otel_exporter_otlp_endpoint or settings.otel_exporter_otlp_traces_endpoint)
        self._provider = None
        if self.enabled:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            resource = Resource.create({"service.name": service, "service.instance.id": instance})
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
            trace.set_tracer_provider(self._provider)
        self.tracer: Tracer = trace.get_tracer("orca")

    def close(self) -> None:
        """Sends the spans that are left; this takes at most some seconds."""
        if self._provider is not None:
            self._provider.force_flush(3000)
            self._provider.shutdown()


def context_of(carrier: Mapping[str, str]) -> Context:
    """The trace context in metadata or in a pool record."""
    return extract(carrier)


def carrier_of(span: Span) -> dict[str, str]:
    """The span's context as W3C headers."""
    carrier: dict[str, str] = {}
    inject(carrier, trace.set_span_in_context(span))
    return carrier


def trace_id_of(carrier: Mapping[str, str]) -> str:
    """The trace id in W3C headers: 32 hex digits, all zeros when there is none."""
    span = trace.get_current_span(extract(carrier))
    return format_trace_id(span.get_span_context().trace_id)
