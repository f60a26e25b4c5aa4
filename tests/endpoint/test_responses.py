"""OpenAI's responses, by OpenAI's own client: items in and out, events, what is kept, and what goes on from it."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from endpoint.harness import World, serving, until
from endpoint.test_chat import Recorder, encode
from endpoint.test_tool_chats import ARGUMENTS, CALLS, NAMES, PATIENCE, SCHEMA, rendered
from hypothesis import given
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.responses import Response
from pydantic import BaseModel

from orca_endpoint.calls.events import Accepted, Finished, Token
from orca_endpoint.openai.answer import Choice
from orca_endpoint.openai.chat.answer import Logprobs
from orca_endpoint.openai.content import Placed
from orca_endpoint.openai.responses import method
from orca_endpoint.openai.responses.answer import NO_EVENTS, ResponseReply
from orca_endpoint.openai.responses.kept import Kept
from orca_endpoint.openai.responses.request import asked, parse
from orca_endpoint.text.tool_calls import SYNTAXES, CallReader
from orca_pool.records import Reason, Times

pytestmark = pytest.mark.usefixtures("one_helper")

WEATHER: Any = {"type": "function", "name": "weather", "description": "é <b>", "parameters": SCHEMA, "strict": None}
TIME: Any = {"type": "function", "name": "time"}
AS_CHAT = [
    {"type": "function", "function": {"name": "weather", "description": "é <b>", "parameters": SCHEMA, "strict": None}},
    {"type": "function", "function": {"name": "time"}},
]
USER: Any = {"role": "user", "content": "Bern?"}


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


# Open Responses requires these members: openresponses/openresponses, ResponseResource.json at 3452c01.
REQUIRED = """id object created_at completed_at status incomplete_details model previous_response_id instructions output
error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs
temperature reasoning user usage max_output_tokens max_tool_calls store background service_tier metadata
safety_identifier prompt_cache_key"""


async def test_a_text(orca: World, client: AsyncOpenAI) -> None:
    """Whole and streamed: the same object, and the events say what it says."""
    ids = encode(orca, "holds 東京")
    script = Recorder(ids)
    asked: dict[str, Any] = {
        **{"model": "tiny", "input": "Bern?", "instructions": "be brief", "metadata": {"a": "b"}},
        **{"max_output_tokens": len(ids), "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    }
    began = int(time.time())
    async with orca.background(script):
        answer = await client.responses.create(**asked)
        stream = await client.responses.create(**asked, stream=True)
        events = [event async for event in stream]
    prompt = encode(orca, rendered("hermes", [{"role": "system", "content": "be brief"}, USER]))
    assert list(script.records[0].prompt_ids) == prompt
    assert script.records[0].request_id == answer.id
    assert {*REQUIRED.split()} <= answer.model_dump().keys()
    assert (answer.output_text, answer.status, answer.instructions) == ("holds 東京", "incomplete", "be brief")
    assert answer.tool_choice == "auto"
    assert answer.id.startswith("resp_")
    assert began <= answer.created_at <= (answer.completed_at or time.time())
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt), len(ids))
    assert answer.usage.input_tokens_details.cached_tokens == 0
    (message,) = answer.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert b"".join(bytes(one.bytes) for one in part.logprobs or []).decode() == "holds 東京"
    assert {len(one.top_logprobs) for one in part.logprobs or []} == {2}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events if event.type != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert same(last.response, answer)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "holds 東京"
    done = next(event for event in events if event.type == "response.output_text.done")
    assert done.text == part.text
    assert [(one.token, one.logprob) for one in done.logprobs] == [
        (one.token, one.logprob) for one in part.logprobs or []
    ]


def same(one: Response, other: Response) -> bool:
    """Whether two responses differ by their ids and times alone."""

    def plain(response: Response) -> str:
        return (
            response.model_copy(update={"created_at": 0, "completed_at": 0})
            .model_dump_json()
            .replace(response.id.removeprefix("resp_"), "ID")
        )

    return plain(one) == plain(other)


class City(BaseModel):
    city: str


async def test_parsed_by_the_client(orca: World, client: AsyncOpenAI) -> None:
    """Its `parse` asks for a strict schema, which the grammar holds the text to."""
    script = Recorder([*encode(orca, '{"city": "Bern"}'), 0])
    async with orca.background(script):
        answer = await client.responses.parse(model="tiny", input="Bern?", text_format=City)
    assert answer.output_parsed == City(city="Bern")
    assert "city" in script.records[0].sampling.grammar
    wrong: Any = {"format": {"type": "json_schema", "name": "a", "strict": True, "schema": {"not": {}}}}
    with pytest.raises(BadRequestError) as refused:
        await client.responses.create(model="tiny", input="a", text=wrong)
    assert refused.value.param == "text.format.schema.not"
    wrong["format"]["strict"] = False
    async with orca.background(script):
        raw = await client.responses.with_raw_response.create(model="tiny", input="a", text=wrong)
    assert raw.headers["x-orca-relaxed"] == "text.format:.not"


async def test_calls_and_the_turn_after_them(orca: World, client: AsyncOpenAI) -> None:
    """The items of an answer are given back as they came, by their ids, or by that of the response: one prompt."""
    script = Recorder([*encode(orca, CALLS), 0])
    asked: dict[str, Any] = {"model": "tiny", "tools": [WEATHER, TIME]}
    async with orca.background(script):
        answer = await client.responses.create(input="Bern?", **asked)
        stream = await client.responses.create(input="Bern?", **asked, stream=True)
        events = [event async for event in stream]
        message, *calls = as_any(answer.output)
        results: list[Any] = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "5°"} for call in calls
        ]
        items: list[Any] = [one.model_dump() for one in answer.output]
        references: list[Any] = [{"type": "item_reference", "id": one.id} for one in answer.output]
        await client.responses.create(input=[USER, *items, *results], **asked)
        await client.responses.create(input=[USER, *references, *results], **asked)
        last = await client.responses.create(input=results, previous_response_id=answer.id, **asked)
        await client.responses.create(input="And?", previous_response_id=last.id, model="tiny")
    assert list(script.records[0].prompt_ids) == encode(orca, rendered("hermes", [USER], tools=AS_CHAT))
    assert (answer.output_text, message.type) == ("Hm 東京 ", "message")
    assert [(call.type, call.name) for call in calls] == [("function_call", name) for name in NAMES]
    assert [call.arguments for call in calls] == ARGUMENTS
    done: Any = events[-1]
    assert done.type == "response.completed"
    assert [getattr(one, "arguments", None) for one in done.response.output] == [None, *ARGUMENTS]
    for n in (0, 1):
        deltas = [
            event.delta
            for event in events
            if event.type == "response.function_call_arguments.delta" and event.output_index == n + 1
        ]
        assert "".join(deltas) == ARGUMENTS[n]
    assert len({tuple(record.prompt_ids) for record in script.records[2:5]}) == 1
    called = [
        {"id": call.call_id, "type": "function", "function": {"name": name, "arguments": json.loads(arguments)}}
        for call, name, arguments in zip(calls, NAMES, ARGUMENTS, strict=True)
    ]
    turns = [
        USER,
        {"role": "assistant", "content": "Hm 東京 ", "tool_calls": called},
        *({"role": "tool", "tool_call_id": one["id"], "content": "5°"} for one in called),
    ]
    assert list(script.records[2].prompt_ids) == encode(orca, rendered("hermes", turns, tools=AS_CHAT))
    again = rendered("hermes", [*turns, turns[1] | {"tool_calls": renamed(called, last)}, USER | {"content": "And?"}])
    assert list(script.records[5].prompt_ids) == encode(orca, again)


def as_any(items: Sequence[Any]) -> Sequence[Any]:
    return items


def renamed(called: Sequence[Mapping[str, Any]], answer: Response) -> list[Any]:
    """The calls with the ids of another answer."""
    ids = [one.call_id for one in answer.output if one.type == "function_call"]
    return [{**call, "id": new} for call, new in zip(called, ids, strict=True)]


async def test_which_calls_a_request_allows(orca: World, client: AsyncOpenAI) -> None:
    script = Recorder([0])
    grammars = dict[str, str]()
    named: Any = {"type": "function", "name": "time"}
    kinds: dict[str, dict[str, Any]] = {
        "auto": {},
        "one": {"parallel_tool_calls": False},
        "none": {"tool_choice": "none"},
        "required": {"tool_choice": "required"},
        "named": {"tool_choice": named},
        "some": {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [named]}},
        "json": {"text": {"format": {"type": "json_object"}}},
    }
    async with orca.background(script):
        for name, more in kinds.items():
            await client.responses.create(model="tiny", input="a", tools=[WEATHER, TIME], max_output_tokens=4, **more)
            grammars[name] = script.records[-1].sampling.grammar
    assert len(set(grammars.values())) == len(grammars)
    assert {name for name, grammar in grammars.items() if "weather" in grammar} == {"auto", "one", "required", "json"}


async def test_a_response_while_and_after_it_runs(orca: World, client: AsyncOpenAI) -> None:
    """A read changes nothing. Its stream is taken up at another endpoint, behind any event."""
    ids = [*encode(orca, CALLS), 0]
    asked: dict[str, Any] = {"model": "tiny", "input": "Bern?", "tools": [WEATHER, TIME]}
    async with (
        serving(orca.redis_url, orca.name, orca.model) as second,
        AsyncOpenAI(base_url=f"{second.http}/v1", api_key="none", max_retries=0) as other,
    ):
        await until(lambda: second.app.endpoint.not_ready() is None)
        stream = await client.responses.create(**asked, stream=True, timeout=PATIENCE)
        seen: list[Any] = [await anext(stream)]
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, ids[:6])
        running = await other.responses.retrieve(request.request_id)
        assert (running.status, running.usage) == ("in_progress", None)
        assert CALLS.startswith(running.output_text)
        assert running.output_text
        with pytest.raises(BadRequestError, match="is in_progress"):
            await other.responses.create(model="tiny", input="a", previous_response_id=request.request_id)
        for n, token in enumerate(ids[6:], 6):
            await orca.engine.commit(request, n, [token], Reason.EOS if token == 0 else None)
        seen += [event async for event in stream]
        assert (await other.responses.retrieve(request.request_id)).output == seen[-1].response.output
        for after in range(0, len(seen), 4):
            rest = [
                event
                async for event in await other.responses.retrieve(request.request_id, stream=True, starting_after=after)
            ]
            assert [event.to_json() for event in rest] == [event.to_json() for event in seen[after + 1 :]]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))


async def test_a_stream_that_another_one_takes_over(orca: World, client: AsyncOpenAI) -> None:
    """It ends with an error for OpenAI's client, whose number is that of the last event: nothing is lost behind it."""
    stream = await client.responses.create(model="tiny", input="a", stream=True)
    first = await anext(stream)
    request = await orca.engine.claim()
    again = await client.responses.retrieve(request.request_id, stream=True, starting_after=first.sequence_number)
    with pytest.raises(APIError, match="taken over") as ended:
        async for _ in stream:
            pass
    assert isinstance(ended.value.body, dict)
    await orca.engine.answer(request, encode(orca, "the pool"))
    rest = [event async for event in again]
    assert rest[0].sequence_number == first.sequence_number + 1
    assert rest[-1].type == "response.incomplete"


