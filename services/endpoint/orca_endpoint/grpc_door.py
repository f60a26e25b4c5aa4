"""The gRPC door: `orca.v1.Orca`, health and reflection, over HTTP/2 by the library h2.

It is not grpc.aio's server, which takes 25 us for each message of a stream and 0.3 ms for each call; this one takes a
quarter of that (docs/decisions/grpc-door.md).
"""

import asyncio
import logging

from orca_common.api_keys import ApiKeys
from orca_common.errors import (
    DeadlineExceeded,
    ErrorReason,
    InvalidArgument,
    OrcaError,
    Unavailable,
    Unimplemented,
    internal,
)
from orca_common.grpc_call import GrpcCall, Method
from orca_common.http2_connection import Headers, Http2Bounds, Http2Connection
from orca_common.listening import listen
from orca_common.roles import ANY, Role, allowed_for, check_role, roles_in
from orca_common.roles import HEALTH as HEALTH_METHODS
from orca_common.tls import MutualTls, Transport

from .access import check_key
from .call_line import grpc_line
from .endpoint import Endpoint
from .grpc_methods import ORCA, OrcaMethods
from .health import HEALTH, Health
from .http_connection import ConnectionLimits, Place
from .limits import Limits
from .listener import Listener
from .messages import Messages
from .reflection import SERVICES as REFLECTION
from .reflection import Reflection
from .turns import Turns

ALLOWED = {  # who may call what, where certificates tell
    f"/{ORCA}/": frozenset({Role.CLIENT}),
    **{f"/{service}/": ANY for service in REFLECTION},
    **HEALTH_METHODS,
}
ALPN = "h2"
UNSUPPORTED = 415  # HTTP's status of a content type that is not gRPC's

log = logging.getLogger(__name__)


class GrpcDoor:
    """The gRPC server. Its health service says NOT_SERVING until `serving(True)`."""

    def __init__(
        self, endpoint: Endpoint, keys: ApiKeys, transport: Transport, limits: Limits, connections: int
    ) -> None:
        settings = endpoint.settings
        self._keys, self._transport, self._certificates = keys, transport, settings.client_certificates
        self._kept = settings.ports_kept
        self._mutual = isinstance(transport, MutualTls) and self._certificates
        self._max_message_bytes = settings.max_message_bytes
        self._bounds = Http2Bounds(
            settings.max_streams, settings.max_header_bytes, settings.header_seconds, settings.connection_age
        )
        self._limits = ConnectionLimits(
            connections,
            connections,  # a host's connections are bounded by their calls
            settings.max_header_bytes,
            settings.header_seconds,
            settings.body_seconds,
            settings.write_timeout,
        )
        turns = Turns(settings.max_body_bytes // settings.max_message_bytes)
        messages = Messages(settings.body_seconds, turns, endpoint.large)
        self._health = Health((ORCA, HEALTH, *REFLECTION), messages, limits)
        orca = OrcaMethods(endpoint, keys, limits, messages)
        reflection = Reflection((ORCA, HEALTH), messages, limits)
        self._methods = {**orca.methods(), **self._health.methods(), **reflection.methods()}
        self._connections: set[Http2Connection] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._listener: Listener | None = None
        self._loop = asyncio.get_running_loop()

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port. Raises Unavailable when the port cannot be had."""
        listening = listen("port", host, port, shared=self._kept)
        bound = listening.getsockname()[1]
        context = None
        if isinstance(self._transport, MutualTls):
            context = self._transport.certificates.server_context(client_certificates=self._certificates, alpn=ALPN)
        self._listener = Listener(listening, self._limits, self._connection, context)
        return bound

    def serving(self, yes: bool) -> None:
        """Sets what the health service says: of the server (the empty name) and of each service."""
        self._health.serving(yes)

    def _connection(self, place: Place) -> Http2Connection:
        return Http2Connection(self._bounds, place, self._begin, self._connections)

    # -- a call
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
                with grpc_line(call.path, call.address):
                    answer = await self._method(call)(call)
                    if answer is not None:
                        await call.write(answer)
            call.end()
        except asyncio.CancelledError:
            call.end(Unavailable("this endpoint is leaving", reason=ErrorReason.ENDPOINT_LEAVING))
        except TimeoutError as error:
            call.end(DeadlineExceeded("Deadline Exceeded") if deadline.expired() else internal(error))
        except Exception as error:
            failure = error if isinstance(error, OrcaError) else internal(error)
            failure.__traceback__ = failure.__cause__ = failure.__context__ = None  # lets go of the request
            await call.begun()
            call.end(failure)

    def _method(self, call: GrpcCall) -> Method:
        """Raises when there is none, or the client may not call it."""
        if call.header_bytes > self._bounds.header_bytes:
            raise InvalidArgument("metadata", f"has {call.header_bytes} bytes; at most {self._bounds.header_bytes}")
        method = self._methods.get(call.path)
        if method is None:
            raise Unimplemented(f"{call.path[:200]}: is no method of this server")
        if self._mutual:
            check_role(call.path, allowed_for(ALLOWED, call.path), roles_in(call.certificate_names()))
        check_key(self._keys, call.path, call.metadata)
        return method

    # -- the end
    def cut(self) -> None:
        """Closes all connections, as the end of the process would. For the time when no call is left."""
        for connection in list(self._connections):
            connection.close()

    async def stop(self, grace: float) -> None:
        """Accepts nothing more, and ends what is left after `grace` seconds.

        Every client is told at once (GOAWAY): its streams go on here, and its new calls go elsewhere. A second call may
        shorten the grace.
        """
        if self._listener is not None:
            await self._listener.close()
        for connection in list(self._connections):
            connection.go_away()
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace)
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        self.cut()
