"""Answers that are held to a form, from whole stacks: independent judges read them."""

import asyncio
import json
import os
import random
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from checkpoints import make_gpt2
from endpoint.any_schemas import a_schema as any_schema
from endpoint.any_schemas import number, validator
from openai import APIConnectionError, AsyncOpenAI
from properties import examples
from schemas import a_schema
from stacks import Running, running
from tool_templates import HERMES, some_tools

from orca_client import FinishReason, InvalidArgument

pytestmark = pytest.mark.asyncio(loop_scope="module")
END = 256
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")
LIMIT = 700  # tokens of an answer: more than any of the schemas needs


def make_model(folder: Path, template: str = HERMES) -> Path:
    """A model of random weights with a token for each byte, which takes tools; the marks of its calls are tokens."""
    make_gpt2(
        folder,
        heads=2,
        layers=2,
        hidden=16,
        vocab=261,
        positions=8192,
        seed=3,
        tokenizer=True,
        special=["</s>", *(mark for mark in MARKS if mark in template)],
        eos_token_id=END,
    )
    config = {"chat_template": template, "bos_token": "", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One for all tests; the last of them kills a rank and the endpoint."""
    folder = tmp_path_factory.mktemp("structured")
    async with running(folder / "run", make_model(folder / "model"), slots=65536) as stack:
        yield stack


async def answer(stack: Running, seed: int, **form: Any) -> str:
    """A drawn answer to its end, which is the form's."""
    text = ""
    async with stack.client.generate(
        [1, 2, seed % 200], max_new_tokens=LIMIT, temperature=1.0, seed=seed, **form
    ) as stream:
        async for event in stream:
            text += getattr(event, "text", "")
    assert stream.finished is not None
    assert stream.finished.reason is FinishReason.EOS, text
    return text


async def test_answers_of_random_schemas_are_valid(stack: Running) -> None:
    draw = random.Random(5)
    schemas = [a_schema(draw) for _ in range(examples(60))]
    answers = await asyncio.gather(*(answer(stack, n, json_schema=one) for n, one in enumerate(schemas)))
    for schema, text in zip(schemas, answers, strict=True):
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert len(set(answers)) > len(answers) * 2 // 3, "the judge sees many answers"


async def test_schemas_over_all_keywords(stack: Running) -> None:
    """Those that are not refused; `endpoint/test_schemas.py` has thousands without a stack."""
    schemas = [any_schema(random.Random(seed)) for seed in range(40)]

    async def judged(schema: str, seed: int) -> str:
        text = ""
        stream = stack.client.generate([1, seed], max_new_tokens=60, temperature=1.0, seed=seed, json_schema=schema)
        try:
            async with stream:
                async for event in stream:
                    text += getattr(event, "text", "")
        except InvalidArgument as error:
            return str(error).partition(".")[0].partition(":")[0]
        assert stream.finished is not None
        if stream.finished.reason is FinishReason.EOS:
            validator(schema)(json.loads(text, parse_float=number))
        return stream.finished.reason.name

    counts = Counter(await asyncio.gather(*(judged(schema, n) for n, schema in enumerate(schemas))))
    assert counts.keys() == {"json_schema", "EOS", "LENGTH"}, "none is stuck"
    assert counts["EOS"] > 10, counts


REGEXES = (r"(ab|cd){2,5}[0-9]{3}", r"[a-f]{0,8}", r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,3})?", "é{1,3}x")
# A grammar, and the regular expression of its language.
GRAMMAR, ITS_REGEX = 'start: N ("+" N){1,5}\nN: /[1-9][0-9]{0,2}/', r"[1-9][0-9]{0,2}(\+[1-9][0-9]{0,2}){1,5}"


async def test_answers_match_their_regular_expressions(stack: Running) -> None:
    asked = [(regex, {"regex": regex}) for regex in REGEXES] + [(ITS_REGEX, {"grammar": GRAMMAR})]
    for regex, form in asked:
        for text in await asyncio.gather(*(answer(stack, seed, **form) for seed in range(8))):
            assert re.fullmatch(regex, text), text


async def calls(client: AsyncOpenAI, seed: int, tools: list[Any], stream: bool) -> list[tuple[str, str]]:
    """Names and arguments of the calls of a forced answer, to its end. OpenAI's own client gathers a stream."""
    asked: dict[str, Any] = {
        "model": "model",
        "messages": [{"role": "user", "content": f"{seed}"}],
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": seed % 2 == 0,
        "max_completion_tokens": 4000,
        "temperature": 1.0,
        "seed": seed,
    }
    if stream:
        async with client.chat.completions.stream(**asked) as events:
            async for _ in events:
                pass
            answer: Any = await events.get_final_completion()
    else:
        answer = await client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls", choice
    assert not choice.message.content
    found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert found
    assert len(found) == 1 or asked["parallel_tool_calls"]
    return found


def judge(tools: list[Any], found: list[tuple[str, str]]) -> None:
    """Each call names a tool, and its arguments are JSON by the schema of this tool."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    for name, arguments in found:
        schema = schemas[name] or {"type": "object", "maxProperties": 0}
        jsonschema.Draft202012Validator(schema).validate(json.loads(arguments))


async def test_forced_calls_of_random_tools_are_valid(stack: Running) -> None:
    """Streamed and not they are the same."""
    draw = random.Random(6)
    tools = [some_tools(draw) for _ in range(examples(8))]  # with one call alone, and with several
    async with AsyncOpenAI(base_url=f"http://{stack.http}/v1", api_key="none", max_retries=0) as client:
        whole = await asyncio.gather(*(calls(client, n, one, False) for n, one in enumerate(tools)))
        streamed = await asyncio.gather(*(calls(client, n, one, True) for n, one in enumerate(tools)))
    assert streamed == whole
    for one, found in zip(tools, whole, strict=True):
        judge(one, found)


async def test_a_response_goes_on_where_its_endpoint_died(stack: Running) -> None:
    """A rank is killed amid its stream, then the endpoint. OpenAI's client takes it up behind the last event."""
    asked: dict[str, Any] = {"model": "model", "input": "1", "max_output_tokens": 1000, "temperature": 1.0}
    asked["extra_body"] = {"seed": 3, "ignore_eos": True}
    address = f"http://{stack.http}/v1"
    async with (
        AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client,
        AsyncOpenAI(base_url=address, api_key="none", max_retries=20) as patient,
    ):
        whole = await client.responses.create(**asked)
        came = list[Any]()
        with pytest.raises(APIConnectionError):  # noqa: PT012 (the loop is what fails)
            async for event in await client.responses.create(**asked, stream=True):
                came.append(event)
                if len(came) in (10, 40):  # what is still to come is more than the connection can hold already
                    role = "rank" if len(came) == 10 else "endpoint"
                    os.kill(next(p["pid"] for p in stack.processes() if p["role"] == role), signal.SIGKILL)
        last, name = came[-1].sequence_number, came[0].response.id
        came += [event async for event in await patient.responses.retrieve(name, stream=True, starting_after=last)]
    assert [event.sequence_number for event in came] == list(range(len(came)))
    assert came[-1].response.output_text == whole.output_text
    deltas = (event.delta for event in came if event.type == "response.output_text.delta")
    assert "".join(deltas) == whole.output_text
