"""What the HTTP door tells of itself: the model, its health, its version, its description, and a path's methods."""

import time
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from orca_common.errors import InvalidArgument, Unavailable
from orca_common.release import VERSION

from ..calls.endpoint import Endpoint
from .openapi import described, page

NOTHING_ELSE = "default-src 'none'; style-src 'unsafe-inline'"  # the page loads nothing


class Door(Route):
    """A route that answers OPTIONS with its methods. HEAD is allowed where GET only reads."""

    def __init__(self, path: str, endpoint: Any, *methods: str, query: bool = False) -> None:
        """query: the method looks at the query itself. Else there must be none."""
        super().__init__(path, endpoint, methods=methods)
        self.methods: set[str] = {*methods}
        self._query = query

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS":
            allowed = ", ".join(sorted({*self.methods, "OPTIONS"}))
            await Response(status_code=204, headers={"Allow": allowed})(scope, receive, send)
        else:
            if not self._query:
                where = "; fields are in the body" if "POST" in self.methods else ""
                for name in QueryParams(scope["query_string"]):
                    raise InvalidArgument(name, f"is not known to Orca in a query{where}")
            await super().handle(scope, receive, send)


class Pages:
    """The methods, as endpoints of Starlette."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Door("/v1/models", self._models, "GET", "HEAD"),
            Door("/v1/models/{id:path}", self._model, "GET", "HEAD"),
            Door("/health", self._health, "GET", "HEAD", query=True),  # probes may say what they like
            Door("/version", self._version, "GET", "HEAD"),
            Door("/openapi.json", self._openapi, "GET", "HEAD"),
            Door("/docs", self._docs, "GET", "HEAD"),
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
