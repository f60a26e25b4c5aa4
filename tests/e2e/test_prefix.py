"""Each turn of a conversation begins behind the blocks of those before, over gRPC and HTTP, and says so."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from reference import Reference
from stacks import Running, running

from orca_client import Finished, Token
from orca_local.stack import DEMO_MODEL
from orca_pool.scripts import Constants
from orca_scheduler.master.journal import Note, read

BLOCK = 16
TURNS = 4


async def turn(stack: Running, prompt: list[int], new: int, **more: Any) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of the prompt's were cached."""
    tokens, cached = list[int](), -1
    async for event in stack.client.generate(prompt, max_new_tokens=new, ignore_eos=True, **more):
        if isinstance(event, Token):
            tokens.append(event.token_id)
        elif isinstance(event, Finished):
            cached = event.cached_tokens
    return tokens, cached


async def test_turns_of_a_conversation(tmp_path: Path) -> None:
    reference = Reference(DEMO_MODEL)
    numbers: dict[str, Any] = {"pp": 2, "block_size": BLOCK, "max_batch_size": 4, "slots": 1024}
    async with running(tmp_path / "run", DEMO_MODEL, policy="balanced,positions=64,prefix=tenant", **numbers) as stack:
        text = [(7 * n) % 250 for n in range(70)]
        for n in range(4):
            answer, cached = await turn(stack, text, 20)
            assert answer == reference.greedy(text, 20)
            assert cached == (
                0 if not n else (len(text) - 7 - 1) // BLOCK * BLOCK
            )  # all but the last answer's last token
            text += [*answer, *[n + 1] * 6, 7][:27]

        assert (await turn(stack, text, 20))[1] > 0, "the last turn again"
        stop = stack.client.generate(text, max_new_tokens=40, stop=["e", "t", "a", "o"])
        ends = [event for event in [event async for event in stop] if isinstance(event, Finished)]
        assert ends[0].cached_tokens == (len(text) - 1) // BLOCK * BLOCK, "an endpoint ended it"

        async with AsyncOpenAI(base_url=f"http://{stack.http}/v1", api_key="none", max_retries=0) as client:
            whole = await client.completions.create(model=DEMO_MODEL.name, prompt=text, max_tokens=5, temperature=0)
            assert whole.usage is not None
            assert whole.usage.prompt_tokens_details is not None
            assert whole.usage.prompt_tokens_details.cached_tokens == ends[0].cached_tokens
            stream = await client.completions.create(
                model=DEMO_MODEL.name, prompt=text, max_tokens=5, stream=True, stream_options={"include_usage": True}
            )
            usage = [chunk.usage async for chunk in stream if chunk.usage is not None][-1]
            assert usage.prompt_tokens_details is not None
            assert usage.prompt_tokens_details.cached_tokens == ends[0].cached_tokens

        # Two at once, and a rank dies while they run: what comes behind begins with nothing, and is right.
        came = asyncio.Event()
        rank = next(process["pid"] for process in stack.processes() if process["role"] == "rank")
        long = asyncio.gather(*(stack.tokens(text, 60, came=lambda _: came.set()) for _ in range(2)))
        await came.wait()
        os.kill(rank, signal.SIGKILL)
        want = reference.greedy(text, 60)
        assert await long == [want, want]
        other = [9, *text[1:]]
        assert await turn(stack, other, 9) == (reference.greedy(other, 9), 0)
        assert (await turn(stack, other, 9))[1] == (len(other) - 1) // BLOCK * BLOCK


async def conversations(stack: Running, first: int, count: int) -> tuple[list[list[int]], int]:
    """The texts of conversations that begin alike and go on at the same time, and how many of their tokens were
    cached."""

    async def talk(n: int) -> tuple[list[int], int]:
        text, hits = [(3 * k) % 250 for k in range(48)], 0
        for number in range(TURNS):
            text = [*text, *((17 * n + 5 * number + k) % 250 for k in range(20))]
            answer, cached = await turn(stack, text, 12)
            text, hits = [*text, *answer], hits + cached
        return text, hits

    done = await asyncio.gather(*(talk(n) for n in range(first, first + count)))
    return [text for text, _ in done], sum(hits for _, hits in done)


async def test_turns_find_their_engine(tmp_path: Path) -> None:
    """Two engines hit nearly as often as one with all the slots, whichever has room first, and through a kill."""
    numbers: dict[str, Any] = {
        "block_size": BLOCK,
        "max_batch_size": 4,
        "policy": "balanced,positions=64,prefix=tenant",
    }
    async with running(tmp_path / "one", DEMO_MODEL, slots=8192, **numbers) as stack:
        texts, most = await conversations(stack, 0, 16)
        others, _ = await conversations(stack, 100, 8)
    async with running(tmp_path / "two", DEMO_MODEL, slots=4096, engines=2, **numbers) as stack:
        mine, hits = await conversations(stack, 0, 16)
        assert mine == texts
        print(f"{hits} of {most} hits")
        assert hits >= 0.9 * most

        rank = next(process["pid"] for process in stack.processes() if process["role"] == "rank")
        lost = asyncio.create_task(conversations(stack, 100, 8))
        claimed = len(prefixes(stack))
        await stack.until(lambda: len(prefixes(stack)) > claimed)
        os.kill(rank, signal.SIGKILL)
        assert (await lost)[0] == others
        found = prefixes(stack)
    assert len({engine for engine, *_ in found}) == 2
    assert all(overtaken <= Constants().overtakings for *_, overtaken in found)
    print(f"{sum(at != engine for engine, at, _ in found)} of {len(found)} elsewhere")


def prefixes(stack: Running) -> list[tuple[str, str, int]]:
    """The claims of requests whose prefix an engine had: who claimed them, that engine, and how many overtook them."""
    found = list[tuple[str, str, int]]()
    for path in sorted(stack.run_dir.glob("journal-*.jsonl")):
        engine = next(name for name in ("engine-0", "engine-1") if name in path.name)
        for line in read(path):
            if isinstance(line, Note):
                found += [(engine, at, overtaken) for at, overtaken in line.values.get("prefix_at", {}).values()]
    return found
