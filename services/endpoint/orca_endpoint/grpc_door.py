"""The gRPC door: `orca.v1.Orca`, health and reflection. It translates and delegates.

A message costs 30 us or so. 25 of them are grpc.aio's own for a `context.write` of bytes, which is the cheapest way
that it offers (a generator costs 3 us more). So what is there together is one message.
"""

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing, suppress

import grpc

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
from orca_common.errors import Cancelled, ErrorReason
from orca_common.interceptor import StatusInterceptor
from orca_common.listening import check_port
from orca_common.roles import ANY, Role
from orca_common.roles import HEALTH as HEALTH_METHODS
from orca_common.tls import Transport
from orca_pool.records import Times

from .access import AUTHORIZATION, KeyInterceptor
from .call import Call
from .call_line import grpc_line
from .endpoint import Endpoint
from .events import Accepted, Event, Finished, Prompted, Token
from .grpc_scores import prompt_messages, token_message
from .health import HEALTH, Health
from .limits import Held, Limits
from .messages import Context, Messages, peer_of
from .own_sockets import sockets_at
from .poller import calm_poller
from .reflection import SERVICES as REFLECTION
from .reflection import Reflection
from .turns import Turns
from .validation import MAX_INTERVAL

ORCA = "orca.v1.Orca"
ALLOWED = {  # who may call what, where certificates tell
    f"/{ORCA}/": frozenset({Role.CLIENT}),
    **{f"/{service}/": ANY for service in REFLECTION},
    **HEALTH_METHODS,
}
OPTIONS = [
    # Clients may ping as often as they like, also while their stream is silent. By default a client that pings a silent
    # stream every few seconds is sent away with too_many_pings.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 30_000),  # so that a client that vanished is noticed
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # with grpcio 1.85 the timeout above alone takes 2 minutes
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a stream may be silent in the queue for long
    # A stream's first window stays 64 KB. With probes it grew to what the network carries, 8 to 64 MB, beside what a
    # message that is being read may take.
    ("grpc.http2.bdp_probe", 0),
]


class OrcaServicer:
    """The methods of orca.v1.Orca. Errors become statuses in the server's StatusInterceptor."""

    def __init__(self, endpoint: Endpoint, keys: ApiKeys, limits: Limits, messages: Messages) -> None:
        self._endpoint, self._keys, self._limits, self._messages = endpoint, keys, limits, messages

    async def generate(self, _: object, context: Context) -> None:
        with self._limits.call(peer_of(context)) as held:
            with self._endpoint.arrivals.coming():
                request = await self._messages.read(context, GenerateRequest, held)
                call = await self._call(request, context)
            del request  # a long prompt needs memory, and the pool has it
            await self._stream(call, context, held)

    async def generate_text(self, _: object, context: Context) -> bytes:
        with self._limits.call(peer_of(context)) as held:
            with self._endpoint.arrivals.coming():
                request = await self._messages.read(context, GenerateRequest, held)
                logprobs = request.logprobs or request.top_logprobs > 0
                request.stream_interval = max(request.stream_interval, MAX_INTERVAL)  # a larger one is refused
                call = await self._call(request, context)
            del request  # a long prompt needs memory, and the pool has it
            return await self._answer(call, logprobs, held)

    async def _answer(self, call: Call, logprobs: bool, held: Held) -> bytes:
        answer = GenerateTextResponse()
        texts: list[str] = []
        async with call:
            async for piece in call.pieces():
                held.release()  # the first piece says that the pool has the request
                for event in piece:
                    add(event, answer, texts, logprobs)
        if answer.reason == FinishReason.FINISH_REASON_CANCELLED:
            raise Cancelled(f"request {answer.request_id} was cancelled after {len(answer.token_ids)} tokens")
        answer.text = "".join(texts)
        return answer.SerializeToString()

    async def resume(self, _: object, context: Context) -> None:
        with self._limits.call(peer_of(context)) as held:
            request = await self._messages.read(context, ResumeRequest, held)
            carrier = carrier_of(context)
            call = self._endpoint.resume(request, deadline_of(context), carrier, tenant=self._tenant(carrier))
            await self._stream(call, context, held)

    async def cancel(self, _: object, context: Context) -> bytes:
        request = await self._messages.read(context, CancelRequest)
        tenant = self._tenant(carrier_of(context))
        return CancelResponse(alive=await self._endpoint.cancel(request, tenant=tenant)).SerializeToString()

    async def get_model(self, _: object, context: Context) -> bytes:
        await self._messages.read(context, GetModelRequest)
        return (await self._endpoint.model()).SerializeToString()

    async def _call(self, request: GenerateRequest, context: Context) -> Call:
        carrier = carrier_of(context)
        return await self._endpoint.generate(request, deadline_of(context), carrier, tenant=self._tenant(carrier))

    def _tenant(self, carrier: Mapping[str, str]) -> str:
        return self._keys.tenant_of(carrier.get(AUTHORIZATION))

    async def _stream(self, call: Call, context: Context, held: Held) -> None:
        encode, now = Encoder().encode, asyncio.get_running_loop().time
        patience = self._endpoint.settings.write_timeout
        async with call, reading(patience) as writing:
            async for piece in call.pieces():
                writing.since = now()
                # Serialized messages one after the other are one message: protobuf merges them.
                await context.write(b"".join([encode(event) for event in piece]))
                writing.since = None
                held.release()  # the first piece says that the pool has the request

    def handlers(self) -> grpc.GenericRpcHandler:
        """Handlers without serializers: the methods read their request and reply with bytes.

        On the wire a single request is a stream of one. gRPC would read it before the method hears of the call, without
        a bound of time.
        """
        stream, unary = grpc.stream_stream_rpc_method_handler, grpc.stream_unary_rpc_method_handler
        methods = {
            "Generate": stream(self.generate),
            "GenerateText": unary(self.generate_text),
            "Resume": stream(self.resume),
            "Cancel": unary(self.cancel),
            "GetModel": unary(self.get_model),
        }
        return grpc.method_handlers_generic_handler(ORCA, methods)


