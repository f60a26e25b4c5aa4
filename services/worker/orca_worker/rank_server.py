"""The gRPC server of a rank: its controller, and health, over HTTP/2 by the library h2.

grpc.aio takes 30 to 50 us for each message that comes or goes, and an iteration has one of each.
"""

import asyncio
import logging
import ssl
from contextlib import nullcontext

from orca_common.errors import Unavailable
from orca_common.grpc_call import GrpcCall
from orca_common.grpc_server import GrpcServer
from orca_common.health import Health
from orca_common.http2_connection import Http2Bounds, Http2Connection
from orca_common.listening import listen
from orca_common.protocol import CONTROLLER
from orca_common.roles import allowed_for, check_role, roles_in
from orca_common.tls import Transport

from .controller import LEAVING, Controller
from .server import ALLOWED, MAX_MESSAGE

# Of the engine's own connections. Each iteration is a small frame, to which a rank in the middle says nothing.
BOUNDS = Http2Bounds(streams=100, header_bytes=16_384, header_seconds=10.0, age=0.0, frames_a_second=100_000)
HANDSHAKE_SECONDS = 10.0

log = logging.getLogger(__name__)


class Unbounded:
    """A place of a connection that nobody counts: who reaches a rank's port is the engine's own."""

    def leave(self) -> None:
        pass


class ToldHandshake(ssl.SSLObject):
    """A handshake whose failure is one line of the log: asyncio says nothing of it, and the master only hears that the
    connection has ended."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            log.info("a TLS handshake failed", extra={"error": error.reason})
            raise


class RankServer:
    """Serves a rank. Its health service says SERVING from the start on."""

    def __init__(self, controller: Controller, transport: Transport) -> None:
        self._health = Health((CONTROLLER,))
        self._health.serving(True)
        self._context = transport.server_context()
        if self._context is not None:
            self._context.sslobject_class = ToldHandshake
        methods = {**controller.methods(), **self._health.methods()}
        leaving = Unavailable(LEAVING)
        self._server = GrpcServer(methods, BOUNDS, MAX_MESSAGE, self._admit, lambda call: nullcontext(), leaving)
        self._listening: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens on a port (0: a free one) and returns it. Raises Unavailable when it cannot be had."""
        listening = listen("port", host, port, shared=True)  # the supervisor keeps a rank's port
        loop = asyncio.get_running_loop()
        seconds = HANDSHAKE_SECONDS if self._context is not None else None
        self._listening = await loop.create_server(
            self._connection, sock=listening, ssl=self._context, ssl_handshake_timeout=seconds
        )
        return listening.getsockname()[1]

    def serving(self, yes: bool) -> None:
        """Sets what the health service says."""
        self._health.serving(yes)

    async def stop(self, grace: float) -> None:
        """Accepts nothing more, and ends the calls that are left after `grace` seconds."""
        if self._listening is not None:
            self._listening.close()
        await self._server.stop(grace)

    def _connection(self) -> Http2Connection:
        return self._server.connection(Unbounded())

    def _admit(self, call: GrpcCall) -> None:
        if self._context is not None:
            check_role(call.path, allowed_for(ALLOWED, call.path), roles_in(call.certificate_names()))
