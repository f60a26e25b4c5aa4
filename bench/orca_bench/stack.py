"""The cost of the whole stack on top of its engine: a case on both in turn, and the CPU time of each process.

    python -m orca_bench.stack --model MODEL [--case b32_32_32] [--rounds 5] [--run-ahead 1] [--stream-interval 8]

The stack is that of `orca serve`; its client, which is this process, takes its time from the same cores. CPU time is
milliseconds an iteration of the longest request. `kernels` are the rank's threads that compute, `rank` is its rest.
A case's last line has the time of an iteration in the stack, and the kernels' wait for the next one.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import uvloop

from orca_lab.timeline import read_run
from orca_local.settings import ServeSettings
from orca_local.stack import Stack

from .cases import WARM_UP_SEED, Case, fixed, vocabulary_of
from .control_plane import processes
from .drive import closed_case
from .engine import Engine, EngineOptions, chosen_cases
from .grpc_door import GrpcDoor
from .schedule import slots_for
from .serve import complain


def threads(pid: int) -> Iterator[tuple[int, float]]:
    """Each thread of a process, and the seconds that it has run."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):
            yield int(thread), int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def seconds_run(run_dir: Path) -> dict[tuple[str, int], float]:
    """(role, thread) -> seconds that it has run."""
    roles = [*processes(run_dir), ("client", os.getpid())]
    return {(role, thread): seconds for role, pid in roles for thread, seconds in threads(pid)}


def cost(before: dict[tuple[str, int], float], after: dict[tuple[str, int], float], kernels: int) -> dict[str, float]:
    """Seconds by role between two readings. The rank's `kernels` busiest threads are those that compute."""
    ran = {who: seconds - before.get(who, 0.0) for who, seconds in after.items()}
    computing = sorted((who for who in ran if who[0] == "rank"), key=lambda who: ran[who])[-kernels:]
    found: dict[str, float] = {}
    for who, seconds in ran.items():
        role = "kernels" if who in computing else who[0]
        found[role] = found.get(role, 0.0) + seconds
    return found


def between(run_dir: Path, rounds: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Medians in ms: of an iteration's computation, and of the time from its end to the begin of the next one's.

    rounds: when each began and ended, in ns of the wall clock. To be asked when the journals are closed.
    """
    every = [iteration.times[0, 0] for life in read_run(run_dir).lives for iteration in life.iterations]
    computing, waiting = [], []
    for began, ended in rounds:
        for one, following in pairwise(times for times in every if began < times.started < ended):
            computing.append((one.computed - one.started) / 1e6)
            waiting.append((following.started - one.computed) / 1e6)
    return statistics.median(computing), statistics.median(waiting)


async def rounds(
    engine: Engine, stack: Stack, run_dir: Path, name: str, case: Case, number: int, interval: int
) -> list[tuple[int, int]]:
    """Runs the case on both in turn, and prints each round and the medians. Returns when the stack's rounds were."""
    when: list[tuple[int, int]] = []
    alone: list[float] = []
    whole: list[float] = []
    iterations = max(one.output for one in case)
    async with GrpcDoor(stack.grpc_addresses[0], interval=interval) as door:
        warm_up = fixed(32, 32, 8, seed=WARM_UP_SEED, vocabulary=vocabulary_of(engine.checkpoint.vocab_size))
        engine.run(warm_up)
        complain(await closed_case(door, warm_up))
        for _ in range(number):
            alone.append(engine.run(case).seconds)
            before, start, began = seconds_run(run_dir), time.perf_counter(), time.time_ns()
            answers = await closed_case(door, case)
            whole.append(time.perf_counter() - start)
            when.append((began, time.time_ns()))
            complain(answers)
            found = cost(before, seconds_run(run_dir), engine.options.compute.threads)
            roles = ", ".join(f"{role} {seconds / iterations * 1e3:.2f}" for role, seconds in sorted(found.items()))
            print(
                f"{name}: engine {alone[-1]:.3f} s, stack {whole[-1]:.3f} s; ms of CPU an iteration: {roles}",
                flush=True,
            )
    share = statistics.median(alone) / statistics.median(whole)
    medians = f"engine {statistics.median(alone):.3f} s, stack {statistics.median(whole):.3f} s"
    print(f"{name}: medians of {number} rounds: {medians}, {share:.1%} of the engine's throughput", flush=True)
    return when


async def bench(model: str | None, names: Sequence[str], number: int, run_ahead: int, interval: int) -> None:
    """Raises FailedPrecondition when the model cannot be served."""
    options = EngineOptions(model=model)
    checkpoint, cases = chosen_cases(options, None, names)
    warm_up = fixed(32, 32, 8, seed=WARM_UP_SEED, vocabulary=vocabulary_of(checkpoint.vocab_size))
    engine = Engine(options, checkpoint, max(slots_for(case, 32) for case in (warm_up, *cases.values())))
    settings = ServeSettings.load(
        model=model, policy="paper", max_batch_size=32, run_ahead=run_ahead, port=0, http_port=0
    )
    when: dict[str, list[tuple[int, int]]] = {}
    with tempfile.TemporaryDirectory(prefix="orca-stack-") as folder:
        stack = Stack(settings, Path(folder), lambda step: None)
        try:
            await stack.start()
            for name, case in cases.items():
                when[name] = await rounds(engine, stack, Path(folder), name, case, number, interval)
        finally:
            await stack.stop()
        for name, its in when.items():
            computing, waiting = between(Path(folder), its)
            print(f"{name}: medians in the stack: {computing:.2f} ms an iteration, {waiting:.2f} ms to the next one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name; the demo model if not given")
    parser.add_argument("--case", action="append", help="b32_32_32 if not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--run-ahead", type=int, default=0, choices=(0, 1))
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens of a message of each stream")
    given = parser.parse_args()
    uvloop.run(bench(given.model, given.case or ["b32_32_32"], given.rounds, given.run_ahead, given.stream_interval))


if __name__ == "__main__":
    main()
