"""Ollama's API: lines of JSON and whole objects, calls and results without ids, options, models, errors in its shape.

Shapes as the page of Ollama's API (ollama/ollama at 01e52d24) and its client for Python, 0.6.3, have them; `make
clients` runs that client.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx2 as httpx
import pytest
import pytest_asyncio
from endpoint.harness import World, make_model, world
from endpoint.test_chat import Recorder, encode
from endpoint.test_tool_chats import CALLS, NAMES, PATIENCE, SCHEMA, rendered

from orca_common.errors import FailedPrecondition
from orca_common.release import VERSION
from orca_endpoint.anthropic.request import parse as parse_message
from orca_endpoint.calls.events import Accepted, Finished, Token
from orca_endpoint.ollama.answer import ChatLines
from orca_endpoint.ollama.fields import CHAT, GENERATE, OPTIONS
from orca_endpoint.ollama.messages import messages_of
from orca_endpoint.ollama.request import parse_chat, parse_generate
from orca_endpoint.openai.answer import Choice
from orca_endpoint.openai.chat.request import parse as parse_openai
from orca_endpoint.openai.fields import markdown
from orca_endpoint.openai.responses.request import parse as parse_response
from orca_endpoint.requests.tools import object_of
from orca_endpoint.text.tool_calls import CallPart, Said
from orca_pool.records import Reason

pytestmark = pytest.mark.usefixtures("one_helper")

USER: Any = {"role": "user", "content": "Bern?"}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "é <b>", "parameters": SCHEMA}}
TIME: Any = {"type": "function", "function": {"name": "time"}}
INPUTS = [{"city": 'Zü"}'}, {}]
COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")


@pytest.fixture(scope="session")
def model(tool_model: Path) -> Path:
    return tool_model


@pytest.fixture(scope="module")
def slots() -> int:
    return 1024


@pytest.fixture
def orca(shared: World) -> World:
    return shared


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(shared: World) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shared.serving.http, timeout=PATIENCE) as client:
        yield client


async def lines(http: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lines of a stream, which comes where a body does not say otherwise."""
    answer = await http.post(path, json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson"), answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_a_text_whole_and_in_lines(orca: World, http: httpx.AsyncClient) -> None:
    ids = encode(orca, "holds 東京")
    script = Recorder(ids)
    turns = [{"role": "system", "content": "be brief"}, USER]
    options = {"num_predict": len(ids), "temperature": 0.5, "repeat_penalty": 1.25, "num_ctx": 4096, "seed": 7}
    chat: dict[str, Any] = {"model": "tiny:latest", "messages": turns, "options": options, "keep_alive": "5m"}
    prompt: dict[str, Any] = {"model": "tiny", "prompt": "Bern?", "system": "be brief", "options": options}
    async with orca.background(script):
        for path, body in (("/api/chat", chat), ("/api/generate", prompt)):
            whole = (await http.post(path, json=body | {"stream": False})).json()
            *pieces, last = await lines(http, path, body)
            texts = [one["message"]["content"] if "message" in one else one["response"] for one in pieces]
            assert "".join(texts) == "holds 東京"
            assert len(texts) > 1
            assert whole.get("response", whole.get("message")) == (
                "holds 東京" if path == "/api/generate" else {"role": "assistant", "content": "holds 東京"}
            )
            assert not any(one["done"] for one in pieces)
            for end in (whole, last):
                assert (end["model"], end["done"], end["done_reason"]) == ("tiny", True, "length")
                assert all(type(end[name]) is int and end[name] >= 0 for name in COUNTS)
                assert end["eval_count"] == len(ids)
                assert end["total_duration"] >= end["prompt_eval_duration"] + end["eval_duration"] > 0
    wanted = encode(orca, rendered("hermes", turns))
    for record in script.records:
        assert list(record.prompt_ids) == wanted
        drawn = record.sampling
        assert (drawn.temperature, drawn.repetition_penalty, drawn.seed) == (0.5, 1.25, 7)
        assert record.max_new_tokens == len(ids)


async def test_a_prompt_as_it_stands(orca: World, http: httpx.AsyncClient) -> None:
    """With `raw`; the options' values that Ollama has for "all", "another" and "no end" are those of an empty body."""
    script = Recorder([*encode(orca, "the"), 0])
    free = {"num_predict": -1, "top_k": 0, "seed": -1, "mirostat": 0, "typical_p": 1.0, "repeat_last_n": -1}
    async with orca.background(script):
        for options in (free, {}):
            *_, last = await lines(http, "/api/generate", {"prompt": "Bern?", "raw": True, "options": options})
            assert (last["done_reason"], last["eval_count"]) == ("stop", 2)
    for record in script.records:
        assert list(record.prompt_ids) == encode(orca, "Bern?")
    first, second = script.records
    assert first.max_new_tokens == second.max_new_tokens
    assert first.sampling.seed != second.sampling.seed
    second.sampling.seed = first.sampling.seed
    assert first.sampling == second.sampling


async def test_calls_and_the_turn_after_them(orca: World, http: httpx.AsyncClient) -> None:
    """A line has a whole call, with arguments as an object. A result names its function, or nothing."""
    script = Recorder([*encode(orca, CALLS), 0])
    asked: dict[str, Any] = {"model": "tiny", "tools": [WEATHER, TIME], "messages": [USER]}
    async with orca.background(script):
        whole = (await http.post("/api/chat", json=asked | {"stream": False})).json()["message"]
        told = [one["message"] for one in await lines(http, "/api/chat", asked)]
        bare = [
            {"function": {name: call["function"][name] for name in ("name", "arguments")}}
            for call in whole["tool_calls"]
        ]
        results = [{"role": "tool", "tool_name": "time", "content": "7"}, {"role": "tool", "content": "5°"}]
        turns = [
            USER,
            {"role": "assistant", "content": whole["content"], "thinking": "hm", "tool_calls": bare},
            *results,
        ]
        await http.post("/api/chat", json=asked | {"messages": turns, "stream": False})
    streamed = [call for message in told for call in message.get("tool_calls", [])]
    assert "".join(message["content"] for message in told) == whole["content"] == "Hm 東京 "
    for calls in (whole["tool_calls"], streamed):
        functions = [call["function"] for call in calls]
        assert [(one["index"], one["name"], one["arguments"]) for one in functions] == [
            (n, name, given) for n, (name, given) in enumerate(zip(NAMES, INPUTS, strict=True))
        ]
    called = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": name, "arguments": given}}
        for n, (name, given) in enumerate(zip(NAMES, INPUTS, strict=True), 1)
    ]
    shown = [
        USER,
        {"role": "assistant", "content": "Hm 東京 ", "tool_calls": called},
        {"role": "tool", "name": "time", "tool_call_id": "call00002", "content": "7"},
        {"role": "tool", "tool_call_id": "call00001", "content": "5°"},
    ]
    functions = [WEATHER, TIME]
    assert list(script.records[-1].prompt_ids) == encode(orca, rendered("hermes", shown, tools=functions))


