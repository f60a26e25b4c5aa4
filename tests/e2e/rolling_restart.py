"""Every process is restarted under load, one after the other, with SIGTERM. No client sees an error.

    python tests/e2e/rolling_restart.py [--streams 40] [--endpoints 2] [--tp 1] [--pp 2] [--rounds 1]

Half of the streams are of the client library. The others are of a raw client, which knows the addresses of all
endpoints and resumes on UNAVAILABLE, and on nothing else. Every token is checked against those of the same prompt
before. It prints for each process how long it took to end, and the longest time that a stream waited for a token.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

sys.path[:0] = [str(Path(__file__).parents[1])]

from checkpoints import make_timed  # noqa: E402
from stacks import Running, folder_in_memory, generation, running  # noqa: E402

from orca_chaos.client import Caller, Stream  # noqa: E402
from orca_chaos.streams import Streams  # noqa: E402
from orca_client import AsyncOrcaClient, Token  # noqa: E402

ITERATION, TOKENS = 0.02, 60
ROLES = ("endpoint", "scheduler", "supervisor", "rank")
LONGEST = 240.0  # seconds until everything runs again and every stream has a token, and until the last requests end


class Clients(Streams):
    """The two kinds of clients. Each stream repeats one prompt, and must get the same tokens each time."""

    def __init__(self, addresses: Sequence[str], streams: int) -> None:
        super().__init__(streams)
        self.finished = self.resumed = 0
        self._library = AsyncOrcaClient("ipv4:" + ",".join(addresses))
        self._raw = Caller(addresses)
        self._known: dict[int, list[int]] = {}  # tokens of a stream's prompt

    async def close(self) -> None:
        await self._library.close()
        await self._raw.close()

    async def _request(self, n: int) -> None:
        got = await (self._of_raw_client(n) if n % 2 else self._of_library(n))
        assert len(got) == TOKENS
        assert self._known.setdefault(n, got) == got, f"stream {n} has other tokens than before"
        self.finished += 1

    async def _of_library(self, n: int) -> list[int]:
        got: list[int] = []
        async for event in self._library.generate(_prompt(n), max_new_tokens=TOKENS, ignore_eos=True):
            if isinstance(event, Token):
                self._came(n, event.engine)
                got.append(event.token_id)
        return got

    async def _of_raw_client(self, n: int) -> list[int]:
        request = generation(_prompt(n), TOKENS, ignore_eos=True)
        stream = Stream(
            self._raw, request, came=lambda stream: self._came(n, stream.engine), again=(grpc.StatusCode.UNAVAILABLE,)
        )
        await stream.run()
        self.resumed += stream.calls - 1
        return stream.tokens


def _prompt(n: int) -> list[int]:
    return [n + 1, 7, 9]


def pids(stack: Running, role: str) -> list[int]:
    return [p["pid"] for p in stack.processes() if p["role"] == role]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ready(stack: Running) -> bool:
    """Whether all processes are."""
    asked = [child for child in stack.stack.children if child.role != "redis"]
    return all("status" in child.addresses and child.unready() is None for child in asked)


async def restart(stack: Running, clients: Clients, role: str, pid: int) -> None:
    """Ends one process with SIGTERM, and waits until another one is there and every stream goes on."""
    count, begun = len(pids(stack, role)), time.monotonic()
    async with asyncio.timeout(LONGEST), clients.disturbed() as seen:
        os.kill(pid, signal.SIGTERM)
        await stack.until(lambda: not alive(pid), 60)
        ended = time.monotonic() - begun
        await stack.until(lambda: len([p for p in pids(stack, role) if p != pid and alive(p)]) >= count, 60)
        await stack.until(lambda: ready(stack), 60)
    print(f"{role:<11} ended after {ended:5.2f} s, the longest gap {seen.pause:5.2f} s", flush=True)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--endpoints", type=int, default=2)
    parser.add_argument("--schedulers", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in ("endpoints", "schedulers", "tp", "pp")}
    with folder_in_memory() as folder:
        model = make_timed(Path(folder) / "model", seconds=ITERATION)
        async with running(Path(folder) / "run", model, max_batch_size=args.streams, **settings) as stack:
            clients = Clients(stack.stack.grpc_addresses, args.streams)
            async with asyncio.timeout(None) as limit, clients:
                for _ in range(args.rounds):
                    for role in ROLES:
                        for pid in pids(stack, role):
                            if alive(pid):
                                await restart(stack, clients, role, pid)
                limit.reschedule(asyncio.get_running_loop().time() + LONGEST)
            await clients.close()
            print(f"{clients.finished} requests finished, {clients.resumed} times resumed by raw clients, no error")
    return 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
