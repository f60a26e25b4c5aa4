"""Asks the schedulers why a request took as long as it did, as `orca explain` does."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import httpx2

from orca_common.accounts import clearest
from orca_common.service import cancel

SECONDS = 15.0  # for a scheduler's answer


class Stories:
    """Asks all schedulers. Browsers that ask for the same request at the same time get one answer."""

    def __init__(self, schedulers: Callable[[], Iterable[str]]) -> None:
        """schedulers: their status ports now."""
        self._schedulers = schedulers
        self._client = httpx2.AsyncClient(timeout=SECONDS, trust_env=False)
        self._asked: dict[str, asyncio.Task[dict[str, Any] | None]] = {}

    async def of(self, request: str) -> dict[str, Any] | None:
        """Returns the account that leaves the least of the request's time unseen; None: no scheduler gives one."""
        if request not in self._asked:
            self._asked[request] = asyncio.create_task(self._ask_all(request))
            self._asked[request].add_done_callback(lambda _: self._asked.pop(request))
        return await asyncio.shield(self._asked[request])  # a browser that leaves does not end the question of another

    async def close(self) -> None:
        await cancel(*self._asked.values())
        await self._client.aclose()

    async def _ask_all(self, request: str) -> dict[str, Any] | None:
        answers = await asyncio.gather(*(self._ask(address, request) for address in self._schedulers()))
        return clearest(filter(None, answers))

    async def _ask(self, address: str, request: str) -> dict[str, Any] | None:
        try:
            answer = await self._client.get(f"http://{address}/explain", params={"request": request})
            return answer.json() if answer.status_code == httpx2.codes.OK else None
        except (httpx2.HTTPError, OSError, ValueError):
            return None
