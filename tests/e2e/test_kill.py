"""Processes are killed under load: every stream completes with exactly the tokens of an undisturbed run."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
from checkpoints import make_gpt2
from reference import Reference
from stacks import running

VOCAB, REQUESTS, NEW_TOKENS = 211, 8, 48


@pytest.mark.parametrize("role", ["rank", "supervisor", "scheduler", "endpoint", "redis"])
async def test_no_token_is_lost(tmp_path: Path, role: str) -> None:
    model = tmp_path / "model"
    make_gpt2(model, heads=3, layers=2, hidden=24, vocab=VOCAB, positions=96, seed=7)
    draw = random.Random(role)
    prompts = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))] for _ in range(REQUESTS)]
    endpoints = 2 if role == "endpoint" else 1
    async with running(tmp_path / "run", model, endpoints=endpoints, max_batch_size=4) as stack:
        seen: list[int] = []
        streams = [asyncio.create_task(stack.tokens(prompt, NEW_TOKENS, seen.append)) for prompt in prompts]
        await stack.until(lambda: len(seen) > REQUESTS)
        victim = next(process["pid"] for process in stack.processes() if process["role"] == role)
        os.kill(victim, signal.SIGKILL)
        got = await asyncio.wait_for(asyncio.gather(*streams), 120)
        await stack.until(lambda: victim not in {process["pid"] for process in stack.processes()})
        await stack.until(lambda: role in {process["role"] for process in stack.processes()})
    reference = Reference(model)
    assert got == [reference.greedy(prompt, NEW_TOKENS) for prompt in prompts]
