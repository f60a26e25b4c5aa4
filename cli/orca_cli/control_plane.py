"""What the control plane costs: CPU seconds per iteration of every process of ours, with a model that computes nothing.

    python -m orca_cli.control_plane [--batches 1,8,32,64] [--seconds 5] [--json FILE]

The stack is that of `orca serve` with a model of type `orca_timed` (0 s per iteration). For each batch size so many
requests run at once; over a window the CPU time of endpoint, scheduler, rank and Redis is divided by the iterations
that ran in it. The load client is a process of its own and is not counted.

Floor, by counting what an iteration must do on this machine (b = batch size):
    b messages of gRPC's Python stack to clients: 18 us each, measured with a server that does nothing else
    4 messages on the control lane (write and read on both sides): about 30 us each
    2 round trips to Redis (commit, read of the delivery stream): about 50 us each in the client library
    the pool's own work: 3 commands a row, about 1 us each
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import psutil

from orca.v1 import orca_pb2 as pb
from orca_cli.stack import DEMO_MODEL, Plan, Stack

SLOTS = 1 << 20
FLOOR_ROW, FLOOR_FIXED = 18.0 + 3.0, 4 * 30.0 + 2 * 50.0  # microseconds


def make_noop_model(folder: Path) -> Path:
    """A checkpoint of type `orca_timed` that computes nothing, with the demo model's tokenizer."""
    folder.mkdir(parents=True)
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    config = {"model_type": "orca_timed", "vocab_size": 4096, "n_positions": 1 << 20, "seconds": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def load(address: str, batch: int, seconds: float) -> None:
    """The load client: `batch` streams at once; prints tokens seen and the iteration at both ends of the window."""
    method = "/orca.v1.Orca/Generate"
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]), max_new_tokens=min(1 << 18, SLOTS // batch - 64), ignore_eos=True
    ).SerializeToString()
    tokens, last = 0, b""
    started = 0

    async with grpc.aio.insecure_channel(address) as channel:

        async def stream() -> None:
            nonlocal tokens, last, started
            first = True
            async for message in channel.unary_stream(method)(request):  # bytes: the client stays cheap
                tokens, last = tokens + 1, message
                started += first
                first = False

        streams = [asyncio.create_task(stream()) for _ in range(batch)]
        while started < batch:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        for wait in (seconds, 0.0):
            iteration = pb.GenerateResponse.FromString(last).token.iteration
            print(json.dumps({"tokens": tokens, "iteration": iteration, "time": time.monotonic()}), flush=True)
            await asyncio.sleep(wait)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def cpu_seconds(run_dir: Path) -> dict[str, float]:
    """CPU time so far of each role."""
    seconds: dict[str, float] = {}
    for process in json.loads((run_dir / "processes.json").read_text()):
        times = psutil.Process(process["pid"]).cpu_times()
        seconds[process["role"]] = seconds.get(process["role"], 0.0) + times.user + times.system
    return seconds


async def measure(stack: Stack, run_dir: Path, batch: int, seconds: float) -> dict[str, Any]:
    """One batch size: microseconds of CPU per iteration by role, and what was delivered."""
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "orca_cli.control_plane",
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
        "microseconds": cost,
        "total": sum(cost.values()),
        "floor": FLOOR_FIXED + FLOOR_ROW * batch,
    }


async def bench(batches: list[int], seconds: float, out: Path | None) -> None:
    folder = Path(tempfile.mkdtemp(prefix="orca-control-plane-"))
    model = make_noop_model(folder / "noop")
    rows = []
    try:
        for batch in batches:
            settings = {"ORCA_MAX_BATCH_SIZE": str(batch), "ORCA_SLOTS": str(SLOTS)}
            plan = Plan(model=model, port=0, http_port=0, settings=settings)
            run_dir = folder / f"batch-{batch}"
            stack = Stack(plan, run_dir, lambda _: None)
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
        f"{row['iterations_per_second']:.0f} iterations/s, {row['tokens_per_second']:.0f} tokens/s delivered",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    if arguments.load:
        asyncio.run(load(arguments.load, batches[0], arguments.seconds))
    else:
        asyncio.run(bench(batches, arguments.seconds, arguments.json))


if __name__ == "__main__":
    main()