def test_which_call_a_result_belongs_to() -> None:
    """By its id, by its name, or the first that has none; a call's own id stays."""
    call = {"function": {"name": "a", "arguments": {}}}
    turns: list[Any] = [
        {"role": "assistant", "tool_calls": [call, {"id": "own", **call}, {"function": {"name": "b"}}]},
        {"role": "tool", "tool_name": "b", "content": "1"},
        {"role": "tool", "tool_call_id": "own", "content": "2"},
        {"role": "tool", "tool_name": "other", "content": "3"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "a", "content": "5"},
    ]
    found = messages_of(turns)
    assert [one.tool_call_id for one in found] == ["", "call00003", "own", "call00001", "", "", "call00004"]
    assert [one["id"] for one in json.loads(found[0].tool_calls)] == ["call00001", "own", "call00003"]


async def test_forms(orca: World, http: httpx.AsyncClient) -> None:
    """`json` is an object; a schema is followed as far as it can be, and a header says how far not."""
    script = Recorder([*encode(orca, '{"city": "Bern"}'), 0])
    loose = {**SCHEMA, "not": {"required": ["country"]}}
    async with orca.background(script):
        for given in ("json", SCHEMA, loose, ""):
            answer = await http.post("/api/generate", json={"prompt": "Bern?", "format": given, "stream": False})
            assert json.loads(answer.json()["response"]) == {"city": "Bern"}
            assert ("x-orca-relaxed" in answer.headers) == (given is loose), answer.headers
    grammars = [record.sampling.grammar for record in script.records]
    assert [bool(grammar) for grammar in grammars] == [True, True, True, False]
    assert ["city" in grammar for grammar in grammars] == [False, True, True, False]


