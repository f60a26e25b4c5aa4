"""Chats over HTTP: a conversation becomes a prompt by the model's own template; OpenAI's client reads the answer."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import grpc
import httpx2 as httpx
import pytest
import pytest_asyncio
from endpoint.harness import POSITIONS, World, field_of, generation, make_model, serving, until, world
from endpoint.test_openai_resume import Events, check_ids
from google.protobuf.message import Message
from openai import AsyncOpenAI, BadRequestError
from transformers import GenerationConfig

from orca.v1 import orca_pb2 as pb
from orca.v1.pool_pb2 import PoolRequest
from orca_common.errors import FailedPrecondition
from orca_endpoint.http.exchange import EVENT_ID
from orca_endpoint.openai.chat import request as chat_request
from orca_endpoint.openai.generations import AT_ONCE
from orca_endpoint.requests.defaults import (
    FOLLOWED,
    NEUTRAL,
    NO_TOKENS,
    READ,
    UNKNOWN_HERE,
    Defaults,
    not_followed,
    read_defaults,
)
from orca_pool.records import Reason

pytestmark = pytest.mark.usefixtures("one_helper")

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>"
    "{% if message.name %}{{ message.name }}: {% endif %}{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if shout is defined %}{{ shout | tojson }}{% endif %}{% endif %}"
)
GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
USER: Any = {"role": "user", "content": "the pool"}


def make_chat_model(
    folder: Path, template: str | None = TEMPLATE, positions: int = POSITIONS, **generation: Any
) -> Path:
    """The model of `make_model`, which begins every prompt with <|end|>, with a chat template."""
    make_model(folder, positions=positions)
    path = folder / "tokenizer.json"
    parts = json.loads(path.read_text())
    parts["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
    }
    path.write_text(json.dumps(parts))
    config = {"bos_token": "<|end|>", **({} if template is None else {"chat_template": template})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("chat") / "tiny")


@pytest.fixture
def orca(shared: World) -> World:
    return shared


@pytest.fixture
def client(shared_client: AsyncOpenAI) -> AsyncOpenAI:
    return shared_client


@pytest_asyncio.fixture(loop_scope="module")
async def http(orca: World) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=orca.serving.http) as client:
        yield client


def encode(orca: World, text: str, special: bool = False) -> list[int]:
    assert orca.serving.app.vocabulary is not None
    return orca.serving.app.vocabulary.encode(text, special)


class Recorder:
    """Answers each request with the same tokens, and keeps the requests."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self.records = ids, list[PoolRequest]()

    def __call__(self, record: PoolRequest) -> Sequence[int]:
        self.records.append(record)
        return self._ids


async def test_a_chat(orca: World, client: AsyncOpenAI) -> None:
    """The prompt is the template's text, with its own special token once; the answer is the assistant's."""
    script = Recorder(encode(orca, "holds 東京"))
    messages: list[Any] = [{"role": "system", "content": "naïve"}, USER]
    async with orca.background(script):
        answer = await client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=64)
    text = "<|end|><system>naïve\n<user>the pool\n<assistant>"
    assert list(script.records[0].prompt_ids) == encode(orca, text)
    assert list(script.records[0].prompt_ids).count(0) == 1, "the tokenizer would put one more before a prompt"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", "holds 東京", None)
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert answer.object == "chat.completion"
    assert script.records[0].request_id == answer.id
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(encode(orca, text))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(encode(orca, "holds 東京"))


