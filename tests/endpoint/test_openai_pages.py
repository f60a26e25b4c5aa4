"""The HTTP door around its calls: health, version, description, tokens, methods, CORS, request ids, errors."""

import asyncio
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import ANY

import httpx2 as httpx
import pytest
from endpoint.harness import POSITIONS, VOCABULARY, World, serving, until, world
from openai.types import chat
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.responses import response_create_params
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from orca_common.release import VERSION
from orca_endpoint.anthropic import blocks
from orca_endpoint.anthropic.fields import FIELDS as MESSAGE_FIELDS
from orca_endpoint.anthropic.request import COUNTED
from orca_endpoint.api.openapi import PATHS
from orca_endpoint.ollama.fields import CHAT, GENERATE
from orca_endpoint.openai.chat import messages
from orca_endpoint.openai.chat.fields import FIELDS as CHAT_FIELDS
from orca_endpoint.openai.chat.messages import KNOWN, NO_MEMBERS
from orca_endpoint.openai.completions.request import FIELDS
from orca_endpoint.openai.fields import Field, markdown
from orca_endpoint.openai.responses import items
from orca_endpoint.openai.responses.fields import FIELDS as RESPONSE_FIELDS

ROOT = Path(__file__).parents[2]


# Our list of fields, and the type of a request in the packages `openai` and `anthropic`. Each process of a run imports
# each file of tests, and `anthropic` takes 1.4 s: the test imports it.
METHODS: dict[str, tuple[Sequence[Field], str, str]] = {
    "completions": (FIELDS, "openai.types.completion_create_params", "CompletionCreateParams"),
    "chat": (CHAT_FIELDS, "openai.types.chat.completion_create_params", "CompletionCreateParams"),
    "messages": (MESSAGE_FIELDS, "anthropic.types.message_create_params", "MessageCreateParams"),
    "responses": (RESPONSE_FIELDS, "openai.types.responses.response_create_params", "ResponseCreateParams"),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_field_of_openai_is_supported_or_refused(method: str) -> None:
    fields, module, name = METHODS[method]
    kinds = [getattr(import_module(module), f"{name}{kind}") for kind in ("NonStreaming", "Streaming")]
    documented = {name for kind in kinds for name in get_type_hints(kind)}
    assert {field.name for field in fields if field.support != "ours"} == documented
    assert {field.name for field in fields if field.support == "ours"}.isdisjoint(documented)
    assert len({field.name for field in fields}) == len(fields)


def test_every_field_of_a_prompt_is_counted() -> None:
    from anthropic.types import message_count_tokens_params

    assert set(get_type_hints(message_count_tokens_params.MessageCountTokensParams)) <= COUNTED


def test_every_option_of_a_stream_is_supported_or_refused() -> None:
    for fields, known in (
        (CHAT_FIELDS, {*get_type_hints(ChatCompletionStreamOptionsParam), "continuous_usage_stats"}),
        (RESPONSE_FIELDS, set(get_type_hints(response_create_params.StreamOptions))),
    ):
        options = next(field for field in fields if field.name == "stream_options").schema["properties"]
        assert set(options) == known


def test_every_member_of_a_message_is_supported_or_refused() -> None:
    kinds = (
        chat.ChatCompletionSystemMessageParam,
        chat.ChatCompletionDeveloperMessageParam,
        chat.ChatCompletionUserMessageParam,
        chat.ChatCompletionAssistantMessageParam,
        chat.ChatCompletionToolMessageParam,
    )
    assert {name for kind in kinds for name in get_type_hints(kind)} == {
        *(*set[str]().union(*KNOWN.values()), *NO_MEMBERS),
    }


async def test_every_field_is_read(orca: World, http: httpx.AsyncClient) -> None:
    """A value that no field takes is refused by the field's own name: so none is ignored in silence."""
    for path, body, fields in (
        ("/v1/completions", {"prompt": "a"}, FIELDS),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, CHAT_FIELDS),
        ("/v1/responses", {"input": "a"}, RESPONSE_FIELDS),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, MESSAGE_FIELDS),
    ):
        for field in fields:
            wrong = {"stream": True} if field.name == "stream_options" else {}
            answer = await http.post(path, json={**body, **wrong, field.name: [[["wrong"]]]})
            assert (field.name, answer.status_code) == (field.name, 400)
            assert re.match(rf"{field.name}\b", answer.json()["error"]["message"])