async def test_logprobs(orca: World, http: httpx.AsyncClient) -> None:
    ids = encode(orca, "the pool")
    async with orca.background(Recorder(ids)):
        asked = {"model": "tiny", "messages": [USER], "options": {"num_predict": len(ids)}, "logprobs": True}
        whole = (await http.post("/api/chat", json=asked | {"stream": False, "top_logprobs": 2})).json()
        told = await lines(http, "/api/chat", asked)
    assert "".join(one["token"] for one in whole["logprobs"]) == "the pool"
    assert all(len(one["top_logprobs"]) == 2 for one in whole["logprobs"])
    streamed = [one for line in told for one in line.get("logprobs", [])]
    assert [(one["token"], one["logprob"]) for one in streamed] == [
        (one["token"], one["logprob"]) for one in whole["logprobs"]
    ]


async def test_without_a_prompt(orca: World, http: httpx.AsyncClient) -> None:
    """Ollama's clients ask so whether a model is there: no engine sees it."""
    for path, body, said in (
        ("/api/generate", {}, {"response": ""}),
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
    ):
        stays = (
            (None, "load"),
            (-1, "load"),
            ("1h30m", "load"),
            (0, "unload"),
            ("0s", "unload"),
            ("0h0.0ms", "unload"),
        )
        for stay, reason in stays:
            answer = (await http.post(path, json={"model": "tiny", **body, "keep_alive": stay})).json()
            assert (answer | said, answer["done"], answer["done_reason"]) == (answer, True, reason)
    missing = await http.post("/api/generate", json={"model": "other:latest"})
    assert missing.status_code == 404


async def test_what_is_served(http: httpx.AsyncClient) -> None:
    (card,) = (await http.get("/api/tags")).json()["models"]
    details = {"family": "gpt2", "families": ["gpt2"]}
    assert card == {"name": "tiny", "model": "tiny", "modified_at": ANY, "digest": ANY, "details": details}
    assert int(card["digest"], 16)
    assert card["modified_at"].endswith("Z")
    (running,) = (await http.get("/api/ps")).json()["models"]
    assert running == card | {"context_length": 1024, "expires_at": "2999-12-31T23:59:59Z"}
    for name in ({"model": "tiny"}, {"name": "tiny:latest", "verbose": True}):
        shown = (await http.post("/api/show", json=name)).json()
        about = {"general.architecture": "gpt2", "gpt2.context_length": 1024, "gpt2.vocab_size": 512}
        assert shown == {
            **{"modified_at": card["modified_at"], "details": details},
            **{"model_info": about, "capabilities": ["completion", "tools"]},
        }
    assert (await http.get("/api/version")).json() == {"version": VERSION}
    for path, part in (("/api/embed", "no model here makes embeddings"), ("/api/pull", "models are the operator's")):
        refused = await http.post(path, json={"model": "tiny"})
        assert refused.status_code == 404
        assert part in refused.json()["error"]


