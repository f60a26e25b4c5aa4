"""An endpoint's spans of a request. Attributes are those of OpenTelemetry's conventions: rpc, http, gen_ai."""

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode, Tracer, set_span_in_context

from orca.v1.pool_pb2 import PoolRequest
from orca_common.errors import OrcaError
from orca_common.telemetry import carrier_of, context_of
from orca_pool.records import Reason

from .line import CLIENT_GONE, CallLine, Outcome

STOPS = {one.name.lower() for one in (Reason.EOS, Reason.STOP, Reason.STOP_TOKEN)}  # OpenTelemetry's `stop`


class RequestSpan:
    """`orca.request` from the call's arrival to its end, and below it `orca.submit`: until the pool has the request.

    A Resume's are called `orca.resume` and `orca.attach`.
    """

    def __init__(
        self,
        tracer: Tracer,
        names: tuple[str, str],
        carrier: Mapping[str, str],
        line: CallLine | None,
        model: str,
        operation: str | None,
    ) -> None:
        """carrier: the client's metadata. line: of the call; None outside a door. operation: what is asked for, where
        it is known."""
        self._door = line.door if line is not None else None
        began = line.began if line is not None else None
        attributes = {"gen_ai.provider.name": "orca", "gen_ai.request.model": model, "gen_ai.response.model": model}
        attributes |= {} if operation is None else {"gen_ai.operation.name": operation}
        attributes |= attributes_of(line) if line is not None else {}
        request, submit = names
        self._span = tracer.start_span(
            request, context_of(carrier), kind=SpanKind.SERVER, attributes=attributes, start_time=began
        )
        self._submit = tracer.start_span(submit, self._context, start_time=began)

    @property
    def _context(self) -> Context:
        return set_span_in_context(self._span)

    @property
    def carrier(self) -> dict[str, str]:
        """The request span's context as W3C headers."""
        return carrier_of(self._span)

    def named(self, request_id: str) -> None:
        """The request's id, which the endpoint makes where the client gave none."""
        self._span.set_attributes({"orca.request_id": request_id, "gen_ai.response.id": request_id})
        self._submit.set_attribute("orca.request_id", request_id)

    def label(self, attributes: Mapping[str, str | list[str]]) -> None:
        """Attributes that the door knows."""
        self._span.set_attributes(dict(attributes))

    def validated(self, record: PoolRequest) -> None:
        """The request was found good: its text is tokens now."""
        self.named(record.request_id)
        self._submit.add_event("validated")
        sampling = record.sampling
        self._span.set_attributes(
            {
                "gen_ai.request.max_tokens": record.max_new_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_k": float(sampling.top_k),
                "gen_ai.request.top_p": sampling.top_p or 1.0,
            }
        )

    def accepted(self) -> None:
        """The pool has the request, and this call is attached to it."""
        if self._submit.is_recording():  # not again after an outage
            self._submit.end()

    def ended(self, outcome: Outcome, error: BaseException | None, prompt_tokens: int = 0, tokens: int = 0) -> None:
        """Ends what has not ended."""
        span = self._span
        span.set_attributes({"orca.tokens": tokens, "orca.reason": outcome.reason})
        span.set_attributes({"gen_ai.usage.input_tokens": prompt_tokens, "gen_ai.usage.output_tokens": tokens})
        if outcome.status == "OK":
            reason = outcome.reason.lower()
            span.set_attribute("gen_ai.response.finish_reasons", ["stop" if reason in STOPS else reason])
        elif outcome.reason == CLIENT_GONE:
            span.set_attribute("error.type", outcome.reason)  # nobody's fault: the status stays unset
        else:
            span.set_attribute("error.type", outcome.reason)
            sentence = str(error) if isinstance(error, OrcaError) else outcome.reason
            for each in (span, self._submit):
                if each.is_recording():
                    each.set_status(StatusCode.ERROR, sentence)
        if self._door is not None:
            span.set_attributes(self._door.ended(outcome))
        if self._submit.is_recording():
            self._submit.end()
        span.end()


def attributes_of(line: CallLine) -> dict[str, str]:
    """Makes the attributes of a call's arrival."""
    address, _, port = line.peer.rpartition(":")
    return {**line.door.arrived(line.method), "client.address": address, "client.port": port}