@pytest.mark.parametrize("method", METHODS)
def test_the_table_of_the_documentation_is_this_one(method: str) -> None:
    fields = METHODS[method][0]
    table = markdown(fields, () if method == "completions" else FIELDS)
    assert table in (ROOT / "docs/openai.md").read_text(), f"put there:\n{table}"


def test_the_table_of_ignored_members_is_this_one() -> None:
    for table in (messages.markdown(), items.markdown(), blocks.markdown()):
        assert table in (ROOT / "docs/openai.md").read_text(), f"put there:\n{table}"


def test_what_clients_send_is_taken() -> None:
    """The page that `make clients` has made: no field of a body there is one that the door would refuse by its name."""
    sent, names = dict[str, set[str]](), set[str]()
    for line in (ROOT / "docs/clients.md").read_text().splitlines():
        if line.startswith("## "):
            names = sent.setdefault(line.removeprefix("## POST /v1/").removesuffix("/completions"), set())
        elif found := re.match(r"\| `(\w+)", line):
            names.add(found[1])
    of_others = {"## POST /api/chat": CHAT, "## POST /api/generate": GENERATE}
    for method, fields in {**{name: fields for name, (fields, *_) in METHODS.items()}, **of_others}.items():
        taken = {field.name for field in fields if field.support != "refused" or field.schema.get("enum")}
        assert sent[method] <= taken, method


def test_the_version_is_that_of_the_package() -> None:
    assert f'version = "{VERSION}"' in (ROOT / "pyproject.toml").read_text()


async def test_pages(orca: World, http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert (await http.get("/version")).json() == {"version": VERSION}
    card = {"id": "tiny", "object": "model", "created": ANY, "owned_by": "orca"}
    card |= {"max_model_len": POSITIONS, "vocab_size": VOCABULARY, "chat_template": False}
    assert (await http.get("/v1/models")).json() == {"object": "list", "data": [card]}
    document = (await http.get("/openapi.json")).json()
    assert set(document) == {"openapi", "info", "paths", "components"}
    assert document["info"] == {"title": "Orca", "version": VERSION, "description": ANY}
    assert set(document["paths"]) == set(PATHS)
    for name, fields in {
        "CompletionRequest": FIELDS,
        "ChatRequest": CHAT_FIELDS,
        "ResponseRequest": RESPONSE_FIELDS,
        "OllamaChatRequest": CHAT,
        "OllamaGenerateRequest": GENERATE,
    }.items():
        schema = document["components"]["schemas"][name]
        assert set(schema["properties"]) == {field.name for field in fields}
    ways = [way for path in document["paths"].values() for way in path.values()]
    parameters = [one for way in ways for one in way.get("parameters", [])]
    assert all(one["required"] == (one["in"] == "path") for one in parameters)
    answers = [one for way in ways for one in way["responses"].values()]
    assert all("$ref" in one or one["description"] for one in answers)
    refs = [part.split('"')[0] for part in (await http.get("/openapi.json")).text.split("#/components/")[1:]]
    assert all(part.split("/")[1] in document["components"][part.split("/")[0]] for part in refs)
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
        shape = document["paths"][path]["post"]["responses"]["default"]["$ref"].rpartition("/")[2]
        refused = (await http.post(path, json={"nothing": 1})).json()
        assert set(refused) == set(document["components"]["schemas"][shape]["properties"]), path
    page = await http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    for part in ("http://", "https://", "src=", "<script"):
        assert part not in page.text.replace(orca.serving.http, ""), "nothing is loaded from elsewhere"
    assert "repetition_penalty" in page.text
    assert "<h1>Orca serves <code>tiny</code></h1>" in page.text
    assert f"<pre>curl {orca.serving.http}/v1/chat/completions -H" in page.text
    for path, methods in PATHS.items():
        for method, way in methods.items():
            row = f"<tr><td><code>{method.upper()} {path}</code></td><td>{way['summary']}</td></tr>"
            assert row.replace("'", "&#x27;") in page.text, path
    tables = page.text.split("<h2>Fields of <code>POST ")[1:]
    for table, (path, fields) in zip(
        tables,
        (
            *(("/v1/chat/completions", CHAT_FIELDS), ("/v1/responses", RESPONSE_FIELDS)),
            *(("/v1/messages", MESSAGE_FIELDS), ("/api/chat", CHAT), ("/v1/completions", FIELDS)),
        ),
        strict=True,
    ):
        assert table.startswith(f"{path}</code></h2>")
        rows = re.findall(r"<tr><td><code>(\w+)</code></td><td>(\w+)</td><td>.", table)
        assert rows == [(field.name, field.support) for field in fields], path
    root = await http.get("/")
    assert (root.status_code, root.headers["location"]) == (307, "/docs")


async def test_health_says_why_not(orca: World, model: Path) -> None:
    async with (
        serving(orca.redis_url, "nobody-has-formed", model) as started,
        httpx.AsyncClient(base_url=started.http) as http,
    ):
        await until(started.app.delivery.on_time)
        answer = await http.get("/health")
    assert answer.status_code == 503
    assert "no engine has formed" in answer.json()["error"]["message"]


async def test_tokens(orca: World, http: httpx.AsyncClient) -> None:
    answer = (await http.post("/tokenize", json={"model": "tiny", "prompt": "the pool 😺"})).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == orca.serving.app.endpoint.checkpoint.max_positions
    assert answer["token_strs"] is None
    text = await http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert text.json() == {"prompt": "the pool 😺"}
    spelled = await http.post("/tokenize", json={"prompt": "the <|end|>", "return_token_strs": True})
    assert "".join(spelled.json()["token_strs"]) == "the <|end|>"
    cases: dict[str, tuple[str, Any, str, str]] = {
        "no prompt": ("/tokenize", {}, "prompt", "missing"),
        "a list": ("/tokenize", {"prompt": ["a"]}, "prompt", "a string"),
        "long": ("/tokenize", {"prompt": "x" * ((1 << 20) + 1)}, "prompt", "at most 1048576"),
        "both": ("/tokenize", {"prompt": "a", "messages": []}, "prompt", "not known"),
        "another": ("/tokenize", {"prompt": "a", "tools": []}, "tools", "not known"),
        "no tokens": ("/detokenize", {}, "tokens", "missing"),
        "no ids": ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "a token id"),
        "no token": ("/detokenize", {"tokens": [1, 9999]}, "tokens[1]", "9999"),
    }
    for case, (path, body, param, part) in cases.items():
        refused = await http.post(path, json=body)
        error = refused.json()["error"]
        assert (case, refused.status_code, error["param"]) == (case, 400, param)
        assert part in error["message"]
    assert (await http.post("/tokenize", json={"prompt": "a", "model": "gpt-99"})).status_code == 404
    assert (await http.get("/tokenizer_info")).json() == {}, "this checkpoint says nothing of it"


