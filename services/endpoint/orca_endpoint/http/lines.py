"""The lines of HTTP calls in the log, and the attributes of their spans."""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orca_common.address import join_address

from ..calls.line import CLIENT_GONE, CallLine, Outcome, opened
from .access import PROBES
from .errors import STATUS


class Http:
    """The HTTP door, as the log and the spans of its calls name it."""

    name = "http"

    def arrived(self, method: str) -> dict[str, str]:
        verb, _, path = method.partition(" ")
        return {"http.request.method": verb, "url.path": path, "http.route": path, "url.scheme": "http"}

    def ended(self, outcome: Outcome) -> dict[str, str | int]:
        if outcome.reason == CLIENT_GONE:
            return {}  # no status was sent
        return {"http.response.status_code": 200 if outcome.status == "OK" else STATUS[outcome.status][0]}


HTTP = Http()


class LineMiddleware:
    """Opens the lines of HTTP calls. The outermost middleware: a request that another one refuses has a line too."""

    def __init__(self, app: ASGIApp, refused: Callable[[str], None]) -> None:
        """refused: counts a refusal by its reason."""
        self._app, self._refused = app, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        host, port = scope["client"] or ("", 0)

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.answered = message["status"]
            await send(message)

        method, peer = f"{scope['method']} {scope['path'][:100]}", join_address(host, port)
        with opened(CallLine(HTTP, method, peer, self._refused)) as line:
            await self._app(scope, receive, watched)
            line.left = line.answered is None
