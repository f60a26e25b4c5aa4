"""A body of each API with all that it may say: the whole request that it becomes, and how it is to be answered."""

import json
import time
from typing import Any

import jsonschema
from google.protobuf.duration_pb2 import Duration

from orca.v1 import orca_pb2 as pb
from orca_endpoint.anthropic.request import parse as parse_message
from orca_endpoint.anthropic.request import prompt_of
from orca_endpoint.api.openapi import described
from orca_endpoint.ollama.request import parse_chat as parse_ollama_chat
from orca_endpoint.ollama.request import parse_generate
from orca_endpoint.openai.answer import UsageIn
from orca_endpoint.openai.chat.request import parse as parse_chat
from orca_endpoint.openai.completions.request import parse as parse_completion
from orca_endpoint.openai.content import Placed
from orca_endpoint.openai.request import Asked, seed_of_sample
from orca_endpoint.openai.responses.kept import Kept
from orca_endpoint.openai.responses.request import asked as with_conversation
from orca_endpoint.openai.responses.request import parse as parse_response

DRAWN: dict[str, Any] = {
    **{"temperature": 0.5, "top_k": 3, "top_p": 0.25, "seed": 7, "min_p": 0.125, "repetition_penalty": 1.5},
    **{"presence_penalty": 0.75, "frequency_penalty": -0.5, "logit_bias": {"5": 1.5}},
}
SAMPLING = pb.Sampling(**{**DRAWN, "logit_bias": {5: 1.5}})
OURS = {"stop_token_ids": [3, 4], "ignore_eos": True, "detach_grace": 2.5, "priority": "high", "min_tokens": 2}
AS_OURS: dict[str, Any] = {
    **{"stop_token_ids": [3, 4], "ignore_eos": True, "detach_grace": Duration(seconds=2, nanos=500_000_000)},
    **{"priority": pb.PRIORITY_HIGH, "min_new_tokens": 2, "show_special_tokens": True, "sampling": SAMPLING},
}
COMMON = {**DRAWN, **OURS, "skip_special_tokens": False, "model": "m"}
LABELS = {"user": "ann", "metadata": {"team": "search"}}
AS_LABELS = {"orca.user": "ann", "orca.metadata.team": "search"}
USER = {"role": "user", "content": "Bern?"}
SAID = pb.ChatMessage(role="user", content="Bern?")
BRIEF = pb.ChatMessage(role="system", content="be brief")
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TIME = {"type": "function", "function": {"name": "time", "parameters": SCHEMA}}
CALLING: dict[str, Any] = {
    **{"template_kwargs": '{"enable_thinking": false, "a": 1}', "tools": json.dumps([TIME])},
    **{"tool_choice": pb.TOOL_CHOICE_REQUIRED, "tool_names": ["time"], "one_tool_call": True},
}


def raw(*parts: dict[str, Any]) -> bytes:
    return json.dumps({name: value for part in parts for name, value in part.items()}).encode()


def told(asked: Asked) -> tuple[Any, ...]:
    return asked.each, asked.stream, asked.detaches, asked.usage_in, asked.labels, {*asked.loose}


def test_a_completion() -> None:
    body = {"prompt": ["a", [5, 6]], "n": 1, "best_of": 2, "echo": True, "logprobs": 3, "max_tokens": 9, "stop": "x"}
    asked = parse_completion(raw(body, COMMON, LABELS), 32)
    assert told(asked) == (2, False, True, UsageIn(), AS_LABELS, {"chat.tools"})
    assert (asked.n, asked.logprobs, asked.echo, asked.only_prompt) == (1, 3, True, False)
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "prompt_logprobs": True, "stop": ["x"]}
    more |= {"model": "m", "max_new_tokens": 9}
    first, _, _, last = asked.samples
    assert first.request == pb.GenerateRequest(text="a", **AS_OURS, **more)
    again = pb.Sampling()
    again.CopyFrom(SAMPLING)
    again.seed = seed_of_sample(7, 1)
    ids = pb.TokenIds(ids=[5, 6])
    assert last.request == pb.GenerateRequest(token_ids=ids, **AS_OURS | {"sampling": again}, **more)
    assert (first.names["text"], last.names["token_ids.ids"], last.open_end) == ("prompt[0]", "prompt[1]", False)
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}}
    plain = parse_completion(raw({"prompt": "a", "max_tokens": 0, "echo": True}, options), 32)
    assert told(plain) == (1, True, False, UsageIn(end=True), {}, {"chat.tools"})
    assert (plain.n, plain.logprobs, plain.echo, plain.only_prompt) == (1, None, True, True)
    (sample,) = plain.samples
    drawn = pb.Sampling(temperature=1)
    assert sample.request == pb.GenerateRequest(text="a", max_new_tokens=1, sampling=drawn, detach_grace=Duration())
    (sample,) = parse_completion(raw({"prompt": "a", "guided_regex": "b+"}), 32).samples
    assert (sample.request.max_new_tokens, sample.request.regex, sample.names["regex"]) == (16, "b+", "guided_regex")