async def test_a_model_without_a_template(redis_url: str, tmp_path: Path) -> None:
    """Its prompts are as they stand; a chat is refused by name."""
    async with (
        world(redis_url, make_model(tmp_path / "tiny"), slots=1024) as orca,
        httpx.AsyncClient(base_url=orca.serving.http, timeout=PATIENCE) as http,
    ):
        script = Recorder([*encode(orca, "the"), 0])
        async with orca.background(script):
            assert (await http.post("/api/generate", json={"prompt": "Bern?"})).status_code == 200
        assert list(script.records[0].prompt_ids) == encode(orca, "Bern?")
        for path, body, part in (
            ("/api/chat", {"messages": [USER]}, "messages: this model has no chat template"),
            ("/api/generate", {"prompt": "a", "system": "b"}, "system: this model has no chat template"),
            ("/api/generate", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs: this model has no"),
        ):
            refused = await http.post(path, json=body)
            assert (refused.status_code, refused.json()["error"].startswith(part)) == (400, True), refused.text
        assert (await http.post("/api/show", json={"model": "tiny"})).json()["capabilities"] == ["completion"]


async def test_a_stream_that_waits_and_fails(redis_url: str, model: Path) -> None:
    """While it waits it gets pieces without a text; an error is its last line."""
    async with (
        world(redis_url, model, slots=1024, comment_seconds=0.2) as orca,
        httpx.AsyncClient(base_url=orca.serving.http, timeout=PATIENCE) as http,
        http.stream("POST", "/api/chat", json={"messages": [USER]}) as answer,
    ):
        read = answer.aiter_lines()
        waited = json.loads(await anext(read))
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, [10], Reason.NOT_FINITE)
        rest = [json.loads(line) async for line in read]
    assert (waited["message"]["content"], waited["done"]) == ("", False)
    assert set(rest[-1]) == {"error"}
    assert not any(line.get("done") for line in rest)


def test_a_call_that_was_cut() -> None:
    """Its arguments are closed where they end, in lines as in an object."""
    for given, said in (('{"a": "Be', {"a": "Be"}), ("", {})):
        reply = ChatLines("tiny", True)
        reply.begun(0, Choice(), Accepted("o-1", 1, 0, None))
        parts = [Said("", (CallPart(0, "id", "f", ""),)), *([Said("", (CallPart(0, "", "", given),))] if given else [])]
        assert reply.shown(0, Choice(), [Token(n, 1, "", None, 1, "e", (), one) for n, one in enumerate(parts)]) == b""
        call, end = map(json.loads, reply.finished(0, Choice(), Finished(Reason.LENGTH, 2, "", None)).splitlines())
        assert call["message"]["tool_calls"][0]["function"]["arguments"] == said
        assert end["done_reason"] == "length"
        assert reply.waiting() == b"", "the last line is the last"
        assert reply.whole()["message"]["tool_calls"] == call["message"]["tool_calls"]


def test_a_call_that_is_deep() -> None:
    """Its arguments are an object as far as JSON can be written; deeper ones are refused in a sentence."""
    for depth in (400, *range(900, 1000), 5000):
        reply = ChatLines("tiny", True)
        reply.begun(0, Choice(), Accepted("o-1", 1, 0, None))
        said = Said("", (CallPart(0, "id", "f", '{"a": ' + "[" * depth),))
        reply.shown(0, Choice(), [Token(0, 1, "", None, 1, "e", (), said)])
        end = Finished(Reason.LENGTH, 2, "", None)
        if depth == 400:
            assert reply.finished(0, Choice(), end).count(b"[") == depth + 1
        else:
            with pytest.raises(FailedPrecondition, match="nested too deeply"):
                reply.finished(0, Choice(), end)


@pytest.mark.parametrize("value", ["1e999", "-1e999", "1" * 5000, r'"\ud800"', r'{"\udfff": 1}'])
def test_a_call_that_no_object_can_hold(value: str) -> None:
    """JSON spells it, and its writer refuses it."""
    for end in ("}", ', "b": "c'):
        with pytest.raises(FailedPrecondition, match="a number that is too large, or half of a character"):
            object_of(f'{{"a": {value}{end}')


async def test_a_number_that_no_object_can_hold(orca: World, http: httpx.AsyncClient) -> None:
    """It is an error in Ollama's shape and in Anthropic's, and no line that is not JSON."""
    said = '<tool_call>\n{"name": "weather", "arguments": {"city": 1e999}}\n</tool_call>'
    function, asked = WEATHER["function"], {"messages": [USER], "tools": [WEATHER]}
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    async with orca.background(Recorder([*encode(orca, said), 0])):
        chat = await http.post("/api/chat", json=asked | {"stream": False})
        message = await http.post("/v1/messages", json={"messages": [USER], "tools": [tool], "max_tokens": 200})
        *_, last = await lines(http, "/api/chat", asked)
    assert (chat.status_code, message.status_code) == (400, 400)
    for error in (chat.json()["error"], message.json()["error"]["message"], last["error"]):
        assert "a number that is too large" in error


