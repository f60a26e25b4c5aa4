"""The network of a stack under chaos: a proxy on the way between any two of its processes that speak to each other.

    endpoints, schedulers > redis      schedulers > supervisors, ranks      ranks > ranks (relays)

A supervisor reports to a scheduler where the ranks are, and the scheduler passes it on to each rank. The proxies write
other addresses into these two messages, so that ranks are reached through proxies too. Tensors travel directly.
"""

import asyncio
from functools import partial
from pathlib import Path

from orca.v1 import worker_pb2 as pb

from .control_proxy import ControlProxy
from .links import Link
from .redis_proxy import RedisProxy

REDIS = "redis"
FOLLOW = 0.05  # seconds between looks at who listens
TABLES = Path("/proc/net/tcp"), Path("/proc/net/tcp6")  # the connections of this machine
LISTEN = "0A"  # a state in them


class Network:
    """Makes links and proxies as processes ask for each other."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], Link] = {}
        self._redis: list[RedisProxy] = []
        self._control: list[ControlProxy] = []
        self._addresses: dict[tuple[str, str, str], str] = {}  # of the proxies
        self._behind: dict[str, tuple[str, str]] = {}  # a proxy's address -> destination, its own address
        self._making = asyncio.Lock()  # one proxy for each way
        self._following = asyncio.create_task(self._follow())

    @property
    def links(self) -> list[Link]:
        """All links that were made so far, by name."""
        return sorted(self._links.values(), key=lambda link: link.name)

    def link(self, source: str, destination: str) -> Link:
        return self._links.setdefault((source, destination), Link(source, destination))

    def heal(self) -> None:
        for link in self._links.values():
            link.heal()

    async def route(self, source: str, destination: str, address: str) -> str:
        """Returns the proxy at which `source` reaches `destination`; it is made when it is first asked for."""
        key = source, destination, address
        async with self._making:
            if key not in self._addresses:
                link = self.link(source, destination)
                make = self._before_redis if destination == REDIS else self._before_process
                self._addresses[key] = made = await make(link, address)
                self._behind[made] = destination, address
        return self._addresses[key]

    async def _before_redis(self, link: Link, address: str) -> str:
        proxy = RedisProxy(link, address)
        self._redis.append(proxy)
        return await proxy.start()

    async def _before_process(self, link: Link, address: str) -> str:
        ports = await asyncio.to_thread(listening)
        proxy = ControlProxy(
            link,
            address,
            sent={"Form": partial(self._formation, link.destination)},
            answered={"Watch": partial(self._table, link)},
        )
        await proxy.follow(ports)
        self._control.append(proxy)
        return proxy.address

    async def _follow(self) -> None:
        """Lets proxies listen while the processes behind them do."""
        while True:
            known = self._control.copy()  # a look says nothing of a process that has begun to listen since
            ports = await asyncio.to_thread(listening)
            for proxy in known:
                await proxy.follow(ports)
            await asyncio.sleep(FOLLOW)

    async def _table(self, link: Link, message: bytes) -> bytes:
        """A supervisor's table as a scheduler gets it."""
        table = pb.RankTable.FromString(message)
        for entry in table.ranks:
            rank = f"rank-{link.destination.rpartition('-')[2]}.{entry.local_rank}"
            entry.address = await self.route(link.source, rank, entry.address)
        return table.SerializeToString()

    async def _formation(self, rank: str, message: bytes) -> bytes:
        """A formation as a rank gets it."""
        request = pb.FormRequest.FromString(message)
        for n, told in enumerate(request.controllers):
            destination, address = self._behind.get(told, ("", told))
            if destination not in ("", rank):
                request.controllers[n] = await self.route(rank, destination, address)
        return request.SerializeToString()

    async def close(self) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        for proxy in (*self._redis, *self._control):
            await proxy.stop()


def listening() -> frozenset[int]:
    """The ports at which processes of this machine accept connections. gRPC listens by IPv6 for IPv4 too."""
    lines = [line for table in TABLES for line in table.read_text().splitlines()[1:]]
    rows = [line.split() for line in lines]
    return frozenset(int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTEN)
