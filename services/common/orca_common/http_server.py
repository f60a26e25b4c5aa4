"""uvicorn's server as our services run it, beside other work on their loop."""

import asyncio
from contextlib import nullcontext, suppress
from typing import Any

import uvicorn

TICK = 1.0  # seconds: as fine as the date in the headers of answers


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, which `service.serve` has. It wakes once a second instead of ten times."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leaving = asyncio.Event()

    def capture_signals(self) -> Any:
        return nullcontext()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK):
                    await self._leaving.wait()

    def leave(self) -> None:
        """Has `serve` end, once the answers under way are through."""
        self.should_exit = True
        self._leaving.set()
