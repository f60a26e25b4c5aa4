"""The cost of the scheduler's core in an iteration: a batch returns, its tokens are applied, the next one is selected.

    python -m orca_bench.core [BATCHxSTAGES ..]

Each stage has a batch in flight, so the pool has BATCH times STAGES requests, all of them with work to do. The cost
follows the batch and what changed, not the pool: 64x8 and 512x1 have as many requests.

The journal's cost is printed beside it: one step and the times of one rank, into memory and into a file, or into memory
alone, as without a run folder. It follows once the next batch is on its way.
"""

import argparse
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from orca_scheduler.core.core import Action, Arrived, BatchReturned, Core, EngineReady, ScheduleBatch
from orca_scheduler.core.request import Arrival
from orca_scheduler.lifecycle.lifecycle import Lifecycle
from orca_scheduler.lifecycle.places import Shape
from orca_scheduler.master.journal import Journal, path_of
from orca_scheduler.master.recent import Recent

PROMPT, OUTPUT = 10, 1000  # tokens of a request
CASES = ["64x1", "64x8", "512x1", "512x8"]
TIMES = [0, 0, *[1_700_000_000_000_000_000] * 5, 120, 200, 3]  # of a rank
MEMORY = 32 << 20  # bytes


class Engine:
    """A core whose stages all have a batch in flight."""

    def __init__(self, batch: int, stages: int) -> None:
        self.core, requests = Core(batch, stages, 1), batch * stages
        self.core.step(EngineReady(0.0, requests * (PROMPT + OUTPUT), 1))
        arrivals = tuple(Arrival(claim, claim, PROMPT, OUTPUT) for claim in range(1, requests + 1))
        self._flying = deque(a for a in self.core.step(Arrived(0.0, arrivals)) if isinstance(a, ScheduleBatch))
        for _ in range(2 * stages):  # the initiations
            self.turn()

    def turn(self) -> tuple[BatchReturned, Sequence[Action]]:
        """Returns the oldest batch. The event, and what followed."""
        back = self._flying.popleft()
        event = BatchReturned(0.0, back.iteration, ((5,),) * len(back.members))
        actions = self.core.step(event)
        self._flying.extend(a for a in actions if isinstance(a, ScheduleBatch))
        return event, actions


def milliseconds(batch: int, stages: int, iterations: int) -> float:
    """CPU time of one `BatchReturned` with all its actions."""
    engine = Engine(batch, stages)
    began = time.process_time()
    for _ in range(iterations):
        engine.turn()
    return (time.process_time() - began) / iterations * 1e3


def journal_microseconds(batch: int, stages: int, iterations: int, folder: Path | None) -> float:
    """CPU time of the journal for one iteration. folder: for its file; None: it has memory alone."""
    engine = Engine(batch, stages)
    steps = [engine.turn() for _ in range(iterations)]
    path = None if folder is None else path_of(folder, "engine-0", 1)
    life = Lifecycle("engine-0", Shape(1, stages, 1, 1), None)
    journal = Journal(path, engine.core, life, recent=Recent(MEMORY).of("engine-0"))
    began = time.process_time()
    for event, actions in steps:
        journal.core_step(event, actions)
        journal.note(iteration=event.iteration, times=[TIMES])
    seconds = time.process_time() - began
    journal.close()
    return seconds / iterations * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="BATCHxSTAGES")
    for case in parser.parse_args().cases:
        batch, stages = (int(number) for number in case.split("x"))
        best = min(milliseconds(batch, stages, 60) for _ in range(5))
        print(f"{batch} x {stages}: {best:.2f} ms an iteration, {best / batch * 1e3:.2f} us a request of the batch")
        with tempfile.TemporaryDirectory() as folder:
            file, memory = (
                min(journal_microseconds(batch, stages, 60, where) for _ in range(5)) for where in (Path(folder), None)
            )
        print(f"  the journal: {file:.1f} us an iteration, {memory:.1f} us without a file")


if __name__ == "__main__":
    main()