async def test_what_is_not_kept(orca: World, client: AsyncOpenAI) -> None:
    async with orca.background(lambda record: [0]):
        answer = await client.responses.create(model="tiny", input="a", store=False)
        chat = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    assert answer.model_dump()["store"] is False
    for name, part in ((answer.id, "store is not false"), (chat.id, "is not kept"), ("resp_nobody", "is not known")):
        with pytest.raises(NotFoundError, match=part):
            await client.responses.retrieve(name)
        with pytest.raises(BadRequestError, match="is not known here") as refused:
            await client.responses.create(model="tiny", input="a", previous_response_id=name)
        assert refused.value.param == "previous_response_id"


async def test_what_a_stop_string_has_ended(orca: World, client: AsyncOpenAI) -> None:
    """It is kept as it was told, and a conversation goes on from it."""
    script = Recorder([*encode(orca, "holds 東京"), 0])
    async with orca.background(script):
        answer = await client.responses.create(model="tiny", input="a", extra_body={"stop": ["東"]})
        kept = await client.responses.retrieve(answer.id)
        await client.responses.create(model="tiny", input="And?", previous_response_id=answer.id)
    assert (answer.status, answer.output_text) == ("completed", "holds ")
    assert kept == answer
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "holds "}, USER | {"content": "And?"}]
    assert list(script.records[1].prompt_ids) == encode(orca, rendered("hermes", turns))


