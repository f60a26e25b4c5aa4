"""The cost of an iteration on one rank: CPU time of its process, and the round trip that its master sees.

    python -m orca_bench.rank [--batch 32] [--model CHECKPOINT]

Without a checkpoint the model computes nothing, and the cost is the control plane's alone. With one, the rank's
resident memory is shown beside what it cannot do without: a process that has imported torch and no more, the weights,
and the keys and values that are used.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc

from orca.v1 import worker_pb2 as pb
from orca.v1 import worker_pb2_grpc
from orca_bench.machine import resident_bytes
from orca_bench.timed_model import make_timed_model
from orca_common.checkpoint import read_checkpoint
from orca_common.environment import child_environment
from orca_scheduler.ranks.members import increment, initiation, put_members
from orca_worker.models.families import topology
from orca_worker.partition import Types

PROMPT = 100
BLOCK_SIZE = 16


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def measure(address: str, pid: int, batch: int, iterations: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.ControllerStub(channel)
        formation = pb.Formation(tensor_parallel=1, pipeline_parallel=1, block_size=BLOCK_SIZE)
        await stub.Form(pb.FormRequest(term=1, epoch=1, formation=formation))
        blocks = -(-(PROMPT + iterations) // BLOCK_SIZE)
        await stub.Allocate(pb.AllocateRequest(term=1, epoch=1, slots=batch * blocks * BLOCK_SIZE))
        run: Any = stub.Run()
        first = pb.Iteration(term=1, epoch=1, number=1)
        for row in range(batch):
            first.admissions.add(row=row, claim=row + 1, token_ids=[1 + row % 90] * PROMPT)
        put_members(first, [initiation(row, PROMPT, range(row * blocks, (row + 1) * blocks)) for row in range(batch)])
        await run.write(pb.ControlMessage(iteration=first))
        tokens = (await run.read()).iteration.token_ids
        began, trips, stages = cpu_seconds(pid), [], []
        for i in range(iterations):
            started = time.perf_counter()
            iteration = pb.Iteration(term=1, epoch=1, number=i + 2)
            put_members(iteration, [increment(row, PROMPT + i, token) for row, token in enumerate(tokens)])
            await run.write(pb.ControlMessage(iteration=iteration))
            report = (await run.read()).iteration
            trips.append(time.perf_counter() - started)
            tokens, times = report.token_ids, report.times
            stages.append((times.computed - times.started) / 1e9)
        spent = (cpu_seconds(pid) - began) / iterations
    print(
        f"batch {batch}: rank's CPU {spent * 1e6:.0f} us an iteration; round trip median "
        f"{statistics.median(trips) * 1e6:.0f} us, of it in the stage {statistics.median(stages) * 1e6:.0f} us"
    )


def memory(pid: int, model: str, dtype: str, tokens: int) -> str:
    """The rank's resident memory, and what it is made of, when `tokens` tokens have keys and values."""
    script = "import torch; from orca_bench.machine import resident_bytes; print(resident_bytes())"
    alone = int(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    [share] = topology(read_checkpoint(model), 1, 1, Types.of(dtype))
    resident, needed = resident_bytes(pid), alone + share.weight_bytes + tokens * share.slot_bytes
    return (
        f"resident {resident / 1e6:.0f} MB, {resident / needed:.2f} x of {needed / 1e6:.0f}: torch alone "
        f"{alone / 1e6:.0f}, weights {share.weight_bytes / 1e6:.0f}, keys and values of {tokens} tokens "
        f"{tokens * share.slot_bytes / 1e6:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--model", help="checkpoint folder")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights, and of keys and values")
    given = parser.parse_args()
    iterations = 100 if given.model else 3000
    with tempfile.TemporaryDirectory(prefix="orca-rank-") as folder:
        model = given.model or str(make_timed_model(Path(folder, "model")))
        environment = child_environment({"ORCA_MODEL": model, "ORCA_LOG_LEVEL": "WARNING", "ORCA_THREADS": "1"})
        if given.model:
            environment["ORCA_DTYPE"] = given.dtype
        command = [sys.executable, "-m", "orca_worker.rank.app"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as rank:
            assert rank.stdout is not None
            address = json.loads(rank.stdout.readline())["address"]
            try:
                asyncio.run(measure(address, rank.pid, given.batch, iterations))
                if given.model:
                    print(memory(rank.pid, given.model, given.dtype, given.batch * (PROMPT + iterations)))
            finally:
                rank.terminate()


if __name__ == "__main__":
    main()
