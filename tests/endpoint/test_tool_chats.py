"""Chats with tools over HTTP and gRPC: by the template, held to a grammar, answered as OpenAI's client reads it."""

import asyncio
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import jsonschema
import pytest
from endpoint.harness import World, collect, detail_of, field_of, make_tool_model, serving, until, world
from endpoint.test_chat import Recorder, encode
from endpoint.test_openai_resume import Events
from google.rpc import error_details_pb2
from openai import APIError, AsyncOpenAI, BadRequestError
from tool_templates import TEMPLATES, XML

from orca.v1 import orca_pb2 as pb
from orca_endpoint.http.exchange import EVENT_ID
from orca_endpoint.requests.cut_json import closed
from orca_endpoint.text.chat_template import ChatTemplate
from orca_pool.records import Reason

pytestmark = pytest.mark.usefixtures("one_helper")

PATIENCE = 60  # seconds: the first form starts its compiler
USER: Any = {"role": "user", "content": "Bern?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "é <b>", "parameters": SCHEMA}}
TIME: Any = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
CALLS = (
    'Hm 東京 <tool_call>\n{"name": "weather", "arguments": {"city": "Zü\\"}"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
NAMES = ["weather", "time"]
ARGUMENTS = ['{"city": "Zü\\"}"}', "{}"]


@pytest.fixture(scope="session")
def model(tool_model: Path) -> Path:
    return tool_model


@pytest.fixture(scope="module")
def slots() -> int:
    return 1024


@pytest.fixture
def orca(shared: World) -> World:
    return shared


@pytest.fixture
def client(shared_client: AsyncOpenAI) -> AsyncOpenAI:
    return shared_client


def rendered(name: str, messages: list[Any], **variables: Any) -> str:
    """The prompt, by the template itself: transformers' text, as test_chat_template.py shows."""
    special = {"bos_token": "<|end|>", "eos_token": "<|end|>"}
    return ChatTemplate(TEMPLATES[name], special).render(messages, variables, 1 << 20)


async def test_calls_whole_and_streamed(orca: World, client: AsyncOpenAI) -> None:
    """Text, then two calls: OpenAI's own client gathers from the stream what the whole answer says."""
    script = Recorder([*encode(orca, CALLS), 0])
    asked: dict[str, Any] = {"model": "tiny", "messages": [USER], "tools": TOOLS, "logprobs": True, "n": 2}
    async with orca.background(script):
        whole = await client.chat.completions.create(**asked)
        async with client.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            gathered = await stream.get_final_completion()
    assert list(script.records[0].prompt_ids) == encode(orca, rendered("hermes", [USER], tools=TOOLS))
    assert script.records[0].tool_syntax == "hermes"
    assert script.records[0].sampling.grammar
    for answer in (whole, gathered):
        for choice in answer.choices:
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Hm 東京 "
            calls: list[Any] = choice.message.tool_calls or []
            assert [(call.type, call.function.name) for call in calls] == [("function", one) for one in NAMES]
            assert [call.function.arguments for call in calls] == ARGUMENTS
            assert choice.logprobs is not None
            assert len(choice.logprobs.content or []) == len(encode(orca, CALLS)) + 1
        ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
        assert len(set(ids)) == 4


async def test_calls_alone_have_no_content(orca: World, client: AsyncOpenAI) -> None:
    """And the answer may be given back with the tool's result, as clients do."""
    alone = CALLS.removeprefix("Hm 東京 ")
    script = Recorder([*encode(orca, alone), 0])
    async with orca.background(script):
        answer = await client.chat.completions.create(
            model="tiny", messages=[USER], tools=TOOLS, tool_choice="required"
        )
        message = answer.choices[0].message
        calls: list[Any] = message.tool_calls or []
        results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "5°"} for call in calls]
        given: list[Any] = [USER, message.model_dump(), *results]
        await client.chat.completions.create(model="tiny", messages=given, tools=TOOLS, max_tokens=4)
    assert message.content is None
    told = [{**call.model_dump(), "function": {"name": call.function.name}} for call in calls]
    for call, arguments in zip(told, ({"city": 'Zü"}'}, {}), strict=True):
        call["function"]["arguments"] = arguments
    before = {"role": "assistant", "content": "", "tool_calls": told}
    assert list(script.records[1].prompt_ids) == encode(orca, rendered("hermes", [USER, before, *results], tools=TOOLS))


