"""Several streams at once, with the Python client for asyncio: `python examples/several_streams.py [ADDRESS ..]`.

They share iterations: each token names the iteration that made it.
"""

import asyncio
import sys
from collections import Counter

from orca_client import AsyncOrcaClient, Token

PROMPTS = ("import os", "class Queue:", "def main(", "for i in")


async def main(addresses: list[str]) -> None:
    shared: Counter[int] = Counter()  # iteration -> tokens

    async def one(client: AsyncOrcaClient, prompt: str) -> str:
        text = prompt
        async for event in client.generate(prompt, max_new_tokens=24, temperature=0.7, seed=1):
            if isinstance(event, Token):
                text += event.text
                shared[event.iteration] += 1
        return text

    async with AsyncOrcaClient(addresses) as client:
        for text in await asyncio.gather(*(one(client, prompt) for prompt in PROMPTS)):
            print(repr(text))
    print(f"{shared.total()} tokens in {len(shared)} iterations")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or ["127.0.0.1:50051"]))
