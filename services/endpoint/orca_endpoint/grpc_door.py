"""The gRPC door: `orca.v1.Orca`, health and reflection. It translates and delegates.

A message costs 30 us or so. 25 of them are grpc.aio's own for a `context.write` of bytes, which is the cheapest way
that it offers (a generator costs 3 us more). So what is there together is one message.
"""

import asyncio
import math
from collections.abc import Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from orca.v1.orca_pb2 import (
    CancelRequest,
    CancelResponse,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    GenerateTextResponse,
    GetModelRequest,
    ResumeRequest,
    Timings,
)
from orca_common.address import join_address
from orca_common.api_keys import ApiKeys
from orca_common.errors import Cancelled, Unavailable
from orca_common.interceptor import StatusInterceptor
from orca_pool.records import Times

from .access import AUTHORIZATION, KeyInterceptor
from .call import Call
from .endpoint import Endpoint
from .events import Accepted, Event, Finished, Prompted, Token
from .grpc_scores import prompt_messages, token_message
from .reflection import SERVICES as REFLECTION
from .reflection import Reflection

ORCA, HEALTH = "orca.v1.Orca", "grpc.health.v1.Health"
Context = grpc.aio.ServicerContext
OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second listener
    # Clients may ping as often as they like, also while their stream is silent. By default a client that pings a silent
    # stream every few seconds is sent away with too_many_pings.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 30_000),  # so that a client that vanished is noticed
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # with grpcio 1.85 the timeout above alone takes 2 minutes
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a stream may be silent in the queue for long
]


class OrcaServicer:
    """The methods of orca.v1.Orca. Errors become statuses in the server's StatusInterceptor."""

    def __init__(self, endpoint: Endpoint, keys: ApiKeys) -> None:
        self._endpoint, self._keys = endpoint, keys

    async def generate(self, request: GenerateRequest, context: Context) -> None:
        await self._stream(await self._call(request, context), context)

    async def generate_text(self, request: GenerateRequest, context: Context) -> bytes:
        call = await self._call(request, context)
        answer = GenerateTextResponse()
        texts: list[str] = []
        async with call:
            async for piece in call.pieces():
                for event in piece:
                    add(event, answer, texts, request.logprobs or request.top_logprobs > 0)
        if answer.reason == FinishReason.FINISH_REASON_CANCELLED:
            raise Cancelled(f"request {answer.request_id} was cancelled after {len(answer.token_ids)} tokens")
        answer.text = "".join(texts)
        return answer.SerializeToString()

    async def resume(self, request: ResumeRequest, context: Context) -> None:
        carrier = carrier_of(context)
        call = self._endpoint.resume(request, deadline_of(context), carrier, tenant=self._tenant(carrier))
        await self._stream(call, context)

    async def cancel(self, request: CancelRequest, context: Context) -> bytes:
        tenant = self._tenant(carrier_of(context))
        return CancelResponse(alive=await self._endpoint.cancel(request, tenant=tenant)).SerializeToString()

    async def get_model(self, request: GetModelRequest, context: Context) -> bytes:
        return (await self._endpoint.model()).SerializeToString()

    async def _call(self, request: GenerateRequest, context: Context) -> Call:
        carrier = carrier_of(context)
        return await self._endpoint.generate(request, deadline_of(context), carrier, tenant=self._tenant(carrier))

    def _tenant(self, carrier: Mapping[str, str]) -> str:
        return self._keys.tenant_of(carrier.get(AUTHORIZATION))

    async def _stream(self, call: Call, context: Context) -> None:
        encode = Encoder().encode
        async with call:
            async for piece in call.pieces():
                # Serialized messages one after the other are one message: protobuf merges them.
                await context.write(b"".join([encode(event) for event in piece]))

    def handlers(self) -> grpc.GenericRpcHandler:
        """Handlers without serializers: the methods reply with bytes."""
        stream, unary = grpc.unary_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
        methods = {
            "Generate": stream(self.generate, GenerateRequest.FromString),
            "GenerateText": unary(self.generate_text, GenerateRequest.FromString),
            "Resume": stream(self.resume, ResumeRequest.FromString),
            "Cancel": unary(self.cancel, CancelRequest.FromString),
            "GetModel": unary(self.get_model, GetModelRequest.FromString),
        }
        return grpc.method_handlers_generic_handler(ORCA, methods)