async def test_many_choices_are_made_in_several_turns(
    orca: World, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copies all messages: 128 copies of a body of 64 KiB held the loop for 8 ms and more."""
    loop, copied = asyncio.get_running_loop(), chat_request.generation
    turns, now = list[int](), Counter[str]()

    def made(common: pb.GenerateRequest, k: int) -> pb.GenerateRequest:
        if not now["made"]:
            loop.call_soon(lambda: turns.append(now.pop("made")))
        now["made"] += 1
        return copied(common, k)

    monkeypatch.setattr(chat_request, "generation", made)
    async with orca.background(lambda record: [10]):
        answer = await client.chat.completions.create(model="tiny", messages=[USER], n=60, max_tokens=1)
    assert [choice.index for choice in answer.choices] == list(range(60))
    assert sum(turns) >= 60
    assert max(turns) <= 2 * AT_ONCE, turns


async def test_a_streamed_chat(orca: World, client: AsyncOpenAI) -> None:
    """The chunks have OpenAI's form: the role first, then text, then the reason, then the usage."""
    ids = encode(orca, "holds 😀 every")
    async with orca.background(Recorder([*ids, 0])):
        stream = await client.chat.completions.create(
            model="tiny", messages=[USER], max_tokens=64, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    *parts, last = chunks
    first, *texts, end = [chunk.choices[0] for chunk in parts]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert "".join(text.delta.content or "" for text in texts) == "holds 😀 every"
    assert {text.delta.role for text in texts} == {None}
    assert {one.finish_reason for one in (first, *texts)} == {None}
    assert (end.finish_reason, end.delta.content) == ("stop", None)
    assert all(chunk.usage is None for chunk in parts)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(ids) + 1


async def test_a_stop_string_that_comes_in_parts_is_no_part_of_the_text(orca: World, client: AsyncOpenAI) -> None:
    async with orca.background(Recorder(encode(orca, "the pool holds"))):
        stream = await client.chat.completions.create(
            model="tiny", messages=[USER], max_tokens=64, stream=True, stop=["l holds", "l holz"]
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "the poo"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_text_that_was_held_back_comes_before_the_end(orca: World, client: AsyncOpenAI) -> None:
    """The end of the answer looks like the beginning of a stop string, and a character stays unfinished."""
    ids = [*encode(orca, "the pool"), encode(orca, "😺")[0]]
    async with orca.background(Recorder(ids)):
        stream = await client.chat.completions.create(
            model="tiny", messages=[USER], max_tokens=len(ids), stream=True, stop="pool holds"
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "the pool\ufffd"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]


async def test_several_choices_render_and_tokenize_once(
    orca: World, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary, seen = orca.serving.app.vocabulary, list[str]()
    assert vocabulary is not None
    plain = vocabulary.encode

    def counting(text: str, special: bool = True) -> list[int]:
        seen.append(text)
        return plain(text, special)

    monkeypatch.setattr(vocabulary, "encode", counting)
    script = Recorder([10, 11])
    async with orca.background(script):
        answer = await client.chat.completions.create(model="tiny", messages=[USER], n=3, max_tokens=2, seed=7)
    assert seen == ["<|end|><user>the pool\n<assistant>"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({record.sampling.seed for record in script.records}) == 3
    assert len({tuple(record.prompt_ids) for record in script.records}) == 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(orca: World, client: AsyncOpenAI, stream: bool) -> None:
    """Each token with its bytes, those of a part of a character too."""
    ids, seen = encode(orca, "the 😺"), list[Any]()
    async with orca.background(Recorder(ids)):
        asked: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": len(ids)}
        asked |= {"logprobs": True, "top_logprobs": 2, "stream": stream}
        answer: Any = await client.chat.completions.create(**asked)
        if stream:
            async for chunk in answer:
                if chunk.choices[0].logprobs is not None:
                    seen += chunk.choices[0].logprobs.content
        else:
            seen += answer.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in seen).decode() == "the 😺"
    assert {one.logprob for one in seen} == {-0.5}
    assert [len(one.top_logprobs) for one in seen] == [2] * len(ids)
    assert [top.logprob for top in seen[0].top_logprobs] == [-0.5, -1.5]
    assert seen[0].top_logprobs[0].token == seen[0].token
    partial = [one for one in seen if one.token.startswith("bytes:")]
    assert partial, "this character has no token of its own"
    assert partial[0].token == "bytes:" + "".join(f"\\x{byte:02x}" for byte in partial[0].bytes)


async def test_messages_as_clients_write_them(orca: World, client: AsyncOpenAI) -> None:
    """Parts of text, names, a message of an answer given back, developers, variables for the template."""
    script = Recorder(encode(orca, "b"))
    async with orca.background(script):
        answer = await client.chat.completions.create(model="tiny", messages=[USER], max_tokens=1)
        messages: list[Any] = [
            {"role": "developer", "content": "be brief", "name": "Ann"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            answer.choices[0].message.model_dump(),
            {"role": "tool", "content": "4", "tool_call_id": "call-1"},
        ]
        await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=1, extra_body={"chat_template_kwargs": {"shout": {"b": "é<"}}}
        )
    text = '<|end|><system>Ann: be brief\n<user>a\nb\n<assistant>b\n<tool>4\n<assistant>{"b": "é<"}'
    assert list(script.records[1].prompt_ids) == encode(orca, text)


async def test_the_length_of_an_answer(orca: World, client: AsyncOpenAI, redis_url: str, model: Path) -> None:
    """Without a word from the request: the setting, or what the engines have room for."""
    script = Recorder([10])
    prompt = len(encode(orca, "<|end|><user>the pool\n<assistant>"))
    async with orca.background(script):
        await client.chat.completions.create(model="tiny", messages=[USER])
        async with (
            serving(redis_url, orca.name, model, chat_tokens=7) as other,
            AsyncOpenAI(base_url=f"{other.http}/v1", api_key="none", max_retries=0) as short,
        ):
            await short.chat.completions.create(model="tiny", messages=[USER])
        await client.chat.completions.create(model="tiny", messages=[USER], max_completion_tokens=9, max_tokens=9)
    assert [record.max_new_tokens for record in script.records] == [200 - prompt, 7, 9]


async def test_values_that_change_nothing(orca: World, http: httpx.AsyncClient) -> None:
    same = {"skip_special_tokens": True, "min_tokens": 0, "service_tier": "default", "reasoning_effort": "none"}
    of_chats = same | {"prompt_cache_key": "a", "add_special_tokens": False}
    of_completions = {"add_special_tokens": True, "skip_special_tokens": True, "min_tokens": 0}
    async with orca.background(lambda record: [10]):
        for path, body in (
            ("chat/completions", {"messages": [USER], **of_chats}),
            ("completions", {"prompt": "a", **of_completions}),
        ):
            answer = await http.post(f"/v1/{path}", json={**body, "max_tokens": 1})
            assert answer.status_code == 200, answer.text


async def test_the_least_length_and_special_tokens(orca: World, http: httpx.AsyncClient) -> None:
    """vLLM's fields. The token that ends an answer has no text."""
    script = Recorder([*encode(orca, "a"), 0, *encode(orca, "b"), 7])
    asked = {"messages": [USER], "max_tokens": 8, "skip_special_tokens": False, "stop_token_ids": [7]}
    async with orca.background(script):
        answer = await http.post("/v1/chat/completions", json={**asked, "min_tokens": 3})
        await http.post("/v1/chat/completions", json={**asked, "ignore_eos": True, "min_tokens": 2, "stream": True})
        shown = await http.post("/v1/chat/completions", json={**asked, "ignore_eos": True})
    first, second, third = script.records
    for record, least, ends in ((first, 3, {0, 7}), (second, 2, {7})):
        assert record.sampling.not_before.min_new_tokens == least
        assert list(record.sampling.not_before.token_ids) == list(record.end_token_ids)
        assert ends <= {*record.end_token_ids}
    assert 0 not in second.end_token_ids
    assert not third.sampling.HasField("not_before")
    assert answer.json()["choices"][0]["message"]["content"] == "a"
    plain = orca.serving.app.endpoint.spell(7)
    assert shown.json()["choices"][0]["message"]["content"] == f"a<|end|>b{plain}"
    for more, part in (
        ({"min_tokens": 9}, "at most 8 tokens"),
        ({"min_tokens": -1}, "at least 0"),
        ({"min_tokens": 1, "stop": "a"}, "stop strings"),
        ({"min_tokens": 1, "response_format": {"type": "json_object"}}, "a form"),
    ):
        refused = await http.post("/v1/chat/completions", json={**asked, **more})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens"), refused.text
        assert part in refused.json()["error"]["message"]


async def test_an_answer_may_be_as_long_as_the_context(redis_url: str, tmp_path: Path) -> None:
    """Clients that write code send no max_tokens: 1,024 cut it."""
    script, model = Recorder([10]), make_chat_model(tmp_path / "long", positions=4096)
    async with (
        world(redis_url, model, slots=8192) as orca,
        AsyncOpenAI(base_url=f"{orca.serving.http}/v1", api_key="none", max_retries=0) as client,
        orca.background(script),
    ):
        await client.chat.completions.create(model="long", messages=[USER])
    (record,) = script.records
    assert record.max_new_tokens == 4096 - len(record.prompt_ids)


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no messages": ({"messages": None}, "messages", "is missing"),
    "empty": ({"messages": []}, "messages", "at least one"),
    "no object": ({"messages": ["a"]}, "messages[0]", "an object"),
    "no role": ({"messages": [{"content": "a"}]}, "messages[0].role", "is missing"),
    "role": ({"messages": [USER, {"role": "king", "content": "a"}]}, "messages[1].role", "'king'"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    "content": ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "a string or a list"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "only 'text'",
    ),
    "part": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "missing"),
    "part's member": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "image_url": "x"}]}]},
        "messages[0].content[0].image_url",
        "is not known",
    ),
    "surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
    "member": ({"messages": [USER | {"weight": 1}]}, "messages[0].weight", "is not known"),
    "call id": ({"messages": [USER | {"tool_call_id": "a"}]}, "messages[0].tool_call_id", "is not known"),
    "calls": (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls",
        "knows no calls",
    ),
    "template": ({"chat_template": "x"}, "chat_template", "the model's own"),
    "template in kwargs": (
        {"chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_kwargs.chat_template",
        "the model's own",
    ),
    "kwargs": ({"chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
    "format": ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'; it may be text, json_object,"),
    "no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "is missing",
    ),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "b"}}}},
        "response_format.json_schema.schema.type",
        "b",
    ),
    "json": (
        {"response_format": {"type": "json_object"}, "ignore_eos": True},
        "ignore_eos",
        "must be false with response_format",
    ),
    "tools": ({"tools": [{"type": "function"}]}, "tools", "takes no tools"),
    "tool choice": ({"tool_choice": "auto"}, "tool_choice", "only with tools"),
    "functions": ({"functions": [{"name": "f"}]}, "functions", "the older name of `tools`"),
    "two lengths": ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "max_completion_tokens is 4"),
    "no length": ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    "long": ({"max_tokens": 1000}, "max_tokens", "positions"),
    "top alone": ({"top_logprobs": 2}, "top_logprobs", "only with logprobs"),
    "top": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    "n": ({"n": 129}, "n", "between 1 and 128; it"),
    "copies": ({"n": 128, "messages": [USER | {"content": "a" * 300000}]}, "n", "allowed together"),
    "service_tier": ({"service_tier": "scale"}, "service_tier", '"auto" or "default" or "flex" or "priority"'),
    "priority": ({"priority": "first"}, "priority", "urgent or high or normal or low; it is first"),
    "two classes": ({"priority": "low", "service_tier": "priority"}, "service_tier", "which is low"),
    "prompt": ({"prompt": "a"}, "prompt", "a chat has messages"),
    "unknown": ({"messagez": []}, "messagez", "messages"),
    "temperature": ({"temperature": -1}, "temperature", "between 0 and 100"),
    "long prompt": ({"messages": [{"role": "user", "content": "q " * 400}]}, "messages", "positions"),
}


