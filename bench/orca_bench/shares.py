"""The first token of a small tenant beside one whose requests fill the engine and the queue, where shares are fair.

    python -m orca_bench.shares [--model FOLDER] [--requests 60] [--queued 500] [--max-batch-size 8]

The small tenant sends a prompt of 8 tokens now and then and wants one token, first alone, then beside requests of 32
tokens in and many out. A line of JSON for each: medians in ms of the time to the first token and of its parts, as
`orca explain` has them, and how many iterations a request waited for.

doors      on the way to the pool, and from there to the client
queue      until the engine had claimed it
wait       at the engine, until its iteration began: the one before ends first
run        its iteration
commit     until the token was in the pool

The last line has the ratio, and the one that would be left if only the engine took longer: alone, and half an iteration
of the full engine to wait for, and a full iteration in place of the small one.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from orca_client import AsyncOrcaClient, Token
from orca_common.api_keys import line_of, new_key
from orca_common.checkpoint import read_checkpoint, resolve_model
from orca_local.settings import ServeSettings
from orca_local.stack import DEMO_MODEL, Stack

from .cases import Request, fixed, vocabulary_of
from .machine import isa
from .stack import between

SMALL, LARGE = (8, 1), (32, 400)  # tokens in and out
BETWEEN, SPREAD = 0.15, 0.1  # seconds from an answer to the next request, and what is added to it at most
WARM_UP = 5  # requests
PARTS = ("doors", "queue", "wait", "run", "commit")


class First(NamedTuple):
    """A request's id, and the seconds until its first token."""

    request: str
    seconds: float


async def ask(client: AsyncOrcaClient, request: Request) -> First:
    """Reads a request's whole answer."""
    began, seconds = time.perf_counter(), 0.0
    async with client.generate(request.prompt, max_new_tokens=request.output, ignore_eos=True) as stream:
        async for event in stream:
            if isinstance(event, Token) and not seconds:
                seconds = time.perf_counter() - began
        return First(stream.request_id, seconds)


async def asked(client: AsyncOrcaClient, requests: Sequence[Request]) -> list[First]:
    """Sends requests one after the other, at other moments of an iteration each time."""
    found = list[First]()
    for n, request in enumerate(requests):
        found.append(await ask(client, request))
        await asyncio.sleep(BETWEEN + SPREAD * (n * 0.618 % 1))
    return found


def parts(first: First, story: Mapping[str, Any]) -> dict[str, float]:
    """ms of each part of the time to the first token, and the iterations that it waited for. story: of `orca explain`,
    of a request with one token."""
    found = dict.fromkeys(PARTS, 0.0) | {"iterations": 0}
    for part in story["parts"]:
        name = "queue" if part["queued"] else part["kind"] if part["kind"] in PARTS else "wait"
        found[name] += part["seconds"] * 1e3
        found["iterations"] += 0 if name == "run" else part["iterations"]
    return found | {"doors": (first.seconds - story["seconds"]) * 1e3, "first_token": first.seconds * 1e3}


def medians(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each part; of the iterations the mean."""
    found = {name: round(statistics.median(one[name] for one in each), 2) for name in ("first_token", *PARTS)}
    return found | {"iterations": round(statistics.mean(one["iterations"] for one in each), 2)}


def ratio(alone: Mapping[str, float], beside: Mapping[str, float], period: float) -> dict[str, float]:
    """The ratio of the times to the first token, and what the engine alone makes of it. period: ms between two full
    iterations."""
    inherent = alone["first_token"] + period / 2 + beside["run"] - alone["run"]
    return {
        "ratio": round(beside["first_token"] / alone["first_token"], 2),
        "of_the_engine": round(inherent / alone["first_token"], 2),
        "period": round(period, 2),
    }


def explained(status: str, request: str) -> Any:
    """The story of a small request, by a scheduler's status port."""
    with urllib.request.urlopen(f"http://{status}/explain?request=small/{request}") as answer:
        return json.load(answer)


async def measured(
    model: str, requests: int, queued: int, max_batch_size: int, **settings: Any
) -> list[dict[str, Any]]:
    """The lines, of a fresh stack with these settings of `orca serve`."""
    vocabulary = vocabulary_of(read_checkpoint(resolve_model(model)).vocab_size)
    small_ones, large_ones = (
        fixed(count, *size, vocabulary=vocabulary) for count, size in ((requests, SMALL), (queued, LARGE))
    )
    keys = {name: new_key() for name in ("small", "large")}
    lines = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="orca-shares-") as folder:
        served = ServeSettings.load(
            model=model,
            max_batch_size=max_batch_size,
            port=0,
            http_port=0,
            ui=False,
            order="fair",
            max_waiting=2 * queued,
            api_keys=",".join(line_of(name, key) for name, key in keys.items()),
            **settings,
        )
        stack = Stack(served, Path(folder), lambda line: None)
        try:
            await stack.start()
            processes = json.loads((Path(folder) / "processes.json").read_text())
            [status] = [one["status"] for one in processes if one["role"] == "scheduler"]
            address = stack.grpc_addresses[0]
            async with (
                AsyncOrcaClient(address, api_key=keys["small"]) as small,
                AsyncOrcaClient(address, api_key=keys["large"]) as large,
            ):
                await asked(small, small_ones[:WARM_UP])
                load = list[asyncio.Task[First]]()
                for phase in ("alone", "beside"):
                    if phase == "beside":
                        load = [asyncio.create_task(ask(large, one)) for one in large_ones]
                        await asked(small, small_ones[:WARM_UP])
                    began = time.time_ns()
                    firsts = await asked(small, small_ones)
                    period = began, time.time_ns()
                    assert phase == "alone" or sum(not task.done() for task in load) >= max_batch_size, "too few queued"
                    stories = [await asyncio.to_thread(explained, status, first.request) for first in firsts]
                    lines.append({"load": phase, **medians(list(map(parts, firsts, stories)))})
                for task in load:
                    task.cancel()
                await asyncio.gather(*load, return_exceptions=True)
        finally:
            await stack.stop()
        lines.append(ratio(lines[0], lines[1], sum(between(Path(folder), [period]))))
    return [line | {"requests": requests, "queued": queued, "isa": isa()} for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--queued", type=int, default=500)
    parser.add_argument("--max-batch-size", type=int, default=8)
    given = parser.parse_args()
    found = measured(given.model, given.requests, given.queued, given.max_batch_size)
    for line in uvloop.run(found):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
