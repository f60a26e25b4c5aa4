"""The cost of the control plane: CPU time per iteration of each process, with a model that computes nothing.

    python -m orca_bench.control_plane [--batches 1,8,32,64] [--seconds 5] [--policy auto] [--json FILE]

The stack is that of `orca serve`, with its default policy; `paper` has no keys of blocks, and drafts nothing. For a
batch of b, b requests run at once; the CPU time that endpoint, scheduler, rank and Redis spend in a window is divided
by the iterations of the window. The load comes from a process of its own, which is not counted.

The floor counts what an iteration cannot do without, with times of two cores with AVX2:
    b messages to clients, each with one token: 1.5 us each, the time to frame one
    (an endpoint that is late sends several tokens a message)
    2 messages on the control lane: 70 us each, both sides (the best of a busy machine)
    2 round trips to Redis, the commit and the read of the delivery stream: 20 us each on a bare transport
    Redis's own work: 3 commands a row, about 1 us each
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import uvloop

from orca.v1 import orca_pb2 as pb
from orca_bench.grpc_door import GENERATE
from orca_common.lanes.client import connect
from orca_local.settings import ServeSettings
from orca_local.stack import Stack
from orca_local.timed_model import make_timed_model

SLOTS = 1 << 20
FLOOR_ROW, FLOOR_FIXED = 1.5 + 3.0, 2 * 70.0 + 2 * 20.0  # microseconds


async def load(address: str, batch: int, seconds: float) -> None:
    """The load: `batch` streams at once. Prints the tokens so far and the iteration, at both ends of the window."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]), max_new_tokens=min(1 << 18, SLOTS // batch - 64), ignore_eos=True
    ).SerializeToString()
    tokens = messages = iteration = started = 0

    def listener() -> Callable[[bytes], None]:
        first = True

        def heard(message: bytes) -> None:
            nonlocal tokens, messages, iteration, started, first
            messages += 1
            if made := pb.GenerateResponse.FromString(message).tokens:
                tokens, iteration = tokens + len(made), made[-1].iteration
                started += first
                first = False

        return heard

    connection = await connect(address, None)
    for _ in range(batch):
        call = connection.call(GENERATE, listener())
        call.send(request)
        call.close()
    while started < batch:
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    for wait in (seconds, 0.0):
        counts = {"tokens": tokens, "messages": messages, "iteration": iteration}
        print(json.dumps({**counts, "time": time.monotonic()}), flush=True)
        await asyncio.sleep(wait)
    connection.close()


def processes(run_dir: Path) -> list[tuple[str, int]]:
    """Role and pid of each process of a stack."""
    return [(process["role"], process["pid"]) for process in json.loads((run_dir / "processes.json").read_text())]


def cpu_seconds(run_dir: Path) -> dict[str, float]:
    """CPU time so far of each role."""
    seconds: dict[str, float] = {}
    for role, pid in processes(run_dir):
        times = psutil.Process(pid).cpu_times()
        seconds[role] = seconds.get(role, 0.0) + times.user + times.system
    return seconds


async def measure(stack: Stack, run_dir: Path, batch: int, seconds: float) -> dict[str, Any]:
    """Measures one batch size: microseconds of CPU per iteration by role, and the rate of delivery."""
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "orca_bench.control_plane",
        "--load",
        stack.grpc_addresses[0],
        "--batches",
        str(batch),
        "--seconds",
        str(seconds),
        stdout=asyncio.subprocess.PIPE,
    )
    assert client.stdout is not None
    ends = []
    for _ in range(2):
        line = json.loads(await client.stdout.readline())
        ends.append((line, cpu_seconds(run_dir)))
    await client.wait()
    (first, before), (second, after) = ends
    iterations = second["iteration"] - first["iteration"]
    cost = {role: (after[role] - before[role]) / iterations * 1e6 for role in after}
    return {
        "batch": batch,
        "iterations_per_second": iterations / (second["time"] - first["time"]),
        "tokens_per_second": (second["tokens"] - first["tokens"]) / (second["time"] - first["time"]),
        "tokens_per_message": (second["tokens"] - first["tokens"]) / (second["messages"] - first["messages"]),
        "microseconds": cost,
        "total": sum(cost.values()),
        "floor": FLOOR_FIXED + FLOOR_ROW * batch,
    }


async def bench(batches: list[int], seconds: float, policy: str, out: Path | None) -> None:
    folder = Path(tempfile.mkdtemp(prefix="orca-control-plane-"))
    model = make_timed_model(folder / "model")
    rows = []
    try:
        for batch in batches:
            numbers = {"max_batch_size": batch, "slots": SLOTS, "port": 0, "http_port": 0}
            settings = ServeSettings.load(model=str(model), policy=policy, **numbers)
            run_dir = folder / f"batch-{batch}"
            stack = Stack(settings, run_dir, lambda step: None)
            try:
                await stack.start()
                rows.append(await measure(stack, run_dir, batch, seconds))
            finally:
                await stack.stop()
            show(rows[-1])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if out is not None:
        out.write_text(json.dumps(rows, indent=1))


def show(row: dict[str, Any]) -> None:
    roles = ", ".join(f"{role} {cost:.0f}" for role, cost in sorted(row["microseconds"].items()))
    print(
        f"batch {row['batch']:3}: {row['total']:6.0f} us CPU per iteration (floor {row['floor']:.0f}): {roles}; "
        f"{row['iterations_per_second']:.0f} iterations/s, {row['tokens_per_second']:.0f} tokens/s delivered, "
        f"{row['tokens_per_message']:.1f} a message",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    if arguments.load:
        uvloop.run(load(arguments.load, batches[0], arguments.seconds))
    else:
        asyncio.run(bench(batches, arguments.seconds, arguments.policy, arguments.json))


if __name__ == "__main__":
    main()
