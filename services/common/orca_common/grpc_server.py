"""The gRPC server that services share, and the call object that its methods receive.

grpcio speaks HTTP/2 and gRPC, and bounds the cost of a connection. One interceptor adds the rest, for every call of
every method: who may call, how a request is read, which status an error becomes, and how a leaving server ends calls.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2_grpc

from .address import join_address
from .errors import (
    Cancelled,
    ErrorReason,
    InvalidArgument,
    OrcaError,
    Unavailable,
    Unimplemented,
    unreadable,
)
from .health import Health
from .listening import check_port
from .roles import ANY, Role, check_role, roles_of
from .statuses import abort, internal
from .tls import MutualTls, Transport

M = TypeVar("M", bound=Message)
T = TypeVar("T")

READ_SECONDS = 30.0  # for a request to come, unless a guard bounds it
WRITE_SECONDS = 30.0  # for a client to take a message
LOOKS = 4  # at the open calls within that time: a timer for each message took 7 % of an endpoint's time
STOP_SECONDS = 1.0  # for the statuses of the last calls to be sent
HEALTH = "grpc.health.v1.Health"
PINGS = [
    ("grpc.keepalive_time_ms", 30_000),  # so that a client that vanished is noticed
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # with grpcio 1.85 the timeout above alone takes 2 minutes
    ("grpc.http2.max_pings_without_data", 0),  # ours: a stream may be silent in the queue for long
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),  # a client's; the third ping below it ends its connection
]
# Compressed messages are refused: 4 KB of a stranger would cost 10 ms of a core, and 4 MB of memory.
IDENTITY = ("grpc.compression_enabled_algorithms_bitset", 1)


class ServerCall:
    """One call. Library servicers get it as their context: they use `write` and `abort`."""

    def __init__(
        self, method: str, context: "grpc.aio.ServicerContext[Any, Any]", metadata: Sequence[Any], guard: "Guard"
    ) -> None:
        self.method, self._context, self._pairs, self._guard = method, context, metadata, guard
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self.task = task  # that serves the call
        self._writing: float | None = None  # since when the client has not taken a message, on the loop's clock
        self._begun = False  # its header is sent
        self._end: OrcaError | None = None  # why the server has ended it
        kind, _, address = context.peer().partition(":")
        self.address = unquote(address) if kind.startswith("ipv") else context.peer()  # of the connection's other end
        # Who calls: the address for the log, and the host for the limits. A guard that trusts a proxy sets both.
        self.peer, self.host = self.address, self.address.rpartition(":")[0]
        left = context.time_remaining()
        self.deadline = None if left is None else self._loop.time() + left  # a moment of the loop's clock

    @cached_property
    def metadata(self) -> Mapping[str, str]:
        """The call's metadata in text, among it the W3C trace context."""
        return {name: value for name, value in self._pairs if isinstance(value, str)}

    def once(self, name: str) -> str | None:
        """The metadata of a name. Raises InvalidArgument where it comes twice: programs on the way may read either."""
        values = [value for key, value in self._pairs if key == name]
        if len(values) > 1:
            raise InvalidArgument(name, "comes twice in the metadata")
        return values[0] if values else None

    @property
    def roles(self) -> frozenset[Role]:
        """The roles in the client's certificate; none without one."""
        return roles_of(self._context)

    async def read(self) -> bytes | None:
        """The next message; None: there is no more. Raises what the guard's `reading` raises."""
        async with self._guard.reading(self):
            return await self._read()

    async def only(self) -> bytes:
        """The single message of a call. Raises InvalidArgument when the client sends none, or two."""
        async with self._guard.reading(self):
            message = await self._read()
            if message is None:
                raise unreadable("is missing")
            if await self._read() is not None:
                raise unreadable("is followed by a second one; this method takes one")
        return message

    def parsed(self, parse: Callable[[bytes], M], raw: bytes) -> M:
        """A message of the call. Raises InvalidArgument when it cannot be parsed. Callable from any thread."""
        try:
            return parse(raw)
        except DecodeError:
            raise unreadable(f"not a valid request of {self.method} (text fields must be UTF-8)") from None

    async def _read(self) -> bytes | None:
        message = await self._core(self._context.read())
        return message if isinstance(message, bytes) else None

    async def write(self, message: object) -> None:
        """Sends a message once the client has room for it. Raises Cancelled when it has none for too long."""
        if not self._begun:
            # Apart from the message: grpcio cannot send a status while a write that contains the header is blocked.
            await self._core(self._context.send_initial_metadata(()))
            self._begun = True
        self._writing = self._loop.time()
        try:
            await self._core(self._context.write(message))
        except asyncio.CancelledError:
            if isinstance(self._end, Cancelled):  # the method ends as that of a client that left
                self.task.uncancel()
                raise self._end from None
            raise
        self._writing = None

    async def _core(self, work: Awaitable[T]) -> T:
        """Waits for C-core. Raises CancelledError when C-core has ended the call: its client receives nothing more."""
        try:
            return await work
        except grpc.aio.InternalError:
            raise asyncio.CancelledError from None

    def when_over(self, tell: Callable[[], None]) -> None:
        """Calls `tell` when grpcio has finished the call."""
        self._context.add_done_callback(lambda _: tell())  # pyright: ignore[reportArgumentType]

    def unread_since(self, moment: float) -> bool:
        """Whether a message has waited since a moment of the loop's clock for the client to take it."""
        return self._writing is not None and self._writing <= moment

    def end(self, error: OrcaError) -> None:
        """Ends the call from outside, with this error. The first end counts."""
        if self._end is None:
            self._end = error
            self.task.cancel()

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        """Ends the call with a status. For library servicers; ours raise an OrcaError."""
        await self._context.abort(code, details)

    async def fail(self, error: OrcaError) -> None:
        """Ends the call with an error's status."""
        await self._core(abort(self._context, error))

    def ended(self) -> OrcaError | None:
        """Why the server has ended the call; None: the client has. To be asked after a CancelledError."""
        if self._end is not None:
            self.task.uncancel()
        return self._end


