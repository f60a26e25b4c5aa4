"""Where the primary is: at a URL's address, where Sentinel says, or at the node of a cluster that has the pool."""

from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote, urlsplit, urlunsplit

from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, RedisError

SCHEME = "redis+sentinel"
SENTINEL_PORT = 26379

Address = tuple[str, int]


class Primary:
    """Finds the server that takes writes. Asked for each new connection, so a failover is followed.

    url: any URL of redis-py; or redis+sentinel:// or rediss+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB, which asks these
    Sentinels for the primary of SERVICE. User and password are the primary's.
    """

    def __init__(self, url: str, patience: float) -> None:
        """Raises ValueError for a URL of Sentinels without the name of the service."""
        self.url = url  # as redis-py reads it
        self._moved: Address | None = None
        self._sentinel: Sentinel | None = None
        self._service = ""
        parts = urlsplit(url)
        if not parts.scheme.endswith("+sentinel"):
            return
        login, _, hosts = parts.netloc.rpartition("@")
        self._service, _, database = unquote(parts.path.lstrip("/")).partition("/")
        if not self._service:
            raise ValueError(f"{SCHEME}://HOST:PORT,HOST:PORT/SERVICE is needed: the name of the service is missing")
        sentinels = [_address(host) for host in hosts.split(",")]
        at = f"{login}@" if login else ""
        scheme = parts.scheme.removesuffix("+sentinel")
        self.url = urlunsplit((scheme, f"{at}primary.invalid", f"/{database or 0}", parts.query, ""))
        # The link retries; a Sentinel that is away must only be passed over.
        options = {
            "socket_timeout": patience / 2,
            "socket_connect_timeout": patience / 2,
            "retry": Retry(NoBackoff(), 0),
        }
        self._sentinel = Sentinel(sentinels, sentinel_kwargs=options)

    async def direct(self, connection: Any) -> None:
        """Points a connection that is about to be made at the primary. Raises redis's ConnectionError."""
        if self._moved is not None:
            connection.host, connection.port = self._moved
        elif self._sentinel is not None:
            try:
                connection.host, connection.port = await cast(Any, self._sentinel).discover_master(self._service)
            except MasterNotFoundError as error:
                raise ConnectionError(str(error)) from None
            except RedisError as error:
                raise ConnectionError(f"Sentinel: {error}") from error

    def moved(self, address: Address) -> None:
        """A node of a cluster says that another one holds the pool's keys."""
        self._moved = address

    def forget(self) -> None:
        """The node is away: the URL's own address, which any node of the cluster may have, tells who took over."""
        self._moved = None

    async def close(self) -> None:
        """Closes the connections to the Sentinels."""
        if self._sentinel is not None:
            for client in cast(list[Any], self._sentinel.sentinels):
                close: Callable[[], Any] = client.aclose
                await close()


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":") if ":" in text else (text, "", "")
    return host, int(port or SENTINEL_PORT)
