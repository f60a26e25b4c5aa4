"""The HTTP door: OpenAI's API for completions and models, over the same calls as the gRPC door.

Every error is in OpenAI's shape, whoever finds it: a method, the router, the keys, the parser of HTTP.
"""

import asyncio
import contextlib
import math
import socket
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from orca_common.api_keys import ApiKeys
from orca_common.errors import InvalidArgument, NotFound, OrcaError, echo, internal
from orca_common.listening import listen
from orca_common.tls import MutualTls, Transport

from ..calls.endpoint import Endpoint
from ..calls.line import LineMiddleware, note_error
from ..openai.answer import failure, refused
from ..openai.completions import Completions
from ..openai.pages import Door, Pages
from ..openai.resumed import ResumedCompletion
from ..openai.tokens import Tokens
from ..requests.limits import Limits
from .access import CertifiedConnection, KeyMiddleware
from .bodies import BodyMiddleware
from .connection import ConnectionLimits, GuardedConnection, Place
from .listener import Listener
from .request_ids import HEADER as REQUEST_ID
from .request_ids import RequestIds

STOP_SECONDS = 3  # for answers under way when their calls have ended


class HttpDoor:
    """The HTTP server, on the service's event loop."""

    def __init__(
        self, endpoint: Endpoint, keys: ApiKeys, transport: Transport, limits: Limits, connections: int
    ) -> None:
        self._endpoint = endpoint
        self._socket: socket.socket | None = None
        self._listener: Listener | None = None
        self._served: asyncio.Event | None = None
        tokens = Tokens(endpoint)
        routes = [
            Door("/v1/completions", Completions(endpoint), "POST"),
            Door("/v1/completions/{id}", ResumedCompletion(endpoint), "GET", query=True),
            Door("/tokenize", tokens.tokenize, "POST"),
            Door("/detokenize", tokens.detokenize, "POST"),
            *Pages(endpoint).routes(),
        ]
        handlers = {HTTPException: answer_http_error, OrcaError: answer_error, Exception: answer_bug}
        app = Starlette(routes=routes, exception_handlers=handlers)
        settings = endpoint.settings
        self._transport, self._certificates = transport, settings.client_certificates
        mutual = isinstance(transport, MutualTls)
        self._connection = CertifiedConnection if mutual and self._certificates else GuardedConnection
        self.connections = ConnectionLimits(
            connections,
            settings.max_peer_connections,
            settings.max_header_bytes,
            settings.header_seconds,
            settings.body_seconds,
            settings.write_timeout,
        )
        keyed = KeyMiddleware(BodyMiddleware(app, limits, settings.max_message_bytes), keys)
        config = uvicorn.Config(
            LineMiddleware(RequestIds(with_cors(keyed, settings.cors_origins))),
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
        self._socket = listen("http_port", host, port, shared=self._endpoint.settings.ports_kept)
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
        self._server.should_exit = True
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
        expose_headers=[REQUEST_ID, "X-Queue-Position", "X-Queue-Seconds", "Retry-After"],
    )


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, which `service.serve` has."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


async def answer_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of an OrcaError."""
    assert isinstance(error, OrcaError)
    return refused(error)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of unknown paths and methods: the error in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    path = echo(request.url.path)
    refusal: OrcaError = NotFound(f"{request.method} {path}: {instead(request)}")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        takes = (error.headers or {}).get("Allow", "another method")
        refusal = InvalidArgument("method", f"is {request.method}; {path} takes {takes}")
    note_error(refusal)
    _, _, body = failure(refusal)
    return JSONResponse(body, error.status_code, error.headers)


def instead(request: Request) -> str:
    """What to call instead of a path that there is not."""
    base = echo(str(request.base_url).rstrip("/"))
    if request.url.path.startswith("/v1/chat"):
        return f"Orca serves completions, not chats; POST a prompt to {base}/v1/completions"
    return f"there is no such path; Orca serves completions, at {base}/v1/completions; {base}/docs lists all paths"


async def answer_bug(request: Request, error: Exception) -> Response:
    """Starlette's handler of everything else."""
    return await answer_error(request, internal(error))
