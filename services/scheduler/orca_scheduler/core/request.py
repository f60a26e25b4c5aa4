"""A request as the scheduler core sees it: numbers only, no text, and of its tokens only the last.

Where blocks are kept by keys, it has those: the master makes them of the tokens."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """The paper's phases of a request, for people to read. A request in a batch in flight is also RUNNING."""

    INITIATION = "initiation"  # keys and values of its input tokens are to be computed
    INCREMENT = "increment"  # those of its last token are

    @classmethod
    def of(cls, start: int, count: int) -> "Phase":
        """The phase of an iteration over `count` tokens, from position `start` on."""
        return cls.INCREMENT if start and count == 1 else cls.INITIATION


class Reason(StrEnum):
    """Why the core ended a request: names of `orca_pool.records.Reason`, which has their numbers."""

    LENGTH = "LENGTH"
    EOS = "EOS"
    STOP_TOKEN = "STOP_TOKEN"
    DEADLINE = "DEADLINE"
    NOT_FINITE = "NOT_FINITE"
    STUCK = "STUCK"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it was claimed from the pool."""

    claim: int  # its claim number: the core's name for it
    arrival: int  # its sort key in the pool's queue, kept over recoveries: by arrival, class or share
    input_tokens: int  # of the prompt
    max_new_tokens: int
    generated: int = 0  # tokens committed under earlier claims: the initiation computes them again
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    deadline: float | None = None  # on the clock of the events' `now`
    # Where the policy shares blocks (orca_common.block_keys): a root, and the keys of its full blocks of input tokens.
    prefix: tuple[str, ...] = ()
    priority: int = 3  # its class, one of orca_common.priorities, or FAIR of these
    forced_end: bool = False  # its last token ends it by LENGTH, whichever it is: the model did not choose it
    elsewhere: int = 0  # positions whose keys and values another engine has

    @property
    def max_tokens(self) -> int:
        return self.input_tokens + self.max_new_tokens


@dataclass(slots=True, eq=False)
class Request:
    """An arrival, and what has become of it on this engine.

    Its first `known` tokens are there, or will be when its batches return; the keys and values of the first `computed`
    are there, or in flight. An iteration runs over some positions from `computed` on, and makes a token where it
    reaches `known`.
    """

    arrived: Arrival
    in_order: bool  # iteration-level FCFS holds for it: it came after all that were seen here before, and never waited
    generated: int  # tokens that have returned
    known: int  # tokens of its prompt, and generated ones, those included that are being made
    computed: int = 0
    in_flight: int = 0  # batches in flight that it is in: one, or with a run-ahead two
    row: int | None = None  # given with its first slots
    holds: int = 0  # slots in its row's blocks, as far as is known: a row that grows asks its memory beyond them
    last_token: int | None = None  # that has returned since it was given its row
    iterations: int = 0  # how many it was scheduled in
    ended: bool = False  # it ended while RUNNING: its slots stay until its batches have returned
    initiated: bool = False  # the last part of its initiation was scheduled: what follows are increments
    preemptions: int = 0  # how often it gave up its row
    offered: int = 0  # for how many tokens behind its newest one there are drafts (`drafting.py`)
    depth: int = 4  # how many of them an iteration verifies
    # As `arrived.prefix`, and of full blocks of tokens that have returned.
    keys: list[str] = field(default_factory=list[str])
    filled: int = 0  # of these blocks, how many its row has with keys and values
    undrafted: int = 0  # it gets no drafts until it has generated this number of tokens
    void: int = 0  # batches in flight, the next ones to return, that went on from a token that was not made
    elsewhere: int = 0  # positions whose keys and values are to be pulled; 0: none, or they are there

    @classmethod
    def of(cls, arrived: Arrival, in_order: bool) -> "Request":
        """A request that has just arrived."""
        known = arrived.input_tokens + arrived.generated
        keys = list(arrived.prefix)
        return cls(arrived, in_order, arrived.generated, known, keys=keys, elsewhere=arrived.elsewhere)

    @property
    def claim(self) -> int:
        return self.arrived.claim

    @property
    def running(self) -> bool:
        return self.in_flight > 0

    @property
    def remaining(self) -> int:
        """Positions to compute before it makes its next token."""
        return self.known - self.computed

    @property
    def goes_on(self) -> bool:
        """Whether there are iterations left to schedule, as far as is known before its batches return."""
        return not self.ended and self.known < self.arrived.max_tokens

    def begin(self, row: int, slots: int) -> None:
        """It gets a row, with the first of its slots."""
        self.row, self.holds = row, slots

    def fall_back(self, tokens: int) -> None:
        """Takes back this number of tokens that its last iteration might have made: the drafts for them were wrong."""
        self.known -= tokens
        self.computed -= tokens

    def wait(self) -> None:
        """The token that was being made is not there yet: the last position runs again.

        What a run-ahead makes of it meanwhile is void. Later requests may have run ahead of it.
        """
        self.in_order = False
        self.known = self.arrived.input_tokens + self.generated
        self.computed = self.known - 1
        self.void = self.in_flight

    def end_by(self, token: int) -> Reason | None:
        """Why the request ends with this token, its newest; None: it goes on."""
        arrived = self.arrived
        longest = self.generated >= arrived.max_new_tokens
        if longest and arrived.forced_end:
            return Reason.LENGTH
        if token in arrived.stop_token_ids:
            return Reason.STOP_TOKEN
        if token in arrived.eos_token_ids:
            return Reason.EOS
        return Reason.LENGTH if longest else None

    def overdue(self, now: float) -> bool:
        return self.arrived.deadline is not None and now >= self.arrived.deadline

    @classmethod
    def restored(cls, values: dict[str, Any]) -> "Request":
        """Makes a request of its fields by name, which may have gone through JSON."""
        fields, arrived = dict(values), dict[str, Any](values["arrived"])
        for name in ("eos_token_ids", "stop_token_ids", "prefix"):
            arrived[name] = tuple(arrived[name])
        fields["arrived"] = Arrival(**arrived)
        return cls(**fields)
