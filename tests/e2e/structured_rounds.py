"""Answers of random schemas with ranks killed meanwhile: each is valid, and the same as in a run without faults.

python tests/e2e/structured_rounds.py --schemas 200 [--kills 6] [--seed 1] [--tp 2] [--pp 2] [--together 16]
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

sys.path[:0] = [str(Path(__file__).parents[1])]

import jsonschema  # noqa: E402
from e2e.test_structured import answer, make_model  # noqa: E402
from schemas import a_schema  # noqa: E402
from stacks import Running, folder_in_memory, running  # noqa: E402

T = TypeVar("T")


async def answers(stack: Running, schemas: list[dict[str, object]], together: int) -> list[str]:
    room = asyncio.Semaphore(together)

    async def one(n: int) -> str:
        async with room:
            return await answer(stack, n, json_schema=schemas[n])

    return await asyncio.gather(*map(one, range(len(schemas))))


async def kill(stack: Running, draw: random.Random, kills: int) -> None:
    """Kills a random rank, waits until its process is another one, and does so again."""
    for _ in range(kills):
        ranks = {p["rank"]: p["pid"] for p in stack.processes() if p["role"] == "rank"}
        rank = draw.choice(sorted(ranks))
        os.kill(ranks[rank], signal.SIGKILL)
        pid = ranks[rank]

        def replaced(rank: int = rank, pid: int = pid, count: int = len(ranks)) -> bool:
            now = {p["rank"]: p["pid"] for p in stack.processes() if p["role"] == "rank"}
            return len(now) == count and now[rank] != pid

        await stack.until(replaced)
        await asyncio.sleep(draw.uniform(0.5, 2))


async def while_killing(stack: Running, draw: random.Random, kills: int, work: Awaitable[T]) -> T:
    """Awaits this work while ranks are killed, and all of them are there again."""
    killing = asyncio.create_task(kill(stack, draw, kills))
    done = await work
    if not killing.done():
        print("some ranks were killed after the last answer")
    await killing
    return done


async def main(asked: argparse.Namespace) -> None:
    draw = random.Random(asked.seed)
    schemas = [a_schema(draw) for _ in range(asked.schemas)]
    with folder_in_memory() as folder:
        model = make_model(Path(folder) / "model")
        settings = {"tp": asked.tp, "pp": asked.pp, "slots": 32768}
        async with running(Path(folder) / "run", model, **settings) as stack:
            began = time.monotonic()
            before = await answers(stack, schemas, asked.together)
            for schema, text in zip(schemas, before, strict=True):
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            print(f"{len(before)} answers are valid, {len(set(before))} distinct, {time.monotonic() - began:.0f} s")
            hit = await while_killing(stack, draw, asked.kills, answers(stack, schemas, asked.together))
            same = sum(a == b for a, b in zip(before, hit, strict=True))
            print(f"with {asked.kills} ranks killed: {same} the same")
            assert hit == before


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--together", type=int, default=16)
    asyncio.run(main(parser.parse_args()))
