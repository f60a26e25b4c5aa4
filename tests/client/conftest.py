"""Fixtures: scripted endpoints, and both kinds of client that call them."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from client.scripted import Asyncio, Endpoint, Face, Script, Threads, Wire


class Stage:
    """Starts endpoints and wires, and stops them at the end of the test."""

    def __init__(self) -> None:
        self.endpoints: list[Endpoint] = []
        self.wires: list[Wire] = []

    async def endpoint(self, script: Script, name: str = "a", port: int = 0) -> Endpoint:
        endpoint = Endpoint(name, script, port)
        await endpoint.server.start()
        self.endpoints.append(endpoint)
        return endpoint

    async def wire(self, address: str) -> tuple[Wire, str]:
        self.wires.append(Wire(address))
        return self.wires[-1], await self.wires[-1].open()

    async def close(self) -> None:
        for wire in self.wires:
            await wire.close()
        for endpoint in self.endpoints:
            if endpoint.ending is not None:
                await endpoint.ending
            await endpoint.server.stop(0)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    await stage.close()


@pytest.fixture(params=[Threads, Asyncio], ids=["threads", "asyncio"])
def face(request: pytest.FixtureRequest) -> Face:
    return request.param()


@pytest.fixture
async def connect(face: Face) -> AsyncIterator[Callable[..., Any]]:
    """Makes clients of the test's kind, and closes them at the end of the test."""
    clients: list[Any] = []

    def make(*addresses: str, **options: Any) -> Any:
        clients.append(face.kind(addresses, **options))
        clients[-1]._addresses._next = 0  # start at the first address, so that a test knows where a call goes
        return clients[-1]

    yield make
    for client in clients:
        await face.run(client.close)