async def test_a_text_and_an_answer_that_is_cut(orca: World, client: AsyncOpenAI) -> None:
    """Their ends are those of any answer."""
    cut = encode(orca, CALLS[:60])
    for ids, most, finish, content, arguments in (
        ([*encode(orca, "no <tool"), 0], 64, "stop", "no <tool", None),
        (cut, len(cut), "length", "Hm 東京 ", '{"city'),
    ):
        async with orca.background(Recorder(ids)):
            answer = await client.chat.completions.create(model="tiny", messages=[USER], tools=TOOLS, max_tokens=most)
            (choice,) = answer.choices
            back: Any = choice.message.model_dump()
            await client.chat.completions.create(model="tiny", messages=[USER, back, USER], tools=TOOLS, max_tokens=4)
        calls: list[Any] = choice.message.tool_calls or []
        assert (choice.finish_reason, choice.message.content) == (finish, content)
        assert [call.function.arguments.startswith(arguments or "?") for call in calls] == [True] * bool(arguments)


async def test_a_call_with_a_name_twice_is_an_error(orca: World, client: AsyncOpenAI) -> None:
    """Parsers take one of its values, each its own one. A schema that allows other members cannot keep a model from it.
    The tokens before it have been streamed."""
    twice = '<tool_call>\n{"name": "weather", "arguments": {"city": "a", "x": 1, "x": 2}}\n</tool_call>'
    asked: dict[str, Any] = {"model": "tiny", "messages": [USER], "tools": TOOLS}
    said = "the arguments of a call have the name 'x' twice"
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Bern?")], tools=json.dumps(TOOLS))
    came = ""
    async with orca.background(Recorder([*encode(orca, twice), 0])):
        with pytest.raises(BadRequestError, match=said):
            await client.chat.completions.create(**asked)
        with pytest.raises(BadRequestError, match=said):
            await client.chat.completions.create(**asked, stop=["</tool"])
        with pytest.raises(APIError, match=said):  # noqa: PT012 (the loop is what fails)
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                parts = (call.function for call in chunk.choices[0].delta.tool_calls or [])
                came += "".join(part.arguments or "" for part in parts if part)
                assert chunk.choices[0].finish_reason is None
        assert came == '{"city": "a", "x": 1, "x": 2}'
        tool = WEATHER["function"] | {"type": "function"}
        with pytest.raises(BadRequestError, match=said):
            await client.responses.create(model="tiny", input="Bern?", tools=[tool])
        with pytest.raises(grpc.aio.AioRpcError, match=said) as refused:
            await orca.stub.GenerateText(pb.GenerateRequest(chat=chat))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert detail_of(refused.value, error_details_pb2.ErrorInfo()).reason == "AMBIGUOUS_CALL"


async def test_a_cancelled_call_with_a_name_twice(orca: World) -> None:
    """Its stream ends as every one does that Cancel ends."""
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Bern?")], tools=json.dumps(TOOLS))
    stream = orca.stub.Generate(pb.GenerateRequest(chat=chat, request_id="unwanted"))
    request = await orca.engine.claim()
    twice = '<tool_call>\n{"name": "weather", "arguments": {"city": "a", "x": 1, "x": 2}}'
    await orca.engine.commit(request, 0, encode(orca, twice))
    await orca.stub.Cancel(pb.CancelRequest(request_id="unwanted"))
    assert (await collect(stream))[-1].finished.reason == pb.FINISH_REASON_CANCELLED


