"""The HTTP door: uvicorn within bounds, and the middlewares before each method: its line, its id, its key, its body."""

import asyncio
import math
import socket
from collections.abc import Callable

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from orca_common.api_keys import ApiKeys
from orca_common.hosts import Hosts
from orca_common.http_server import Server
from orca_common.listening import listen
from orca_common.tls import MutualTls, Transport

from ..requests.limits import Limits
from ..settings import EndpointSettings
from .access import CertifiedConnection, HostMiddleware, KeyMiddleware
from .bodies import BodyMiddleware
from .connection import ConnectionLimits, GuardedConnection, Place
from .lines import LineMiddleware
from .listener import Listener
from .request_ids import HEADER as REQUEST_ID
from .request_ids import RequestIds
from .routing import without_slashes

STOP_SECONDS = 3  # for answers under way when their calls have ended


class HttpDoor:
    """The HTTP server, on the service's event loop."""

    def __init__(
        self,
        app: ASGIApp,
        settings: EndpointSettings,
        keys: ApiKeys,
        transport: Transport,
        limits: Limits,
        connections: int,
        refused: Callable[[str], None],
    ) -> None:
        """app: the methods. connections: how many it may have at a time. refused: counts a refusal by its reason."""
        self._shared = settings.ports_kept
        self._socket: socket.socket | None = None
        self._listener: Listener | None = None
        self._served: asyncio.Event | None = None
        self._transport, self._certificates = transport, settings.client_certificates
        mutual = isinstance(transport, MutualTls)
        self._connection = CertifiedConnection if mutual and self._certificates else GuardedConnection
        self.connections = ConnectionLimits(
            connections=connections,
            peer_connections=settings.max_peer_connections,
            header_bytes=settings.max_header_bytes,
            header_seconds=settings.header_seconds,
            body_seconds=settings.body_seconds,
            write_timeout=settings.write_timeout,
        )
        keyed = KeyMiddleware(BodyMiddleware(app, limits, settings.max_message_bytes), keys)
        open_to = with_cors(keyed, settings.cors_origins)
        hosts = Hosts(settings.host, settings.host_names, keyed=keys.required)
        config = uvicorn.Config(
            without_slashes(LineMiddleware(RequestIds(HostMiddleware(open_to, hosts)), refused)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(settings.trusted_proxies),
            forwarded_allow_ips=settings.trusted_proxies,
            timeout_graceful_shutdown=math.ceil(settings.drain_seconds) + STOP_SECONDS,
        )
        config.load()
        self._server = Server(config)

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port. Raises Unavailable when the port cannot be had."""
        self._socket = listen("http_port", host, port, shared=self._shared)
        return self._socket.getsockname()[1]

    async def serve(self) -> None:
        """Serves until `stop`."""
        assert self._socket is not None
        context = None
        if isinstance(self._transport, MutualTls):
            context = self._transport.certificates.server_context(
                client_certificates=self._certificates, alpn="http/1.1"
            )
        self._served = asyncio.Event()
        self._listener = Listener(self._socket, self.connections, self._protocol, context)
        try:
            await self._server.serve(sockets=[])
        finally:
            await self._listener.close()
            self._served.set()

    def _protocol(self, place: Place) -> GuardedConnection:
        server = self._server
        return self._connection(
            config=server.config,
            server_state=server.server_state,
            app_state={},
            limits=self.connections,
            place=place,
        )

    async def stop(self) -> None:
        """Accepts nothing more, and waits some seconds for the answers under way."""
        if self._listener is not None:
            await self._listener.close()
        self._server.leave()
        if self._served is not None:
            await self._served.wait()
        if self._socket is not None:
            self._socket.close()


def with_cors(app: ASGIApp, origins: str) -> ASGIApp:
    """Lets pages of these origins call, from a browser. Comes before the keys: a browser asks first, without one."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=[origin.strip() for origin in origins.split(",")],
        allow_methods=["GET", "HEAD", "POST"],
        allow_headers=["*"],
        expose_headers=[
            REQUEST_ID,
            "X-Orca-Request",
            "X-Orca-Relaxed",
            "X-Queue-Position",
            "X-Queue-Seconds",
            "Retry-After",
        ],
    )
