"""The paths of the live page: its files, its events, chats; and who may call them."""

from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orca_common.api_keys import AUTHORIZATION, ApiKeys
from orca_common.errors import Unauthenticated
from orca_common.hosts import Hosts

from .chats import Chats, failed
from .picture import Picture
from .stories import Stories
from .viewers import Viewers

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {  # of every answer. Nothing comes from elsewhere, nothing is inline, and no other page shows this one.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """Adds HEADERS, and refuses what comes for another host, and what comes without a valid key, but for the page's
    files, which tell nothing."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, hosts: Hosts, open_paths: frozenset[str]) -> None:
        self._app, self._keys, self._hosts, self._open = app, keys, hosts, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        app: ASGIApp = self._app
        headers = Headers(scope=scope)
        if (refusal := self._hosts.refusal(headers.getlist("host"))) is not None:
            app = failed(421, f"Host: {refusal}")
        elif scope["path"] not in self._open:
            try:
                self._keys.tenant_of(headers.get(AUTHORIZATION, ""))
            except Unauthenticated as error:
                app = failed(401, str(error))
        await app(scope, receive, with_headers)


def application(
    viewers: Viewers, picture: Picture, stories: Stories, chats: Chats, keys: ApiKeys, hosts: Hosts
) -> Starlette:
    """Makes the application of the page."""
    files = {f"/{path.name}": path for path in sorted(STATIC.iterdir()) if path.suffix in TYPES}
    files["/"] = STATIC / "index.html"

    async def file(request: Request) -> Response:
        path = files[request.url.path]
        return FileResponse(path, media_type=TYPES[path.suffix], headers={"cache-control": "no-cache"})

    async def about(request: Request) -> Response:
        return JSONResponse({"keys": keys.required})

    async def live(request: Request) -> Response:
        if viewers.full:
            return failed(503, f"{len(viewers)} browsers look already (max_viewers)")
        return Stream(viewers)

    async def story(request: Request) -> Response:
        name = picture.id_of(request.path_params["number"])
        told = None if name is None else await stories.of(name)
        return failed(404, "no scheduler knows the request any more") if told is None else JSONResponse(told)

    async def text(request: Request) -> Response:
        found = picture.tokens_of(request.path_params["number"])
        if found is None:
            return failed(404, "prompts are not shown (show_prompts of the schedulers), or the request is forgotten")
        prompt, answer = found
        return JSONResponse(
            {"prompt": await chats.text_of(request, prompt), "text": await chats.text_of(request, answer)}
        )

    routes = [
        *(Route(path, file) for path in files),
        Route("/about", about),
        Route("/live", live),
        Route("/requests/{number:int}", story),
        Route("/requests/{number:int}/text", text),
        Route("/v1/models", chats.models),
        Route("/v1/chat/completions", chats.chat, methods=["POST"]),
        Route("/v1/completions", chats.complete, methods=["POST"]),
    ]
    guard = Middleware(Guard, keys=keys, hosts=hosts, open_paths=frozenset({*files, "/about"}))
    return Starlette(routes=routes, middleware=[guard])


class Stream(Response):
    """The answer of `/live`, which ends when the browser leaves."""

    def __init__(self, viewers: Viewers) -> None:
        super().__init__()
        self._viewers = viewers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._viewers(scope, receive, send)
