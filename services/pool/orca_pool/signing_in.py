"""How a new connection signs in, to Redis as to a Sentinel: a login, our certificate, and a look at the other one."""

from pathlib import Path
from typing import Any, Protocol, cast

from redis.asyncio import SSLConnection
from redis.exceptions import ConnectionError

from orca_common.errors import PermissionDenied
from orca_common.roles import check_redis, dns_names
from orca_common.tls import AUTHORITY, CERTIFICATE, KEY

# With a name before it, a password is taken by a server that asks for none, too: Sentinels perhaps, or a server that
# is about to be restarted with one.
USER = "default"


class SigningIn(Protocol):
    """What a new connection of redis.asyncio is asked for. They are typed only in part."""

    async def on_connect(self) -> None: ...
    async def send_command(self, *args: str | bytes | int, check_health: bool) -> None: ...
    async def read_response(self) -> Any: ...


def options(scheme: str, password: str | None, tls_dir: str | None) -> dict[str, str]:
    """redis-py's options for a login and for a TLS connection that shows a certificate. What a URL says wins."""
    found = {} if password is None else {"username": USER, "password": password}
    if tls_dir is not None and scheme.startswith("rediss"):
        names = {"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY, "ssl_ca_certs": AUTHORITY}
        found |= {option: str(Path(tls_dir) / name) for option, name in names.items()}
    return found


async def sign_in(connection: SigningIn) -> None:
    """Signs in. Raises redis's ConnectionError when a service of ours, and not Redis, is at the other end."""
    if isinstance(connection, SSLConnection):
        try:
            check_redis(dns_names(cast(Any, connection)._writer.get_extra_info("peercert")))
        except PermissionDenied as error:
            raise ConnectionError(str(error)) from None
    await connection.on_connect()
