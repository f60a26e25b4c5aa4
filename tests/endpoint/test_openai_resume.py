"""A completion's stream is taken up at another endpoint, or after a break, without a hole and without a repetition."""

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from endpoint.harness import World, serving, until, world
from servers import redis_server

from orca_pool.records import Reason


class Events:
    """Server-sent events as they come: (id, data)."""

    def __init__(self, answer: httpx.Response) -> None:
        self._lines = answer.aiter_lines()

    async def next(self) -> tuple[str | None, Any]:
        number, data = None, None
        async for line in self._lines:
            if line.startswith("id: "):
                number = line[4:]
            elif line.startswith("data: "):
                data = line[6:]
            elif not line:
                break
        assert data is not None
        return number, data if data == "[DONE]" else json.loads(data)

    async def rest(self) -> list[tuple[str | None, Any]]:
        found = [await self.next()]
        while found[-1][1] != "[DONE]":
            found.append(await self.next())
        return found[:-1]


def text_of(events: list[tuple[str | None, Any]]) -> str:
    return "".join(data["choices"][0]["text"] for _, data in events)


async def test_at_another_endpoint(orca: World, http: httpx.AsyncClient) -> None:
    """The id of each event says how far the client is; EventSource sends the last one by itself."""
    assert orca.serving.app.vocabulary is not None
    ids = orca.serving.app.vocabulary.encode("the pool 東京 😺 holds")
    body = {"prompt": "a", "max_tokens": len(ids), "stream": True, "logprobs": 2, "detach_grace": 30}
    async with (
        serving(orca.redis_url, orca.name, orca.model) as second,
        httpx.AsyncClient(base_url=second.http) as other,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        await until(lambda: second.app.endpoint.not_ready() is None)
        events = Events(answer)
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, ids[:3])
        number, first = await events.next()
        assert number == "3"
        assert first["id"] == request.request_id
        path = f"/v1/completions/{first['id']}"
        async with other.stream("GET", path, params={"from": 1}, headers={"Last-Event-ID": number}) as resumed:
            assert resumed.headers["content-type"].startswith("text/event-stream")
            again = Events(resumed)
            _, aborted = await events.next()
            assert "taken over" in aborted["error"]["message"]
            await orca.engine.commit(request, 3, ids[3:], Reason.LENGTH)
            rest = await again.rest()
        assert first["choices"][0]["text"] + text_of(rest) == "the pool 東京 😺 holds"
        assert rest[-1][0] == f"{len(ids)}.2"
        assert rest[-1][1]["choices"][0]["finish_reason"] == "length"
        shown = rest[0][1]["choices"][0]["logprobs"]
        assert len(shown["top_logprobs"][0]) == 2
        whole = (await other.get(path, params={"from": 0, "include_usage": "true"})).text
        assert whole.endswith('"total_tokens":' + whole.rsplit('"total_tokens":', 1)[1])
        assert '"usage": {' in whole.replace('"usage":{', '"usage": {')


async def test_after_the_client_lost_its_connection(orca: World, http: httpx.AsyncClient) -> None:
    """With detach_grace the request lives on until somebody takes it up."""
    body = {"prompt": [5], "max_tokens": 2, "stream": True, "detach_grace": 60}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, [10])
        _, first = await Events(answer).next()
    await orca.serving.quiet()
    await orca.engine.commit(request, 1, [11], Reason.LENGTH)
    async with http.stream("GET", f"/v1/completions/{first['id']}?from=1") as answer:
        rest = await Events(answer).rest()
    assert text_of(rest) == orca.serving.app.endpoint.spell(11)


async def test_in_an_outage_a_browser_is_asked_to_come_again(model: Path) -> None:
    """Its EventSource comes back after a stream that has ended, and never after a 503."""
    with redis_server() as server:
        async with (
            world(server.url, model, pool_patience=0.1) as own,
            httpx.AsyncClient(base_url=own.serving.http, timeout=60) as http,
        ):
            server.freeze()
            try:
                answers = [await http.get("/v1/completions/a", headers=h) for h in ({}, {"Last-Event-ID": "1"})]
            finally:
                server.thaw()
    assert [answer.status_code for answer in answers] == [503, 200]
    assert answers[1].headers["content-type"].startswith("text/event-stream")
    assert answers[1].text == "id: 1\nretry: 1000\n\n"


async def test_an_end_that_was_seen_does_not_come_again(orca: World, http: httpx.AsyncClient) -> None:
    """A client that saw the text that was held back, and not [DONE], got it again: `**av` became `**av*av`."""
    assert orca.serving.app.vocabulary is not None
    ids = orca.serving.app.vocabulary.encode("the pool")
    body = {"prompt": [5], "max_tokens": len(ids), "stop": ["poolside"], "stream": True, "detach_grace": 60}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        request = await orca.engine.claim()
        assert answer.headers["x-orca-request"] == request.request_id, "before the first token"
        await orca.engine.commit(request, 0, ids, Reason.LENGTH)
        events = await Events(answer).rest()
    (seen, _), (end, last) = events[-2:]
    assert (seen, end, last["choices"][0]["text"]) == (str(len(ids)), f"{len(ids)}.2", "pool")
    for number, text in ((seen, "pool"), (end, None)):
        headers = {"Last-Event-ID": str(number)}
        async with http.stream("GET", f"/v1/completions/{request.request_id}", headers=headers) as again:
            came = Events(again)
            if text is not None:
                assert (await came.next())[1]["choices"][0]["text"] == text
            assert (await came.next())[1] == "[DONE]"


