"""The control plane and the data plane of a pipeline, measured apart: hops, bytes, and what each stage waits for.

    python -m orca_bench.hops [--stages 3] [--seconds 0.02] [--tokens 60]

The stack is that of `orca serve`, with a model that only waits. Two requests for each stage run at once, so that as
many batches are in flight as there are stages. All numbers come from the times in the engine master's journal.
"""

import argparse
import asyncio
import statistics
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from orca_bench.timed_model import make_timed_model
from orca_client import AsyncOrcaClient, Finished
from orca_lab.timeline import Life, percentile, planes, read_run, shares
from orca_local.settings import ServeSettings
from orca_local.stack import Stack

BATCH = 2


async def serve(folder: Path, stages: int, seconds: float, tokens: int) -> Life:
    """Runs the requests to their end. Returns what the journal says of the engine's life."""
    model, run_dir = make_timed_model(folder / "model", seconds), folder / "run"
    settings = ServeSettings.load(model=str(model), pp=stages, max_batch_size=BATCH, slots=1 << 16, port=0, http_port=0)
    stack = Stack(settings, run_dir, lambda step: None)
    try:
        await stack.start()
        async with AsyncOrcaClient(stack.grpc_addresses) as client:

            async def finish(prompt: list[int]) -> None:
                stream = client.generate(prompt, max_new_tokens=tokens, ignore_eos=True)
                assert [isinstance(event, Finished) async for event in stream][-1]

            await asyncio.gather(*(finish([n, 2, 3]) for n in range(BATCH * stages)))
    finally:
        await stack.stop()
    life = read_run(run_dir).last
    assert life is not None
    return life


def show(what: str, nanoseconds: Iterable[int]) -> None:
    values = [value / 1e6 for value in nanoseconds]
    print(f"{what:50} p50 {statistics.median(values):7.2f} ms   p99 {percentile(values, 0.99):7.2f} ms")


def report(life: Life) -> None:
    """Prints the hops in the order of an iteration's way, then each stage's shares of its time."""
    runs = [[iteration.times[stage, 0] for stage in range(life.pp)] for iteration in life.iterations]
    for k in range(life.pp - 1):
        show(f"control message, stage {k} to {k + 1}", (t[k + 1].received - t[k].received for t in runs))
        waits = (t[k + 1].started - max(t[k].sent, t[k + 1].taken) for t in runs)
        show(f"data, stage {k} to {k + 1}, while stage {k + 1} waits", waits)
    later = zip(runs, runs[life.n_workers :], strict=False)
    back = (after[0].received - before[-1].sent for before, after in later)
    show("tokens to the master, its next message to stage 0", back)
    found = planes(life)
    print(f"an iteration, all ranks: control {found.control_bytes:.0f} bytes, data {found.data_bytes:.0f} bytes")
    for stage, share in enumerate(shares(life)):
        print(
            f"stage {stage}: busy {share.busy:.1%}, waiting for upstream {share.upstream:.1%}, for the scheduler "
            f"{share.scheduler:.1%}, no work {share.no_work:.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.02, help="of an iteration on a stage")
    parser.add_argument("--tokens", type=int, default=60, help="of each request")
    given = parser.parse_args()
    with TemporaryDirectory(prefix="orca-hops-") as folder:
        report(asyncio.run(serve(Path(folder), given.stages, given.seconds, given.tokens)))


if __name__ == "__main__":
    main()
