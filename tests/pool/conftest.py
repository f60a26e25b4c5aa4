"""The servers of these tests: the embedded Valkey, and Redis where it is installed."""

import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from pool.lab import Lab
from servers import KINDS, RedisServer, redis_server


@pytest.fixture(scope="session", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """One server for all tests of a kind. Without fsync, which takes milliseconds; test_link.py runs with it."""
    with redis_server(request.param) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"CONFIG SET appendfsync no\r\n")
            assert connection.recv(64) == b"+OK\r\n"
        yield server


@pytest.fixture
async def lab(server: RedisServer) -> AsyncIterator[Lab]:
    async with Lab(server.url) as lab:
        yield lab
