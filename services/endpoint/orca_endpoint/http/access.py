"""Admits callers over HTTP: a client by its certificate, and a call by its API key, before its body is read."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from orca_common.api_keys import AUTHORIZATION, ApiKeys
from orca_common.errors import InvalidArgument, OrcaError
from orca_common.hosts import Hosts
from orca_common.roles import Role, dns_names, roles_in, wrong_role

from .connection import GuardedConnection
from .errors import OtherHost, refused

PROBES = {"/health"}
OPEN_PATHS = {*PROBES, "/", "/version", "/docs", "/openapi.json"}  # without a key: probes, and how to call
API_KEY = "x-api-key"  # in which clients of Anthropic's send their key
TWICE = "comes twice; programs on the way may each read another one"


class HostMiddleware:
    """Refuses HTTP requests for another host than this one. Probes pass: proxies send names of their own with them."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = Headers(scope=scope).getlist("host")
        app = self._app
        if len(hosts) > 1:
            app = refused(InvalidArgument("host", TWICE))
        elif scope["path"] not in PROBES and (refusal := self._hosts.refusal(hosts)) is not None:
            app = refused(OtherHost("Host", refusal))
        await app(scope, receive, send)


class KeyMiddleware:
    """Refuses HTTP requests without a valid key, in OpenAI's shape. `tenant_in` reads the tenant of those that pass."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] not in OPEN_PATHS:
                headers = Headers(scope=scope)
                for name in (AUTHORIZATION, API_KEY):
                    if len(headers.getlist(name)) > 1:
                        raise InvalidArgument(name, TWICE)
                given, key = headers.get(AUTHORIZATION), headers.get(API_KEY)
                if key is not None and given not in (None, f"Bearer {key}") and self._keys.required:
                    raise InvalidArgument(API_KEY, f"is another key than that of {AUTHORIZATION}")
                scope["orca.tenant"] = self._keys.tenant_of(f"Bearer {key}" if given is None and key else given)
        except OrcaError as error:
            await refused(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def tenant_in(scope: Mapping[str, Any]) -> str:
    """The tenant of a request that the KeyMiddleware let pass; empty without keys."""
    return scope["orca.tenant"]


def peer_of(scope: Mapping[str, Any]) -> str:
    """The client's host."""
    client = scope.get("client")
    return client[0] if client else ""


def caller_in(scope: Mapping[str, Any]) -> str:
    """Whose turn a request is, where callers have turns: the tenant, or the host without keys."""
    return tenant_in(scope) or peer_of(scope)


class CertifiedConnection(GuardedConnection):
    """Refuses what comes over a connection whose certificate has another role than client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        roles = roles_in(dns_names(transport.get_extra_info("ssl_object").getpeercert()))
        if Role.CLIENT not in roles:
            self.app = refused(wrong_role("this door", [Role.CLIENT], roles))
