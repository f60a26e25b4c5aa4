"""Every process is restarted under load, one after the other, with SIGTERM. No client sees an error.

    python tests/e2e/rolling_restart.py [--streams 40] [--endpoints 2] [--tp 1] [--pp 2] [--rounds 1]

Half of the streams are of the client library. The others are of a raw client, which knows the addresses of all
endpoints and resumes on UNAVAILABLE, and on nothing else. Every token is checked against those of the same prompt
before. It prints for each process how long it took to end, and the longest time that a stream waited for a token.
"""

import argparse
import asyncio
import itertools
import os
import signal
import sys
import time
from pathlib import Path

import grpc
from google.protobuf.duration_pb2 import Duration

sys.path[:0] = [str(Path(__file__).parents[1])]

from checkpoints import make_timed  # noqa: E402
from stacks import Running, folder_in_memory, generation, running  # noqa: E402

from orca.v1 import orca_pb2 as pb  # noqa: E402
from orca.v1.orca_pb2_grpc import OrcaStub  # noqa: E402
from orca_client import AsyncOrcaClient, Token  # noqa: E402

ITERATION, TOKENS = 0.02, 60
ROLES = ("endpoint", "scheduler", "supervisor", "rank")
PAUSE = 0.1  # seconds after which the raw client calls again
LONGEST = 120.0  # seconds until every stream has a token again, and until the last requests end


class Streams:
    """Streams that never stop: when one ends, its client begins the next."""

    def __init__(self, addresses: list[str], count: int) -> None:
        self._addresses, self._count = addresses, count
        self._stopped = False
        self._last: dict[int, float] = {}
        self.finished, self.resumed, self.gap = 0, 0, 0.0
        self._known: dict[int, list[int]] = {}  # prompt -> its tokens

    def stop(self) -> None:
        """Each stream ends with the request that it has."""
        self._stopped = True

    async def library(self, n: int) -> None:
        async with AsyncOrcaClient("ipv4:" + ",".join(self._addresses)) as client:
            while not self._stopped:
                got: list[int] = []
                async for event in client.generate([n + 1, 7, 9], max_new_tokens=TOKENS, ignore_eos=True):
                    if isinstance(event, Token):
                        self._came(n)
                        got.append(event.token_id)
                self._ended(n, got)

    async def raw(self, n: int) -> None:
        channels = [grpc.aio.insecure_channel(address) for address in self._addresses]
        stubs = itertools.cycle([OrcaStub(channel) for channel in channels])
        for number in itertools.count():
            if self._stopped:
                break
            name, got = f"raw-{n}-{number}", list[int]()
            request = generation(
                [n + 1, 7, 9], TOKENS, ignore_eos=True, request_id=name, detach_grace=Duration(seconds=30)
            )
            accepted = done = False
            while not done:
                stub = next(stubs)
                resume = pb.ResumeRequest(request_id=name, from_index=len(got))
                call = stub.Resume(resume) if accepted else stub.Generate(request)
                try:
                    async for response in call:
                        accepted = accepted or response.HasField("accepted")
                        for token in response.tokens:
                            self._came(n)
                            assert token.index == len(got), f"{name}: {token.index} after {len(got) - 1}"
                            got.append(token.token_id)
                        done = done or response.HasField("finished")
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                    self.resumed += 1
                    await asyncio.sleep(PAUSE)
            self._ended(n, got)
        for channel in channels:
            await channel.close()

    def _came(self, n: int) -> None:
        now = time.monotonic()
        self.gap = max(self.gap, now - self._last.get(n, now))
        self._last[n] = now

    def _ended(self, n: int, got: list[int]) -> None:
        assert len(got) == TOKENS
        assert self._known.setdefault(n, got) == got, f"stream {n} has other tokens than before"
        self.finished += 1

    async def flows(self) -> None:
        """Returns when every stream has had a token from now on. Raises TimeoutError when one does not."""
        now = time.monotonic()
        async with asyncio.timeout(LONGEST):
            while len(self._last) < self._count or any(last <= now for last in self._last.values()):
                await asyncio.sleep(0.05)


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


async def restart(stack: Running, streams: Streams, role: str, pid: int) -> None:
    """Ends one process with SIGTERM, and waits until another one is there and every stream goes on."""
    streams.gap, count, begun = 0.0, len(pids(stack, role)), time.monotonic()
    os.kill(pid, signal.SIGTERM)
    await stack.until(lambda: not alive(pid), 60)
    ended = time.monotonic() - begun
    await stack.until(lambda: len([p for p in pids(stack, role) if p != pid and alive(p)]) >= count, 60)
    await stack.until(lambda: ready(stack), 60)
    await streams.flows()
    print(f"{role:<11} ended after {ended:5.2f} s, the longest gap {streams.gap:5.2f} s", flush=True)


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
            streams = Streams(stack.stack.grpc_addresses, args.streams)
            async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as load:
                for n in range(args.streams):
                    load.create_task(streams.raw(n) if n % 2 else streams.library(n))
                await streams.flows()
                for _ in range(args.rounds):
                    for role in ROLES:
                        for pid in pids(stack, role):
                            if alive(pid):
                                await restart(stack, streams, role, pid)
                streams.stop()
                limit.reschedule(asyncio.get_running_loop().time() + LONGEST)
            print(f"{streams.finished} requests finished, {streams.resumed} times resumed by raw clients, no error")
    return 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
