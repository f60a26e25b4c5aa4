"""Fixtures of the endpoint's tests: one Redis for all tests, and a pool for each test."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from endpoint.harness import World, make_model, world
from servers import redis_server


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with redis_server() as server:
        yield server.url


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
async def orca(redis_url: str, model: Path) -> AsyncIterator[World]:
    async with world(redis_url, model) as started:
        yield started


@pytest.fixture
async def http(orca: World) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=orca.serving.http) as client:
        yield client
