"""Answers that are held to a form, from whole stacks: independent judges read them."""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from checkpoints import make_gpt2
from schemas import a_schema
from stacks import Running, running

from orca_client import FinishReason

END = 256
LIMIT = 700  # tokens of an answer: more than any of the schemas needs


def make_model(folder: Path) -> Path:
    return make_gpt2(
        folder,
        heads=2,
        layers=2,
        hidden=16,
        vocab=261,
        positions=768,
        seed=3,
        tokenizer=True,
        special=["</s>"],
        eos_token_id=END,
    )


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "run", make_model(tmp_path / "model"), slots=16384) as stack:
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
    schemas = [a_schema(draw) for _ in range(60)]
    answers = await asyncio.gather(*(answer(stack, n, json_schema=one) for n, one in enumerate(schemas)))
    for schema, text in zip(schemas, answers, strict=True):
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert len(set(answers)) > 40, "the judge sees many answers"


REGEXES = (r"(ab|cd){2,5}[0-9]{3}", r"[a-f]{0,8}", r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,3})?", "é{1,3}x")
# A grammar, and the regular expression of its language.
GRAMMAR, ITS_REGEX = 'start: N ("+" N){1,5}\nN: /[1-9][0-9]{0,2}/', r"[1-9][0-9]{0,2}(\+[1-9][0-9]{0,2}){1,5}"


async def test_answers_match_their_regular_expressions(stack: Running) -> None:
    asked = [(regex, {"regex": regex}) for regex in REGEXES] + [(ITS_REGEX, {"grammar": GRAMMAR})]
    for regex, form in asked:
        for text in await asyncio.gather(*(answer(stack, seed, **form) for seed in range(8))):
            assert re.fullmatch(regex, text), text
