"""The gRPC door: `orca.v1.Orca`, health and reflection. It translates and delegates.

A delivered token costs one message: of about 30 us, 25 are grpc.aio's own for a `context.write` of bytes, which is the
cheapest that it offers (a generator costs 3 us more).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from orca.v1.orca_pb2 import (
    CancelRequest,
    CancelResponse,
    GenerateRequest,
    GenerateResponse,
    GetModelRequest,
    ResumeRequest,
    Timings,
)
from orca_common.errors import InvalidArgument, OrcaError, Unavailable, abort
from orca_pool.records import Times

from .call import AcceptedEvent, Call, Event, FinishedEvent, TokenEvent
from .endpoint import Endpoint
from .failures import internal
from .wire import decoder

log = logging.getLogger(__name__)

ORCA = "orca.v1.Orca"
Context = grpc.aio.ServicerContext
OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second listener
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # clients may look after a silent stream
    ("grpc.keepalive_time_ms", 30_000),  # a client that vanished is noticed
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # with grpcio 1.85 the line before alone needs 2 minutes
    ("grpc.http2.max_pings_without_data", 0),  # a stream may wait in the queue for long
]


class OrcaServicer:
    """The four methods. Requests come as messages or as the error that their deserializer found."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def generate(self, request: GenerateRequest, context: Context) -> None:
        await self._stream(await self._endpoint.generate(request, deadline_of(context), carrier_of(context)), context)

    async def resume(self, request: ResumeRequest, context: Context) -> None:
        await self._stream(self._endpoint.resume(request, deadline_of(context), carrier_of(context)), context)

    async def cancel(self, request: CancelRequest, context: Context) -> bytes:
        return CancelResponse(alive=await self._endpoint.cancel(request)).SerializeToString()

    async def get_model(self, request: GetModelRequest, context: Context) -> bytes:
        return (await self._endpoint.model()).SerializeToString()

    async def _stream(self, call: Call, context: Context) -> None:
        encode = Encoder().encode
        async with call:
            async for event in call.events():
                await context.write(encode(event))

    def handlers(self) -> grpc.GenericRpcHandler:
        """Handlers with deserializers that never raise, and without serializers: replies are bytes."""
        stream, unary = grpc.unary_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
        methods = {
            "Generate": stream(guarded(self.generate), decoder(GenerateRequest)),
            "Resume": stream(guarded(self.resume), decoder(ResumeRequest)),
            "Cancel": unary(guarded(self.cancel), decoder(CancelRequest)),
            "GetModel": unary(guarded(self.get_model), decoder(GetModelRequest)),
        }
        return grpc.method_handlers_generic_handler(ORCA, methods)


class Encoder:
    """Events to serialized messages; the token's message is used again and again (0.6 us instead of 1.5)."""

    def __init__(self) -> None:
        self._response = GenerateResponse()
        self._token = self._response.token

    def encode(self, event: Event) -> bytes:
        if type(event) is TokenEvent:
            token = self._token
            token.index, token.token_id, token.text, logprob, token.iteration, token.engine = event
            if logprob is not None:
                token.logprob = logprob
            elif token.HasField("logprob"):
                token.ClearField("logprob")
            return self._response.SerializeToString()
        response = GenerateResponse()
        if isinstance(event, AcceptedEvent):
            accepted = response.accepted
            accepted.request_id, accepted.input_tokens, accepted.queue_position = event
        elif isinstance(event, FinishedEvent):
            finished = response.finished
            # FinishReason's numbers are the first five of records.Reason
            finished.reason = event.reason.value  # pyright: ignore[reportAttributeAccessIssue]
            finished.output_tokens, finished.text = event.output_tokens, event.text
            if event.times is not None:
                finished.timings.CopyFrom(timings(event.times))
        return response.SerializeToString()


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def timings(times: Times) -> Timings:
    def since(moment: int) -> float:
        return max(moment - times.submitted, 0) / 1e6 if moment else 0.0

    return Timings(claimed=since(times.claimed), first_token=since(times.first_token), finished=since(times.finished))


def deadline_of(context: Context) -> float | None:
    """The call's deadline as a moment of the loop's clock."""
    left = context.time_remaining()
    return None if left is None else asyncio.get_running_loop().time() + left


def carrier_of(context: Context) -> Mapping[str, str]:
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}


def guarded(
    method: Callable[[Any, Context], Awaitable[bytes | None]],
) -> Callable[[Any, Context], Awaitable[bytes | None]]:
    """Answers errors with their status, what could not be parsed with INVALID_ARGUMENT, and a bug with its trace id."""

    async def handler(request: Message | InvalidArgument, context: Context) -> bytes | None:
        try:
            if isinstance(request, InvalidArgument):
                raise request
            return await method(request, context)
        except OrcaError as error:
            await abort(context, error)
        except Exception as error:
            await abort(context, internal(error))

    return handler


class Tolerant(grpc.aio.ServerInterceptor):
    """Gives the stock services (health, reflection) deserializers that never raise, as Orca's own methods have."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = str(handler_call_details.method)
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or method.startswith(f"/{ORCA}/"):
            return handler
        parse, answer = handler.request_deserializer, handler.unary_stream or handler.unary_unary

        def deserialize(raw: bytes) -> Message | InvalidArgument:
            try:
                return parse(raw)
            except DecodeError:
                return InvalidArgument("message", f"not valid for {method}")

        async def checked(request: Message | InvalidArgument, context: Context) -> Any:
            if isinstance(request, InvalidArgument):
                await abort(context, request)
            return await answer(request, context)

        make = grpc.unary_stream_rpc_method_handler if handler.unary_stream else grpc.unary_unary_rpc_method_handler
        return make(checked, deserialize, handler.response_serializer)


class GrpcDoor:
    """The gRPC server. Health is NOT_SERVING until `serving(True)`."""

    def __init__(self, endpoint: Endpoint) -> None:
        limit = endpoint.settings.max_message_bytes
        options = [*OPTIONS, ("grpc.max_receive_message_length", limit)]
        self._server = grpc.aio.server(interceptors=[Tolerant()], options=options)
        self._health = HealthServicer()
        self._server.add_generic_rpc_handlers((OrcaServicer(endpoint).handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((ORCA, "grpc.health.v1.Health", reflection.SERVICE_NAME), self._server)

    async def start(self, host: str, port: int) -> int:
        """The port. Raises Unavailable when it cannot be had."""
        await self.serving(False)
        try:
            bound = self._server.add_insecure_port(address(host, port))
        except RuntimeError as error:
            raise Unavailable(f"port: {host}:{port} cannot be listened on ({error})") from None
        await self._server.start()
        return bound

    async def serving(self, yes: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        for service in ("", ORCA):
            await self._health.set(service, status.SERVING if yes else status.NOT_SERVING)

    async def stop(self, grace: float) -> None:
        await self._server.stop(grace)
