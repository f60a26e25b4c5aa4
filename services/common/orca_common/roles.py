"""Permissions by method: the roles in the certificates of mTLS.

A certificate has the DNS name of its role, `worker.orca.internal` for a worker, beside the names of its host. A caller
expects this name of a server, and a server reads it in the certificate of its caller. So a scheduler that is led to
another service, and a worker that calls like a scheduler, are both refused.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import grpc

from .errors import PermissionDenied

DOMAIN = "orca.internal"
REDIS = "redis"  # in the certificate of the pool's Redis: no role, since it calls nobody


class Role(StrEnum):
    """The role of a certificate's holder."""

    CLIENT = "client"
    ENDPOINT = "endpoint"
    SCHEDULER = "scheduler"
    WORKER = "worker"

    @property
    def dns_name(self) -> str:
        """The name in a certificate that gives its holder the role."""
        return f"{self.value}.{DOMAIN}"


ANY = frozenset(Role)


def dns_names(certificate: Mapping[str, Any] | None) -> list[str]:
    """The DNS names of a certificate as Python's ssl shows it; none without one."""
    return [str(name) for kind, name in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"]


def roles_in(names: Iterable[str]) -> frozenset[Role]:
    """The roles that a certificate with these names has."""
    return frozenset(map(Role, {role.value for role in Role} & {_role_name(name) for name in names}))


def _role_name(name: str) -> str:
    return name.removesuffix(f".{DOMAIN}") if name.endswith(f".{DOMAIN}") else ""


def check_redis(names: Iterable[str]) -> None:
    """Raises PermissionDenied when the server with a certificate of these names is another one of ours than Redis.

    A certificate without any of our names is Redis's own, from elsewhere: the authority and the host's name speak for
    it.
    """
    ours = sorted(filter(None, map(_role_name, names)))
    if ours and REDIS not in ours:
        raise PermissionDenied(f"redis_url: the certificate there is that of {', '.join(ours)}, not of Redis")


def roles_of(context: grpc.aio.ServicerContext) -> frozenset[Role]:
    """The roles of a call's client, by its certificate; none without one."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return roles_in(name.decode(errors="replace") for name in names)


def check_role(method: str, allowed: Mapping[str, frozenset[Role]], roles: frozenset[Role]) -> None:
    """Raises PermissionDenied for a caller that has none of the roles that may call a method.

    allowed: by "/package.Service/Method" or "/package.Service/". No role may call another method.
    """
    wanted = allowed.get(method, allowed.get(method[: method.rfind("/") + 1], frozenset()))
    if not roles & wanted:
        raise wrong_role(method, wanted, roles)


def wrong_role(what: str, allowed: Iterable[Role], roles: Iterable[Role]) -> PermissionDenied:
    """The error of a caller whose certificate has other roles than the allowed ones."""
    wanted, found = (", ".join(sorted(some)) or "none" for some in (allowed, roles))
    return PermissionDenied(f"{what} is for the role {wanted}; the certificate of this caller has {found}")