def test_no_thoughts() -> None:
    """Each door's way to ask for none is what chat templates call `enable_thinking`, unless a request says more."""
    asked: list[tuple[Callable[[bytes], Any], dict[str, Any], dict[str, Any]]] = [
        (parse_chat, {"messages": [USER]}, {"think": False}),
        (parse_generate, {"prompt": "Bern?"}, {"think": False}),
        (partial(parse_openai, max_samples=1), {"messages": [USER]}, {"reasoning_effort": "none"}),
        (parse_response, {"input": "Bern?"}, {"reasoning": {"effort": "none"}}),
        (parse_message, {"messages": [USER], "max_tokens": 8}, {"thinking": {"type": "disabled"}}),
    ]
    for parse, body, quiet in asked:
        for more, variables in (
            ({}, ""),
            (quiet, '{"enable_thinking": false}'),
            (quiet | {"chat_template_kwargs": {"a": 1}}, '{"enable_thinking": false, "a": 1}'),
            (quiet | {"chat_template_kwargs": {"enable_thinking": True}}, '{"enable_thinking": true}'),
        ):
            (sample,) = parse(json.dumps({**body, **more}).encode()).samples
            assert sample.request.chat.template_kwargs == variables, (quiet, more)
    (raw,) = parse_generate(b'{"prompt": "a", "raw": true, "think": false}').samples
    assert raw.request.text == "a"


async def test_what_the_client_in_go_sends(http: httpx.AsyncClient) -> None:
    """All members of its structures (api/types.go), empty ones too."""
    shown: dict[str, Any] = {"model": "", "system": "", "template": "", "verbose": False, "options": None}
    assert (await http.post("/api/show", json=shown | {"name": "tiny"})).json()["capabilities"]
    prompt: dict[str, Any] = {"model": "tiny", "prompt": "", "suffix": "", "system": "", "template": "", "options": {}}
    assert (await http.post("/api/generate", json=prompt | {"shift": False})).json()["done_reason"] == "load"
    chat: dict[str, Any] = {"model": "tiny", "messages": None, "options": None, "truncate": False}
    assert (await http.post("/api/chat", json=chat)).json()["done_reason"] == "load"


