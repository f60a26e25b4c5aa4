"""The HTTP door with OpenAI's own client, and with plain HTTP for what that client would not send."""

import asyncio
import json
from typing import Any

import httpx2 as httpx
import openai
import pytest
from endpoint.harness import VOCABULARY, World, encode, until
from openai import AsyncOpenAI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from orca_pool.records import Committed, Reason


async def test_a_completion(orca: World, client: AsyncOpenAI) -> None:
    ids = encode(orca, "grüße 😀 und mehr")
    async with orca.background(lambda record: ids):
        answer = await client.completions.create(model="tiny", prompt="the pool", max_tokens=len(ids), temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "grüße 😀 und mehr"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(encode(orca, "the pool"))
    assert answer.usage.completion_tokens == len(ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(ids)


async def test_a_stream(orca: World, client: AsyncOpenAI) -> None:
    ids = encode(orca, "grüße 😀 und mehr")
    async with orca.background(lambda record: ids):
        stream = await client.completions.create(
            model="tiny",
            prompt=[5, 6, 7],
            max_tokens=len(ids),
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "grüße 😀 und mehr"
    assert "\ufffd" not in "".join(chunk.choices[0].text for chunk in chunks[:-1])
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, len(ids))


async def test_tokens_that_are_there_together_are_one_chunk(orca: World, client: AsyncOpenAI) -> None:
    ids = encode(orca, "grüße 😀 und mehr")
    sending = asyncio.ensure_future(
        client.completions.create(model="tiny", prompt=[5], max_tokens=len(ids), stream=True, logprobs=1)
    )
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, ids[:2])
    stream = aiter(await sending)
    first = (await anext(stream)).choices[0]
    assert first.logprobs is not None
    assert first.logprobs.token_logprobs == [-0.5] * 2
    await orca.engine.commit(request, 2, ids[2:], Reason.LENGTH)
    rest, end = [chunk.choices[0] async for chunk in stream]
    assert first.text + rest.text + end.text == "grüße 😀 und mehr"
    assert rest.logprobs is not None
    assert len(rest.logprobs.tokens or []) == len(ids) - 2
    assert (rest.logprobs.text_offset or [])[0] == len(first.text)
    assert (rest.finish_reason, end.finish_reason) == (None, "length")


async def test_defaults_are_openais(orca: World, client: AsyncOpenAI) -> None:
    seen = []

    def script(record: Any) -> list[int]:
        seen.append(record)
        return [10] * 100

    async with orca.background(script):
        answer = await client.completions.create(model="tiny", prompt="a")
        await client.completions.create(
            model="tiny", prompt="a", top_p=0.5, seed=-3, extra_body={"top_k": 4, "ignore_eos": True}
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    first, second = seen[0].sampling, seen[1].sampling
    assert (first.temperature, first.top_p, first.top_k, list(seen[0].end_token_ids)) == (1.0, 0, 0, [0])
    assert (second.temperature, second.top_p, second.top_k, second.seed) == (1.0, 0.5, 4, 2**64 - 3)
    assert not seen[1].end_token_ids


async def test_a_stop_string_and_the_end_token(orca: World, client: AsyncOpenAI) -> None:
    ids = encode(orca, "the pool 東京 and more")
    async with orca.background(lambda record: ids):
        answer = await client.completions.create(model="tiny", prompt="a", max_tokens=len(ids), stop="東京")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("the pool ", "stop")
    async with orca.background(lambda record: [*ids, 0, 9]):
        answer = await client.completions.create(model="tiny", prompt="a", max_tokens=99, stop=["x", "yz"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("the pool 東京 and more", "stop")


async def test_several_prompts(orca: World, client: AsyncOpenAI) -> None:
    """A list of texts, or of lists of ids: one choice for each, in their order."""
    letters = {encode(orca, letter)[0]: letter for letter in "abc"}
    async with orca.background(lambda record: [record.prompt_ids[0]] * 3):
        answer = await client.completions.create(model="tiny", prompt=["a", "b", "c"], max_tokens=3)
        stream = await client.completions.create(model="tiny", prompt=[[i] for i in letters], max_tokens=3, stream=True)
        texts = ["", "", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.text for choice in answer.choices] == ["aaa", "bbb", "ccc"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert texts == [letter * 3 for letter in letters.values()]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 9)


@pytest.mark.usefixtures("punctual")
async def test_one_prompt_of_several_is_refused(orca: World, http: httpx.AsyncClient) -> None:
    """The requests of the other prompts end too."""
    sending = asyncio.create_task(http.post("/v1/completions", json={"prompt": [[5], [6]], "max_tokens": 2}))
    requests = [await orca.engine.claim() for _ in range(2)]
    await orca.pool.cancel(requests[0].request_id)
    assert (await sending).status_code == 499
    await orca.serving.quiet()
    assert await orca.engine.commit(requests[1], 0, [10]) == Committed.GONE


async def test_logprobs(orca: World, client: AsyncOpenAI) -> None:
    ids = encode(orca, "the pool")
    async with orca.background(lambda record: ids):
        answer = await client.completions.create(model="tiny", prompt="a", max_tokens=len(ids), logprobs=1)
        stream = await client.completions.create(model="tiny", prompt="a", max_tokens=len(ids), logprobs=0, stream=True)
        chunks = [chunk async for chunk in stream]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [-0.5] * len(ids)
    assert "".join(logprobs.tokens or []) == "the pool"
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [offset for part in streamed for offset in part.text_offset or []] == logprobs.text_offset


async def test_the_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    card = await client.models.retrieve("tiny")
    assert card.owned_by == "orca"
    assert (card.model_extra or {})["vocab_size"] == VOCABULARY, "for load tools that draw token ids"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-99")


@pytest.mark.usefixtures("punctual")
async def test_a_client_that_closes_its_connection(orca: World, http: httpx.AsyncClient) -> None:
    """The request ends, whether the answer was a stream or not."""
    for stream in (True, False):
        body = {"prompt": [5, 6], "max_tokens": 100, "stream": stream}
        sending = asyncio.create_task(http.post("/v1/completions", json=body))
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, [10])
        assert not sending.done()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await orca.serving.quiet()
        assert await orca.engine.commit(request, 1, [11]) == Committed.GONE


async def test_a_deadline(orca: World, http: httpx.AsyncClient) -> None:
    body = {"prompt": [5, 6], "max_tokens": 100}
    answer = await http.post("/v1/completions", json=body, headers={"X-Request-Timeout": "0.3"})
    assert answer.status_code == 504
    for wrong in ("-1", "0", "soon", "inf", "", "nan", "1e303", "1e10", "9" * 400):
        answer = await http.post("/v1/completions", json=body, headers={"X-Request-Timeout": wrong})
        assert (wrong, answer.status_code, answer.json()["error"]["param"]) == (wrong, 400, "X-Request-Timeout")


async def test_an_end_in_the_middle_of_a_stream(orca: World, client: AsyncOpenAI) -> None:
    """The last event of the stream is the error: a client must not take the part for a whole answer."""
    stream = await client.completions.create(model="tiny", prompt="a", stream=True)
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10])
    await orca.engine.commit(request, 1, [], Reason.DEADLINE)
    with pytest.raises(openai.APIError, match=r"the deadline that .* set has passed"):
        _ = [chunk async for chunk in stream]


async def test_a_request_that_is_cancelled_elsewhere(orca: World, http: httpx.AsyncClient) -> None:
    sending = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"}))
    request = await orca.engine.claim()
    await orca.pool.cancel(request.request_id)
    answer = await sending
    assert answer.status_code == 499


async def test_a_stream_that_is_cancelled_elsewhere(orca: World, client: AsyncOpenAI) -> None:
    """It ends with an error: a part of an answer that ends as "stop" would be taken for a whole one."""
    stream = await client.completions.create(model="tiny", prompt="a", stream=True)
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10])
    shown = [await anext(stream)]
    await orca.pool.cancel(request.request_id)

    async def rest() -> None:
        async for chunk in stream:
            shown.append(chunk)

    with pytest.raises(openai.APIError, match="was cancelled"):
        await rest()
    assert {chunk.choices[0].finish_reason for chunk in shown} == {None}