class Guard:
    """Decides which calls a server takes, and how long it reads a message. This one takes all calls."""

    def count(self, call: ServerCall) -> None:
        """Counts a call that has come. Raises an OrcaError when there are too many."""

    def over(self, call: ServerCall) -> None:
        """Ends the count of a call: it uses no memory any more.

        That may be long after the method's end. C-core cannot end a single stream, so the last message to a client
        that reads nothing stays until the client leaves.
        """

    def admit(self, call: ServerCall) -> AbstractContextManager[object]:
        """Surrounds a call. Raises an OrcaError when its client may not make it."""
        return nullcontext()

    def reading(self, call: ServerCall) -> AbstractAsyncContextManager[object]:
        """Surrounds the wait for a message. Raises an OrcaError when the message does not come in time."""
        return asyncio.timeout(READ_SECONDS)


class Calls(grpc.aio.ServerInterceptor):
    """Runs all calls of a server. It registers every method with grpcio as a stream of bytes in both directions.

    Otherwise grpcio would read a single request by itself, for as long as the client likes, and answer INTERNAL where
    it cannot parse the request.
    """

    def __init__(self, guard: Guard, allowed: Mapping[str, frozenset[Role]] | None, write_seconds: float) -> None:
        """allowed: which roles may call which method (see `check_role`); None: clients have no certificates."""
        self._guard, self._allowed, self._write_seconds = guard, allowed, write_seconds
        self.open: set[ServerCall] = set()
        self._look()

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        details = handler_call_details
        handler = await continuation(details)
        serve = partial(self._serve, str(details.method), handler, details.invocation_metadata or ())
        return grpc.stream_stream_rpc_method_handler(
            serve, response_serializer=handler.response_serializer if handler is not None else None
        )

    async def _serve(self, method: str, handler: Any, metadata: Sequence[Any], _: object, context: Any) -> None:
        """Runs a call until its status is sent."""
        call = ServerCall(method, context, metadata, self._guard)
        if not call.host:  # C-core has ended the call already: it knows no address any more
            raise asyncio.CancelledError
        self.open.add(call)
        try:
            failure = await self._outcome(call, handler)
            if failure is not None:
                await call.fail(failure)
        finally:
            self.open.discard(call)

    async def _outcome(self, call: ServerCall, handler: Any) -> OrcaError | None:
        """Serves a call. Returns the error that it ends with. Any exception but an OrcaError is a bug: INTERNAL."""
        method = call.method
        try:
            self._guard.count(call)
            call.when_over(partial(self._guard.over, call))
            with self._guard.admit(call):
                if handler is None:
                    raise Unimplemented(f"{method[:200]}: is no method of this server")
                if self._allowed is not None:
                    check_role(method, self._allowed, call.roles)
                await answer(handler, call)
            return None
        except grpc.aio.AbortError:  # a library's servicer has ended the call itself
            raise
        except asyncio.CancelledError:
            failure = call.ended()
            if failure is None:
                raise
        except Exception as error:
            failure = error if isinstance(error, OrcaError) else internal(error)
            # grpcio keeps the error in a cycle with its call. With its traceback it would keep the request, too, until
            # a garbage collection: 120 refused requests of 3.5 MB took 445 MB.
            failure.__traceback__ = failure.__cause__ = failure.__context__ = None
        return failure

    def _look(self) -> None:
        """Ends calls whose clients do not read."""
        loop, seconds = asyncio.get_running_loop(), self._write_seconds
        for call in self.open:
            if call.unread_since(loop.time() - seconds):
                call.end(Cancelled(f"the client read nothing for {seconds:g} s", reason=ErrorReason.CLIENT_LEFT))
        self._timer = loop.call_later(seconds / LOOKS, self._look)

    async def end(self, error: OrcaError, grace: float) -> None:
        """Ends the calls that are left after `grace` seconds."""
        await self._wait(grace)
        for call in self.open:
            call.end(error)
        await self._wait(STOP_SECONDS)

    async def _wait(self, seconds: float) -> None:
        """Waits until the calls that are open now have ended, for some seconds at most."""
        if self.open:
            await asyncio.wait([call.task for call in self.open], timeout=seconds)

    def close(self) -> None:
        self._timer.cancel()


