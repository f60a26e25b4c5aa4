"""Forced calls of random tools with ranks killed meanwhile, by OpenAI's client: each is valid, and the same as before.

python tests/e2e/tool_rounds.py --tools 100 [--template hermes] [--kills 6] [--seed 1] [--tp 2] [--pp 2] [--together 8]
"""

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

from e2e.structured_rounds import while_killing  # noqa: E402
from e2e.test_structured import calls, judge, make_model  # noqa: E402
from openai import AsyncOpenAI  # noqa: E402
from stacks import folder_in_memory, running  # noqa: E402
from tool_templates import TEMPLATES, some_tools  # noqa: E402

Calls = list[tuple[str, str]]


async def answers(address: str, tools: list[list[Any]], together: int, stream: bool) -> list[Calls]:
    room = asyncio.Semaphore(together)
    async with AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=600) as client:

        async def one(n: int) -> Calls:
            async with room:
                return await calls(client, n, tools[n], stream)

        return await asyncio.gather(*map(one, range(len(tools))))


async def main(asked: argparse.Namespace) -> None:
    draw = random.Random(asked.seed)
    tools = [some_tools(draw) for _ in range(asked.tools)]
    with folder_in_memory() as folder:
        model = make_model(Path(folder) / "model", TEMPLATES[asked.template])
        settings = {"tp": asked.tp, "pp": asked.pp, "slots": 65536}
        async with running(Path(folder) / "run", model, **settings) as stack:
            began = time.monotonic()
            whole = await answers(stack.http, tools, asked.together, stream=False)
            for given, found in zip(tools, whole, strict=True):
                judge(given, found)
            count = sum(map(len, whole))
            print(f"{len(whole)} answers with {count} calls are valid, {time.monotonic() - began:.0f} s")
            work = answers(stack.http, tools, asked.together, stream=True)
            streamed = await while_killing(stack, draw, asked.kills, work)
            same = sum(a == b for a, b in zip(whole, streamed, strict=True))
            print(f"streamed with {asked.kills} ranks killed: {same} the same")
            assert streamed == whole


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=int, default=100)
    parser.add_argument("--template", choices=sorted(TEMPLATES), default="hermes")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--together", type=int, default=8)
    asyncio.run(main(parser.parse_args()))
