"""`X-Request-Id`: the caller's own name of an HTTP request, given back with every answer; one is made when absent.

It names the exchange, for logs of the caller and proxies. What names a completion is its `id`.
"""

import re
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orca_common.errors import InvalidArgument

from .errors import refused

HEADER = "X-Request-Id"
GIVEN = re.compile(r"[!-~]{1,128}")  # visible ASCII


class RequestIds:
    """Middleware: takes or makes the id, and gives it back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(HEADER)
        usable = given is not None and GIVEN.fullmatch(given) is not None
        name = given if given is not None and usable else f"req_{secrets.token_hex(12)}"
        scope["orca.exchange"] = name

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER.lower().encode(), name.encode())]
            await send(message)

        if given is not None and not usable:
            error = InvalidArgument(HEADER, "must be 1 to 128 visible ASCII characters")
            await refused(error)(scope, receive, send_named)
        else:
            await self._app(scope, receive, send_named)


def exchange_in(scope: Mapping[str, Any]) -> str:
    """The id of a request that RequestIds let pass."""
    return scope["orca.exchange"]


def labels_in(scope: Scope) -> dict[str, str | list[str]]:
    """The caller's id as an attribute of spans; empty where it gave none."""
    given = Headers(scope=scope).get(HEADER)
    return {"http.request.header.x-request-id": [given]} if given is not None else {}
