"""OpenTelemetry: off unless `OTEL_EXPORTER_OTLP_ENDPOINT` is set, and cheap when off.

Spans carry the client's W3C context. It comes as gRPC or HTTP metadata, is kept in the pool's record, and reaches
scheduler and ranks in their control messages.
"""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagate import extract, inject
from opentelemetry.trace import Span, Tracer, format_trace_id
from pydantic_settings import BaseSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

    from .span_ids import SpanIds

CLOSING_SECONDS = 3.0  # for the spans that are left when a service ends


class OtelSettings(BaseSettings):
    """The standard variables that decide whether anything is sent. OpenTelemetry's SDK reads the others."""

    otel_exporter_otlp_endpoint: str | None = None
    otel_exporter_otlp_traces_endpoint: str | None = None
    otel_exporter_otlp_protocol: str = "grpc"
    otel_exporter_otlp_traces_protocol: str | None = None
    # A process that is killed takes along the spans that it has not sent. The SDK's own default is 5000.
    otel_bsp_schedule_delay: float = 500.0  # milliseconds

    @property
    def protocol(self) -> str:
        """Raises SystemExit with a sentence for a protocol that is not spoken."""
        from .span_exporter import PROTOCOLS

        given = self.otel_exporter_otlp_traces_protocol or self.otel_exporter_otlp_protocol
        if given not in PROTOCOLS:
            raise SystemExit(f"OTEL_EXPORTER_OTLP_PROTOCOL: is {given!r}; Orca speaks {' and '.join(PROTOCOLS)}")
        return given


class Telemetry:
    """A service's tracer. When nothing is exported, `enabled` is false, and callers make no spans.

    Spans are sent by a thread of their own. While no collector answers they are dropped, and the log says so once.
    """

    def __init__(self, service: str, instance: str = "", part: str = "", share: float = 1.0, slow: float = 0.0) -> None:
        """instance: tells processes of one service apart; in a pod, its name is used instead. part: of one of several
        such processes in the same pod. share, slow: the settings `trace_share` and `trace_slow`."""
        settings = OtelSettings()
        endpoint = settings.otel_exporter_otlp_traces_endpoint or settings.otel_exporter_otlp_endpoint
        self.enabled = bool(endpoint)
        self._sending = None
        self.ids: SpanIds | None = None  # of its spans
        if endpoint:
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            from . import span_ids
            from .span_exporter import PatientExporter, exporter_of
            from .span_sampling import ByRequest, KeepSlowOrFailed

            self._exporter = PatientExporter(exporter_of(settings.protocol), endpoint)
            self._sending = BatchSpanProcessor(self._exporter, schedule_delay_millis=settings.otel_bsp_schedule_delay)
            self.ids = span_ids.SpanIds()
            provider = TracerProvider(
                sampler=ByRequest(share),
                resource=resource_of(service, instance, part),
                shutdown_on_exit=False,
                id_generator=self.ids,
            )
            provider.add_span_processor(KeepSlowOrFailed(self._sending, slow))
            trace.set_tracer_provider(provider)
        self.tracer: Tracer = trace.get_tracer("orca")

    def close(self) -> None:
        """Sends the spans that are left, for at most `CLOSING_SECONDS`; at once when no collector answers."""
        if self._sending is None:
            return
        # The SDK's own shutdown waits 30 s for a collector that does not answer.
        closing = threading.Thread(target=self._sending.shutdown, name="telemetry", daemon=True)
        closing.start()
        closing.join(0 if self._exporter.away else CLOSING_SECONDS)
        self._exporter.shutdown()  # gives up what is under way
        closing.join(CLOSING_SECONDS)


def resource_of(service: str, instance: str, part: str) -> "Resource":
    """The sender of spans: the service, its instance, and what `OTEL_RESOURCE_ATTRIBUTES` says of both (`k8s.*`)."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    given = OTELResourceDetector().detect().attributes
    name = given.get("service.instance.id") or given.get("k8s.pod.name") or instance
    return Resource.create({"service.name": service, "service.instance.id": f"{name}/{part}" if part else str(name)})


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
