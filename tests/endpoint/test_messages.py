"""Anthropic's messages, by Anthropic's own client: blocks in and out, events, tools, counts, errors in its shape."""

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import pytest
import pytest_asyncio
from endpoint.harness import World, world
from endpoint.test_chat import Recorder, encode
from endpoint.test_tool_chats import CALLS, NAMES, PATIENCE, SCHEMA, rendered
from pydantic import BaseModel

from orca_common.api_keys import line_of, new_key
from orca_common.errors import FailedPrecondition
from orca_endpoint.anthropic.answer import MessageReply
from orca_endpoint.calls.events import Accepted, Finished, Token
from orca_endpoint.openai.answer import Choice
from orca_endpoint.text.tool_calls import CallPart, Said
from orca_pool.records import Reason

if TYPE_CHECKING:  # each process of a run imports each file of tests, and this client alone takes 1.4 s
    from anthropic import AsyncAnthropic

pytestmark = pytest.mark.usefixtures("one_helper")

USER: Any = {"role": "user", "content": "Bern?"}
NONE = {"type": "object", "properties": {}}
WEATHER: Any = {"name": "weather", "description": "é <b>", "input_schema": SCHEMA, "cache_control": None}
TIME: Any = {"type": "custom", "name": "time", "input_schema": NONE}
TOLD = [
    {"type": "function", "function": {"name": "weather", "description": "é <b>", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": NONE}},
]
INPUTS = [{"city": 'Zü"}'}, {}]


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
async def claude(shared: World) -> "AsyncIterator[AsyncAnthropic]":
    """Anthropic's client, which tries nothing again."""
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=shared.serving.http, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


async def test_a_text_whole_and_streamed(orca: World, claude: "AsyncAnthropic") -> None:
    ids = encode(orca, "holds 東京")
    script = Recorder(ids)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": len(ids), "system": "be brief", "messages": [USER]}
    asked |= {"metadata": {"user_id": "ann"}, "extra_body": {"temperature": 0.5}}
    async with orca.background(script):
        whole = await claude.messages.create(**asked)
        async with claude.messages.stream(**asked) as stream:
            events = [event async for event in stream]
            gathered = await stream.get_final_message()
    prompt = encode(orca, rendered("hermes", [{"role": "system", "content": "be brief"}, USER]))
    assert list(script.records[0].prompt_ids) == prompt
    assert script.records[0].request_id == whole.id
    assert script.records[0].sampling.temperature == 0.5
    for message in (whole, gathered):
        (block,) = message.content
        assert block.type == "text"
        assert (block.text, message.stop_reason, message.stop_sequence) == ("holds 東京", "max_tokens", None)
        assert (message.usage.input_tokens, message.usage.output_tokens) == (len(prompt), len(ids))
        assert message.usage.cache_read_input_tokens == 0
    assert [event.type for event in events if event.type not in {"text", "content_block_delta"}] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_calls_and_the_turn_after_them(orca: World, claude: "AsyncAnthropic") -> None:
    """The blocks of an answer are given back as they came; results are tools' messages."""
    script = Recorder([*encode(orca, CALLS), 0])
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "tools": [WEATHER, TIME]}
    async with orca.background(script):
        whole = await claude.messages.create(messages=[USER], **asked)
        async with claude.messages.stream(messages=[USER], **asked) as stream:
            gathered = await stream.get_final_message()
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "5°"}]}
            for block in whole.content
            if block.type == "tool_use"
        ]
        thought: Any = {"type": "thinking", "thinking": "hm", "signature": "x"}
        turns: list[Any] = [
            USER,
            {"role": "assistant", "content": [thought, *whole.content]},
            {"role": "user", "content": [*results, {"type": "text", "text": "And?", "cache_control": None}]},
        ]
        await claude.messages.create(messages=turns, **asked)
        counted = await claude.messages.count_tokens(model="tiny", messages=turns, tools=[WEATHER, TIME])
    assert list(script.records[0].prompt_ids) == encode(orca, rendered("hermes", [USER], tools=TOLD))
    for message in (whole, gathered):
        text, *calls = message.content
        assert text.type == "text"
        assert (text.text, message.stop_reason) == ("Hm 東京 ", "tool_use")
        assert [(call.name, call.input) for call in calls if call.type == "tool_use"] == list(
            zip(NAMES, INPUTS, strict=True)
        )
    called = [
        {"id": result["tool_use_id"], "type": "function", "function": {"name": name, "arguments": arguments}}
        for result, name, arguments in zip(results, NAMES, INPUTS, strict=True)
    ]
    shown = [
        USER,
        {"role": "assistant", "content": "Hm 東京 ", "tool_calls": called},
        *({"role": "tool", "tool_call_id": result["tool_use_id"], "content": "5°"} for result in results),
        {"role": "user", "content": "And?"},
    ]
    prompt = encode(orca, rendered("hermes", shown, tools=TOLD))
    assert list(script.records[2].prompt_ids) == prompt
    assert counted.input_tokens == len(prompt)


