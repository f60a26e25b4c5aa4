"""The HTTP door's listening socket when the system refuses a connection."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from logged import messages_of

from orca_endpoint.http import listener as listeners
from orca_endpoint.http.connection import ConnectionLimits, Place
from orca_endpoint.http.listener import Listener


class Refusing(socket.socket):
    """A listening socket whose first connections fail: some of these errors cannot be had at will."""

    def __init__(self, *errors: int) -> None:
        super().__init__()
        self.errors = list(errors)

    def accept(self) -> tuple[socket.socket, Any]:
        if self.errors:
            raise OSError(self.errors.pop(), "refused by the test")
        return super().accept()


class Greeting(asyncio.Protocol):
    """Says hello and leaves."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(b"hello")
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.leave()


async def greeted(listening: socket.socket) -> bytes:
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


@pytest.fixture
async def refusing() -> AsyncIterator[Refusing]:
    with Refusing() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening


def listener(listening: socket.socket) -> Listener:
    make: Any = Greeting
    seconds: dict[str, Any] = {"header_seconds": 10.0, "body_seconds": 10.0, "write_timeout": 10.0}
    return Listener(
        listening, ConnectionLimits(connections=8, peer_connections=8, header_bytes=100, **seconds), make, None
    )


@pytest.mark.parametrize(
    "error", [errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ECONNABORTED], ids=errno.errorcode.get
)
async def test_a_connection_that_failed_stops_nobody(refusing: Refusing, error: int) -> None:
    """A firewall's refusal, or what the network had for this connection alone."""
    refusing.errors = [error] * 3
    door = listener(refusing)
    assert await greeted(refusing) == b"hello"
    assert door._pause is None
    assert not refusing.errors
    await door.close()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM], ids=errno.errorcode.get)
async def test_without_means_the_door_pauses(
    refusing: Refusing, error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection waits in the queue of the system, and `accept` would fail again at once."""
    monkeypatch.setattr(listeners, "PAUSE_SECONDS", 0.01)
    refusing.errors = [error]
    door = listener(refusing)
    assert await greeted(refusing) == b"hello"
    assert door._pause is not None
    assert messages_of(caplog, listeners.__name__) == ["no connection can be accepted"]
    await door.close()
