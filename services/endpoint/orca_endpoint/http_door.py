"""The HTTP door: OpenAI's completions API over the same calls as the gRPC door."""

import socket

import uvicorn
from starlette.applications import Starlette

from orca_common.errors import Unavailable

from .endpoint import Endpoint


class Server(uvicorn.Server):
    """uvicorn in our event loop: signals are ours."""

    def capture_signals(self):  # type: ignore[override]
        from contextlib import nullcontext

        return nullcontext()


class HttpDoor:
    """The HTTP server."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._socket: socket.socket | None = None
        config = uvicorn.Config(
            Starlette(),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
        )
        self._server = Server(config)

    async def start(self, host: str, port: int) -> int:
        try:
            self._socket = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            raise Unavailable(f"http_port: {host}:{port} cannot be listened on ({error})") from None
        return self._socket.getsockname()[1]

    async def serve(self) -> None:
        assert self._socket is not None
        await self._server.serve(sockets=[self._socket])

    async def stop(self) -> None:
        self._server.should_exit = True