def test_arguments_that_are_nested_deeply() -> None:
    """A model may write them: a stream has them as they are, and a whole message has no object of them."""
    for streams, depth in itertools.product((True, False), (600, *range(900, 1000), 5000)):
        arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
        reply = MessageReply("msg_1", "tiny", streams, str)
        said = [Said("", (CallPart(0, "id", "f", ""),)), Said("", (CallPart(0, "", "", arguments),))]
        reply.begun(0, Choice(), Accepted("msg_1", 1, 0, None))
        reply.shown(0, Choice(), [Token(n, 1, "", None, 1, "e", (), one) for n, one in enumerate(said)])
        end = Finished(Reason.EOS, 2, "", None, Said("", ()), called=True)
        assert (b"message_stop" in reply.finished(0, Choice(), end)) == streams
        with pytest.raises(FailedPrecondition, match="nested too deeply"):
            reply.whole()


async def test_which_end_an_answer_has(orca: World, claude: "AsyncAnthropic") -> None:
    """Of several stop sequences the one that came; a call that was cut is closed where it ends."""
    cut = encode(orca, CALLS[:66])
    for ids, more, reason, sequence in (
        (encode(orca, "the pool holds"), {"stop_sequences": ["holds", "l h"]}, "stop_sequence", "l h"),
        (encode(orca, "the pool holds"), {"stop_sequences": ["never"]}, "max_tokens", None),
        ([*encode(orca, "the"), 0], {"stop_sequences": ["<|end|>"]}, "stop_sequence", "<|end|>"),
        ([*encode(orca, "the"), 0], {}, "end_turn", None),
        (cut, {"tools": [WEATHER]}, "max_tokens", None),
    ):
        async with orca.background(Recorder(ids)):
            asked: dict[str, Any] = {"model": "tiny", "max_tokens": len(ids), "messages": [USER], **more}
            message = await claude.messages.create(**asked)
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    *_, call = message.content
    assert call.type == "tool_use"
    assert "city" in call.input


class City(BaseModel):
    city: str


async def test_which_answers_a_request_allows(orca: World, claude: "AsyncAnthropic") -> None:
    script = Recorder([*encode(orca, '{"city": "Bern"}'), 0])
    choices: dict[str, Any] = {
        "auto": {"type": "auto"},
        "one": {"type": "auto", "disable_parallel_tool_use": True},
        "none": {"type": "none"},
        "any": {"type": "any"},
        "named": {"type": "tool", "name": "time"},
    }
    grammars = dict[str, str]()
    async with orca.background(script):
        parsed = await claude.messages.parse(model="tiny", max_tokens=64, messages=[USER], output_format=City)
        for name, choice in choices.items():
            asked: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "messages": [USER], "tools": [WEATHER, TIME]}
            await claude.messages.create(**asked, tool_choice=choice)
            grammars[name] = script.records[-1].sampling.grammar
    assert parsed.parsed_output == City(city="Bern")
    assert "city" in script.records[0].sampling.grammar
    assert len(set(grammars.values())) == len(grammars)
    assert {name for name, grammar in grammars.items() if "weather" in grammar} == {"auto", "one", "any"}


async def test_a_stream_that_fails(orca: World, claude: "AsyncAnthropic") -> None:
    from anthropic import APIStatusError

    async with claude.messages.stream(model="tiny", max_tokens=8, messages=[USER]) as stream:
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, [10], Reason.NOT_FINITE)
        with pytest.raises(APIStatusError, match="api_error"):
            await stream.get_final_message()


