"""Who may come in: the API key of a call, at both doors, before its body is read; over HTTP the client's role too."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from orca_common.api_keys import ApiKeys
from orca_common.errors import Unauthenticated
from orca_common.roles import Role, dns_names, roles_in, wrong_role

from ..openai.answer import refused
from .connection import GuardedConnection

AUTHORIZATION = "authorization"
OPEN_PATHS = {"/health", "/version", "/docs", "/openapi.json"}  # the same over HTTP, and how to call
OPEN = "/grpc.health.v1.Health/"  # probes have no key; health tells only whether the endpoint serves


def check_key(keys: ApiKeys, path: str, metadata: Mapping[str, str]) -> None:
    """Raises Unauthenticated for a gRPC call without a valid key."""
    if not path.startswith(OPEN):
        keys.tenant_of(metadata.get(AUTHORIZATION))


class KeyMiddleware:
    """Refuses HTTP requests without a valid key, in OpenAI's shape. `tenant_in` reads the tenant of those that pass."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] not in OPEN_PATHS:
                scope["orca.tenant"] = self._keys.tenant_of(Headers(scope=scope).get(AUTHORIZATION))
        except Unauthenticated as error:
            await refused(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def tenant_in(scope: Mapping[str, Any]) -> str:
    """The tenant of a request that the KeyMiddleware let pass; empty without keys."""
    return scope["orca.tenant"]


class CertifiedConnection(GuardedConnection):
    """Refuses what comes over a connection whose certificate has another role than client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        roles = roles_in(dns_names(transport.get_extra_info("ssl_object").getpeercert()))
        if Role.CLIENT not in roles:
            self.app = refused(wrong_role("this door", [Role.CLIENT], roles))
