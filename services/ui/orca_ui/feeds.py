"""Follows the feeds of all schedulers, in full while somebody looks, and otherwise for failures alone."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import Sequence

import httpx2

from orca_common.address import join_address, split_address

from .picture import Picture

log = logging.getLogger(__name__)

SILENT_SECONDS = 2.0  # without a line, of which two come in a second at least; then the scheduler counts as away
RETRY_SECONDS = 0.3
LOOK_UP_SECONDS = 5.0  # between looks at what addresses a name has
QUIET_SECONDS = 5.0  # after the last browser has left, until feeds are followed for failures alone
MOST_LINE = 64 << 20  # bytes of a line


class Feeds:
    """Follows the schedulers at these addresses. A name stands for all its addresses, as of a headless Service."""

    def __init__(self, addresses: Sequence[str], picture: Picture) -> None:
        self._addresses, self._picture = addresses, picture
        self._following: dict[str, asyncio.Task[None]] = {}
        self.full = False  # whether steps of cores are followed, too
        self._changed = asyncio.Event()  # `full` has

    @property
    def addresses(self) -> list[str]:
        """The status ports of the schedulers that are followed now."""
        return list(self._following)

    def follow(self, full: bool) -> None:
        """Follows in full, or for failures alone."""
        if full != self.full:
            self.full = full
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def run(self) -> None:
        """Follows all schedulers. Never returns."""
        try:
            while True:
                found = set[str]()
                for address in self._addresses:
                    found |= await resolved(address)
                for address in found - self._following.keys():
                    self._following[address] = asyncio.create_task(self._follow(address))
                if found:  # a name server that is away for a moment forgets no scheduler
                    for address in self._following.keys() - found:
                        self._following.pop(address).cancel()
                        self._picture.forget(address)
                for task in [task for task in self._following.values() if task.done()]:
                    task.result()
                await asyncio.sleep(LOOK_UP_SECONDS)
        finally:
            for task in self._following.values():
                task.cancel()

    async def _follow(self, address: str) -> None:
        timeout = httpx2.Timeout(SILENT_SECONDS)
        async with httpx2.AsyncClient(timeout=timeout, trust_env=False) as client:
            while True:
                reading = asyncio.create_task(self._read(client, address, self.full))
                changed = asyncio.create_task(self._changed.wait())
                try:
                    await asyncio.wait([reading, changed], return_when=asyncio.FIRST_COMPLETED)
                    if reading.done():
                        self._picture.away(address, reading.result(), time.time())
                        await asyncio.sleep(RETRY_SECONDS)
                finally:
                    reading.cancel()
                    changed.cancel()
                    await asyncio.gather(reading, changed, return_exceptions=True)

    async def _read(self, client: httpx2.AsyncClient, address: str, full: bool) -> str:
        """Reads a feed until it ends. Returns why it has."""
        url = f"http://{address}/live" + ("" if full else "/quiet")
        try:
            async with client.stream("GET", url) as answer:
                if answer.status_code != httpx2.codes.OK:
                    return f"answers {answer.status_code}"
                rest = b""
                async for piece in answer.aiter_bytes():  # `aiter_lines` would end a line at U+2028, too
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        self._picture.line(address, json.loads(line), time.time())
                return "has ended"
        except httpx2.TimeoutException:
            return "is silent"
        except (httpx2.HTTPError, OSError) as error:
            return f"cannot be reached ({type(error).__name__})"
        except ValueError:
            return "sends no feed"


async def resolved(address: str) -> set[str]:
    """All addresses of a name and port; none while the name cannot be looked up."""
    host, port = split_address(address)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("a name cannot be looked up", extra={"name": host, "why": str(error)})
        return set()
    return {join_address(str(one[4][0]), port) for one in found}
