"""Loglikelihoods from a whole stack over the OpenAI door, as lm-evaluation-harness computes them, against transformers.

lm_eval itself is too large for a development dependency: it needs pandas, pyarrow, scikit-learn and nltk. This asks as
its `local-completions` does, and reads the answer as it does. docs/openai.md names the version that was run.
"""

import random
from pathlib import Path

import openai
import pytest
from checkpoints import make_gpt2
from reference import Reference
from stacks import running


async def test_of_a_task(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = make_gpt2(folder, heads=2, layers=2, hidden=16, vocab=256, positions=512, seed=3, tokenizer=True)
    draw = random.Random(4)
    lengths = [300, *(draw.randint(1, 20) for _ in range(11))]  # the default policy computes the first one in parts
    pairs = [(draw.choices(range(256), k=length), draw.choices(range(256), k=3)) for length in lengths]
    reference = Reference(model)
    # For each task half of the continuations are what the model itself would say.
    pairs = [(context, reference.greedy(context, 3) if n % 2 else rest) for n, (context, rest) in enumerate(pairs)]
    async with (
        running(tmp_path / "run", model, slots=512) as stack,
        openai.AsyncOpenAI(base_url=f"http://{stack.http}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.completions.create(
            model="model",
            prompt=[context + rest for context, rest in pairs],
            temperature=0,
            max_tokens=1,
            logprobs=1,
            seed=1234,
            echo=True,
        )
    assert [choice.index for choice in answer.choices] == list(range(len(pairs)))
    for choice, (context, rest) in zip(answer.choices, pairs, strict=True):
        assert choice.logprobs is not None
        values = (choice.logprobs.token_logprobs or [])[len(context) : -1]
        tops = (choice.logprobs.top_logprobs or [])[len(context) : -1]
        is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        expected = reference.logprobs(context + rest)
        likelihood = sum(float(expected[len(context) + n - 1, token]) for n, token in enumerate(rest))
        assert sum(values) == pytest.approx(likelihood, abs=1e-3)
        assert is_greedy == (rest == reference.greedy(context, 3))
