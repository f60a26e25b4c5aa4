"""Endpoints behind one name are restarted one after the other, under streams. The caller sees no error."""

import asyncio
import os
import signal
from pathlib import Path

from checkpoints import make_timed
from stacks import Running, running

from orca_client import AsyncOrcaClient, Token

PROMPTS = [[n + 1, 7, 9] for n in range(6)]
TOKENS = 60


async def tokens(client: AsyncOrcaClient, prompt: list[int]) -> list[int]:
    stream = client.generate(prompt, max_new_tokens=TOKENS, ignore_eos=True)
    return [event.token_id async for event in stream if isinstance(event, Token)]


def pids(stack: Running) -> dict[str, int]:
    """The endpoints that run, by address."""
    return {p["address"]: p["pid"] for p in stack.processes() if p["role"] == "endpoint" and p["pid"]}


async def test_streams_go_on(tmp_path: Path) -> None:
    """A drain of half a second is shorter than a stream, so some streams move while they run. First each endpoint is
    asked to end, then each is killed."""
    model = make_timed(tmp_path / "model", seconds=0.02)
    async with (
        running(tmp_path / "run", model, endpoints=2, drain_seconds=0.5, connection_age=1) as stack,
        AsyncOrcaClient("ipv4:" + ",".join(pids(stack))) as client,
    ):
        expected = await asyncio.gather(*(tokens(client, prompt) for prompt in PROMPTS))
        restarted = asyncio.Event()

        async def keep_streaming(prompt: list[int], right: list[int]) -> int:
            streams = 0
            while not restarted.is_set() or not streams:
                assert await tokens(client, prompt) == right
                streams += 1
            return streams

        async with asyncio.TaskGroup() as streaming:
            for prompt, right in zip(PROMPTS, expected, strict=True):
                streaming.create_task(keep_streaming(prompt, right))
            for number in (signal.SIGTERM, signal.SIGKILL):
                for address, pid in pids(stack).items():
                    os.kill(pid, number)
                    await stack.until(lambda address=address, pid=pid: pids(stack).get(address, pid) != pid)
                    child = next(c for c in stack.stack._children if c.addresses.get("grpc") == address)
                    await stack.until(lambda child=child: child.unready() is None)
            restarted.set()