@pytest.mark.parametrize("echo", [False, True])
async def test_offsets_go_on_where_they_were(orca: World, http: httpx.AsyncClient, echo: bool) -> None:
    assert orca.serving.app.vocabulary is not None
    ids = orca.serving.app.vocabulary.encode("the pool 東京 😺 holds")
    body = {"prompt": "café", "max_tokens": len(ids), "stream": True, "logprobs": 1, "echo": echo, "detach_grace": 60}
    async with orca.background(lambda record: ids), http.stream("POST", "/v1/completions", json=body) as answer:
        name, whole = answer.headers["x-orca-request"], offsets_of(await Events(answer).rest())
    generated = whole[-len(ids) :]
    assert generated[0] == (len("café") if echo else 0)
    for seen in range(len(ids)):
        async with http.stream("GET", f"/v1/completions/{name}", params={"from": seen}) as answer:
            assert offsets_of(await Events(answer).rest()) == generated[seen:], seen


def offsets_of(events: list[tuple[str | None, Any]]) -> list[int]:
    logprobs = [data["choices"][0]["logprobs"] for _, data in events]
    return [offset for part in logprobs if part is not None for offset in part["text_offset"]]


WANTED: dict[str, tuple[dict[str, Any], dict[str, str], bool]] = {  # more of a body, headers, whether events have ids
    "nothing": ({}, {}, False),
    "a header": ({}, {"X-Stream-Ids": "on"}, True),
    "a request that lives on": ({"detach_grace": 5}, {}, True),
    "but not": ({"detach_grace": 5}, {"X-Stream-Ids": "off"}, False),
    "a browser's": ({}, {"Last-Event-ID": ""}, True),
    "several choices": ({"n": 2, "detach_grace": 5}, {}, False),
}


async def test_which_streams_have_ids(orca: World, http: httpx.AsyncClient) -> None:
    """vLLM's bench, SGLang's and others read each line of an event as data."""
    await check_ids(orca, http, "/v1/completions", {"prompt": [5, 6]})


async def check_ids(orca: World, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    async with orca.background(lambda record: [10, 11]):
        for case, (more, headers, has) in WANTED.items():
            asked = {**body, "max_tokens": 2, "stream": True, **more}
            answer = await http.post(path, json=asked, headers=headers)
            lines = [line for line in answer.text.splitlines() if line]
            assert (case, lines[-1]) == (case, "data: [DONE]")
            assert ("id: 2.2" in lines) == has, case
            assert all(line.startswith("data: ") for line in lines) != has, case
    answer = await http.post(path, json=body, headers={"X-Stream-Ids": "yes"})
    assert answer.json()["error"]["param"] == "X-Stream-Ids"


CASES = {
    "an unknown id": ("/v1/completions/cmpl-nobody", {}, 404, None),
    "a bad id": ("/v1/completions/a%20b", {}, 400, "request_id"),
    "from": ("/v1/completions/a?from=-1", {}, 400, "from"),
    "a large from": ("/v1/completions/a?from=99999999999999999999", {}, 400, "from"),
    "an unknown name": ("/v1/completions/a?form=1", {}, 400, "form"),
    "a name twice": ("/v1/completions/a?from=1&from=2", {}, 400, "from"),
    "usage": ("/v1/completions/a?include_usage=yes", {}, 400, "include_usage"),
    "no such end": ("/v1/completions/a?from=1.3", {}, 400, "from"),
    "an end twice": ("/v1/completions/a?from=1.1.1", {}, 400, "from"),
    "Last-Event-ID": ("/v1/completions/a", {"Last-Event-ID": "x"}, 400, "Last-Event-ID"),
}


async def test_an_unknown_id_after_some_tokens(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a status of 500 that told of the pool and of from_index."""
    monkeypatch.setattr("orca_endpoint.calls.call.HEALING", 0.1)
    answer = await http.get("/v1/completions/nobody?from=1")
    assert answer.status_code == 404
    sentence = "request nobody: it is not known; it ended too long ago, was lost, or never was"
    assert answer.json()["error"]["message"] == sentence


async def test_more_tokens_than_there_are(
    orca: World, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request that runs and of one that has ended: the number is the client's, and was a status of 500."""
    monkeypatch.setattr("orca_endpoint.calls.call.HEALING", 0.1)
    body = {"prompt": "a", "max_tokens": 8, "stream": True, "detach_grace": 30}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, [5, 6])
        await Events(answer).next()
    path = f"/v1/completions/{request.request_id}"
    for end in (None, Reason.LENGTH):
        if end is not None:
            await orca.engine.commit(request, 2, [7], end)
        by_header = {"Last-Event-ID": "9.1"}
        for field, refused in (
            ("from", await http.get(path, params={"from": 9})),
            ("Last-Event-ID", await http.get(path, headers=by_header)),
        ):
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, field)
            assert error["message"] == f"{field}: is 9, and the answer has fewer tokens"


async def test_bad_input(http: httpx.AsyncClient) -> None:
    for case, (path, headers, status, param) in CASES.items():
        answer = await http.get(path, headers=headers)
        assert (case, answer.status_code, answer.json()["error"]["param"]) == (case, status, param)
    answer = await http.get("/v1/completions/a?form=1")
    assert answer.json()["error"]["message"] == "form: is not known to Orca; did you mean from?"
