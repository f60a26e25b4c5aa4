"""Algorithm 1 over a case: which requests run in which iteration, when all of them are there at the start."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orca_common.errors import FailedPrecondition
from orca_scheduler.core.core import Action, Arrived, BatchReturned, Commit, Core, EngineReady, ScheduleBatch
from orca_scheduler.core.request import Arrival, Phase

from .cases import Case

BLOCK_SIZE = 16


def slots_for(case: Case, max_batch_size: int) -> int:
    """Slots with which a case never waits for memory: those of its largest requests, as many as a batch holds."""
    blocks = sorted((-(-one.tokens // BLOCK_SIZE) for one in case), reverse=True)
    return BLOCK_SIZE * sum(blocks[:max_batch_size])


@dataclass(frozen=True)
class Shape:
    """The shape of one iteration."""

    initiations: tuple[int, ...]  # the input tokens of each request that begins
    contexts: tuple[int, ...]  # of each other request: tokens before the one that it runs

    @property
    def requests(self) -> int:
        return len(self.initiations) + len(self.contexts)

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """For each request, tokens before this iteration and tokens in it."""
        return [*((0, length) for length in self.initiations), *((context, 1) for context in self.contexts)]


def shape_of(batch: ScheduleBatch) -> Shape:
    return Shape(
        tuple(member.count for member in batch.members if member.phase is Phase.INITIATION),
        tuple(member.start for member in batch.members if member.phase is Phase.INCREMENT),
    )


class Schedule:
    """Drives a scheduler core through one case, batch by batch."""

    def __init__(self, case: Case, slots: int, max_batch_size: int, core: Core | None = None) -> None:
        """core: a fresh one with one batch in flight, instead of the paper's. Raises FailedPrecondition when a request
        never fits in `slots`."""
        self._core = core or Core(max_batch_size, 1, BLOCK_SIZE)
        self.tokens: dict[int, list[int]] = {claim: [] for claim in range(1, len(case) + 1)}  # of each request
        needed = slots_for(case, 1)
        if needed > slots:
            raise FailedPrecondition(f"slots: a request needs {needed}; there are {slots}")
        self._core.step(EngineReady(0.0, slots, 1))
        arrivals = [Arrival(claim, claim, len(one.prompt), one.output) for claim, one in enumerate(case, 1)]
        self.batch = self._take(self._core.step(Arrived(0.0, tuple(arrivals))))

    def returned(self, token_ids: Sequence[int]) -> None:
        """The batch came back with these tokens. `batch` is now the next one, or None when all requests have ended."""
        assert self.batch is not None
        self.batch = self._take(self._core.step(BatchReturned(0.0, self.batch.iteration, tuple(zip(token_ids)))))

    def _take(self, actions: Sequence[Action]) -> ScheduleBatch | None:
        batch = None
        for action in actions:
            match action:
                case ScheduleBatch():
                    batch = action
                case Commit():
                    for outcome in action.outcomes:
                        assert outcome.token is not None, f"request {outcome.claim} ended with {outcome.finish}"
                        self.tokens[outcome.claim].append(outcome.token)
                case _:
                    raise AssertionError(f"nothing of a bench asks for {action}")
        return batch


def shapes(case: Case, slots: int, max_batch_size: int) -> Iterator[Shape]:
    """The iterations of a case, without running any."""
    schedule = Schedule(case, slots, max_batch_size)
    while schedule.batch is not None:
        yield shape_of(schedule.batch)
        schedule.returned([0] * len(schedule.batch.members))