async def answer(handler: Any, call: ServerCall) -> None:
    """Serves a call by a handler of any kind, and sends what it returns or yields."""
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    parse = handler.request_deserializer
    request = messages(call, parse) if handler.request_streaming else call.parsed(parse, await call.only())
    if inspect.isasyncgenfunction(behaviour):
        async for response in behaviour(request, call):
            await call.write(response)
    elif (response := await behaviour(request, call)) is not None:
        await call.write(response)


async def messages(call: ServerCall, parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    """Reads a client's messages, each one when the client has taken the answer to the message before."""
    while (raw := await call.read()) is not None:
        yield call.parsed(parse, raw)


class GrpcServer:
    """A server with health. Add services to `server`, then start it. Health says NOT_SERVING until `serving(True)`."""

    def __init__(
        self,
        services: Sequence[str],
        transport: Transport,
        allowed: Mapping[str, frozenset[Role]],
        leaving: Unavailable,
        *,
        options: Sequence[tuple[str, Any]],
        guard: Guard | None = None,
        client_certificates: bool = True,
        port_kept: bool = False,
        write_seconds: float = WRITE_SECONDS,
    ) -> None:
        """services: full names, for health. allowed: which roles may call which method; health is open to all roles.
        leaving: the error of calls that outlast a stop's grace. options: C-core's, beside those of all servers.
        port_kept: a process of ours keeps the port, by SO_REUSEPORT (see `reserve_port`)."""
        self._transport, self._client_certificates, self._leaving = transport, client_certificates, leaving
        self._port_kept = port_kept
        certified = isinstance(transport, MutualTls) and client_certificates
        roles = {**allowed, f"/{HEALTH}/": ANY} if certified else None
        self._calls = Calls(guard or Guard(), roles, write_seconds)
        kept = ("grpc.so_reuseport", int(port_kept))
        self.server = grpc.aio.server(interceptors=[self._calls], options=[*PINGS, IDENTITY, kept, *options])
        self._health = Health((*services, HEALTH))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port; 0 takes a free one. Raises Unavailable when it cannot be had."""
        check_port("port", host, port, shared=self._port_kept)
        certificates = self._client_certificates
        bound = self._transport.listen(self.server, join_address(host, port), client_certificates=certificates)
        await self.server.start()
        return bound

    def serving(self, yes: bool) -> None:
        """Sets the status that health reports for the server (the empty name) and for each service."""
        self._health.serving(yes)

    @property
    def clients(self) -> set[str]:
        """The addresses of connections that have an open call."""
        return {call.address for call in self._calls.open}

    async def stop(self, grace: float) -> None:
        """Accepts nothing more, and after `grace` seconds ends the calls that are left. Once or more often.

        C-core answers CANCELLED to each call that arrives from now on.
        """
        stopping = asyncio.ensure_future(self.server.stop(grace + STOP_SECONDS))
        await self._calls.end(self._leaving, grace)
        await stopping
        self._calls.close()
