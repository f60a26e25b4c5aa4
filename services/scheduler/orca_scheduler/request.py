"""A request as the scheduler core sees it: numbers only, no text, and of its tokens only the last."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class Phase(StrEnum):
    """The paper's phases: what a request's next iteration will be. A request in a batch in flight is also RUNNING."""

    INITIATION = "initiation"  # its next iteration runs over all its input tokens
    INCREMENT = "increment"  # its next iteration runs over one token


# For what is done for each row: Python 3.11 takes 0.1 us to look up a member of an Enum.
INITIATION, INCREMENT = Phase


class Reason(StrEnum):
    """Why the core ended a request: names of `orca_pool.records.Reason`, which has their numbers."""

    LENGTH = "LENGTH"
    EOS = "EOS"
    STOP_TOKEN = "STOP_TOKEN"
    DEADLINE = "DEADLINE"
    NOT_FINITE = "NOT_FINITE"


class Arrival(NamedTuple):
    """A request as it was claimed from the pool."""

    claim: int  # its claim number: the core's name for it
    arrival: int  # its place in the queue, kept over recoveries
    input_tokens: int  # of the prompt
    max_new_tokens: int
    generated: int = 0  # tokens committed before (a recovery): they join the input of the initiation
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    deadline: float | None = None  # on the clock of the events' `now`

    @property
    def max_tokens(self) -> int:
        return self.input_tokens + self.max_new_tokens

    @classmethod
    def of(cls, values: Sequence[Any]) -> "Arrival":
        """From its fields, which may have gone through JSON."""
        claim, arrival, input_tokens, max_new_tokens, generated, eos, stop, deadline = values
        return cls(claim, arrival, input_tokens, max_new_tokens, generated, tuple(eos), tuple(stop), deadline)


@dataclass(slots=True, eq=False)
class Request:
    """An arrival, and what has become of it on this engine."""

    arrived: Arrival
    in_order: bool  # it arrived after all that were seen here before: iteration-level FCFS holds for it
    generated: int  # tokens that have returned
    in_flight: int = 0  # batches in flight that it is in: one, or with a run-ahead two
    row: int | None = None  # given with its slots at its first iteration
    blocks: tuple[int, ...] = field(default=())
    last_token: int | None = None
    iterations: int = 0  # how many it was scheduled in
    ended: bool = False  # it ended while RUNNING: its slots stay until its batches have returned

    @property
    def claim(self) -> int:
        return self.arrived.claim

    @property
    def phase(self) -> Phase:
        return INITIATION if self.row is None else INCREMENT

    @property
    def running(self) -> bool:
        return self.in_flight > 0

    @property
    def length(self) -> int:
        """Prompt and generated tokens, including those that are being made."""
        return self.arrived.input_tokens + self.generated + self.in_flight

    @property
    def goes_on(self) -> bool:
        """Whether there are iterations left to schedule, as far as is known before its batches return."""
        return not self.ended and self.generated + self.in_flight < self.arrived.max_new_tokens

    def end_by(self, token: int) -> Reason | None:
        """Why the request ends with this token, its newest; None: it goes on."""
        if token in self.arrived.stop_token_ids:
            return Reason.STOP_TOKEN
        if token in self.arrived.eos_token_ids:
            return Reason.EOS
        return Reason.LENGTH if self.generated >= self.arrived.max_new_tokens else None

    def overdue(self, now: float) -> bool:
        return self.arrived.deadline is not None and now >= self.arrived.deadline

    @classmethod
    def restored(cls, values: Sequence[Any]) -> "Request":
        """From its fields, which may have gone through JSON."""
        arrived, in_order, generated, in_flight, row, blocks, *rest = values
        return cls(Arrival.of(arrived), in_order, generated, in_flight, row, tuple(blocks), *rest)
