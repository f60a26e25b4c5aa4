"""The gRPC door: `orca.v1.Orca`, health and reflection, over HTTP/2 by the library h2.

It is not grpc.aio's server, which takes 25 us for each message of a stream and 0.3 ms for each call; this one takes a
quarter of that (docs/decisions/grpc-door.md).
"""

from contextlib import AbstractContextManager

from orca_common.api_keys import ApiKeys
from orca_common.errors import ErrorReason, InvalidArgument, Unavailable
from orca_common.grpc_call import GrpcCall
from orca_common.grpc_server import GrpcServer
from orca_common.health import HEALTH, Health
from orca_common.http2_connection import Http2Bounds
from orca_common.listening import listen
from orca_common.roles import ANY, Role, allowed_for, check_role, roles_in
from orca_common.roles import HEALTH as HEALTH_METHODS
from orca_common.tls import ALPN, MutualTls, Transport

from .access import check_key
from .call_line import grpc_line
from .endpoint import Endpoint
from .grpc_methods import ORCA, OrcaMethods
from .http_connection import ConnectionLimits
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


class GrpcDoor:
    """The gRPC server. Its health service says NOT_SERVING until `serving(True)`."""

    def __init__(
        self, endpoint: Endpoint, keys: ApiKeys, transport: Transport, limits: Limits, connections: int
    ) -> None:
        settings = endpoint.settings
        self._keys, self._transport, self._certificates = keys, transport, settings.client_certificates
        self._kept = settings.ports_kept
        self._mutual = isinstance(transport, MutualTls) and self._certificates
        self._bounds = Http2Bounds(
            settings.max_streams,
            settings.max_header_bytes,
            settings.header_seconds,
            settings.connection_age,
            write_seconds=settings.write_timeout,
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
        self._health = Health((ORCA, HEALTH, *REFLECTION), messages.read, limits.call)
        orca = OrcaMethods(endpoint, keys, limits, messages)
        reflection = Reflection((ORCA, HEALTH), messages, limits)
        methods = {**orca.methods(), **self._health.methods(), **reflection.methods()}
        leaving = Unavailable("this endpoint is leaving", reason=ErrorReason.ENDPOINT_LEAVING)
        self._server = GrpcServer(methods, self._bounds, settings.max_message_bytes, self._admit, _line, leaving)
        self._listener: Listener | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port. Raises Unavailable when the port cannot be had."""
        listening = listen("port", host, port, shared=self._kept)
        bound = listening.getsockname()[1]
        context = None
        if isinstance(self._transport, MutualTls):
            context = self._transport.certificates.server_context(client_certificates=self._certificates, alpn=ALPN)
        self._listener = Listener(listening, self._limits, self._server.connection, context)
        return bound

    def serving(self, yes: bool) -> None:
        """Sets what the health service says: of the server (the empty name) and of each service."""
        self._health.serving(yes)

    def _admit(self, call: GrpcCall) -> None:
        """Raises when the client may not make this call."""
        if call.header_bytes > self._bounds.header_bytes:
            raise InvalidArgument("metadata", f"has {call.header_bytes} bytes; at most {self._bounds.header_bytes}")
        if self._mutual:
            check_role(call.path, allowed_for(ALLOWED, call.path), roles_in(call.certificate_names()))
        check_key(self._keys, call.path, call.metadata)

    def cut(self) -> None:
        """Closes all connections, as the end of the process would. For the time when no call is left."""
        self._server.cut()

    async def stop(self, grace: float) -> None:
        """Accepts nothing more, and ends what is left after `grace` seconds.

        Every client is told at once: its streams go on here, and its new calls go elsewhere. A second call may shorten
        the grace.
        """
        if self._listener is not None:
            await self._listener.close()
        await self._server.stop(grace)


def _line(call: GrpcCall) -> AbstractContextManager[None]:
    return grpc_line(call.path, call.address)