def test_a_chat() -> None:
    body = {
        **{"messages": [USER | {"name": "Ann"}], "n": 2, "max_completion_tokens": 9, "stop": ["x"], "stream": True},
        **{"stream_options": {"continuous_usage_stats": True}, "logprobs": True, "top_logprobs": 3},
        **{"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "time"}}},
        **{"chat_template_kwargs": {"a": 1}, "reasoning_effort": "none", "safety_identifier": "s"},
    }
    asked = parse_chat(raw(COMMON, body, LABELS, {"priority": None, "service_tier": "priority"}), 32)
    labels = AS_LABELS | {"orca.safety_identifier": "s"}
    assert told(asked) == (2, True, True, UsageIn(each=True), labels, {"chat.tools"})
    assert asked.logprobs
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Bern?", name="Ann")], **CALLING)
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "stop": ["x"], "model": "m", "max_new_tokens": 9}
    first, second = asked.samples
    assert first.request == pb.GenerateRequest(chat=chat, **AS_OURS, **more)
    assert second.request.sampling.seed == seed_of_sample(7, 1)
    names = [first.names[name] for name in ("priority", "max_new_tokens", "chat.messages", "chat.tool_names")]
    assert names == ["service_tier", "max_completion_tokens", "messages", "tool_choice"]
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
    loose = parse_chat(raw({"messages": [USER], "max_tokens": 3}, form), 32)
    assert told(loose) == (1, False, False, UsageIn(), {}, {"chat.tools", "json_schema"})
    (sample,) = loose.samples
    assert json.loads(sample.request.json_schema) == SCHEMA
    assert (sample.names["json_schema"], sample.names["max_new_tokens"]) == (
        "response_format.json_schema.schema",
        "max_tokens",
    )