@pytest.mark.parametrize("case", BAD)
async def test_what_is_refused(client: AsyncOpenAI, case: str) -> None:
    """By the caller's own name of the field, and never ignored."""
    changes, param, part = BAD[case]
    raw = json.dumps({"model": "tiny", "messages": [USER], **changes})
    answer = await post(client, raw)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert part in error["message"]


async def post(client: AsyncOpenAI, raw: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=str(client.base_url)) as http:
        return await http.post("/chat/completions", content=raw.encode(), headers={"content-type": "application/json"})


async def test_the_template_may_refuse(redis_url: str, tmp_path: Path) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{% if long is defined %}{% for i in range(2000) %}{{ messages[0].content * 1000 }}{% endfor %}{% endif %}"
        "{{ messages[0].lines.count }}"
    )
    async with (
        world(redis_url, make_chat_model(tmp_path / "strict", template), max_prompt_bytes=5000) as orca,
        AsyncOpenAI(base_url=f"{orca.serving.http}/v1", api_key="none", max_retries=0) as client,
    ):
        cases: dict[str, Any] = {
            "no system message": {"messages": [{"role": "system", "content": "a"}]},
            "more than 5000 characters": {"messages": [USER], "extra_body": {"chat_template_kwargs": {"long": 1}}},
            "UndefinedError": {"messages": [USER]},
        }
        for part, fields in cases.items():
            with pytest.raises(BadRequestError, match=part) as refused:
                await client.chat.completions.create(model="strict", **fields)
            assert refused.value.param == "messages"