@pytest.mark.parametrize("stop", [[], ["</tool"]])
async def test_what_has_a_name_twice_has_failed(orca: World, client: AsyncOpenAI, stop: list[str]) -> None:
    """Whether the model has ended it, or a stop string: it is kept as failed, and no conversation goes on from it."""
    twice = '<tool_call>\n{"name": "weather", "arguments": {"city": "a", "x": 1, "x": 2}}\n</tool_call>'
    script = Recorder([*encode(orca, twice), 0])
    async with orca.background(script):
        with pytest.raises(BadRequestError, match="the name 'x' twice"):
            await client.responses.create(model="tiny", input="a", tools=[WEATHER], extra_body={"stop": stop})
        name = script.records[0].request_id
        kept = await client.responses.retrieve(name)
        assert kept.status == "failed"
        assert kept.error is not None
        assert "the name 'x' twice" in kept.error.message
        with pytest.raises(BadRequestError, match="is failed") as refused:
            await client.responses.create(model="tiny", input="And?", previous_response_id=name)
    assert refused.value.param == "previous_response_id"


async def test_references_bring_no_more_than_a_chat_may_have(
    orca: World, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short body may name a long answer often, and many answers."""
    ids, answers = [*encode(orca, "holds 東京" * 40), 0], list[Response]()
    for _ in range(2):
        coming = asyncio.create_task(client.responses.create(model="tiny", input="a"))
        await orca.engine.commit(await orca.engine.claim(), 0, ids, Reason.EOS)  # at once
        answers.append(await coming)
    answer, other = answers
    # The long inputs are in `extra_body`: OpenAI's client looks for seconds at one that it knows.
    monkeypatch.setattr(method, "REFERRED", 1)
    with pytest.raises(BadRequestError, match="positions"):  # this many messages are put together beside the loop
        await client.responses.create(model="tiny", extra_body={"input": [USER] * 2 * method.IN_LOOP})
    both: list[Any] = [{"type": "item_reference", "id": one.output[0].id} for one in (answer, other)]
    with pytest.raises(BadRequestError, match="one response more than 1") as refused:
        await client.responses.create(model="tiny", input=both)
    assert refused.value.param == "input[1].id"
    often: list[Any] = [{"type": "item_reference", "id": answer.output[0].id}] * 3_000
    with pytest.raises(BadRequestError, match="a chat has at most 1048576 bytes") as refused:
        await client.responses.create(model="tiny", extra_body={"input": often})
    assert str(refused.value.param).startswith("input[2")  # where it became too much


def test_many_calls_of_one_answer_take_time_by_their_number() -> None:
    """They become one message: one that took the calls before it apart for each took 20 s of 4,000 calls."""
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"b": 1}'}
    seconds = list[float]()
    for count in (200, 3200):
        question = parse(json.dumps({"input": [USER, *[call] * count]}).encode())
        began = time.thread_time()
        (sample,) = asked(question, [], [one for one in question.items if isinstance(one, Placed)]).samples
        seconds.append(time.thread_time() - began)
        user, calls = sample.request.chat.messages
        assert (user.content, len(json.loads(calls.tool_calls))) == ("Bern?", count)
        assert [*Kept.of(sample.kept).messages] == [user, calls]
    assert seconds[1] < 80 * seconds[0] + 0.1  # 16 times as many; by their square it would be 256 times as long


async def test_a_request_that_failed(orca: World, client: AsyncOpenAI) -> None:
    stream = await client.responses.create(model="tiny", input="a", stream=True)
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10], Reason.NOT_FINITE)
    with pytest.raises(APIError):
        async for _ in stream:
            pass
    answer = await client.responses.retrieve(request.request_id)
    assert answer.status == "failed"
    assert answer.error is not None


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no input": ({"input": None}, "input", "is missing"),
    "empty": ({"input": []}, "input", "at least one"),
    "no object": ({"input": ["a"]}, "input[0]", "an object"),
    "kind": ({"input": [USER, {"type": "computer_call"}]}, "input[1].type", "computer_call"),
    "role": ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "'tool'"),
    "no content": ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "'input_image'; only 'input_text' and 'output_text'",
    ),
    "part": ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "missing"),
    "member": ({"input": [USER | {"weight": 1}]}, "input[0].weight", "is not known"),
    "surrogate": ({"input": "\ud800"}, "input", "surrogate"),
    "call": (
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[1]"}]},
        "input[0].arguments",
        "an object of JSON",
    ),
    "call id": ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "is missing"),
    "output": ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output", "is missing"),
    "reference": ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input[0].id", "is not known here"),
    "tool": ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
    "tool's member": ({"tools": [TIME, TIME | {"name": "f", "async": True}]}, "tools[1].async", "is not known"),
    "tool's name": ({"tools": [TIME | {"name": "a b"}]}, "tools[0].name", "only letters"),
    "schema": (
        {"tools": [TIME | {"strict": True, "parameters": {"properties": {"a": {"not": {}}}}}]},
        "tools[0].parameters.properties.a.not",
        "",
    ),
    "choice": ({"tool_choice": "required"}, "tool_choice", "only with tools"),
    "choice's name": (
        {"tools": [TIME], "tool_choice": {"type": "function", "name": "f"}},
        "tool_choice",
        "not among the tools",
    ),
    "choice's kind": ({"tools": [TIME], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "'function'"),
    "format": ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'xml'"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
    "reasoning": ({"reasoning": {"effort": "high"}}, "reasoning.effort", "null or none"),
    "include": ({"include": ["thoughts"]}, "include[0]", "may be"),
    "top": ({"top_logprobs": 2}, "top_logprobs", "only with"),
    "options": ({"stream_options": {}}, "stream_options", "only with stream"),
    "usage": ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage", "not known"),
    "length": ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    "long": ({"max_output_tokens": 5000}, "max_output_tokens", "positions"),
    "background": ({"background": True}, "background", "detach_grace"),
    "truncation": ({"truncation": "auto"}, "truncation", '"disabled"'),
    "messages": ({"messages": []}, "messages", "a response has an input"),
    "chat template": ({"chat_template": "a"}, "chat_template", "the model's own"),
}
QUERIES = {
    "stream": ("?stream=yes", "stream"),
    "a number": ("?stream=true&starting_after=-1", "starting_after"),
    "no stream": ("?starting_after=1", "starting_after"),
    "padding": ("?include_obfuscation=true", "include_obfuscation"),
    "a name": ("?from=1", "from"),
    "twice": ("?stream=true&stream=true", "stream"),
}


async def test_what_is_refused(orca: World) -> None:
    """By the caller's own name of the field, and never ignored."""
    async with httpx.AsyncClient(base_url=orca.serving.http, timeout=PATIENCE) as http:
        for case, (changes, param, part) in BAD.items():
            answer = await http.post(
                "/v1/responses",
                content=json.dumps({"model": "tiny", "input": "a", **changes}),
                headers={"content-type": "application/json"},
            )
            error = answer.json()["error"]
            assert (case, answer.status_code, error["param"]) == (case, 400, param), error
            assert part in error["message"], (case, error)
        for case, (query, param) in QUERIES.items():
            answer = await http.get(f"/v1/responses/resp_a{query}")
            assert (case, answer.status_code, answer.json()["error"]["param"]) == (case, 400, param)
        other = await http.get("/v1/responses/resp_a?model=other")
        assert (other.status_code, other.json()["error"]["param"]) == (404, "model")


async def test_what_clients_give_back(orca: World) -> None:
    """By the table of docs/openai.md."""
    script = Recorder([0])
    of_answer = {"id": "msg_1", "status": "completed", "phase": "final_answer", "type": "message"}
    part = {"type": "output_text", "text": "b", "annotations": [], "logprobs": [], "parsed": {"a": 1}}
    call = {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "x", "name": "time"}
    history: list[Any] = [
        {**USER, "type": "message", "phase": None},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {**of_answer, "role": "assistant", "content": [part, {"type": "refusal", "refusal": "c"}]},
        {**call, "arguments": '{"a": "cu', "parsed_arguments": {}, "namespace": None},
        {
            "type": "function_call_output",
            "id": "1",
            "status": "completed",
            "call_id": "x",
            "output": [{"type": "input_text", "text": "5"}],
        },
    ]
    async with orca.background(script), httpx.AsyncClient(base_url=orca.serving.http, timeout=PATIENCE) as http:
        answer = await http.post("/v1/responses", json={"input": history, "tools": [TIME], "tool_choice": "auto"})
    assert answer.status_code == 200, answer.text
    called = {"id": "x", "type": "function", "function": {"name": "time", "arguments": {"a": "cu"}}}
    turns = [
        USER,
        {"role": "assistant", "content": "b\nc", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "x", "content": "5"},
    ]
    prompt = encode(orca, rendered("hermes", turns, tools=[AS_CHAT[1]]))
    assert list(script.records[0].prompt_ids) == prompt


PIECES = st.lists(
    st.sampled_from(["a", "東", "", "<tool_call>", "\n", '{"name": "', "f", '", "arguments": ', "{}", "}"])
)


@given(PIECES, st.lists(st.integers(1, 9)), st.sampled_from([Reason.EOS, Reason.LENGTH]), st.integers(-1, 20))
def test_events_say_what_the_response_says(pieces: list[str], together: list[int], reason: Reason, after: int) -> None:
    """Whatever text comes, and however its tokens come together: the deltas are the whole, and the numbers the same."""
    text = ["Hm ", "<tool_call>", '\n{"name": "', "f", '", "arguments": ', '{"a":', " 1}", "}\n</tool_call>", *pieces]
    for said in (pieces, text):
        one = events_of(said, [], reason)
        other = events_of(said, together, reason)
        assert one == other
        assert [event["sequence_number"] for event in one] == list(range(len(one)))
        assert events_of(said, together, reason, after) == one[after + 1 :]
        whole = one[-1]["response"]
        for n, item in enumerate(whole["output"]):
            of_item = [event for event in one if event.get("output_index") == n]
            kinds = {"message": "response.output_text.delta", "function_call": "response.function_call_arguments.delta"}
            deltas = "".join(event["delta"] for event in of_item if event["type"] == kinds[item["type"]])
            assert deltas == (item["content"][0]["text"] if item["type"] == "message" else item["arguments"])
            assert of_item[-1]["item"] == item
            assert of_item[-1]["type"] == "response.output_item.done"
        assert whole == events_of(said, together, reason, NO_EVENTS)[0]


def events_of(pieces: Sequence[str], together: Sequence[int], reason: Reason, seen: float = -1) -> list[Any]:
    """The events of an answer whose tokens have these texts. together: how many come in one piece."""
    reader = CallReader(SYNTAXES["hermes"], "resp_1")
    tokens = [Token(n, 1, text, None, 0, "e", (), reader.push(text)) for n, text in enumerate(pieces)]
    end = Finished(reason, len(tokens), "", Times(1, 2, 3, 4_000_000), reader.flush(), reader.called)
    reply = ResponseReply("resp_1", "tiny", Logprobs(str, str.encode), Kept(1, {}, False, []), seen)  # type: ignore[arg-type]
    sent = reply.begun(0, Choice(), Accepted("resp_1", 3, 0))
    sizes = iter(together)
    while tokens:
        size = next(sizes, 1)
        sent += reply.shown(0, Choice(), tokens[:size])
        del tokens[:size]
    sent += reply.finished(0, Choice(), end)
    if seen == NO_EVENTS:
        assert sent == b""
        return [reply.whole()]
    found = [json.loads(part.partition("\ndata: ")[2]) for part in sent.decode().split("\n\n") if part]
    assert [part.partition("\n")[0] for part in sent.decode().split("\n\n") if part] == [
        f"event: {event['type']}" for event in found
    ]
    return found
