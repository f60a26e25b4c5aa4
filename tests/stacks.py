"""Whole stacks for tests: the processes of `orca serve` on free loopback ports, in a folder of the test."""

import asyncio
import json
import re
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from warm_forks import begin_warm

from orca.v1 import orca_pb2 as pb
from orca.v1.orca_pb2_grpc import OrcaStub
from orca_client import AsyncOrcaClient, Token
from orca_local import stack as of_stack
from orca_local.pod import Program
from orca_local.settings import ServeSettings
from orca_local.stack import Stack
from orca_scheduler.master.journal import Line, read

OF_THEMSELVES = {  # lines of logs about what no kill and no freeze explains
    "verdict on a right rank": re.compile(r'"event": "rank lost".*\) failed: '),
    "process that ended by itself": re.compile(r"ended with status (?!0|-9|-15)|was killed by SIG(?!KILL|TERM)"),
}
of_stack.begin = begin_warm  # a start takes 0.6 s of processor time instead of 2.9


def folder_in_memory() -> tempfile.TemporaryDirectory[str]:
    """A folder for a run, in memory where there is some.

    Each commit waits for Redis's file, and a disk that others use stops at times.
    """
    return tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


def of_themselves(run_dir: Path) -> Counter[str]:
    """Counts what no fault explains in a run's logs, by kind: streams survive it, and so they say nothing of it."""
    logs = sorted((run_dir / "logs").glob("*.log*"))  # NAME.log.1, too: a long run's log goes on as an empty one
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    return +Counter({kind: sum(bool(found.search(line)) for line in lines) for kind, found in OF_THEMSELVES.items()})


@dataclass
class Running:
    """A stack that is ready, with its clients and its files."""

    stack: Stack
    run_dir: Path
    client: AsyncOrcaClient
    stub: OrcaStub

    @property
    def grpc(self) -> str:
        return self.stack.grpc_addresses[0]

    @property
    def http(self) -> str:
        return self.stack.http_addresses[0]

    def processes(self) -> list[dict[str, Any]]:
        return json.loads((self.run_dir / "processes.json").read_text())

    def journal(self) -> list[Line]:
        """All complete lines of all journals, the oldest term first."""
        return [line for path in sorted(self.run_dir.glob("journal-*.jsonl")) for line in read(path)]

    async def tokens(
        self, prompt: list[int], count: int, came: Callable[[int], None] = lambda token: None, **sampling: Any
    ) -> list[int]:
        """Returns a request's tokens, and calls `came` with each. The client library resumes by itself."""
        tokens: list[int] = []
        sampling = {"ignore_eos": True} | sampling
        async for event in self.client.generate(prompt, max_new_tokens=count, **sampling):
            if isinstance(event, Token):
                assert event.index == len(tokens)
                tokens.append(event.token_id)
                came(event.token_id)
        return tokens

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Waits for a condition that another process will make true."""
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.02)


@asynccontextmanager
async def running(
    run_dir: Path,
    model: Path,
    *,
    environment: Mapping[str, str] | None = None,
    ui: bool = False,
    scheduler: Program | None = None,
    broken: bool = False,
    **settings: object,
) -> AsyncIterator[Running]:
    """Starts a stack with these settings of `orca serve`. Prints the processes' logs when the test fails.

    ui: with the live page, which starts when all else is ready. scheduler: another program that schedules. broken: the
    test makes a process fail; otherwise none may, nor may a rank be taken for one that has failed."""
    values = {"dtype": "float32", "device": "cpu", "slots": 4096, "threads": 1, "port": 0, "http_port": 0} | settings
    stack = Stack(
        ServeSettings.load(model=str(model), **values), run_dir, print, environment, ui=ui, scheduler=scheduler
    )
    try:
        async with asyncio.timeout(120):
            await stack.start()
        options = [("grpc.max_send_message_length", -1)]
        async with (
            AsyncOrcaClient(stack.grpc_addresses) as client,
            grpc.aio.insecure_channel(stack.grpc_addresses[0], options=options) as channel,
        ):
            yield Running(stack, run_dir, client, OrcaStub(channel))
        assert broken or not of_themselves(run_dir)
    except BaseException:
        for log in sorted((run_dir / "logs").glob("*.log")):
            print(f"---- {log.name}\n{log.read_text(errors='replace')[-4000:]}")
        raise
    finally:
        await stack.stop()


def generation(prompt: list[int], max_new_tokens: int, **fields: Any) -> pb.GenerateRequest:
    """A request whose prompt is token ids."""
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), max_new_tokens=max_new_tokens, **fields)