async def test_a_model_without_a_template(redis_url: str, tmp_path: Path) -> None:
    async with (
        world(redis_url, make_chat_model(tmp_path / "base", None)) as orca,
        AsyncOpenAI(base_url=f"{orca.serving.http}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(BadRequestError, match="this model has no chat template") as refused:
            await client.chat.completions.create(model="base", messages=[{"role": "user", "content": "a"}])
    assert refused.value.param == "messages"


async def test_a_chat_goes_on_at_another_endpoint(orca: World, http: httpx.AsyncClient) -> None:
    """The id of each event says how far the client is. The role comes once, the text without a hole."""
    ids = encode(orca, "the pool 東京 😺 holds")
    body = {"messages": [USER], "max_tokens": len(ids), "stream": True, "logprobs": True, "detach_grace": 30}
    async with (
        serving(orca.redis_url, orca.name, orca.model) as second,
        httpx.AsyncClient(base_url=second.http) as other,
        http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        await until(lambda: second.app.endpoint.not_ready() is None)
        events = Events(answer)
        request = await orca.engine.claim()
        number, role = await events.next()
        assert (number, role["choices"][0]["delta"]) == ("0", {"role": "assistant", "content": ""})
        await orca.engine.commit(request, 0, ids[:3])
        number, first = await events.next()
        assert (number, first["id"]) == ("3", request.request_id)
        path = f"/v1/chat/completions/{first['id']}"
        async with other.stream("GET", path, params={"include_usage": "true"}, headers={EVENT_ID: "3"}) as resumed:
            rest = Events(resumed)
            await orca.engine.commit(request, 3, ids[3:], Reason.LENGTH)
            found = [data for _, data in await rest.rest()]
    usage = found.pop()["usage"]
    deltas = [one["choices"][0]["delta"] for one in found]
    assert all("role" not in delta for delta in deltas)
    whole = first["choices"][0]["delta"]["content"] + "".join(delta.get("content", "") for delta in deltas)
    assert whole == "the pool 東京 😺 holds"
    scored = [token for one in found for token in (one["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [bytes(token["bytes"]) for token in scored] == [orca.serving.app.endpoint.token_bytes(i) for i in ids[3:]]
    assert usage["completion_tokens"] == len(ids)


async def test_which_streams_have_ids(orca: World, http: httpx.AsyncClient) -> None:
    await check_ids(orca, http, "/v1/chat/completions", {"messages": [USER]})


async def test_an_end_that_was_seen_does_not_come_again(orca: World, http: httpx.AsyncClient) -> None:
    """A text that was held back comes behind the last token, and the end behind it; each has an id of its own."""
    ids = encode(orca, "the pool")
    body = {"messages": [USER], "max_tokens": len(ids), "stream": True, "stop": ["poolside"], "detach_grace": 60}
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, ids, Reason.LENGTH)
        events = await Events(answer).rest()
    held, end = events[-2:]
    assert (held[0], held[1]["choices"][0]["delta"]["content"]) == (f"{len(ids)}.1", "pool")
    assert (end[0], end[1]["choices"][0]["finish_reason"]) == (f"{len(ids)}.2", "length")
    for number, left in ((held[0], [end]), (end[0], [])):
        path = f"/v1/chat/completions/{request.request_id}"
        async with http.stream("GET", path, headers={EVENT_ID: str(number)}) as again:
            came = Events(again)
            for name, data in left:
                assert (await came.next()) == (name, data | {"created": ANY})
            assert (await came.next())[1] == "[DONE]"


async def test_the_defaults_of_the_model(redis_url: str, tmp_path: Path) -> None:
    """Where a request of OpenAI's methods says nothing. gRPC's Generate has defaults of its own."""
    model = make_chat_model(tmp_path / "tuned", **GENERATION, max_new_tokens=5)
    script = Recorder([10])
    async with (
        world(redis_url, model) as orca,
        AsyncOpenAI(base_url=f"{orca.serving.http}/v1", api_key="none", max_retries=0) as client,
        orca.background(script),
    ):
        await client.chat.completions.create(model="tuned", messages=[USER], seed=1)
        await client.completions.create(
            model="tuned", prompt="a", max_tokens=4, seed=1, top_p=1, extra_body={"top_k": -1}
        )
        await client.chat.completions.create(model="tuned", messages=[USER], temperature=0, max_tokens=6)
        await orca.stub.GenerateText(generation(max_new_tokens=3))
        told = await orca.stub.GetModel(pb.GetModelRequest())
    chat, completion, greedy, plain = [record.sampling for record in script.records]
    tuned = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "seed": 1}
    assert fields_of(chat) == tuned
    assert fields_of(completion) == {"temperature": 0.6, "repetition_penalty": 1.1, "seed": 1}
    assert fields_of(greedy) == {"repetition_penalty": 1.1}
    assert fields_of(plain) == {}
    assert [record.max_new_tokens for record in script.records] == [5, 4, 6, 3]
    assert told.has_chat_template
    assert fields_of(told.sampling_defaults) == {name: value for name, value in tuned.items() if name != "seed"}


async def test_the_adapter_that_answers_is_named_again(redis_url: str, model: Path) -> None:
    """As in the first stream, whether the call that takes it up says a model, and whichever one."""
    async with (
        world(redis_url, model, adapters="legal=/not/here,other=/not/here") as orca,
        httpx.AsyncClient(base_url=orca.serving.http) as client,
    ):
        await orca.engine.load_adapters()
        for way, prompt in ("completions", {"prompt": [5]}), ("chat/completions", {"messages": [USER]}):
            for asked in "legal", "":
                body = {**prompt, "max_tokens": 2, "stream": True, "detach_grace": 60}
                body |= {"model": asked} if asked else {}
                async with client.stream("POST", f"/v1/{way}", json=body) as answer:
                    request = await orca.engine.claim()
                    await orca.engine.commit(request, 0, [10, 11], Reason.LENGTH)
                    names = {data["model"] for _, data in await Events(answer).rest()}
                assert names == {asked or orca.serving.app.endpoint.name}
                for query in "", "&model=other":
                    path = f"/v1/{way}/{request.request_id}?from=0&include_usage=true{query}"
                    async with client.stream("GET", path) as answer:
                        assert {data["model"] for _, data in await Events(answer).rest()} == names, (way, asked, query)


def fields_of(message: Message) -> dict[str, Any]:
    return {field.name: value for field, value in message.ListFields()}


@pytest.mark.parametrize(
    ("generation", "sampling", "tokens"),
    [
        (None, {"temperature": 1.0}, None),
        ({"eos_token_id": 0, "top_k": 0, "temperature": None, "top_p": 1.0}, {"temperature": 1.0, "top_p": 1.0}, None),
        ({"do_sample": False, "temperature": 0.7, "max_new_tokens": 9}, {"temperature": 0}, 9),
        ({"temperature": 0.7, "min_p": 0.1, "top_k": -1}, {"temperature": 0.7, "min_p": 0.1}, None),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number", None),
        ({"top_p": 1.5}, "top_p is 1.5; it must be above 0 and at most 1", None),
        ({"top_k": 2.5}, "top_k is 2.5; it must be a whole number", None),
        ({"top_k": True}, "top_k is True; it must be a whole number", None),
        ({"top_k": 1 << 40}, "top_k is 1099511627776; it must be at least 1", None),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be between 1 and 16777216", None),
        ({"forced_eos_token_id": 100}, "forced_eos_token_id is 100; it must be tokens of a vocabulary of 100", None),
        ({"forced_eos_token_id": ["a"]}, "forced_eos_token_id is a list; it must be tokens of", None),
    ],
)
def test_generation_config(
    tmp_path: Path, generation: dict[str, Any] | None, sampling: dict[str, float] | str, tokens: int | None
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    if isinstance(sampling, str):
        with pytest.raises(FailedPrecondition, match=re.escape(sampling)):
            read_defaults(tmp_path, 100)
    else:
        assert read_defaults(tmp_path, 100) == Defaults(sampling, tokens)


async def test_messages_over_grpc(orca: World, client: AsyncOpenAI) -> None:
    """The same prompt as over HTTP. A retry with the same id and body is the same request."""
    script = Recorder(encode(orca, "holds"))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="the pool")], template_kwargs='{"shout": 1}')
    request = pb.GenerateRequest(request_id="mine", chat=chat, max_new_tokens=64)
    async with orca.background(script):
        answer = await orca.stub.GenerateText(request)
        again = await orca.stub.GenerateText(request)
        await orca.stub.GenerateText(pb.GenerateRequest(chat=chat))
    assert (answer.text, again.text) == ("holds", "holds")
    first, unbounded = script.records
    prompt = encode(orca, "<|end|><user>the pool\n<assistant>1")
    assert list(first.prompt_ids) == list(unbounded.prompt_ids) == prompt
    assert unbounded.max_new_tokens == 200 - len(prompt), "what the engine has room for"


@pytest.mark.parametrize(
    ("chat", "field", "part"),
    [
        (pb.Chat(), "chat.messages", "at least one"),
        (pb.Chat(messages=[pb.ChatMessage(role="king")]), "chat.messages[0]", "'king'"),
        (pb.Chat(messages=[pb.ChatMessage(role="user")], template_kwargs="["), "chat.template_kwargs", "not JSON"),
        (
            pb.Chat(messages=[pb.ChatMessage(role="user")], template_kwargs="[1]"),
            "chat.template_kwargs",
            "a JSON object",
        ),
        (
            pb.Chat(messages=[pb.ChatMessage(role="user")], template_kwargs='{"chat_template": "x"}'),
            "chat.template_kwargs",
            "the model's own",
        ),
        (pb.Chat(messages=[pb.ChatMessage(role="user", content="q " * 400)]), "chat.messages", "positions"),
    ],
)
async def test_what_is_refused_over_grpc(orca: World, chat: pb.Chat, field: str, part: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await orca.stub.GenerateText(pb.GenerateRequest(chat=chat, max_new_tokens=4))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_of(refused.value) == field
    assert part in (refused.value.details() or "")


def test_every_field_of_generation_config_is_followed_or_named(tmp_path: Path) -> None:
    """The fields of transformers' class (5.23): none is named with its own values, those that matter with others."""
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(GenerationConfig().to_dict()))
    assert not_followed(tmp_path, "gpt2") == {}
    asks = {
        "num_beams": 6,
        "no_repeat_ngram_size": 3,
        "min_length": 3,
        "forced_eos_token_id": 0,
        "bad_words_ids": [[5]],
        "top_k": 3,
        "x": 1,
    }
    left = {"num_beams": 6, "no_repeat_ngram_size": 3, "min_length": 3}
    neutral = {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "max_length": 512, "length_penalty": 2.0}
    for given, kind, named in (
        (asks, "gpt2", left | {"bad_words_ids": "a list", "x": 1}),
        (asks, "marian", left | {"x": 1}),
        (neutral, "gpt2", {}),
    ):
        path.write_text(json.dumps(given))
        assert not_followed(tmp_path, kind) == named
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 8, **asks}))
    path.unlink()  # config.json says it then, beside other things
    assert not_followed(tmp_path, "gpt2") == left | {"bad_words_ids": "a list"}
    known = NO_TOKENS | FOLLOWED | NEUTRAL.keys() | UNKNOWN_HERE | {one.name for one in READ}
    assert known == GenerationConfig().to_dict().keys()


