"""From a path to its method. Errors of methods, of the router and of bugs are answered in OpenAI's shape."""

from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from orca_common.errors import InvalidArgument, NotFound, OrcaError, echo
from orca_common.statuses import internal

from .errors import refused

Instead = Callable[[str, str], str]  # of an unknown path and the door's address: a sentence with a path to call instead


class MethodRoute(Route):
    """The route of one path. It answers OPTIONS with the methods. HEAD is allowed where GET only reads."""

    def __init__(self, path: str, endpoint: Any, *methods: str, query: bool = False) -> None:
        """query: the method looks at the query itself. Otherwise there must be none."""
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


def application(routes: Sequence[Route], instead: Instead) -> Starlette:
    """Makes the application that serves these routes."""
    unknown = partial(answer_http_error, instead)
    handlers = {HTTPException: unknown, OrcaError: answer_error, Exception: answer_bug}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # to an address that a proxy may know by another name
    return app


def without_slashes(app: ASGIApp) -> ASGIApp:
    """Serves a path with slashes behind it as the path without."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await app(scope, receive, send)

    return served


async def answer_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of an OrcaError."""
    assert isinstance(error, OrcaError)
    return refused(error)


async def answer_http_error(instead: Instead, request: Request, error: Exception) -> Response:
    """Starlette's handler of unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path, base = request.url.path, echo(str(request.base_url).rstrip("/"))
    refusal: OrcaError = NotFound(f"{request.method} {echo(path)}: {instead(path, base)}")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        takes = (error.headers or {}).get("Allow", "another method")
        refusal = InvalidArgument("method", f"is {request.method}; {echo(path)} takes {takes}")
    return refused(refusal, error.status_code, error.headers or {})


async def answer_bug(request: Request, error: Exception) -> Response:
    """Starlette's handler of everything else."""
    return await answer_error(request, internal(error))