CITY: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
PARSED = CITY | {"index": 0, "custom": None, "function": CITY["function"] | {"parsed_arguments": {"a": [1]}}}
SHOWN = {
    "role": "assistant",
    "content": "",
    "tool_calls": [CITY | {"function": {"name": "f", "arguments": {"a": [1]}}}],
}


def called(arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A message with a call of these arguments, and the message that the template sees where there are no arguments."""
    call = CITY | {"function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}, {
        "role": "assistant",
        "content": "",
        "tool_calls": [CITY | {"function": {"name": "f", "arguments": {}}}],
    }


HISTORIES: dict[
    str, tuple[dict[str, Any], dict[str, Any]]
] = {  # what a client gives back, and what the template is shown
    "openai's parse and stream": (
        {"role": "assistant", "content": None, "parsed": None, "refusal": None, "audio": None, "tool_calls": [PARSED]},
        SHOWN,
    ),
    "no arguments": called(""),
    "null": called(None),
    "cut at once": called("{"),
    "cut in a name": called('{"na'),
    "an answer": (
        {
            **{"role": "assistant", "content": "b", "annotations": [], "reasoning": "x", "reasoning_content": "y"},
            **{"parsed": {"a": 1}, "tool_calls": [], "function_call": None, "provider_specific_fields": {"z": 1}},
        },
        {"role": "assistant", "content": "b"},
    ),
    "nothing": ({"role": "assistant", "content": None, "tool_calls": None}, {"role": "assistant", "content": ""}),
    "a refusal": ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}),
    "parts": (
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "b", "annotations": []}, {"type": "refusal", "refusal": "c"}],
        },
        {"role": "assistant", "content": "b\nc"},
    ),
    "a cache": (
        {
            **{"role": "system", "cache_control": {"type": "ephemeral"}},
            "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}, "image_url": None}],
        },
        {"role": "system", "content": "b"},
    ),
}


async def test_conversations_as_clients_have_them(orca: World) -> None:
    script = Recorder([0])
    async with (
        orca.background(script),
        httpx.AsyncClient(base_url=orca.serving.http, timeout=PATIENCE) as http,
    ):
        for case, (given, shown) in HISTORIES.items():
            body = {"messages": [given, USER], "max_tokens": 4}
            answer = await http.post("/v1/chat/completions", json=body)
            assert (case, answer.status_code) == (case, 200), answer.text
            prompt = encode(orca, rendered("hermes", [shown, USER]))
            assert (case, list(script.records[-1].prompt_ids)) == (case, prompt)


def test_an_object_that_was_cut_is_closed() -> None:
    """Wherever it was cut: all that is whole in it is kept, and a value that is a text as far as it came."""
    text = r'{"a": [1, {"b": "x\"\ud83d\ude00\u00e9\n", "": [[], {}]}, "y\u00e9"], "c": {"d": null, "e": -1.5e3}'
    text += r', "q": "\\\\", "f" : "z" }'
    whole, seen = json.loads(text), set[str]()
    for end in range(1, len(text)):
        found = json.loads(closed(text[:end]))
        assert begins(found, whole), (text[:end], found)
        seen.add(json.dumps(found))
    assert json.dumps({**whole, "f": ""}) in seen
    assert {"a": [1, {"b": 'x"😀'}]} in map(json.loads, seen)
    for other in ("", "[1", '{"a": 1} b', "null", "}{"):
        with pytest.raises(ValueError, match="no object that was cut"):
            closed(other)


def begins(part: Any, whole: Any) -> bool:
    """Whether a value may be what came of another one."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(name in whole and begins(value, whole[name]) for name, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(begins, part, whole))
    return whole.startswith(part) if isinstance(part, str) and isinstance(whole, str) else part == whole


async def test_which_calls_a_request_allows(orca: World, client: AsyncOpenAI) -> None:
    """By its grammar, which the rank that samples follows."""
    script = Recorder([0])
    named: Any = {"type": "function", "function": {"name": "time"}}
    some: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    grammars = dict[str, str]()
    kinds: dict[str, dict[str, Any]] = {
        "auto": {},
        "one": {"parallel_tool_calls": False},
        "none": {"tool_choice": "none"},
        "required": {"tool_choice": "required"},
        "named": {"tool_choice": named},
        "some": {"tool_choice": some},
        "json": {"response_format": {"type": "json_object"}},
        "json alone": {"tool_choice": "none", "response_format": {"type": "json_object"}},
    }
    async with orca.background(script):
        for name, more in kinds.items():
            await client.chat.completions.create(model="tiny", messages=[USER], tools=TOOLS, max_tokens=4, **more)
            grammars[name] = script.records[-1].sampling.grammar
    assert len(set(grammars.values())) == len(grammars)
    assert {name for name, grammar in grammars.items() if "weather" in grammar} == {"auto", "one", "required", "json"}
    assert {name for name, grammar in grammars.items() if "time" in grammar} == {*grammars} - {"none", "json alone"}
    assert len({tuple(record.prompt_ids) for record in script.records}) == 1, "the model always sees all tools"


async def test_a_stream_with_calls_goes_on_at_another_endpoint(orca: World) -> None:
    """Also amid a name, a mark or arguments: the same chunks as without a break."""
    ids = [*encode(orca, CALLS), 0]
    body = {"messages": [USER], "tools": TOOLS, "stream": True, "detach_grace": 30}
    async with (
        serving(orca.redis_url, orca.name, orca.model) as second,
        httpx.AsyncClient(base_url=orca.serving.http, timeout=PATIENCE) as http,
        httpx.AsyncClient(base_url=second.http, timeout=PATIENCE) as other,
        http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        await until(lambda: second.app.endpoint.not_ready() is None)
        events, request = Events(answer), await orca.engine.claim()
        seen = [await events.next()]
        for n, token in enumerate(ids):
            await orca.engine.commit(request, n, [token], Reason.EOS if token == 0 else None)
        seen += await events.rest()
        numbers = list(dict.fromkeys(number for number, _ in seen if number is not None))
        for number in numbers[:-1:5]:
            path = f"/v1/chat/completions/{request.request_id}"
            async with other.stream("GET", path, headers={EVENT_ID: number}) as resumed:
                rest = await Events(resumed).rest()
            after = numbers[numbers.index(number) + 1 :]
            assert calls_in(rest) == calls_in([event for event in seen if event[0] in after])
            assert rest[-1][1]["choices"][0]["finish_reason"] == "tool_calls"
    assert [name for _, name, _ in calls_in(seen)] == ["weather", "time"]


def calls_in(events: list[tuple[str | None, Any]]) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call in chunks, as far as they are in these; the text as a call without either."""
    found: dict[int, list[str]] = {}
    for _, data in events:
        delta = data["choices"][0]["delta"]
        for part in delta.get("tool_calls", ()):
            call = found.setdefault(part["index"], ["", "", ""])
            function = part["function"]
            for place, piece in enumerate((part.get("id"), function.get("name"), function["arguments"])):
                call[place] += piece or ""
    return [(one, name, arguments) for _, (one, name, arguments) in sorted(found.items())]


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "tools": ({"tools": {}}, "tools", "a list"),
    "type": ({"tools": [{"type": "custom", "function": {}}]}, "tools[0].type", "only 'function'"),
    "surrogate": (
        {"tools": [{"type": "function", "function": {"name": "\ud800"}}]},
        "tools[0].function.name",
        "lone",
    ),
    "schema": (
        {"tools": [TIME, {"type": "function", "function": {"name": "g", "strict": True, "parameters": {"not": {}}}}]},
        "tools[1].function.parameters.not",
        "cannot be enforced",
    ),
    "choice": ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'any'; it may be none, auto, required"),
    "choice alone": ({"tool_choice": "auto"}, "tool_choice", "only with tools"),
    "unknown": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "'f', which is not among the tools",
    ),
    "custom": ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type", "'custom'"),
    "no name": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}},
        "tool_choice.function.name",
        "is missing",
    ),
    "mode": (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "all"}}},
        "tool_choice.allowed_tools.mode",
        "auto or required",
    ),
    "parallel": ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    "end": ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos", "must be false with tools"),
    "calls": (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}]},
        "messages[0].tool_calls[0].function",
        "is missing",
    ),
    "arguments": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1]"}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
        "an object of JSON",
    ),
    "calls of a user": ({"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls", "is not known"),
}


@pytest.mark.parametrize("case", BAD)
async def test_what_is_refused(client: AsyncOpenAI, case: str) -> None:
    changes, param, part = BAD[case]
    async with httpx.AsyncClient(base_url=str(client.base_url), timeout=PATIENCE) as http:
        raw = json.dumps({"model": "tiny", "messages": [USER], **changes})
        answer = await http.post(
            "/chat/completions", content=raw.encode(), headers={"content-type": "application/json"}
        )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert part in error["message"]


@pytest.mark.parametrize(
    ("template", "problem"),
    [("{{ messages[0].content }}", "takes no tools"), (XML, "takes tools, but in no way that is known here")],
)
async def test_models_without_tools(redis_url: str, tmp_path: Path, template: str, problem: str) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    before: Any = {"role": "assistant", "tool_calls": calls}
    async with (
        world(redis_url, make_tool_model(tmp_path / "none", template)) as orca,
        AsyncOpenAI(base_url=f"{orca.serving.http}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(BadRequestError, match=problem) as refused:
            await client.chat.completions.create(model="none", messages=[USER], tools=TOOLS)
        assert refused.value.param == "tools"
        with pytest.raises(BadRequestError, match="knows no calls") as refused:
            await client.chat.completions.create(model="none", messages=[before, USER])
        assert refused.value.param == "messages[0].tool_calls"
        told = await orca.stub.GetModel(pb.GetModelRequest())
        assert told.tool_syntax == ""


async def test_a_schema_is_relaxed_for_those_who_do_not_ask_for_strictness(orca: World) -> None:
    """A header and a metric say which keyword of which function, for an answer and for a stream. gRPC is strict."""
    records: Any = {"properties": {"a b": {"propertyNames": {"maxLength": 5}, "type": "object"}, "é": {"not": {}}}}
    tool: Any = {"type": "function", "function": {"name": "records", "parameters": records}}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"uniqueItems": True}}}
    ofs = {"chat/completions": {"messages": [USER], "tools": [WEATHER, tool]}, "completions": {"prompt": "Bern"}}
    relaxed = "records:.properties.a%20b.propertyNames; records:.properties.%C3%A9.not"
    async with (
        httpx.AsyncClient(base_url=f"{orca.serving.http}/v1", timeout=PATIENCE) as http,
        httpx.AsyncClient(base_url=f"http://{orca.serving.addresses['status']}") as status,
        orca.background(lambda record: [0]),
    ):
        for path, body in ofs.items():
            asked = {**body, "max_tokens": 4, "response_format": form}
            for more in ({}, {"stream": True}):
                answer = await http.post(path, json=asked | more)
                said = answer.headers["x-orca-relaxed"]
                assert said == "response_format:.uniqueItems" + (f"; {relaxed}" if "tools" in body else "")
            strict = {**form, "json_schema": form["json_schema"] | {"strict": True}}
            answer = await http.post(path, json=asked | {"response_format": strict})
            assert answer.json()["error"]["param"] == "response_format.json_schema.schema.uniqueItems"
        held = await http.post("chat/completions", json={"messages": [USER], "tools": [WEATHER], "max_tokens": 4})
        assert "x-orca-relaxed" not in held.headers
        counted = (await status.get("/metrics")).text
    for keyword, function, count in (("propertyNames", "records", 2), ("not", "records", 2), ("uniqueItems", "", 4)):
        assert f'orca_schema_relaxations_total{{keyword="{keyword}",tool="{function}"}} {count}.0\n' in counted
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Bern?")], tools=json.dumps([tool]))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await orca.stub.GenerateText(pb.GenerateRequest(chat=chat))
    assert field_of(refused.value) == "chat.tools[0].function.parameters.properties.a b.propertyNames"


NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}}
AS_VLLM: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # two spellings of a form
    "json": ({"guided_json": NUMBER}, {"structured_outputs": {"json": json.dumps(NUMBER)}}),
    "object": (
        {"structured_outputs": {"json_object": True}},
        {"response_format": {"type": "json_object"}},
    ),
    "regex": ({"guided_regex": "a+|b"}, {"structured_outputs": {"regex": "a+|b", "json": None}}),
    "grammar": ({"guided_grammar": 'start: "a"'}, {"structured_outputs": {"grammar": 'start: "a"'}}),
    "choice": ({"guided_choice": ["a.", ""]}, {"structured_outputs": {"choice": ["a.", ""]}}),
}
NO_FORM: dict[str, tuple[dict[str, Any], str]] = {
    "two": ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    "beside": ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
    "none": ({"structured_outputs": {}}, "structured_outputs"),
    "unknown": ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    "strict": ({"guided_json": {"not": {}}}, "guided_json.not"),
    "its place": ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json.not"),
    "choice": ({"guided_choice": []}, "guided_choice"),
    "regex": ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    "object": ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
}


async def test_forms_as_vllm_spells_them(orca: World) -> None:
    script = Recorder([0])
    async with (
        orca.background(script),
        httpx.AsyncClient(base_url=f"{orca.serving.http}/v1", timeout=PATIENCE) as http,
    ):
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": [USER]})):
            for case, spellings in AS_VLLM.items():
                for spelling in spellings:
                    answer = await http.post(path, json={**body, **spelling, "max_tokens": 2})
                    assert (case, answer.status_code) == (case, 200), answer.text
                one, other = script.records[-2:]
                assert one.sampling.grammar == other.sampling.grammar != ""
            for case, (wrong, param) in NO_FORM.items():
                answer = await http.post(path, json={**body, **wrong, "max_tokens": 2})
                assert (case, answer.status_code, answer.json()["error"]["param"]) == (case, 400, param)
    choices = {record.sampling.grammar for record in script.records if r"a\\x{2E}" in record.sampling.grammar}
    assert len(choices) == 1, "the texts are no patterns"


async def test_the_tokens_of_a_chat(orca: World) -> None:
    """They are those of the prompt that the chat would have."""
    script = Recorder([0])
    body = {"messages": [USER | {"content": "a </tool_call>"}], "tools": TOOLS}
    async with orca.background(script), httpx.AsyncClient(base_url=orca.serving.http, timeout=PATIENCE) as http:
        await http.post("/v1/chat/completions", json=body)
        more = {"add_special_tokens": False, "add_generation_prompt": True, "return_token_strs": True}
        answer = (await http.post("/tokenize", json=body | more)).json()
        assert answer["tokens"] == list(script.records[0].prompt_ids)
        refused = await http.post("/tokenize", json=body | {"add_generation_prompt": False})
        assert refused.json()["error"]["param"] == "add_generation_prompt"
        info = (await http.get("/tokenizer_info")).json()
    assert info["chat_template"] == TEMPLATES["hermes"]


async def test_answers_are_as_the_door_describes_them(orca: World) -> None:
    """By /openapi.json: each answer has the members that are needed, and no others but those that its API adds."""
    ids = [*encode(orca, 'Hm <tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'), 0]
    asked = {"messages": [USER], "tools": TOOLS, "max_tokens": 200}
    tool = {"name": "time", "input_schema": SCHEMA}

    async def answering() -> None:
        while True:
            request = await orca.engine.claim()
            await orca.engine.commit(request, 0, ids, Reason.EOS)

    async with httpx.AsyncClient(base_url=orca.serving.http, timeout=PATIENCE) as http:
        document = (await http.get("/openapi.json")).json()

        def check(name: str, found: Any, optional: Collection[str] = (), more: Collection[str] = ()) -> None:
            """optional: members that are not always there. more: members that are not described."""
            schema = document["components"]["schemas"][name]
            judge = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
            judge.validate(found)
            assert set(found) - schema["properties"].keys() == set(more), name
            for member in schema["properties"]:
                left = {other: value for other, value in found.items() if other != member}
                assert judge.is_valid(left) == (member in optional), (name, member)
                assert not judge.is_valid(found | {member: [["wrong"]]}), (name, member)

        async def ask(path: str, body: Any = None, way: str = "") -> tuple[str, Any]:
            """The name of an answer's description, and the answer."""
            answer = await http.request("GET" if body is None else "POST", path, json=body)
            assert answer.status_code == 200, answer.text
            described = document["paths"][way or path]["get" if body is None else "post"]["responses"]["200"]
            (content,) = {one["schema"]["$ref"].rpartition("/")[2] for one in described["content"].values()}
            return content, answer.json()

        engine = asyncio.create_task(answering())
        try:
            scored = {"logprobs": True, "top_logprobs": 1}
            completion = await ask("/v1/completions", {"prompt": "a", "max_tokens": 200, "logprobs": 1})
            chat = await ask("/v1/chat/completions", asked | scored)
            streamed = await http.post("/v1/chat/completions", json=asked | scored | {"stream": True})
            flat = [{"type": "function", **one["function"]} for one in TOOLS]
            response = await ask("/v1/responses", {"input": "Bern?", "tools": flat})
            prompt = {"messages": [USER], "tools": [tool]}
            message = await ask("/v1/messages", prompt | {"max_tokens": 200})
            lines = {"messages": [USER], "tools": TOOLS, "stream": False, **scored}
            by_ollama = await ask("/api/chat", lines), await ask("/api/generate", {"prompt": "a", "stream": False})
        finally:
            engine.cancel()
        (choice,) = completion[1]["choices"]
        (answered,) = chat[1]["choices"]
        check(*completion, {"usage"})
        check("Choice", choice)
        check("Logprobs", choice["logprobs"])
        check("Usage", completion[1]["usage"])
        check(*chat, {"usage"})
        check("ChatChoice", answered)
        check("Message", answered["message"], {"tool_calls"})
        check("ChatLogprobs", answered["logprobs"])
        check("ChatToken", answered["logprobs"]["content"][0])
        chunks = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
        for chunk in chunks:
            check("ChatChunk", chunk, {"usage"})
            check("ChatDelta", chunk["choices"][0])
        delta = next(chunk["choices"][0]["delta"] for chunk in chunks if "tool_calls" in chunk["choices"][0]["delta"])
        check("Delta", delta, {"role", "content", "tool_calls"})
        check("CallDelta", delta["tool_calls"][0], {"id", "type"})
        said, call = response[1]["output"]
        check(*response, more=response[1].keys() - document["components"]["schemas"]["Response"]["properties"])
        check("OutputMessage", said)
        check("FunctionCall", call)
        check("ResponseUsage", response[1]["usage"], more={"input_tokens_details", "output_tokens_details"})
        check(*message)
        counts = {"prompt_eval_count", "eval_count", "total_duration", "load_duration"}
        for one in by_ollama:
            check(*one, counts | {"done_reason", "logprobs", "prompt_eval_duration", "eval_duration"})
        check(*await ask("/v1/messages/count_tokens", prompt))
        of_card = {"max_model_len", "vocab_size", "chat_template", "parent"}
        check(*await ask("/v1/models"))
        check(*await ask("/v1/models/tiny", way="/v1/models/{model}"), of_card)
        check(*await ask("/api/tags"))
        check(*await ask("/api/ps"))
        check(*await ask("/api/show", {"model": "tiny"}), more={"modified_at"})
        for path in ("/api/version", "/version", "/health"):
            check(*await ask(path))
        check(*await ask("/tokenize", {"prompt": "a", "return_token_strs": True}))
        check(*await ask("/detokenize", {"tokens": [5]}))
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
            shape = document["paths"][path]["post"]["responses"]["default"]["$ref"].rpartition("/")[2]
            ref = document["components"]["responses"][shape]["content"]["application/json"]["schema"]["$ref"]
            refused = (await http.post(path, json={"nothing": 1})).json()
            check(ref.rpartition("/")[2], refused)
            inner = document["components"]["schemas"][shape]["properties"]["error"]
            if path != "/api/chat":
                assert set(inner["required"]) == set(inner["properties"]) == set(refused["error"]), path


async def test_a_schema_that_is_too_much_is_left_out_whole(orca: World, client: AsyncOpenAI) -> None:
    """For those who do not ask for strictness: their answer is JSON."""
    script = Recorder([0])
    schema: Any = {"properties": {f"p{n}": {} for n in range(4000)}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "hard", "schema": schema}}
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": "Bern",
        "max_tokens": 4,
        "extra_body": {"response_format": form},
    }
    async with orca.background(script):
        raw = await client.completions.with_raw_response.create(**asked)
        assert raw.headers["x-orca-relaxed"] == "response_format:."
        assert "p1" not in script.records[0].sampling.grammar
        form["json_schema"]["strict"] = True
        with pytest.raises(BadRequestError, match="too large or too complex"):
            await client.completions.create(**asked)