class Encoder:
    """Turns events into serialized messages. One message serves all tokens (0.6 us a token instead of 1.5)."""

    def __init__(self) -> None:
        self._response = GenerateResponse()
        self._token = self._response.tokens.add()

    def encode(self, event: Event) -> bytes:
        if type(event) is Token:
            if event.top:
                return GenerateResponse(tokens=[token_message(event)]).SerializeToString()
            token = self._token
            token.index, token.token_id, token.text, logprob, token.iteration, token.engine, _ = event
            if logprob is not None:
                token.logprob = logprob
            elif token.HasField("logprob"):
                token.ClearField("logprob")
            return self._response.SerializeToString()
        response = GenerateResponse()
        if isinstance(event, Accepted):
            accepted = response.accepted
            accepted.request_id, accepted.input_tokens, accepted.queue_position = event[:3]
            if event.starts_in is not None:
                accepted.starts_in.FromMilliseconds(round(event.starts_in * 1000))
        elif isinstance(event, Prompted):
            response.prompt.extend(prompt_messages(event))
        elif isinstance(event, Finished):
            finished = response.finished
            finished.reason = reason_of(event)
            finished.output_tokens, finished.text = event.output_tokens, event.text
            if event.times is not None:
                finished.timings.CopyFrom(timings(event.times))
        return response.SerializeToString()


def add(event: Event, answer: GenerateTextResponse, texts: list[str], logprobs: bool) -> None:
    """Adds an event to an answer that is not streamed; its text to `texts`."""
    if isinstance(event, Token):
        answer.token_ids.append(event.token_id)
        texts.append(event.text)
        if logprobs:
            answer.logprobs.append(math.nan if event.logprob is None else event.logprob)
        if event.top:
            answer.tokens.append(token_message(event))
    elif isinstance(event, Accepted):
        answer.request_id, answer.input_tokens = event.request_id, event.input_tokens
    elif isinstance(event, Prompted):
        answer.prompt.extend(prompt_messages(event))
    else:
        answer.reason = reason_of(event)
        texts.append(event.text)
        if event.times is not None:
            answer.timings.CopyFrom(timings(event.times))


def reason_of(event: Finished) -> FinishReason:
    """FinishReason's numbers are the first five of records.Reason."""
    return event.reason.value  # pyright: ignore[reportReturnType]


def timings(times: Times) -> Timings:
    """The durations since the submission, without those that did not happen."""
    message = Timings()
    for name in ("claimed", "first_token", "finished"):
        moment = getattr(times, name)
        if moment:
            getattr(message, name).FromMicroseconds(max(moment - times.submitted, 0))
    return message


def deadline_of(context: Context) -> float | None:
    """The call's deadline as a moment of the loop's clock."""
    left = context.time_remaining()
    return None if left is None else asyncio.get_running_loop().time() + left


def carrier_of(context: Context) -> Mapping[str, str]:
    """The call's metadata in text, among it the W3C trace context."""
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}


def age_options(connection_age: float) -> list[tuple[str, int]]:
    """gRPC's options for connections that take no new calls after this many seconds; 0: they do for ever.

    gRPC itself adds 10 % of jitter. Its grace for the streams that such a connection still has is without limit.
    """
    return [("grpc.max_connection_age_ms", int(connection_age * 1000))] if connection_age else []


class GrpcDoor:
    """The gRPC server. Its health service says NOT_SERVING until `serving(True)`."""

    def __init__(self, endpoint: Endpoint, keys: ApiKeys) -> None:
        limit = endpoint.settings.max_message_bytes
        options = [*OPTIONS, ("grpc.max_receive_message_length", limit), *age_options(endpoint.settings.connection_age)]
        self._server = grpc.aio.server(interceptors=[StatusInterceptor(), KeyInterceptor(keys)], options=options)
        self._health = HealthServicer()
        self._server.add_generic_rpc_handlers((OrcaServicer(endpoint, keys).handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_generic_rpc_handlers(tuple(Reflection((ORCA, HEALTH)).handlers()))

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port. Raises Unavailable when the port cannot be had."""
        await self.serving(False)
        try:
            bound = self._server.add_insecure_port(join_address(host, port))
        except RuntimeError as error:
            raise Unavailable(f"port: cannot listen on {host}:{port} ({error})") from None
        await self._server.start()
        return bound

    async def serving(self, yes: bool) -> None:
        """Sets what the health service says: of the server (the empty name) and of each service."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        for service in ("", ORCA, HEALTH, *REFLECTION):
            await self._health.set(service, status.SERVING if yes else status.NOT_SERVING)

    async def stop(self, grace: float) -> None:
        """Accepts nothing more, and cancels what is left after `grace` seconds.

        Every client is told at once (GOAWAY): its streams go on here, and its new calls go elsewhere. A second call may
        shorten the grace.
        """
        await self._server.stop(grace)
