"""Serves a model with random weights by a whole stack: its throughput under load, then kills, as lines of JSON.

    python tests/gpu/served.py [--model llama-7b] [--device cuda]

Streams of a killed rank or scheduler go on: each must have all its tokens, each index once. Tokens after a recovery may
be others where another batch shape rounds otherwise; `equal` counts the streams that are the undisturbed run's.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from stacks import Running, running  # noqa: E402

from orca_bench.cases import fixed, vocabulary_of  # noqa: E402
from orca_bench.grpc_door import GrpcDoor  # noqa: E402
from orca_bench.serve import case_lines  # noqa: E402
from orca_lab.decode import write_model  # noqa: E402

STREAMS = 8
VICTIMS = ("rank", "scheduler", "rank")


async def throughput(stack: Running, vocabulary: range, tokens: int) -> None:
    """Closed loads of 1, 8 and 32 requests."""
    cases = {f"b{batch}_128_{tokens}": fixed(batch, 128, tokens, vocabulary=vocabulary) for batch in (1, 8, 32)}
    async with GrpcDoor(stack.grpc) as door:
        async for line in case_lines(door, cases, 1, vocabulary, lambda what, count: lambda answer: None, 60.0):
            print(json.dumps(line), flush=True)


async def kills(stack: Running, vocabulary: range, tokens: int) -> None:
    prompts = [request.prompt for request in fixed(STREAMS, 32, tokens, 5, vocabulary)]
    calm = await asyncio.gather(*(stack.tokens(prompt, tokens) for prompt in prompts))
    for role in VICTIMS:
        moments: list[list[float]] = [[] for _ in prompts]
        streams = [
            asyncio.create_task(stack.tokens(prompt, tokens, lambda _, came=came: came.append(time.monotonic())))
            for prompt, came in zip(prompts, moments, strict=True)
        ]
        await stack.until(lambda moments=moments: sum(map(len, moments)) >= STREAMS * tokens // 4)
        os.kill(next(row["pid"] for row in stack.processes() if row["role"] == role), signal.SIGKILL)
        got = await asyncio.wait_for(asyncio.gather(*streams), 60)
        assert all(len(one) == tokens for one in got), "a stream lacks tokens"
        pause = max(later - earlier for came in moments for earlier, later in pairwise(came))
        equal = sum(one == other for one, other in zip(got, calm, strict=True))
        print(json.dumps({"killed": role, "streams": STREAMS, "equal": equal, "longest_pause": pause}), flush=True)


async def main(model: str, device: str) -> None:
    cuda, tokens = device == "cuda", 128 if device == "cuda" else 24
    with tempfile.TemporaryDirectory(prefix="orca-served-") as temporary:
        folder = write_model(model, Path(temporary) / model)
        vocabulary = vocabulary_of(json.loads((folder / "config.json").read_text())["vocab_size"])
        settings = {"device": device, "dtype": "bfloat16", "max_batch_size": 32, "slots": None if cuda else 16384}
        began = time.monotonic()
        async with running(Path(temporary) / "run", folder, **settings, run_ahead=int(cuda)) as stack:
            print(json.dumps({"model": model, "ready_seconds": time.monotonic() - began}), flush=True)
            await throughput(stack, vocabulary, tokens)
            await kills(stack, vocabulary, 2 * tokens)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-7b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    given = parser.parse_args()
    asyncio.run(main(given.model, given.device))
