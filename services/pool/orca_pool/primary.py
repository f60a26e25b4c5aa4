"""Finds the primary: at a URL's address, where Sentinel says, or at the node of a cluster that has the pool."""

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ConnectionError, RedisError, ResponseError

from . import redis_url
from .redis_url import SENTINEL, Address
from .signing_in import ToSentinel

# Seconds. While the primary is away, all streams wait for the next question. One costs a Sentinel some 50 us.
LOOK_AGAIN = 0.05
LATE = 0.05  # seconds after another Sentinel's answer, whatever it is: one that takes longer is not waited for


class Named(NamedTuple):
    """One Sentinel's answer. epoch: grows with each failover that it knows of."""

    epoch: int
    address: Address | None  # None: it does not reach that primary itself, or is replacing it


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
        self._sentinels: list[Any] = []  # redis.asyncio is typed only in part
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
            "protocol": 2,
            "socket_timeout": patience / 2,
            "socket_connect_timeout": patience / 2,
            "retry": Retry(NoBackoff(), 0),
            "ssl": secured,
            **signing_in,
        }
        self._sentinels = [Redis(host=host, port=port, **cast(Any, options)) for host, port in parts.servers]
        for client in self._sentinels if secured else []:
            client.connection_pool.connection_class = ToSentinel

    @property
    def watched(self) -> bool:
        """Whether Sentinels name the primary."""
        return bool(self._sentinels)

    async def find(self) -> Address | None:
        """The primary's address; None: the URL's. Raises redis's ConnectionError where no Sentinel names one.

        All Sentinels are asked at once. Those that know of the newest epoch count: a Sentinel that is cut off from the
        others goes on naming the old primary.
        """
        if not self._sentinels:
            return self._moved
        waiting = {asyncio.ensure_future(self._ask(sentinel)) for sentinel in self._sentinels}
        answers, why = list[Named](), ""
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=LATE if answers else None, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for answer in (task.result() for task in done):
                    if isinstance(answer, Named):
                        answers.append(answer)
                    else:
                        why = answer or why
        finally:
            for task in waiting:
                task.cancel()
        newest = max((one.epoch for one in answers), default=0)
        named = [one.address for one in answers if one.epoch == newest and one.address is not None]
        if not named:
            raise ConnectionError(f"no Sentinel names a primary of {self._service}{why and f': {why}'}")
        return max(named)

    async def _ask(self, sentinel: Any) -> Named | str:
        """A Sentinel's answer, or why it or this process refuses one; "" where it is away."""
        try:
            said = await sentinel.execute_command("SENTINEL MASTER", self._service)
        except (AuthenticationError, ResponseError) as error:
            return str(error)
        except (RedisError, OSError) as error:
            return str(error) if by_tls(error) else ""
        # The one that replaces it goes on saying so here until all replicas follow the next one, with the new epoch.
        gone = said["is_sdown"] or said["is_odown"] or "failover_in_progress" in said["flags"] or not said["is_master"]
        return Named(said["config-epoch"], None if gone else (said["ip"], said["port"]))

    def moved(self, address: Address) -> None:
        """A node of a cluster says that another one holds the pool's keys."""
        self._moved = address

    def forget(self) -> None:
        """The node is away: the URL's own address, which any node of the cluster may have, tells who took over."""
        self._moved = None

    async def close(self) -> None:
        """Closes the connections to the Sentinels."""
        for client in self._sentinels:
            await client.aclose()


def by_tls(error: BaseException | None) -> bool:
    """Whether a connection was lost to an error of TLS, as for a certificate of another authority."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error is not None
