"""The calls of a gRPC server: each is found its method, and ended by its answer or by the error that it raises."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from .compression import unreadable
from .errors import DeadlineExceeded, OrcaError, Unavailable, Unimplemented, internal
from .grpc_call import GrpcCall, Method, Methods
from .http2_connection import Headers, Http2Bounds, Http2Connection, Place

M = TypeVar("M", bound=Message)
UNSUPPORTED = 415  # HTTP's status of a content type that is not gRPC's


class GrpcServer:
    """Serves the connections that `connection` makes. Who listens, and what a listener bounds, is its owner's."""

    def __init__(
        self,
        methods: Methods,
        bounds: Http2Bounds,
        max_message_bytes: int,
        admit: Callable[[GrpcCall], None],
        around: Callable[[GrpcCall], AbstractContextManager[None]],
        leaving: Unavailable,
    ) -> None:
        """admit: raises when the client may not make this call. around: surrounds each call. leaving: what ends the
        calls that are left after a stop's grace."""
        self._methods, self._bounds, self._max_message_bytes = methods, bounds, max_message_bytes
        self._admit, self._around, self._leaving = admit, around, leaving
        self._connections: set[Http2Connection] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def connection(self, place: Place) -> Http2Connection:
        return Http2Connection(self._bounds, place, self._begin, self._connections)

    def _begin(self, connection: Http2Connection, number: int, headers: Headers) -> GrpcCall:
        call = GrpcCall(connection, number, headers, self._max_message_bytes)
        if not call.content_type.startswith("application/grpc"):
            self._loop.call_soon(call.refuse, UNSUPPORTED)
            return call
        call.task = self._loop.create_task(self._serve(call))
        self._calls.add(call.task)
        call.task.add_done_callback(self._calls.discard)
        return call

    async def _serve(self, call: GrpcCall) -> None:
        """Runs a call to its end, and answers what it raises: an OrcaError by its status, anything else INTERNAL."""
        deadline = asyncio.timeout_at(call.deadline)
        try:
            async with deadline:
                with self._around(call):
                    answer = await self._method(call)(call)
                    if answer is not None:
                        await call.write(answer)
            call.end()
        except asyncio.CancelledError:
            call.end(self._leaving)
        except TimeoutError as error:
            call.end(DeadlineExceeded("Deadline Exceeded") if deadline.expired() else internal(error))
        except Exception as error:
            failure = error if isinstance(error, OrcaError) else internal(error)
            failure.__traceback__ = failure.__cause__ = failure.__context__ = None  # lets go of the request
            await call.begun()
            call.end(failure)

    def _method(self, call: GrpcCall) -> Method:
        """Raises when there is none, or the client may not call it."""
        method = self._methods.get(call.path)
        if method is None:
            raise Unimplemented(f"{call.path[:200]}: is no method of this server")
        self._admit(call)
        return method

    def go_away(self) -> None:
        """Tells every client (GOAWAY): its streams go on here, and its new calls go elsewhere."""
        for connection in list(self._connections):
            connection.go_away()

    def cut(self) -> None:
        """Closes all connections, as the end of the process would. For the time when no call is left."""
        for connection in list(self._connections):
            connection.close()

    async def stop(self, grace: float) -> None:
        """Ends what is left after `grace` seconds. A second call may shorten the grace."""
        self.go_away()
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace)
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        self.cut()


async def only(call: GrpcCall, kind: type[M]) -> M:
    """The one message of a call. Raises InvalidArgument."""
    raw = await call.read()
    if raw is None:
        raise unreadable("is missing")
    return parsed(kind, raw)


def unary(kind: type[M], method: Callable[[M], Awaitable[Message]]) -> Method:
    """A method of one message each way."""

    async def serve(call: GrpcCall) -> bytes:
        return (await method(await only(call, kind))).SerializeToString()

    return serve


def parsed(kind: type[M], raw: bytes) -> M:
    """A message that has come. Raises InvalidArgument when it cannot be parsed."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise unreadable(f"not a valid {kind.DESCRIPTOR.name} (text fields must be UTF-8)") from None