async def test_several_models(redis_url: str, model: Path) -> None:
    """Where releases share an address, all are listed, and one must be named."""
    async with (
        world(redis_url, model, other_models="other") as orca,
        httpx.AsyncClient(base_url=orca.serving.http, timeout=PATIENCE) as http,
    ):
        _, other = (await http.get("/api/tags")).json()["models"]
        assert other == {"name": "other", "model": "other", "modified_at": ANY, "details": {}}
        assert [one["name"] for one in (await http.get("/api/ps")).json()["models"]] == ["tiny"]
        for path, body in (("chat", {"messages": [USER]}), ("generate", {"prompt": "a"}), ("generate", {})):
            refused = await http.post(f"/api/{path}", json=body)
            assert refused.json()["error"].startswith("model: is missing"), refused.text
        elsewhere = await http.post("/api/show", json={"model": "other:latest"})
        assert (elsewhere.status_code, "another release" in elsewhere.json()["error"]) == (404, True)


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "messages": ("chat", {"messages": "a"}, "messages: must be"),
    "role": ("chat", {"messages": [{"role": "developer", "content": "a"}]}, "messages[0].role: is 'developer'"),
    "no object": ("chat", {"messages": ["a"]}, "messages[0]: must be an object"),
    "images": ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, "messages[0].images: must"),
    "member": ("chat", {"messages": [{"role": "user", "tool_calls": []}]}, "messages[0].tool_calls: is not known"),
    "call": (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}]},
        "messages[0].tool_calls[0].function.name: is missing",
    ),
    "kind": (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "web", "function": {"name": "f"}}]}]},
        "messages[0].tool_calls[0].type: is 'web'",
    ),
    "arguments": (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
        "messages[0].tool_calls[0].function.arguments: must be an object",
    ),
    "tool": ("chat", {"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function: is missing"),
    "think": ("chat", {"messages": [USER], "think": True}, "think: must be false"),
    "format": ("chat", {"messages": [USER], "format": "xml"}, "format: must be json"),
    "schema": ("chat", {"messages": [USER], "format": {"type": "nothing"}}, "format.type: "),
    "options": ("chat", {"messages": [USER], "options": []}, "options: must be an object"),
    "option": ("chat", {"messages": [USER], "options": {"num_predicts": 1}}, "options.num_predicts: is not known"),
    "length": ("chat", {"messages": [USER], "options": {"num_predict": 0}}, "options.num_predict: must be at least 1"),
    "way": ("chat", {"messages": [USER], "options": {"mirostat": 2}}, "options.mirostat: must be 0"),
    "window": ("chat", {"messages": [USER], "options": {"repeat_last_n": 64}}, "options.repeat_last_n: must be -1"),
    "type": ("chat", {"messages": [USER], "options": {"temperature": "a"}}, "options.temperature: must be a number"),
    "range": (
        "chat",
        {"messages": [USER], "options": {"repeat_penalty": -1}},
        "options.repeat_penalty: must be above 0",
    ),
    "stop": ("chat", {"messages": [USER], "options": {"stop": [""]}}, "options.stop[0]: is an empty string"),
    "stay": ("chat", {"messages": [USER], "keep_alive": True}, "keep_alive: must be"),
    "a stay": ("chat", {"messages": [USER], "keep_alive": "5 minutes"}, "keep_alive: must be"),
    "cut": ("chat", {"messages": [USER], "truncate": True}, "truncate: must be false"),
    "top": ("chat", {"messages": [USER], "top_logprobs": 1}, "top_logprobs: is allowed only with logprobs"),
    "other": ("chat", {"prompt": "a"}, "prompt: is a field of /api/generate"),
    "suffix": ("generate", {"prompt": "a", "suffix": "b"}, 'suffix: must be ""'),
    "template": ("generate", {"prompt": "a", "template": "b"}, 'template: must be ""'),
    "context": ("generate", {"prompt": "a", "context": [1]}, "context: must be []"),
    "a system": ("generate", {"prompt": "a", "raw": True, "system": "b"}, "system: is not allowed with raw"),
    "variables": (
        "generate",
        {"prompt": "a", "raw": True, "chat_template_kwargs": {"a": 1}},
        "chat_template_kwargs: is",
    ),
    "another": ("generate", {"messages": [USER]}, "messages: is a field of /api/chat"),
    "long": ("generate", {"prompt": "a" * 5000, "raw": True}, "prompt: "),
    "long by the template": ("generate", {"prompt": "a" * 5000}, "prompt: the prompt has"),
    "a name": ("show", {}, "model: is missing"),
    "two names": ("show", {"model": "tiny", "name": "other"}, "name: is another"),
    "a show's system": ("show", {"model": "tiny", "system": "b"}, "system: must be"),
    "a query": ("chat?a=b", {}, "a: is not known"),
}


async def test_what_is_refused(http: httpx.AsyncClient) -> None:
    """By the caller's own name of the field, in Ollama's shape, and never ignored."""
    for case, (path, body, part) in BAD.items():
        answer = await http.post(f"/api/{path}", json=body)
        assert (case, answer.status_code, set(answer.json())) == (case, 400, {"error"})
        assert answer.json()["error"].startswith(part), (case, answer.json())


async def test_every_field_is_read(http: httpx.AsyncClient) -> None:
    """A value that no field takes is refused by its name, options too, but for those that say how a model is loaded."""
    for path, body, fields in (
        ("/api/chat", {"messages": [USER]}, CHAT),
        ("/api/generate", {"prompt": "a"}, GENERATE),
    ):
        for field in fields:
            answer = await http.post(path, json={**body, field.name: [[["wrong"]]]})
            assert (field.name, answer.status_code) == (field.name, 400)
            assert answer.json()["error"].startswith(field.name)
    for option in OPTIONS:
        if option.schema:
            answer = await http.post("/api/chat", json={"messages": [USER], "options": {option.name: [["wrong"]]}})
            assert answer.json()["error"].startswith(f"options.{option.name}"), answer.text


def test_the_tables_of_the_documentation_are_these() -> None:
    page = (Path(__file__).parents[2] / "docs/ollama.md").read_text()
    for fields in (CHAT, GENERATE, OPTIONS):
        table = markdown(fields)
        assert table in page, f"put there:\n{table}"
