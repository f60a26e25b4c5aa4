"""Fixtures of the endpoint's tests: a model for all of them, and a pool for each one."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2 as httpx
import pytest
from endpoint.harness import World, make_model, world
from openai import AsyncOpenAI


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def punctual(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an endpoint finds itself late, and gives the requests that its clients left a longer grace."""
    monkeypatch.setattr("orca_endpoint.calls.delivery.GAP_SECONDS", 600.0)


@pytest.fixture
def one_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint starts one process that renders chats, and one that compiles forms, instead of two. Each imports for
    0.2 s of processor time, the most of such a test. That callers have one each, `test_chat_renderer.py` and
    `test_forms.py` say."""
    for module in ("chats", "forms"):
        monkeypatch.setattr(f"orca_endpoint.requests.{module}.COUNT", 1)


@pytest.fixture
async def orca(redis_url: str, model: Path) -> AsyncIterator[World]:
    async with world(redis_url, model) as started:
        yield started


@pytest.fixture
async def http(orca: World) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose bodies are JSON, also those that are given as bytes."""
    async with httpx.AsyncClient(base_url=orca.serving.http, headers={"content-type": "application/json"}) as client:
        yield client


@pytest.fixture
async def client(orca: World) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client, which tries nothing again."""
    async with AsyncOpenAI(base_url=f"{orca.serving.http}/v1", api_key="none", max_retries=0) as client:
        yield client