async def test_what_other_servers_have_elsewhere(http: httpx.AsyncClient) -> None:
    for path, part in {
        "/metrics": "at /metrics of its status port",
        "/v1/embeddings": "no model here makes embeddings",
        "/v1/responses/compact": "no conversation is compacted here",
        "/v2": "there is no such path; Orca serves chats",
    }.items():
        answer = await http.post(path, json={})
        assert (path, answer.status_code) == (path, 404)
        assert part in answer.json()["error"]["message"]


async def test_a_websocket_is_refused_without_a_line(http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn logged two for each, with packages to install."""
    asked = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    answer = await http.get("/v1/responses", headers=asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (405, "method")
    assert not [line for line in caplog.messages if "pgrade" in line or "WebSocket" in line]


async def test_which_methods_each_path_has(http: httpx.AsyncClient) -> None:
    for allowed, paths in {
        "OPTIONS, POST": "v1/completions v1/chat/completions v1/responses v1/messages v1/messages/count_tokens "
        "api/chat api/generate api/show v1/load_lora_adapter v1/unload_lora_adapter tokenize detokenize",
        "GET, OPTIONS": "v1/completions/a v1/chat/completions/a v1/responses/a",
        "GET, HEAD, OPTIONS": "api/tags api/ps api/version v1/models v1/models/a/b health version openapi.json docs "
        "tokenizer_info",
    }.items():
        for path in paths.split():
            answer = await http.options(f"/{path}")
            assert (path, answer.status_code, answer.headers["allow"]) == (path, 204, allowed)


async def test_methods(http: httpx.AsyncClient) -> None:
    for path, allowed in {
        "/v1/completions": "OPTIONS, POST",
        "/v1/completions/a": "GET, OPTIONS",
        "/v1/models": "GET, HEAD, OPTIONS",
        "/health": "GET, HEAD, OPTIONS",
        "/tokenize": "OPTIONS, POST",
        "/tokenizer_info": "GET, HEAD, OPTIONS",
    }.items():
        answer = await http.options(path)
        assert (answer.status_code, answer.headers["allow"], answer.content) == (204, allowed, b"")
        wrong = await http.request("DELETE", path)
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
        assert {*wrong.headers["allow"].split(", "), "OPTIONS"} == {*allowed.split(", ")}
    head, get = await http.head("/v1/models"), await http.get("/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]
    assert (await http.head("/v1/completions")).status_code == 405
    assert (await http.head("/v1/completions/a")).status_code == 405, "it would take a stream over"


async def test_request_ids(orca: World, http: httpx.AsyncClient) -> None:
    """Given back with every answer, streams and errors too; made when absent."""
    mine = {"X-Request-Id": "mine-1/2"}
    async with orca.background(lambda record: [10]):
        body = {"prompt": "a", "max_tokens": 1}
        answers = [
            await http.post("/v1/completions", json=body, headers=mine),
            await http.post("/v1/completions", json={**body, "stream": True}, headers=mine),
            await http.post("/v1/completions", json={}, headers=mine),
            await http.get("/v1/nothing", headers=mine),
        ]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine-1/2"] * 4
    made = [(await http.get("/v1/models")).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    for bad in ("a b", "x" * 129):
        answer = await http.get("/v1/models", headers={"X-Request-Id": bad})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Id")


async def test_labels_go_to_the_span(orca: World, http: httpx.AsyncClient) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = orca.serving.app.endpoint.telemetry
    telemetry.enabled, telemetry.tracer = True, provider.get_tracer("test")
    body = {"prompt": "a", "max_tokens": 1, "user": "u-1", "metadata": {"team": "search"}}
    async with orca.background(lambda record: [10]):
        answer = await http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    await orca.serving.quiet()
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "orca.request"]
    assert span.attributes is not None
    found = {name: span.attributes[name] for name in ("orca.user", "orca.metadata.team")}
    assert found == {"orca.user": "u-1", "orca.metadata.team": "search"}
    assert span.attributes["http.request.header.x-request-id"] == ("mine",)
    name = answer.json()["id"]
    await http.get(f"/v1/completions/{name}?from=0", headers={"X-Request-Id": "again"})
    await orca.serving.quiet()
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "orca.resume"]
    assert (span.attributes or {})["http.request.header.x-request-id"] == ("again",)


async def test_the_place_in_the_queue(orca: World, http: httpx.AsyncClient) -> None:
    first = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}))
    await until(lambda: orca.serving.app.delivery.count == 1)
    async with http.stream("POST", "/v1/completions", json={"prompt": "b", "max_tokens": 1, "stream": True}) as second:
        position = second.headers["x-queue-position"]
        async with orca.background(lambda record: [10]):
            await second.aread()
            assert (await first).headers["x-queue-position"] == "0"
    assert position in {"0", "1"}, "1 unless the second came first"


async def test_what_is_no_http_gets_the_same_shape(orca: World) -> None:
    host, port = orca.serving.addresses["http"].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"NOT HTTP\r\n\r\n")
    raw = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert raw.startswith(b"HTTP/1.1 400")
    assert b'"type": "invalid_request_error"' in raw


async def test_a_bug_gets_the_same_shape(orca: World, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(orca.serving.app.endpoint, "not_ready", broken)
    answer = await http.get("/health")
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]


async def test_cors(redis_url: str, model: Path) -> None:
    mine, others = {"Origin": "https://app.example"}, {"Origin": "https://else.example"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    origins = "https://app.example, https://b.example"
    async with (
        world(redis_url, model, cors_origins=origins) as orca,
        httpx.AsyncClient(base_url=orca.serving.http) as http,
    ):
        preflight = await http.options("/v1/completions", headers={**mine, **asks})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        for answer in (await http.get("/v1/models", headers=mine), await http.get("/nothing", headers=mine)):
            assert answer.headers["access-control-allow-origin"] == "https://app.example"
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        answer = await http.get("/v1/models", headers=others)
        assert "access-control-allow-origin" not in answer.headers
    async with world(redis_url, model) as orca, httpx.AsyncClient(base_url=orca.serving.http) as http:
        answer = await http.get("/v1/models", headers=mine)
        assert "access-control-allow-origin" not in answer.headers