def test_a_message() -> None:
    tool = {"type": "custom", "name": "time", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
    prompt = {
        **{"model": "m", "system": [{"type": "text", "text": "be brief"}], "messages": [USER], "tools": [tool]},
        **{"tool_choice": {"type": "tool", "name": "time"}, "thinking": {"type": "disabled"}},
        **{"chat_template_kwargs": {"a": 1}},
    }
    form = {"output_config": {"effort": None, "format": {"type": "json_schema", "schema": SCHEMA}}}
    body = {"max_tokens": 9, "stop_sequences": ["x"], "stream": True, "metadata": {"user_id": "ann"}}
    asked = parse_message(raw(COMMON, prompt, body, form))
    assert told(asked) == (1, True, True, UsageIn(), {"orca.user": "ann"}, {"chat.tools"})
    chat = pb.Chat(messages=[BRIEF, SAID], **CALLING)
    (sample,) = asked.samples
    schema = json.dumps(SCHEMA)
    assert sample.request == pb.GenerateRequest(
        chat=chat, **AS_OURS, stop=["x"], model="m", max_new_tokens=9, json_schema=schema
    )
    names = [sample.names[name] for name in ("stop", "max_new_tokens", "json_schema")]
    assert names == ["stop_sequences", "max_tokens", "output_config.format.schema"]
    model, counted, theirs = prompt_of(raw(prompt, form))
    assert (model, counted) == ("m", chat)
    for place in (asked.theirs, theirs):
        assert [place(field) for field in ("messages[0]", "messages[1]", "tools[0].function.parameters.a")] == [
            "system",
            "messages[0]",
            "tools[0].input_schema.a",
        ]


def test_a_response() -> None:
    tool = {"type": "function", "name": "time", "parameters": SCHEMA}
    body = {
        **{"input": [USER], "instructions": "be brief", "max_output_tokens": 9, "stop": ["x"], "stream": True},
        **{"include": ["message.output_text.logprobs"], "top_logprobs": 3, "tools": [tool]},
        **{"tool_choice": {"type": "function", "name": "time"}, "parallel_tool_calls": False},
        **{"chat_template_kwargs": {"a": 1}, "reasoning": {"effort": "none"}, "safety_identifier": "s"},
        **{"previous_response_id": "resp_0", "prompt_cache_key": "k", "text": {"verbosity": "medium"}},
    }
    began = int(time.time())
    asked = parse_response(raw(COMMON, body, LABELS))
    labels = AS_LABELS | {"orca.safety_identifier": "s"}
    assert told(asked) == (1, True, True, UsageIn(), labels, {"chat.tools"})
    assert (asked.previous, asked.store) == ("resp_0", True)
    before = [Placed(pb.ChatMessage(role="user", content="a"), "previous_response_id")]
    whole = with_conversation(asked, before, [one for one in asked.items if isinstance(one, Placed)])
    (sample,) = whole.samples
    chat = pb.Chat(messages=[BRIEF, before[0].message, SAID], **CALLING)
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "stop": ["x"], "model": "m", "max_new_tokens": 9}
    assert sample.request == pb.GenerateRequest(chat=chat, **AS_OURS, **more)
    assert (sample.names["chat.messages"], sample.names["max_new_tokens"]) == ("input", "max_output_tokens")
    assert [whole.theirs(f"input[{n}]") for n in range(3)] == ["instructions", "previous_response_id", "input[0]"]
    kept = Kept.of(sample.kept)
    assert (kept.logprobs, [*kept.messages]) == (True, [before[0].message, SAID])
    assert began <= kept.created_at <= time.time()
    assert kept.fields == {
        **{"instructions": "be brief", "max_output_tokens": 9, "previous_response_id": "resp_0", "user": "ann"},
        **{"prompt_cache_key": "k", "safety_identifier": "s", "background": False, "max_tool_calls": None},
        **{"temperature": 0.5, "top_p": 0.25, "presence_penalty": 0.75, "frequency_penalty": -0.5},
        **{"metadata": {"team": "search"}, "parallel_tool_calls": False, "service_tier": "default", "store": True},
        **{"reasoning": {"effort": None, "summary": None}, "truncation": "disabled", "top_logprobs": 3},
        **{"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        **{"tool_choice": {"type": "function", "name": "time"}},
        **{"tools": [{"description": None, "strict": None, **tool}]},
    }


def test_what_a_response_says_of_a_short_body() -> None:
    asked = parse_response(raw({"input": "Bern?", "store": False}))
    assert told(asked) == (1, False, False, UsageIn(), {}, {"chat.tools"})
    (sample,) = with_conversation(asked, [], [one for one in asked.items if isinstance(one, Placed)]).samples
    assert sample.kept == b""
    assert asked.kept.fields == {
        **dict.fromkeys(("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key")),
        **dict.fromkeys(("user", "safety_identifier", "max_tool_calls")),
        **{"temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "top_logprobs": 0},
        **{"background": False, "metadata": {}, "parallel_tool_calls": True, "service_tier": "default"},
        **{"reasoning": {"effort": None, "summary": None}, "store": False, "truncation": "disabled"},
        **{"text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": []},
    }


def test_a_chat_of_ollama() -> None:
    renamed = {**DRAWN, "repeat_penalty": DRAWN["repetition_penalty"]}
    del renamed["repetition_penalty"]
    options = renamed | {"num_predict": 9, "stop": "x", "num_ctx": 5}
    body = {"model": "m:latest", "options": options, "logprobs": True, "top_logprobs": 3, "format": SCHEMA}
    body |= {"priority": "high", "keep_alive": 0, "think": False, "chat_template_kwargs": {"a": 1}}
    chat = raw(body, {"messages": [USER], "tools": [TIME], "stream": False})
    generate = raw(body, {"prompt": "Bern?", "system": "be brief"})
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "stop": ["x"], "model": "m", "max_new_tokens": 9}
    more |= {"sampling": SAMPLING, "priority": pb.PRIORITY_HIGH, "json_schema": json.dumps(SCHEMA)}
    more["detach_grace"] = Duration()
    quiet = '{"enable_thinking": false, "a": 1}'
    of_chat = pb.Chat(messages=[SAID], template_kwargs=quiet, tools=json.dumps([TIME]))
    of_prompt = pb.Chat(messages=[BRIEF, SAID], template_kwargs=quiet)
    for asked, wanted, stream in (
        (parse_ollama_chat(chat, ["m"]), of_chat, False),
        (parse_generate(generate, ["m"]), of_prompt, True),
    ):
        assert told(asked) == (1, stream, False, UsageIn(), {}, {"chat.tools", "json_schema"})
        assert (asked.model, asked.logprobs, asked.unload) == ("m", True, True)
        (sample,) = asked.samples
        assert sample.request == pb.GenerateRequest(chat=wanted, **more)
        assert sample.open_end
        names = [sample.names[name] for name in ("stop", "max_new_tokens", "sampling.repetition_penalty")]
        assert names == ["options.stop", "options.num_predict", "options.repeat_penalty"]
    assert [parse_generate(generate).theirs(f"prompt[{n}]") for n in range(2)] == ["system", "prompt"]
    tagged = parse_ollama_chat(raw({"model": "m:latest"}), ["m:latest"])
    assert (tagged.model, tagged.unload, [*tagged.samples]) == ("m:latest", False, [])


def test_bodies_are_as_the_door_describes_them() -> None:
    """They need what it says, take nothing else, and no member takes all values."""
    document = described("m")
    needed: dict[str, dict[str, Any]] = {
        "CompletionRequest": {"prompt": "a"},
        "ChatRequest": {"messages": [USER]},
        "ResponseRequest": {"input": "a"},
        "MessageRequest": {"messages": [USER]},
        "CountRequest": {"messages": [USER]},
        "OllamaChatRequest": {},
        "OllamaGenerateRequest": {},
        "OllamaShowRequest": {},
        "LoadAdapterRequest": {"lora_name": "a", "lora_path": "/a"},
        "UnloadAdapterRequest": {"lora_name": "a"},
        "TokenizeRequest": {},
        "DetokenizeRequest": {"tokens": [5]},
    }
    asking = [way for ways in document["paths"].values() for way in ways.values() if "requestBody" in way]
    assert all(way["requestBody"]["required"] for way in asking)
    schemas = [way["requestBody"]["content"]["application/json"]["schema"]["$ref"] for way in asking]
    assert sorted(schema.removeprefix("#/components/schemas/") for schema in schemas) == sorted(needed)
    for name, body in needed.items():
        schema = document["components"]["schemas"][name]
        judge = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
        judge.validate(body)
        assert not judge.is_valid(body | {"nothing": 1}), name
        for member in schema["properties"]:
            assert not judge.is_valid(body | {member: [[["wrong"]]]}), (name, member)
        for member in body:
            assert not judge.is_valid({other: value for other, value in body.items() if other != member}), name
    parameters = {
        (one["name"], one["in"], json.dumps(one["schema"]))
        for ways in document["paths"].values()
        for way in ways.values()
        for one in way.get("parameters", [])
    }
    switch, number = '{"enum": ["on", "off"]}', '{"type": "integer", "minimum": 0}'
    text, choice = '{"type": "string"}', '{"type": "boolean"}'
    assert parameters == {
        *((name, "header", text) for name in ("X-Request-Id", "Last-Event-ID")),
        *((name, "header", switch) for name in ("X-Stream-Comments", "X-Stream-Ids")),
        ("X-Request-Timeout", "header", '{"type": "number", "exclusiveMinimum": 0}'),
        *((name, "query", number) for name in ("from", "starting_after")),
        *((name, "query", choice) for name in ("include_usage", "stream")),
        *((name, where, text) for name, where in (("model", "query"), ("model", "path"), ("id", "path"))),
    }
