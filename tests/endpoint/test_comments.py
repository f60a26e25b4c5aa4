"""A stream that waits gets comments, so that nothing on its way ends it."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2 as httpx
import pytest
from endpoint.harness import World, world
from openai import AsyncOpenAI

from orca_pool.records import Reason

COMMENT, END = ": waiting", "data: [DONE]"
OFF = {"X-Stream-Comments": "off"}
BODY = {"model": "tiny", "prompt": [5], "max_tokens": 2, "stream": True}


@pytest.fixture
async def commenting(redis_url: str, model: Path) -> AsyncIterator[World]:
    """An endpoint whose streams get a comment after 20 ms."""
    async with world(redis_url, model, comment_seconds=0.02) as started:
        yield started


@pytest.fixture
async def http(commenting: World) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=commenting.serving.http) as client:
        yield client


async def lines_to(lines: AsyncIterator[str], wanted: str, count: int = 1) -> list[str]:
    """The lines of a stream, until the last of `count` that begin so."""
    found = list[str]()
    while sum(line.startswith(wanted) for line in found) < count:
        found.append(await anext(lines))
    return found


async def test_while_it_waits_and_between_its_tokens(commenting: World, http: httpx.AsyncClient) -> None:
    """Comments are whole, and stand between events. The stream ends as it would without them."""
    async with http.stream("POST", "/v1/completions", json=BODY, headers={"X-Stream-Ids": "on"}) as answer:
        lines = answer.aiter_lines()
        assert set(await lines_to(lines, COMMENT, 3)) == {COMMENT, ""}
        request = await commenting.engine.claim()
        await commenting.engine.commit(request, 0, [10])
        between = [*await lines_to(lines, "data: {"), *await lines_to(lines, COMMENT, 3)]
        assert sum(line.startswith("data: {") for line in between) == 1
        await commenting.engine.commit(request, 1, [11], Reason.LENGTH)
        rest = await lines_to(lines, END)
        assert [line async for line in lines] == [""], "no comment behind the end"
    plain = [line for line in (*between, *rest) if line not in (COMMENT, "")]
    assert [line.partition(":")[0] for line in plain] == ["id", "data"] * ((len(plain) - 1) // 2) + ["data"]


async def test_of_a_stream_that_is_taken_up(commenting: World, http: httpx.AsyncClient) -> None:
    async with http.stream("POST", "/v1/completions", json={**BODY, "detach_grace": 60}) as answer:
        name = answer.headers["x-orca-request"]
    async with http.stream("GET", f"/v1/completions/{name}") as answer:
        assert set(await lines_to(answer.aiter_lines(), COMMENT, 2)) == {COMMENT, ""}


async def test_a_request_may_want_none(commenting: World, http: httpx.AsyncClient) -> None:
    """Beside it another one gets five."""
    async with (
        http.stream("POST", "/v1/completions", json=BODY, headers=OFF) as silent,
        http.stream("POST", "/v1/completions", json=BODY) as answer,
    ):
        first, second = await commenting.engine.claim(), await commenting.engine.claim()
        await lines_to(answer.aiter_lines(), COMMENT, 5)
        for request in (first, second):
            await commenting.engine.commit(request, 0, [10, 11], Reason.LENGTH)
        lines = [line async for line in silent.aiter_lines()]
    assert COMMENT not in lines
    assert END in lines
    for kind in ("no", "OFF"):
        refused = await http.post("/v1/completions", json=BODY, headers={"X-Stream-Comments": kind})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "X-Stream-Comments"


async def test_openais_client_reads_over_them(commenting: World, http: httpx.AsyncClient) -> None:
    """Several choices, too, whose events come from several calls. A stream beside it shows that comments came."""
    base = f"{commenting.serving.http}/v1"
    async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model="tiny", prompt=[5], max_tokens=1, n=2, stream=True)
        claimed = [await commenting.engine.claim() for _ in range(2)]
        async with http.stream("POST", "/v1/completions", json=BODY) as beside:
            await lines_to(beside.aiter_lines(), COMMENT, 3)
        for request in claimed:
            await commenting.engine.answer(request, [10])
        chunks = [chunk async for chunk in stream]
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1}


async def test_a_setting_of_0_turns_them_off(redis_url: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        raise AssertionError("a comment is waited for")

    monkeypatch.setattr("orca_endpoint.http.exchange.Answer._comment", never)
    async with (
        world(redis_url, model, comment_seconds=0) as orca,
        httpx.AsyncClient(base_url=orca.serving.http) as http,
        http.stream("POST", "/v1/completions", json=BODY) as answer,
    ):
        await orca.engine.answer(await orca.engine.claim(), [10, 11])
        assert END in [line async for line in answer.aiter_lines()]


async def test_an_error_of_a_stream_is_its_end(commenting: World, http: httpx.AsyncClient) -> None:
    async with http.stream("POST", "/v1/completions", json=BODY) as answer:
        reader = answer.aiter_lines()
        lines = await lines_to(reader, COMMENT)
        await commenting.engine.commit(await commenting.engine.claim(), 0, [], Reason.NOT_FINITE)
        lines += [line async for line in reader]
    assert [line.startswith('data: {"error"') for line in lines if line not in (COMMENT, "")] == [True]
    assert COMMENT not in lines[lines.index(next(line for line in lines if line.startswith("data: "))) :]