class Writing:
    """Bounds each write of a stream. It looks a few times within the bound: a timer for each write took 7 % of the
    endpoint's time."""

    LOOKS = 4

    def __init__(self, seconds: float, timeout: asyncio.Timeout) -> None:
        self.since: float | None = None  # when the present write began, on the loop's clock; None: nothing is written
        self._seconds, self._timeout = seconds, timeout
        self._loop = asyncio.get_running_loop()
        self._look()

    def _look(self) -> None:
        now = self._loop.time()
        if self.since is not None and now - self.since >= self._seconds:
            self._timeout.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._seconds / self.LOOKS, self._look)

    def close(self) -> None:
        self._timer.cancel()


@asynccontextmanager
async def reading(seconds: float) -> AsyncIterator[Writing]:
    """The bound of a stream's writes. Raises Cancelled when the client does not read in time."""
    timeout = asyncio.timeout(None)
    try:
        async with timeout:
            with closing(Writing(seconds, timeout)) as writing:
                yield writing
    except TimeoutError:
        if not timeout.expired():  # something else took too long
            raise
        raise Cancelled(f"the client read nothing for {seconds:g} s", reason=ErrorReason.CLIENT_LEFT) from None


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

    def __init__(
        self, endpoint: Endpoint, keys: ApiKeys, transport: Transport, limits: Limits, connections: int
    ) -> None:
        settings = endpoint.settings
        self._transport, self._certificates = transport, settings.client_certificates
        self._kept = settings.ports_kept
        options = [
            *OPTIONS,
            ("grpc.so_reuseport", int(settings.ports_kept)),  # else a port in use is an error, not a second listener
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            ("grpc.max_concurrent_streams", settings.max_streams),
            ("grpc.max_metadata_size", settings.max_header_bytes),
            ("grpc.absolute_max_metadata_size", settings.max_header_bytes),
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.server_handshake_timeout_ms", int(settings.header_seconds * 1000)),
            *age_options(settings.connection_age),
        ]
        roles = transport.interceptors(ALLOWED) if self._certificates else []
        interceptors = [StatusInterceptor(grpc_line), *roles, KeyInterceptor(keys)]
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        self._port = 0
        turns = Turns(settings.max_body_bytes // settings.max_message_bytes)
        messages = Messages(settings.body_seconds, turns, endpoint.large)
        self._health = Health((ORCA, HEALTH, *REFLECTION), messages, limits)
        orca = OrcaServicer(endpoint, keys, limits, messages)
        reflection = Reflection((ORCA, HEALTH), messages, limits)
        self._server.add_generic_rpc_handlers((orca.handlers(), self._health.handlers(), *reflection.handlers()))

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port. Raises Unavailable when the port cannot be had."""
        await self.serving(False)
        check_port("port", host, port, shared=self._kept)
        address = join_address(host, port)
        bound = self._transport.listen(self._server, address, client_certificates=self._certificates)
        await self._server.start()
        self._port = bound
        calm_poller()
        return bound

    async def serving(self, yes: bool) -> None:
        """Sets what the health service says: of the server (the empty name) and of each service."""
        await self._health.serving(yes)

    def cut(self) -> None:
        """Closes all connections, as the end of the process would. For the time when no call is left.

        gRPC's own stop answers CANCELLED to a call that arrives at the same moment. A client whose connection ends
        hears UNAVAILABLE, which is true: it may call again.
        """
        for connection in sockets_at(self._port):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    async def stop(self, grace: float) -> None:
        """Accepts nothing more, and cancels what is left after `grace` seconds.

        Every client is told at once (GOAWAY): its streams go on here, and its new calls go elsewhere. A second call may
        shorten the grace.
        """
        await self._server.stop(grace)