async def test_tools_over_grpc(orca: World) -> None:
    """The same prompt and grammar; the text is the model's own, with its calls."""
    script = Recorder([*encode(orca, CALLS), 0])
    chat = pb.Chat(
        messages=[pb.ChatMessage(role="user", content="Bern?")],
        tools=json.dumps(TOOLS),
        tool_choice=pb.TOOL_CHOICE_REQUIRED,
        tool_names=["time"],
    )
    async with orca.background(script):
        answer = await orca.stub.GenerateText(pb.GenerateRequest(chat=chat))
        told = await orca.stub.GetModel(pb.GetModelRequest())
    assert answer.text == CALLS
    assert told.tool_syntax == "hermes"
    assert list(script.records[0].prompt_ids) == encode(orca, rendered("hermes", [USER], tools=TOOLS))
    assert "weather" not in script.records[0].sampling.grammar
    free = pb.Chat(messages=chat.messages, tools=chat.tools)
    for wrong, field in (
        (pb.GenerateRequest(chat=free, regex="a*"), "regex"),
        (pb.GenerateRequest(chat=pb.Chat(messages=chat.messages, one_tool_call=True)), "chat.one_tool_call"),
        (pb.GenerateRequest(chat=pb.Chat(messages=chat.messages, tools="[]")), "chat.tools"),
        (
            pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="assistant", tool_calls="[1]")])),
            "chat.messages[0].tool_calls[0]",
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await orca.stub.GenerateText(wrong)
        assert field_of(refused.value) == field


async def test_tokens_that_mark_calls_have_a_text(redis_url: str, tmp_path: Path) -> None:
    """Mistral's marks are special tokens, which have no text in other answers."""
    model = make_tool_model(tmp_path / "marks", TEMPLATES["mistral-args"], ["[TOOL_CALLS]", "[ARGS]", "[OTHER]"])
    async with (
        world(redis_url, model, slots=1024) as orca,
        AsyncOpenAI(base_url=f"{orca.serving.http}/v1", api_key="none", max_retries=0) as client,
        orca.background(lambda record: [*encode(orca, "a[OTHER][TOOL_CALLS]time[ARGS]{}"), 0]),
    ):
        answer = await client.chat.completions.create(model="marks", messages=[USER], tools=TOOLS)
        plain = await client.chat.completions.create(model="marks", messages=[USER])
    calls: list[Any] = answer.choices[0].message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == [("time", "{}")]
    assert (answer.choices[0].message.content, plain.choices[0].message.content) == ("a", "atime{}")
