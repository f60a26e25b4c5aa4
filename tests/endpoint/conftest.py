"""Fixtures of the endpoint's tests: a model for all of them, and a pool for each one."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
import pytest_asyncio
from endpoint.harness import SLOTS, World, make_model, make_tool_model, world
from openai import AsyncOpenAI
from tool_templates import TEMPLATES


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calls are written as Hermes' models do."""
    marks = ["<tool_call>", "</tool_call>"]
    return make_tool_model(tmp_path_factory.mktemp("tools") / "tiny", TEMPLATES["hermes"], marks)


@pytest.fixture
def punctual(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an endpoint finds itself late, and gives the requests that its clients left a longer grace."""
    monkeypatch.setattr("orca_endpoint.calls.delivery.GAP_SECONDS", 600.0)


@pytest.fixture(scope="module")
def one_helper() -> Iterator[None]:
    """An endpoint starts one process that renders chats, and one that compiles forms, instead of two. Each imports for
    0.2 s of processor time, the most of such a test. That callers have one each, `test_chat_renderer.py` and
    `test_forms.py` say."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("chats", "forms"):
            patch.setattr(f"orca_endpoint.requests.{module}.COUNT", 1)
        yield


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


# For the tests of a file that disturb nothing: they run in one event loop, and share what is started in it.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # of all folders: others have parameters of that name
        ours = item.path.is_relative_to(Path(__file__).parent)
        if ours and isinstance(item, pytest.Function) and "shared" in item.fixturenames:
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest.fixture(scope="module")
def slots() -> int:
    """Of the engine; a file may have others."""
    return SLOTS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(redis_url: str, model: Path, slots: int, one_helper: None) -> AsyncIterator[World]:
    """One endpoint, with one helper of each kind."""
    async with world(redis_url, model, slots=slots) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_client(shared: World) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client of the shared endpoint, which tries nothing again."""
    async with AsyncOpenAI(base_url=f"{shared.serving.http}/v1", api_key="none", max_retries=0) as client:
        yield client
