"""Streams with drafts, and of requests that begin behind others' blocks, are those without: tokens, logprobs, texts,
ends, for each way to draw and to end an answer."""

import asyncio
from pathlib import Path
from typing import Any

from properties import first
from stacks import running

from orca_client import Finished, Prompt, Token
from orca_local.stack import DEMO_MODEL
from orca_scheduler.master.journal import CoreStep, scheduled

TOKENS = 45
REPEATED = "The ship sails home. The ship sails home. The ship sails"
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 5},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 6},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"logprobs": True, "top_logprobs": 3, "prompt_logprobs": True},
    {"temperature": 0.9, "seed": 7, "logprobs": True, "logit_bias": {5: 1.5}},
    {"stop": ["home", "zzz"]},
    {"temperature": 0.8, "seed": 8, "stop": ["a"]},
    {"json_schema": '{"type": "array", "items": {"const": 7}, "minItems": 5, "maxItems": 9}'},
    {"regex": "(ab){4,9}c", "temperature": 0.9, "seed": 9},
]


async def streams(folder: Path, policy: str) -> tuple[list[list[Any]], int, int, list[int]]:
    """Each way's events, without what differs from run to run; the drafts of all iterations, and those that were
    right; and the cached tokens of each request's prompt."""
    numbers: dict[str, Any] = {"pp": 2, "max_batch_size": 3, "policy": policy}
    async with running(folder, DEMO_MODEL, dtype="float32", **numbers) as stack:

        async def one(way: dict[str, Any]) -> list[Any]:
            found = list[Any]()
            async for event in stack.client.generate(REPEATED, max_new_tokens=TOKENS, **way):
                if isinstance(event, Token):
                    found.append((event.index, event.token_id, event.text, repr(event.logprob), repr(event.top)))
                elif isinstance(event, Prompt):
                    found.append(repr(event.tokens))
                elif isinstance(event, Finished):
                    found.append((event.reason, event.output_tokens))
                    cached.append(event.cached_tokens)
            return found

        cached = list[int]()

        found = await asyncio.gather(*(one(way) for way in WAYS))
        journal = stack.journal()
    drafts = sum(member.drafts for batch in scheduled(journal) for member in batch.members)
    events = [line.event for line in journal if isinstance(line, CoreStep)]
    right = sum(max(len(tokens) - 1, 0) for event in events for tokens in getattr(event, "made", ()))
    return found, drafts, right, cached


async def test_streams_are_those_without_drafts_and_blocks(tmp_path: Path) -> None:
    """With parts of prompts and blocks on demand besides; in the night with drafts alone, too. A request that asks for
    its prompt's logprobs begins with its first position."""
    plain, none, _, cached = await streams(tmp_path / "paper", "paper")
    assert (none, sum(cached)) == (0, 0)
    for policy in first(1, ["balanced,positions=40,prefix=tenant,drafts=ngram", "drafts=ngram"]):
        mine, drafts, right, cached = await streams(tmp_path / policy, policy)
        assert mine == plain
        assert drafts - right > 20
        assert right > 20
        if "prefix" in policy:
            assert len([n for n in cached if n]) >= len(WAYS) // 2
            assert cached.count(0) >= 2
