"""The headline: greedy tokens through the whole stack are those of transformers, whatever shares their iterations."""

import asyncio
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkpoints import make_gpt2
from properties import first
from reference import Reference
from stacks import Running, running

from orca_client import Finished, Token

REQUESTS = 60
POSITIONS = 96
PROMPT, VOCABULARY = [7, 8, 9], 211  # of the sampled streams
YIELD = ("endpoint", "redis")  # processes that take no core from the kernels


class Case(NamedTuple):
    max_bs: int
    block_size: int
    heads: int
    layers: int
    hidden: int
    vocab: int


CASES = [
    Case(3, 1, 5, 3, 40, 307),
    Case(8, 16, 1, 5, 32, 257),
    Case(1, 16, 3, 4, 36, 149),
]


@pytest.mark.parametrize("case", first(2, CASES), ids=str)
async def test_tokens_equal_transformers(tmp_path: Path, case: Case) -> None:
    assert await differing(tmp_path, case) == []


async def differing(folder: Path, case: Case, **settings: Any) -> list[float]:
    """Runs a case on a whole stack, and compares its tokens with those of transformers.

    Returns a number for each request that differs: the smallest distance between the two largest logits on its way. If
    it is tiny, another order of the same sums may give another token.
    """
    max_bs, block_size, heads, layers, hidden, vocab = case
    model = make_gpt2(
        folder / "model",
        heads=heads,
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        positions=POSITIONS,
        seed=1000 * max_bs + block_size,
    )
    return await compared(folder / "run", model, vocab, max_batch_size=max_bs, block_size=block_size, **settings)


async def compared(run: Path, model: Path, vocab: int, **settings: Any) -> list[float]:
    """As `differing`, of any model with POSITIONS."""
    draw = random.Random(vocab)
    asked = [
        ([draw.randrange(vocab) for _ in range(draw.randint(1, 40))], draw.randint(1, 24), draw.expovariate(1 / 0.02))
        for _ in range(REQUESTS)
    ]
    async with running(run, model, **settings) as stack:
        arrivals = [sum(gap for _, _, gap in asked[: n + 1]) for n in range(REQUESTS)]
        got = await asyncio.gather(
            *(answer(stack, prompt, n, at) for (prompt, n, _), at in zip(asked, arrivals, strict=True))
        )
    reference = Reference(model)
    wanted = [reference.continued(prompt, n) for prompt, n, _ in asked]
    assert len({tuple(tokens) for tokens, _ in wanted}) > REQUESTS // 2, (
        "a model that repeats itself would prove nothing"
    )
    return [margin for made, (tokens, margin) in zip(got, wanted, strict=True) if made != tokens]


async def answer(stack: Running, prompt: list[int], max_new_tokens: int, at: float) -> list[int]:
    """Sends a request at its moment. Returns its tokens."""
    await asyncio.sleep(at)
    tokens: list[int] = []
    async for event in stack.client.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True):
        if isinstance(event, Token):
            assert event.index == len(tokens)
            tokens.append(event.token_id)
        elif isinstance(event, Finished):
            assert event.output_tokens == max_new_tokens == len(tokens)
    return tokens


async def test_a_draw_depends_on_seed_and_index_alone(tmp_path: Path) -> None:
    """Sampled streams are the same on either engine, alone and beside others. Each token is one of those that
    transformers' own filters leave; at a temperature of 20 the distribution is so flat that few would be by chance."""
    model = make_gpt2(tmp_path / "model", heads=3, layers=2, hidden=24, vocab=VOCABULARY, positions=96, seed=9)
    async with running(tmp_path / "run", model, engines=2, max_batch_size=3) as stack:
        policies = {(row["role"], os.sched_getscheduler(row["pid"])) for row in stack.processes()}
        assert policies == {(role, os.SCHED_BATCH if role in YIELD else os.SCHED_OTHER) for role, _ in policies}

        async def draw(
            seed: int, temperature: float = 1.5, top_k: int = 50, top_p: float = 0.9
        ) -> list[tuple[int, float | None]]:
            stream = stack.client.generate(
                PROMPT, max_new_tokens=20, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, logprobs=True
            )
            return [(event.token_id, event.logprob) async for event in stream if isinstance(event, Token)]

        alone = [await draw(seed) for seed in range(4)]
        few, nucleus = await draw(4, 20.0, 3, 1.0), await draw(5, 20.0, VOCABULARY, 0.1)
        together = await asyncio.gather(*(draw(seed) for seed in [0, 1, 2, 3, 3, 2, 1, 0]))
    ids = [[token for token, _ in stream] for stream in alone]
    assert [[token for token, _ in stream] for stream in together] == [*ids, *reversed(ids)]
    assert len({tuple(stream) for stream in ids}) == 4
    reference = Reference(model)
    for drawn, temperature, top_k, top_p in (
        (few, 20.0, 3, 1.0),
        (nucleus, 20.0, VOCABULARY, 0.1),
        (alone[0], 1.5, 50, 0.9),
    ):
        tokens = [token for token, _ in drawn]
        assert tokens != reference.greedy(PROMPT, 20)
        assert all(reference.drawable(PROMPT, tokens, temperature=temperature, top_k=top_k, top_p=top_p))
    for one, other in zip(alone, together, strict=False):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-4)
