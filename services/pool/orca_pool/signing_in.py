"""Signs a new connection in, to Redis as to a Sentinel: a login, our certificate, and a look at the other one."""

import ssl
from pathlib import Path
from typing import Any, cast

from redis.asyncio import SSLConnection

from orca_common.errors import PermissionDenied
from orca_common.roles import check_redis, dns_names
from orca_common.tls import AUTHORITY, CERTIFICATE, KEY

# With a name before it, a password is taken by a server that asks for none, too: Sentinels perhaps, or a server that
# is about to be restarted with one.
USER = "default"


def options(scheme: str, password: str | None, tls_dir: str | None) -> dict[str, str]:
    """redis-py's options for a login and for a TLS connection that shows a certificate. A login in the URL wins."""
    found = {} if password is None else {"username": USER, "password": password}
    if tls_dir is not None and scheme.startswith("rediss"):
        names = {"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY, "ssl_ca_certs": AUTHORITY}
        found |= {option: str(Path(tls_dir) / name) for option, name in names.items()}
    return found


class RedisAlone(ssl.SSLObject):
    """A TLS handshake that fails when a service of ours, and not Redis, is at the other end."""

    def do_handshake(self) -> None:
        super().do_handshake()
        try:
            check_redis(dns_names(self.getpeercert()))
        except PermissionDenied as error:
            raise ssl.SSLCertVerificationError(str(error)) from None


def redis_alone(connection: object) -> None:
    """Lets a connection that is about to be made by TLS refuse our own services."""
    if isinstance(connection, SSLConnection):
        cast(Any, connection).ssl_context.get().sslobject_class = RedisAlone


class ToSentinel(SSLConnection):
    """A TLS connection to a Sentinel."""

    async def connect(self) -> None:
        redis_alone(self)
        await super().connect()
