"""The engine that the clients of the interop tests expect. A test plays it on the endpoint's pool."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from endpoint.harness import World

from orca.v1.pool_pb2 import PoolRequest
from orca_pool.records import Reason

POSITIONS = 300_000  # a prompt of 271,828 tokens fits
TOGETHER = 5  # tokens of one commit


def tokens(prompt: int, count: int) -> list[int]:
    """The tokens of an answer to a prompt of this length. The clients compute the same."""
    return [1 + (prompt * 31 + index) % 500 for index in range(count)]


async def serve(orca: World) -> None:
    """Answers requests for ever, except those whose id begins with `silent`."""
    while True:
        request = await orca.engine.claim()
        if request.request_id.startswith("silent"):
            continue
        record = PoolRequest.FromString(request.record)
        ids = tokens(len(record.prompt_ids), record.max_new_tokens)
        for base in range(0, len(ids), TOGETHER):
            last = base + TOGETHER >= len(ids)
            await orca.engine.commit(request, base, ids[base : base + TOGETHER], Reason.LENGTH if last else None)


@asynccontextmanager
async def played(orca: World) -> AsyncIterator[None]:
    """Runs the engine inside. Raises what ended it early."""
    task = asyncio.create_task(serve(orca))
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
