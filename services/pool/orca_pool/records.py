"""What the pool's operations take and answer. Plain values: no Redis, no protobuf."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Reason(IntEnum):
    """Why a request ended. The first five are orca.v1.FinishReason's numbers; the others end a stream with an error."""

    LENGTH = 1
    EOS = 2
    STOP_TOKEN = 3
    STOP = 4
    CANCELLED = 5
    DEADLINE = 6
    DETACHED = 7  # its client left, and the detach grace is over
    INTERNAL = 8  # its engine was lost with it three times
    NEVER_FITS = 9  # larger than every engine
    ABORTED = 10  # never a request's end: a packet that tells an older call that a newer one took over


class CommittedToken(NamedTuple):
    """A committed token: 16 bytes in `tokens:ID`, little-endian u32, f32, u64."""

    token_id: int
    logprob: float  # NaN when it was not asked for
    iteration: int


@dataclass(frozen=True, slots=True)
class Times:
    """Redis's TIME in microseconds; 0: not yet."""

    submitted: int
    claimed: int
    first_token: int
    finished: int


@dataclass(frozen=True, slots=True)
class Finish:
    reason: Reason
    output_tokens: int
    times: Times


@dataclass(frozen=True, slots=True)
class Attached:
    """Answer of submit and attach: the call is attached, and this is all that was committed so far."""

    record: bytes  # the PoolRequest as submitted
    position: int  # in the queue; 0 when claimed or ended
    tokens: list[CommittedToken]
    engines: list[tuple[int, str]]  # (index of the first token made there, engine), ascending
    finish: Finish | None


class Refusal(IntEnum):
    """Why submit or attach changed nothing."""

    UNREGISTERED = 1  # the endpoint's incarnation is not registered: take a new one, attach again
    STALE = 2  # a newer attempt is attached, or this one has detached
    UNKNOWN = 3  # no such request
    OTHER_BODY = 4  # the id is known with another body
    FULL = 5  # the queue is full
    NEVER_FITS = 6  # larger than every engine
    NO_ENGINE = 7  # no engine has formed yet: nobody knows what fits


@dataclass(frozen=True, slots=True)
class Packet:
    """News of one request for one call. `finish.reason` ABORTED: a newer call took over."""

    request_id: str
    attempt: int
    first: int  # index of tokens[0]
    engine: str
    tokens: list[CommittedToken]
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class Delivery:
    """One entry of a delivery stream. `number` grows by one per entry; a hole means that entries were lost."""

    cursor: bytes  # to read on from
    number: int
    packets: list[Packet]


@dataclass(frozen=True, slots=True)
class EngineState:
    """What candidates see of an engine's lease."""

    owner: str | None  # None: free
    term: int
    counter: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """A request in an engine's hands."""

    request_id: str
    claim: int
    arrival: int
    record: bytes
    tokens: list[CommittedToken]  # committed before
    losses: int
    deadline_in: float | None  # seconds from now until its deadline
    submitted: int  # Redis's TIME in microseconds


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    requests: list[Claimed]
    last_claim: int
    waiting: int  # requests that were left in the queue


@dataclass(frozen=True, slots=True)
class Renewed:
    """Answer of renew: what the engine holds by the pool's books."""

    claims: dict[str, int]  # request id -> claim number
    epoch: int
    reserved: int  # iteration numbers up to this one are reserved
    last_claim: int


@dataclass(frozen=True, slots=True)
class CommitRow:
    """Tokens of one request, and perhaps its end. `tokens` is their 16-byte form, concatenated."""

    request_id: str
    claim: int
    base: int  # index of the first token
    tokens: bytes
    finish: Reason | None


class Committed(IntEnum):
    """Answer of commit for a row, where it is not a count (the pool has that many tokens: send again from there)."""

    OK = -1
    GONE = -2  # ended, or claimed elsewhere: free it


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The `pool` hash: what all services of a release agree on."""

    digest: str
    max_positions: int
    vocab_size: int
    slots: int  # of the largest engine that ever formed; 0: none has


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What GetModel tells of an engine."""

    engine: str
    tensor_parallel: int
    pipeline_parallel: int
    slots: int
    epoch: int