# body -> status, param, a part of the message
CASES: dict[str, tuple[Any, int, str | None, str]] = {
    "no prompt": ({}, 400, "prompt", "missing"),
    "empty prompt": ({"prompt": ""}, 400, "prompt", "empty"),
    "empty list": ({"prompt": []}, 400, "prompt", "empty"),
    "prompt an object": ({"prompt": {}}, 400, "prompt", "must be a string"),
    "mixed prompts": ({"prompt": ["a", 5]}, 400, "prompt[1]", "string or a list"),
    "ids with a string": ({"prompt": [5, "a"]}, 400, "prompt[1]", "token id"),
    "negative id": ({"prompt": [5, -1]}, 400, "prompt[1]", "-1"),
    "unknown id": ({"prompt": [5, 99_999]}, 400, "prompt[1]", "99999"),
    "unknown id of the second": ({"prompt": [[5], [5, 6, 99_999]]}, 400, "prompt[1][2]", "99999"),
    "enormous id": ({"prompt": [1 << 80]}, 400, "prompt[0]", "no token id"),
    "many prompts": ({"prompt": ["a"] * 2049}, 400, "prompt", "at most 2048"),
    "lone surrogate": (b'{"prompt": "\\ud800"}', 400, "prompt", "surrogate"),
    "lone surrogate of the model": (b'{"prompt": "a", "model": "\\ud800"}', 400, "model", "surrogate"),
    "lone surrogate deep": (
        b'{"prompt": "a", "metadata": {"x": [{"y": "\\udfff"}]}}',
        400,
        "metadata.x[0].y",
        "surrogate",
    ),
    "lone surrogate of a name": (b'{"prompt": "a", "metadata": {"\\udabc": 1}}', 400, "metadata", "surrogate"),
    "max_tokens 0": ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "at least 1, or 0 with echo"),
    "max_tokens negative": ({"prompt": "a", "max_tokens": -4}, 400, "max_tokens", "at least 1"),
    "max_tokens enormous": ({"prompt": "a", "max_tokens": 1 << 70}, 400, "max_tokens", "are allowed"),
    "max_tokens true": ({"prompt": "a", "max_tokens": True}, 400, "max_tokens", "an integer"),
    "max_tokens 1.5": ({"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens", "an integer"),
    "temperature negative": ({"prompt": "a", "temperature": -1}, 400, "temperature", "-1"),
    "temperature overflows": (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature", "inf"),
    "temperature a huge integer": ({"prompt": "a", "temperature": 10**400}, 400, "temperature", "large"),
    "temperature text": ({"prompt": "a", "temperature": "1"}, 400, "temperature", "a number"),
    "top_p": ({"prompt": "a", "top_p": 2}, 400, "top_p", "at most 1"),
    "top_k": ({"prompt": "a", "top_k": 0}, 400, "top_k", "at least 1"),
    "seed": ({"prompt": "a", "seed": 1 << 64}, 400, "seed", "64 bits"),
    "n 0": ({"prompt": "a", "n": 0}, 400, "n", "at least 1"),
    "n true": ({"prompt": "a", "n": True}, 400, "n", "an integer"),
    "many choices": ({"prompt": ["a", "b"], "n": 1025}, 400, "n", "1025 for each of 2 prompts are too many"),
    "best_of below n": ({"prompt": "a", "n": 3, "best_of": 2}, 400, "best_of", "at least n, which is 3"),
    "best_of streamed": ({"prompt": "a", "best_of": 2, "stream": True}, 400, "best_of", "cannot be streamed"),
    "many best_of": (
        {"prompt": "a", "best_of": 2049},
        400,
        "best_of",
        "2049 are too many; at most 2048 are allowed together",
    ),
    "copies": ({"prompt": "a" * 65536, "n": 1000}, 400, "prompt", "33554432 are allowed together"),
    "min_tokens": ({"prompt": "a", "min_tokens": -3}, 400, "min_tokens", "must be at least 0"),
    "skip_special_tokens": ({"prompt": "a", "skip_special_tokens": 1}, 400, "skip_special_tokens", "must be true"),
    "add_special_tokens": ({"prompt": "a", "add_special_tokens": False}, 400, "add_special_tokens", "must be true"),
    "echo 1": ({"prompt": "a", "echo": 1}, 400, "echo", "true or false"),
    "store 0": ({"prompt": "a", "store": 0}, 400, "store", "must be false"),
    "suffix": ({"prompt": "a", "suffix": "b"}, 400, "suffix", "no model here inserts text"),
    "presence_penalty": ({"prompt": "a", "presence_penalty": 2.5}, 400, "presence_penalty", "between -2 and 2"),
    "frequency_penalty": ({"prompt": "a", "frequency_penalty": "1"}, 400, "frequency_penalty", "a number"),
    "repetition_penalty": ({"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty", "above 0"),
    "min_p": ({"prompt": "a", "min_p": 1.5}, 400, "min_p", "between 0 and 1"),
    "logit_bias of text": ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "'x', which is no token id"),
    "logit_bias of no token": ({"prompt": "a", "logit_bias": {"9999": 1}}, 400, "logit_bias[9999]", "no token"),
    "logit_bias large": ({"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias[5]", "between -100 and 100"),
    "logit_bias many zeros": (
        {"prompt": "a", "logit_bias": {"0" * 5000 + "9" * 22: 1}},
        400,
        "logit_bias",
        "no token id",
    ),
    "logit_bias zeros, twice": (
        {"prompt": "a", "logit_bias": {"0" * 5000 + "5": 1, "5": 2}},
        400,
        "logit_bias[5]",
        "twice",
    ),
    "logit_bias 32 bits": ({"prompt": "a", "logit_bias": {str(1 << 32): 1}}, 400, "logit_bias", "no token id"),
    "logit_bias twice": ({"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, 400, "logit_bias[5]", "comes twice"),
    "logit_bias text": ({"prompt": "a", "logit_bias": {"5": "1"}}, 400, "logit_bias[5]", "a number"),
    "logprobs 21": ({"prompt": "a", "logprobs": 21}, 400, "logprobs", "at most 20; it is 21"),
    "logprobs -1": ({"prompt": "a", "logprobs": -1}, 400, "logprobs", "at least 0"),
    "logprobs true": ({"prompt": "a", "logprobs": True}, 400, "logprobs", "an integer"),
    "store": ({"prompt": "a", "store": True}, 400, "store", "must be false: nothing is stored"),
    "user": ({"prompt": "a", "user": 5}, 400, "user", "a string"),
    "metadata": ({"prompt": "a", "metadata": {"a": 5}}, 400, "metadata.a", "a string"),
    "much metadata": ({"prompt": "a", "metadata": {str(n): "" for n in range(17)}}, 400, "metadata", "at most 16"),
    "long metadata": ({"prompt": "a", "metadata": {"a": "x" * 513}}, 400, "metadata.a", "513 characters; at most 512"),
    "a long name of metadata": (
        {"prompt": "a", "metadata": {"x" * 65: ""}},
        400,
        "metadata",
        "has a name of 65 characters; at most 64 are allowed",
    ),
    "detach_grace": ({"prompt": "a", "detach_grace": -1}, 400, "detach_grace", "from 0 on"),
    "long detach_grace": ({"prompt": "a", "detach_grace": 3601}, 400, "detach_grace", "at most 3600 s"),
    "stream_options alone": ({"prompt": "a", "stream_options": {}}, 400, "stream_options", "only with stream"),
    "stream_options unknown": (
        {"prompt": "a", "stream": True, "stream_options": {"padding": True}},
        400,
        "stream_options.padding",
        "not known",
    ),
    "obfuscation": (
        {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        "stream_options.include_obfuscation",
        "must be false",
    ),
    "a name twice": (b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2}', 400, "max_tokens", "comes twice"),
    "a name twice inside": (
        b'{"prompt": "a", "stream": true, "stream_options": {"include_usage": true, "include_usage": false}}',
        400,
        "include_usage",
        "comes twice",
    ),
    "stop a number": ({"prompt": "a", "stop": 5}, 400, "stop", "a list of strings"),
    "stop kind": ({"prompt": "a", "stop": ["x", 3]}, 400, "stop[1]", "must be a string"),
    "messages": (
        {"messages": []},
        400,
        "messages",
        "is a field of chats, at /v1/chat/completions",
    ),
    "prompt kind": ({"prompt": 5}, 400, "prompt", "a string, a list of token ids, or a list of either"),
    "stop empty": ({"prompt": "a", "stop": ["x", ""]}, 400, "stop[1]", "empty"),
    "stop_token_ids": ({"prompt": "a", "stop_token_ids": [9999]}, 400, "stop_token_ids[0]", "9999"),
    "stream text": ({"prompt": "a", "stream": "yes"}, 400, "stream", "true or false"),
    "usage text": (
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}},
        400,
        "stream_options.include_usage",
        "true",
    ),
    "unknown field": ({"prompt": "a", "tools": []}, 400, "tools", "not known"),
    "another model": ({"prompt": "a", "model": "gpt-99"}, 404, "model", "gpt-99"),
    "larger than every engine": ({"prompt": [1], "max_tokens": 220}, 400, None, "the largest engine has 200"),
    "no JSON": (b"{", 400, "body", "not valid JSON"),
    "deep JSON": (b"[" * 200_000, 400, "body", "not valid JSON"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', 400, "body", "NaN"),
    "no object": (b"[]", 400, "body", "JSON object"),
    "no UTF-8": (b'{"prompt": "\xff"}', 400, "body", "UTF-8"),
    "too large": (b" " * (9 << 20), 413, None, "bytes; at most"),
}


async def test_bad_input(orca: World, http: httpx.AsyncClient) -> None:
    """Errors have OpenAI's shape, with the field in `param`. The next request works."""
    for case, (body, status, param, part) in CASES.items():
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await http.post("/v1/completions", content=raw)
        error = answer.json()["error"]
        assert (case, answer.status_code, error["param"]) == (case, status, param)
        assert part in error["message"], case
        assert error["type"]
    async with orca.background(lambda record: [10]):
        answer = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "stop": None, "n": 1})
    assert answer.status_code == 200


async def test_a_name_in_a_query(http: httpx.AsyncClient) -> None:
    """It was ignored."""
    for path in ("/v1/completions", "/tokenize", "/detokenize"):
        answer = await http.post(f"{path}?x=1", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x")
    for path in ("/v1/models", "/v1/models/m", "/version", "/openapi.json", "/docs", "/v1/completions/r"):
        answer = await http.get(f"{path}?limit=1")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit"), path
        assert answer.json()["error"]["message"].startswith("limit: is not known to Orca"), path
    assert (await http.get("/health?from=probe")).status_code == 200


async def test_paths_and_methods(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")
    base = str(http.base_url).rstrip("/")
    there_is = f"Orca serves chats, at {base}/v1/chat/completions, and completions, at {base}/v1/completions"
    sentence = f"GET /v1/nothing: there is no such path; {there_is}; {base}/docs lists all paths"
    assert answer.json()["error"]["message"] == sentence
    answer = await http.get("/v1/completions")
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")


async def answer_or_none(http: httpx.AsyncClient) -> httpx.Response | None:
    """The answer to a request; None when the door is closed."""
    try:
        return await http.post("/v1/completions", json={"prompt": "a"})
    except httpx.TransportError:
        return None


async def test_leaving(orca: World, http: httpx.AsyncClient) -> None:
    """A drain closes the door, and waits for the requests under way."""
    sending = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}))
    request = await orca.engine.claim()
    draining = asyncio.create_task(orca.serving.app.drain())
    await until(lambda: orca.serving.app.endpoint.draining)
    while (refused := await answer_or_none(http)) is not None:  # the door is about to close
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
    await orca.engine.commit(request, 0, [10], Reason.LENGTH)
    assert (await sending).status_code == 200
    await draining


async def test_a_refused_prompt_ends_the_spans_of_those_before(orca: World, http: httpx.AsyncClient) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = orca.serving.app.endpoint.telemetry
    telemetry.enabled, telemetry.tracer = True, provider.get_tracer("test")
    answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": [[5], [5, 6, 99_999]]})
    assert answer.status_code == 400
    requests = [span for span in exporter.get_finished_spans() if span.name == "orca.request"]
    for span in requests:
        assert span.attributes is not None
        assert (span.attributes["orca.reason"], span.attributes["orca.tokens"]) == ("INVALID_FIELD", 0)
    assert len(requests) == 2