def test_values_that_change_nothing_are_not_named(tmp_path: Path) -> None:
    zero = ("epsilon_cutoff", "eta_cutoff", "min_length", "min_new_tokens", "penalty_alpha")
    zero += ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size")
    one = ("num_beams", "typical_p", "guidance_scale", "encoder_repetition_penalty")
    neutral = {**dict.fromkeys(zero, 0), **dict.fromkeys(one, 1), "token_healing": False}
    assert neutral.keys() == NEUTRAL.keys()
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(neutral))
    assert not_followed(tmp_path, "gpt2") == {}
    others = {name: True if value is False else value + 1 for name, value in neutral.items()}
    file.write_text(json.dumps(others))
    assert not_followed(tmp_path, "gpt2") == others


def test_the_longest_answers_end(tmp_path: Path) -> None:
    """`forced_eos_token_id` as transformers reads it: of generation_config.json, or of config.json without one."""
    config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"
    config.write_text(json.dumps({"forced_eos_token_id": 7}))
    assert read_defaults(tmp_path, 100).forced_end == 7
    for given, token in (({}, None), ({"forced_eos_token_id": [5, 2]}, 2), ({"forced_eos_token_id": None}, None)):
        generation.write_text(json.dumps(given))
        assert read_defaults(tmp_path, 100).forced_end == token
