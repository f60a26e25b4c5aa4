"""Finds the primary: at a URL's address, where Sentinel says, or at the node of a cluster that has the pool."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, RedisError

from . import redis_url
from .redis_url import SENTINEL, Address
from .signing_in import ToSentinel


class Primary:
    """Finds the server that takes writes. Asked for each new connection, so a failover is followed.

    url: any URL of redis-py; or redis+sentinel:// or rediss+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB, which asks these
    Sentinels for the primary of SERVICE. User and password in it are the primary's. With rediss the Sentinels speak
    TLS, too.
    """

    def __init__(self, url: str, patience: float, signing_in: Mapping[str, str] = {}) -> None:
        """signing_in: redis-py's options for a connection to a Sentinel, as `signing_in.options` gives them.

        Raises ValueError, with a sentence, for a wrong address, and for Sentinels without a service.
        """
        self.url = url  # as redis-py reads it
        self._moved: Address | None = None
        self._sentinel: Sentinel | None = None
        self._service = ""
        parts = redis_url.parse(url)
        if not parts.of_sentinels:
            return
        self._service, _, database = parts.path.partition("/")
        if not self._service:
            raise ValueError(f"{parts.scheme}://HOST:PORT,HOST:PORT/SERVICE/DB: the name of the service is missing")
        at = f"{parts.login}@" if parts.login else ""
        query = f"?{parts.query}" if parts.query else ""
        self.url = f"{parts.scheme.removesuffix(SENTINEL)}://{at}primary.invalid/{database or 0}{query}"
        secured = parts.scheme.startswith("rediss")
        # The link retries; a Sentinel that is away must only be passed over.
        options = {
            "socket_timeout": patience / 2,
            "socket_connect_timeout": patience / 2,
            "retry": Retry(NoBackoff(), 0),
            "ssl": secured,
            **signing_in,
        }
        self._sentinel = Sentinel(parts.servers, sentinel_kwargs=options)
        for client in cast(list[Any], self._sentinel.sentinels) if secured else []:
            client.connection_pool.connection_class = ToSentinel

    async def direct(self, connection: Any) -> None:
        """Points a connection that is about to be made at the primary. Raises redis's ConnectionError."""
        if self._moved is not None:
            connection.host, connection.port = self._moved
        elif self._sentinel is not None:
            try:
                connection.host, connection.port = await cast(Any, self._sentinel).discover_master(self._service)
            except MasterNotFoundError:  # its text is a page long, with the options of all connections
                raise ConnectionError(f"no Sentinel names a primary of {self._service}") from None
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
