"""What the scheduler's core costs an iteration: a batch returns, its tokens are applied, the next batch is selected.

    python -m orca_bench.core [BATCHxSTAGES ..]

Each stage has a batch in flight, so the pool has BATCH times STAGES requests, all of them with work to do. The cost
follows the batch and what changed, not the pool: 64x8 and 512x1 have as many requests.
"""

import argparse
import time
from collections import deque

from orca_scheduler.core.core import Arrived, BatchReturned, Core, EngineReady, ScheduleBatch
from orca_scheduler.core.request import Arrival

PROMPT, OUTPUT = 10, 1000  # tokens of a request
CASES = ["64x1", "64x8", "512x1", "512x8"]


def milliseconds(batch: int, stages: int, iterations: int) -> float:
    """CPU time of one `BatchReturned` with all its actions."""
    core, requests = Core(batch, stages, 1), batch * stages
    core.step(EngineReady(0.0, requests * (PROMPT + OUTPUT), 1))
    arrivals = tuple(Arrival(claim, claim, PROMPT, OUTPUT) for claim in range(1, requests + 1))
    flying = deque(a for a in core.step(Arrived(0.0, arrivals)) if isinstance(a, ScheduleBatch))

    def turn() -> None:
        back = flying.popleft()
        actions = core.step(BatchReturned(0.0, back.iteration, (5,) * len(back.members)))
        flying.extend(a for a in actions if isinstance(a, ScheduleBatch))

    for _ in range(2 * stages):  # the initiations
        turn()
    began = time.process_time()
    for _ in range(iterations):
        turn()
    return (time.process_time() - began) / iterations * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="BATCHxSTAGES")
    for case in parser.parse_args().cases:
        batch, stages = (int(number) for number in case.split("x"))
        best = min(milliseconds(batch, stages, 60) for _ in range(5))
        print(f"{batch} x {stages}: {best:.2f} ms an iteration, {best / batch * 1e3:.2f} us a request of the batch")


if __name__ == "__main__":
    main()
