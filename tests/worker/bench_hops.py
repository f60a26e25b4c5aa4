"""Measures the control plane and the data plane of a pipeline apart: hops, bytes, and what each stage waits for.

    python tests/worker/bench_hops.py [STAGES] [SECONDS A STAGE]

Real ranks run the model that only waits. A master of a few lines keeps as many batches in flight as there are stages.
"""

import asyncio
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

from checkpoints import make_timed
from worker.driver import Sampled
from worker.engines import Master, processes

from orca.v1 import worker_pb2 as pb

FILL, LENGTH = 20, 60  # iterations until the pipeline has filled; tokens of each request


def show(what: str, nanoseconds: Iterable[int]) -> None:
    values = sorted(value / 1e6 for value in nanoseconds)
    p99 = values[int(0.99 * len(values))]
    print(f"{what:44} p50 {statistics.median(values):7.2f} ms   p99 {p99:7.2f} ms")


async def measure(folder: Path, stages: int) -> None:
    async with processes([folder] * stages, 8192) as ranks:
        master = Master([rank.address for rank in ranks], 1, stages, 8192)
        await master.form()
        flight = [await master.issue([Sampled([i, 2, 3], LENGTH) for i in range(2)], []) for _ in range(stages)]
        for _ in range((LENGTH - 1) * stages):
            batch = flight.pop(0)
            await master.collect(batch)
            flight.append(await master.issue([], batch.requests))
        for batch in flight:
            await master.collect(batch)
        while len(master.times) < stages * master.number:
            await asyncio.sleep(0.01)
        await master.close()

    def times(stage: int, number: int) -> pb.StageTimes:
        return master.times[stage, number]

    numbers = range(FILL, master.number - stages)
    for k in range(stages - 1):
        arrived = [times(k + 1, n).started - max(times(k, n).sent, times(k + 1, n).taken) for n in numbers]
        show(f"control, stage {k} to {k + 1}", (times(k + 1, n).received - times(k, n).received for n in numbers))
        show(f"data, stage {k} to {k + 1}, while it is waited for", arrived)
    last = stages - 1
    back = (times(0, n + stages).received - times(last, n).sent for n in numbers)
    show("tokens to the master, next iteration from it", back)
    for k in range(stages):
        span = times(k, numbers[-1]).sent - times(k, numbers[0]).started
        busy = sum(times(k, n).sent - times(k, n).started for n in numbers) / span
        upstream = sum(times(k, n).started - times(k, n).taken for n in numbers) / span
        one = times(k, numbers[0])
        print(
            f"stage {k}: busy {busy:.1%}, waiting for upstream {upstream:.1%}, for the scheduler "
            f"{1 - busy - upstream:.1%}; bytes an iteration: control {one.control_bytes}, data {one.data_bytes}"
        )


def main() -> None:
    stages = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 0.02
    with TemporaryDirectory() as folder:
        asyncio.run(measure(make_timed(Path(folder), seconds=seconds), stages))


if __name__ == "__main__":
    main()
