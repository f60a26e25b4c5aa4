"""`GET` methods that describe the door: its models, its health, its version, and how to call it."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from orca_common.errors import Unavailable
from orca_common.release import VERSION

from ..calls.endpoint import Endpoint
from ..http.routing import MethodRoute
from .openapi import described, page

NOTHING_ELSE = "default-src 'none'; style-src 'unsafe-inline'"  # the page loads nothing


class Pages:
    """The methods, as endpoints of Starlette."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            MethodRoute("/v1/models", self._models, "GET", "HEAD"),
            MethodRoute("/v1/models/{id:path}", self._model, "GET", "HEAD"),
            MethodRoute("/health", self._health, "GET", "HEAD", query=True),  # probes may say what they like
            MethodRoute("/version", self._version, "GET", "HEAD"),
            MethodRoute("/openapi.json", self._openapi, "GET", "HEAD"),
            MethodRoute("/docs", self._docs, "GET", "HEAD"),
        ]

    async def _models(self, request: Request) -> Response:
        others = [self._card(name) for name in self._endpoint.settings.others]
        return JSONResponse({"object": "list", "data": [self._own_card(), *others]})

    async def _model(self, request: Request) -> Response:
        self._endpoint.check_model(request.path_params["id"])
        return JSONResponse(self._own_card())

    def _own_card(self) -> dict[str, Any]:
        return self._card(self._endpoint.name) | {"max_model_len": self._endpoint.checkpoint.max_positions}

    def _card(self, name: str) -> dict[str, Any]:
        """OpenAI's model object."""
        return {"id": name, "object": "model", "created": self._created, "owned_by": "orca"}

    async def _health(self, request: Request) -> Response:
        problem = self._endpoint.not_ready()
        if problem is not None:
            raise Unavailable(problem)
        return JSONResponse({"status": "ok"})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(described(self._endpoint.name))

    async def _docs(self, request: Request) -> Response:
        base = str(request.base_url).rstrip("/")
        return HTMLResponse(page(self._endpoint.name, base), headers={"Content-Security-Policy": NOTHING_ELSE})
