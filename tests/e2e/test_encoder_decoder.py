"""A model with an encoder through the whole stack: tokens equal transformers', scheduling is by iterations."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import torch
from e2e.test_iteration_level import newcomers, wait_of
from encoder_decoders import Seq2Seq, make_t5
from stacks import running
from transformers import T5ForConditionalGeneration

from orca_client import Finished, FinishReason, Token

REQUESTS = 24


async def test_tokens_equal_transformers(tmp_path: Path) -> None:
    """Those of `generate`, too, with the end that the model forces."""
    model = make_t5(tmp_path / "model", seed=2, num_heads=5, num_layers=3, tied=False, feed_forward_proj="gated-gelu")
    (model / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 0, "forced_eos_token_id": 7}))
    draw = random.Random(3)
    prompts = ([draw.randrange(97) for _ in range(draw.randint(1, 40))] for _ in range(REQUESTS))
    known = list(Seq2Seq(model).known((prompt, draw.randint(1, 20)) for prompt in prompts))
    assert len(known) > REQUESTS // 2
    async with running(tmp_path / "run", model, max_batch_size=3, block_size=4) as stack:

        async def stream(prompt: list[int], tokens: list[int], wait: float) -> None:
            await asyncio.sleep(wait)  # arrivals at random
            assert await stack.tokens(prompt, len(tokens)) == tokens

        await asyncio.gather(*(stream(*one, draw.uniform(0, 0.3)) for one in known))
        prompt, tokens = next(one for one in known if len(one.tokens) > 4)
        events = [event async for event in stack.client.generate(prompt, max_new_tokens=4)]
    reference: Any = T5ForConditionalGeneration.from_pretrained(model)
    ids = reference.generate(torch.tensor([prompt]), max_new_tokens=4)
    made = [event.token_id for event in events if isinstance(event, Token)]
    assert made == ids[0, 1:].tolist() == [*tokens[:3], 7]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.LENGTH, "the model did not choose its last token"


async def test_a_late_request_joins_at_once_and_an_early_end_returns_at_once(tmp_path: Path) -> None:
    model = make_t5(tmp_path / "model", seed=2, num_layers=3, n_positions=2500)
    async with running(tmp_path / "run", model, max_batch_size=4, slots=16384) as stack:
        await newcomers(stack, [1, 2, 3], [6], [4, 5, 6, 7, 8], 4900)  # an initiation is one iteration
        journal = stack.journal()
    for name in ("short", "late"):
        assert wait_of(journal, name) <= 1