async def test_keys(redis_url: str, model: Path) -> None:
    """Its client sends its key in a header of its own."""
    from anthropic import AsyncAnthropic, AuthenticationError

    key = new_key()
    async with (
        world(redis_url, model, api_keys=line_of("ann", key)) as orca,
        orca.background(lambda record: [0]),
        AsyncAnthropic(base_url=orca.serving.http, api_key=key, max_retries=0) as claude,
        AsyncAnthropic(base_url=orca.serving.http, api_key="other", max_retries=0) as stranger,
    ):
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "messages": [USER]}
        assert (await claude.messages.create(**asked)).stop_reason == "end_turn"
        with pytest.raises(AuthenticationError, match="authentication_error"):
            await stranger.messages.create(**asked)
        both = {"x-api-key": key, "authorization": "Bearer other"}
        async with httpx.AsyncClient(base_url=orca.serving.http, headers=both) as http:
            refused = await http.post("/v1/messages", json=asked)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": None}, "messages: is missing"),
    "empty": ({"messages": []}, "messages: must be a list"),
    "no object": ({"messages": ["a"]}, "messages[0]: must be an object"),
    "role": ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role: is 'tool'"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content: is missing"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type: is 'image'; only 'text'",
    ),
    "a type": ({"messages": [{"role": "assistant", "content": [{"type": []}]}, USER]}, "messages[0].content[0].type: "),
    "a call of a user": (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
        "messages[0].content[0].type: is 'tool_use'",
    ),
    "call": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}, USER]},
        "messages[0].content[0].name: is missing",
    ),
    "result": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id: is missing",
    ),
    "a beginning": ({"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages[1]: is the assistant's"),
    "system": ({"system": 3}, "system: must be"),
    "no length": ({"max_tokens": None}, "max_tokens: is missing"),
    "length": ({"max_tokens": 0}, "max_tokens: must be at least 1"),
    "tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: is 'web_search"),
    "tool's name": ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: may hold only letters"),
    "tool's schema": (
        {"tools": [TIME, {"name": "f", "strict": True, "input_schema": {"not": {}}}]},
        "tools[1].input_schema.not: ",
    ),
    "choice": ({"tool_choice": {"type": "any"}}, "tool_choice: is allowed only with tools"),
    "choice's type": ({"tools": [TIME], "tool_choice": {"type": "some"}}, "tool_choice.type: is 'some'"),
    "choice's name": ({"tools": [TIME], "tool_choice": {"type": "tool"}}, "tool_choice.name: is missing"),
    "thinking": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: must be"),
    "effort": ({"output_config": {"effort": "low"}}, "output_config.effort: must be null"),
    "format": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: must be"),
    "schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "output_config.format.schema.not: ",
    ),
    "stops": ({"stop_sequences": "a"}, "stop_sequences: must be a list"),
    "a stop": ({"stop_sequences": [""]}, "stop_sequences[0]: is an empty string"),
    "stop": ({"stop": "a"}, "stop: is a field of chats"),
    "metadata": ({"metadata": {"a": "b"}}, "metadata.a: is not known"),
    "unknown": ({"messagez": []}, "messagez: is not known"),
}


async def test_what_is_refused(orca: World) -> None:
    """By the caller's own name of the field, in Anthropic's shape, and never ignored."""
    async with httpx.AsyncClient(base_url=orca.serving.http, timeout=PATIENCE) as http:
        for case, (changes, part) in BAD.items():
            body = {"model": "tiny", "max_tokens": 4, "messages": [USER], **changes}
            answer = await http.post("/v1/messages?beta=true", json=body)
            error = answer.json()["error"]
            assert (case, answer.status_code, error["type"]) == (case, 400, "invalid_request_error")
            assert error["message"].startswith(part), (case, error)
        body = {"model": "tiny", "messages": [USER]}
        for path, more in (("/v1/messages", {"max_tokens": 4}), ("/v1/messages/count_tokens", {})):
            answer = await http.post(f"{path}?alpha=true", json=body | more)
            error = answer.json()["error"]
            assert (path, answer.status_code, error["type"]) == (path, 400, "invalid_request_error")
            assert error["message"].startswith("alpha: is not known"), (path, error)
        answer = await http.post("/v1/messages/batches", json={})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
