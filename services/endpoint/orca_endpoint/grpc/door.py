"""The gRPC door: `orca.v1.Orca`, health and reflection, by grpcio's server.

C-core bounds connections, streams, headers and messages. The guard bounds the calls of a host and of all hosts, how
many messages are read at a time, and how long a message may take. It also checks the API key.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext, suppress
from ipaddress import ip_address
from typing import Any

from orca_common.api_keys import AUTHORIZATION, ApiKeys
from orca_common.errors import ErrorReason, ResourceExhausted, Unavailable
from orca_common.grpc_server import HEALTH, GrpcServer, Guard, ServerCall
from orca_common.roles import ANY, Role
from orca_common.tls import Transport

from ..calls.endpoint import Endpoint
from ..calls.line import CallLine, Outcome, opened
from ..requests.limits import Limits
from ..settings import EndpointSettings
from .methods import ORCA, OrcaMethods
from .own_sockets import descriptors, sockets_at
from .reflection import SERVICES as REFLECTION
from .reflection import handlers as reflection_handlers
from .turns import Turns

# Who may call what, where certificates tell.
ALLOWED = {f"/{ORCA}/": frozenset({Role.CLIENT}), **{f"/{service}/": ANY for service in REFLECTION}}
KEYLESS = "/grpc.health.v1.Health/"  # probes have no key; health reports only whether the endpoint serves
STREAMS = {f"/{ORCA}/Generate", f"/{ORCA}/GenerateText"}  # calls that last
CONNECTIONS = "gRPC connections"
FORWARDED = "x-forwarded-for"
SHORT_ROOM = 2  # times the limits for all others: a host that is full of streams can still cancel and resume them


class Grpc:
    """The gRPC door, as the log and the spans of its calls name it."""

    name = "grpc"

    def arrived(self, method: str) -> dict[str, str]:
        return {"rpc.system.name": "grpc", "rpc.method": f"{ORCA}/{method}"}

    def ended(self, outcome: Outcome) -> dict[str, str | int]:
        return {"rpc.response.status_code": outcome.status}


GRPC = Grpc()


def line_of(call: ServerCall, refused: Callable[[str], None]) -> AbstractContextManager[object]:
    """Opens a call's line in the log. Calls of probes and of reflection have none. refused: counts a refusal."""
    service, _, method = call.method.removeprefix("/").partition("/")
    return opened(CallLine(GRPC, method, call.peer, refused)) if service == ORCA else nullcontext()


class DoorGuard(Guard):
    """Bounds what strangers may cost the door, and checks their keys."""

    def __init__(
        self, settings: EndpointSettings, keys: ApiKeys, limits: Limits, refused: Callable[[str], None]
    ) -> None:
        """refused: counts a refusal by its reason."""
        self._refused = refused
        self._keys, self._limits, self._seconds = keys, limits, settings.body_seconds
        self._proxies = settings.proxies
        self._turns = Turns(settings.max_body_bytes // settings.max_message_bytes, limits.refusals)

    def count(self, call: ServerCall) -> None:
        """Counts a call against its host's and all calls. Raises ResourceExhausted."""
        if (client := self._forwarded(call)) is not None:
            call.peer = call.host = client
        try:
            self._limits.enter(f"grpc {call.host}", 1 if call.method in STREAMS else SHORT_ROOM)
        except ResourceExhausted as full:  # the call has no line yet
            self._refused(full.reason.value)
            raise

    def _forwarded(self, call: ServerCall) -> str | None:
        """The client that a trusted proxy names, the last one in its header; None when no trusted proxy calls."""
        if not self._proxies or not any(ip_address(call.host.strip("[]")) in network for network in self._proxies):
            return None
        return call.metadata.get(FORWARDED, "").rpartition(",")[2].strip() or None

    def over(self, call: ServerCall) -> None:
        self._limits.leave(f"grpc {call.host}")

    @contextmanager
    def admit(self, call: ServerCall) -> Iterator[None]:
        """Opens a call's line in the log, and checks its key. Raises Unauthenticated, or InvalidArgument for two."""
        with line_of(call, self._refused):
            if not call.method.startswith(KEYLESS):
                self._keys.tenant_of(call.once(AUTHORIZATION))
            yield

    def reading(self, call: ServerCall) -> AbstractAsyncContextManager[None]:
        return self._turns.turn(call.host, self._seconds)


class GrpcDoor(GrpcServer):
    """The gRPC server of an endpoint."""

    def __init__(
        self, endpoint: Endpoint, keys: ApiKeys, transport: Transport, limits: Limits, connections: int
    ) -> None:
        settings = endpoint.settings
        super().__init__(
            (ORCA, *REFLECTION),
            transport,
            ALLOWED,
            Unavailable("this endpoint is leaving", reason=ErrorReason.ENDPOINT_LEAVING),
            options=options_of(settings, connections),
            guard=DoorGuard(settings, keys, limits, endpoint.metrics.refused),
            client_certificates=settings.client_certificates,
            port_kept=settings.ports_kept,
            write_seconds=settings.write_timeout,
        )
        methods = OrcaMethods(endpoint, keys, limits)
        self.server.add_generic_rpc_handlers((methods.handlers(), *reflection_handlers((ORCA, HEALTH))))
        self._port = self._descriptors = 0
        self._connections, self._refusals = connections, limits.refusals

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port. Raises Unavailable when the port cannot be had."""
        self._port = await super().start(host, port)
        self._descriptors = len(descriptors())
        return self._port

    def look(self, others: int) -> None:
        """Logs that the door is full: C-core closes further connections silently. others: HTTP connections."""
        open_ones = len(descriptors()) - self._descriptors - others
        if open_ones >= self._connections:
            self._refusals.refused(CONNECTIONS, self._connections)
        self._refusals.used(CONNECTIONS, self._connections, open_ones)

    def cut(self, spare: bool = False) -> None:
        """Stops listening and closes connections, as the end of the process would. spare: keeps those with a call.

        The clients see UNAVAILABLE and may call again. C-core's own stop would answer CANCELLED to a call that arrives
        at the same moment.
        """
        spared = self.clients if spare else set[str]()
        for one, client in sockets_at(self._port):
            if client not in spared:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


def options_of(settings: EndpointSettings, connections: int) -> list[tuple[str, Any]]:
    """C-core's options of the door's server, by the endpoint's settings."""
    milliseconds = int(settings.header_seconds * 1000)
    options = [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", milliseconds),
        ("grpc.http2.settings_timeout", milliseconds),
        ("grpc.max_concurrent_streams", settings.max_streams),
        # Calls that wait to be begun. By default C-core drops some above 1,000, and a burst may be larger.
        ("grpc.server.max_pending_requests", settings.max_calls),
        ("grpc.server.max_pending_requests_hard_limit", settings.max_calls),
        ("grpc.max_metadata_size", settings.max_header_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_header_bytes),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Keeps a stream's first window at 64 KB. With probes it grew to 8 to 64 MB, beside the message that is read.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_connection_idle_ms", int(settings.connection_idle * 1000)),
    ]
    if settings.connection_age:  # gRPC adds 10 % of jitter; streams that such a connection still has go on
        options.append(("grpc.max_connection_age_ms", int(settings.connection_age * 1000)))
    return options
