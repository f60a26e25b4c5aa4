"""Arguments and results of the pool's operations. Plain values: no Redis, no protobuf."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from orca_common.priorities import Priority
from orca_common.reservation import Reservation


class Reason(IntEnum):
    """Why a request ended.

    The first five have the numbers of orca.v1.FinishReason. The others end the stream with an error.
    """

    LENGTH = 1
    EOS = 2
    STOP_TOKEN = 3
    STOP = 4
    CANCELLED = 5
    DEADLINE = 6
    DETACHED = 7  # the client left, and the detach grace is over
    INTERNAL = 8  # three losses of an engine hit it: no request takes engines down for ever
    NEVER_FITS = 9  # larger than every engine
    ABORTED = 10  # the end of a call only, not of a request: a newer call took over
    NOT_FINITE = 11  # the model's logits were NaN or infinite
    MODEL_CHANGED = 12  # no engine has the weights any more that made its tokens
    STUCK = 13  # no token can follow by the form of the answer, or the engine does not know a sampling parameter


class CommittedToken(NamedTuple):
    """A committed token. `wire.TOKEN` is its form in the pool."""

    token_id: int
    logprob: float  # NaN when the request did not ask for it
    iteration: int


@dataclass(frozen=True, slots=True)
class Times:
    """The moments of a request, as Redis's TIME in microseconds. 0: not yet."""

    submitted: int
    claimed: int
    first_token: int
    finished: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a request."""

    reason: Reason
    output_tokens: int
    times: Times
    cached_tokens: int = 0  # of its prompt: it began behind their keys and values


@dataclass(frozen=True, slots=True)
class Attached:
    """The answer of submit and attach: the call is attached, and this was committed so far."""

    record: bytes  # the PoolRequest as submitted; empty for a call that has tokens already
    position: int  # in the queue, from 1; 0 when the request is claimed or has ended
    tokens: list[CommittedToken]  # from index `first` on
    engines: list[tuple[int, str]]  # (index of the first token that the engine made, engine), in order
    finish: Finish | None
    first: int = 0  # tokens that the call has, and that the pool has too
    starts_in: float | None = None  # seconds until a waiting request begins, as predicted; None: nobody knows
    tops: bytes = b""  # as in Packet, of `tokens`
    prompt: bytes = b""  # the logprobs of the prompt, where asked for; empty before token 0, and for a call that has it
    weights: str = ""  # fingerprint of those that made its tokens; "" while it has none
    new: bool = False  # this submit has put the request into the queue


class Standing(NamedTuple):
    """A request's standing in the pool."""

    state: str  # waiting, claimed or ended
    position: int  # in the queue, from 1; 0: it is in none
    slots: int  # that must be free for it to begin
    order: int  # its sort key in the queue
    engine: str  # that has claimed it; "" for none
    tokens: int  # committed
    losses: int  # of its engine in a row, without a token in between
    reason: Reason | None  # of its end
    times: Times
    now: int  # Redis's TIME in microseconds
    prefix_at: str = ""  # the engine that had its prefix as it was submitted; "" for none
    overtaken: int = 0  # how many were taken before it as it waited for that engine


class QueueLimits(NamedTuple):
    """The queue's limits beside the number of requests. None: no limit."""

    bytes: int | None  # of all records that wait
    tenant_requests: int | None  # of one tenant, waiting or running
    tenant_tokens: int | None  # slots that the waiting requests of one tenant need


NO_LIMITS = QueueLimits(None, None, None)


class Turn(NamedTuple):
    """A request's place in the queue as it comes."""

    lift: int = 0  # microseconds that are added to its arrival: those of its class (orca_common.priorities)
    weight: float | None = None  # of its tenant, above 0; with it tenants have fair shares, whatever arrived first
    priority: int = Priority.NORMAL  # its class; FAIR where shares are fair


BY_ARRIVAL = Turn()


class Refusal(IntEnum):
    """Why submit or attach changed nothing."""

    UNREGISTERED = 1  # the endpoint's incarnation is not registered: register a new one and attach again
    STALE = 2  # a newer attempt is attached, or this attempt has detached
    UNKNOWN = 3  # there is no such request
    OTHER_BODY = 4  # the request id is known with another body
    FULL = 5  # the queue is full
    NEVER_FITS = 6  # larger than every engine
    NO_ENGINE = 7  # no engine has formed yet, so nobody knows what fits
    TENANT_FULL = 8  # the tenant has as many requests, or queued tokens, as it may
    LATE = 9  # the request would wait so long that it could not end before its deadline
    MEMORY = 10  # Redis has no memory left (`maxmemory`)
    FEWER_TOKENS = 11  # the pool has fewer tokens than the client saw; they may be made again
    OTHER_TOKENS = 12  # the pool has other tokens than the client saw
    SHARE_FULL = 13  # the tenant has as much in the queue as is free in it for all
    NO_ADAPTER = 14  # the adapter was unloaded, and no request has it any more; or no engine has it, and each says so


class Busy(NamedTuple):
    """A submit was refused because of what waits already."""

    why: Refusal  # FULL, TENANT_FULL, SHARE_FULL or LATE
    wait: float | None  # seconds until the request would begin if it were in the queue; None: nobody knows
    # Seconds until what it lacks is due: a place in the queue, one of its tenant's, or a queue that is short enough.
    due: float | None = None
    limit: int | None = None  # of the tenant
    things: str = ""  # that the limit counts


class Packet(NamedTuple):
    """New tokens of a request, its end, or both, for one call. `finish.reason` ABORTED: a newer call took over.

    A tuple, because one is made for each request of every iteration (0.3 us instead of 0.8).
    """

    request_id: str
    attempt: int
    first: int  # index of tokens[0]
    engine: str  # that made the tokens
    tokens: list[CommittedToken]
    finish: Finish | None
    tops: bytes = b""  # the most probable tokens at each token's place (orca_common.scores), where asked for


@dataclass(frozen=True, slots=True)
class Delivery:
    """One entry of a delivery stream. `number` grows by one from entry to entry; a gap means that entries were lost."""

    cursor: bytes  # where the next read goes on; it holds the number
    number: int
    packets: list[Packet]


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine's lease as candidates see it."""

    owner: str | None  # None: the engine is free
    term: int
    counter: int  # grows with every renewal


@dataclass(frozen=True, slots=True)
class Claimed:
    """A request that an engine has claimed."""

    request_id: str
    claim: int
    order: int  # its sort key in the queue
    priority: int  # its class, or FAIR
    record: bytes
    tokens: list[CommittedToken]  # committed before the claim
    losses: int  # of its engine in a row, without a token in between
    deadline_in: float | None  # seconds from now until its deadline
    submitted: int  # Redis's TIME in microseconds, as the next two
    queued_at: int  # when it came into the queue last
    taken_at: int  # when the engine claimed it
    weights: str = ""  # fingerprint of those that are to make its tokens; behind a slash the id of its adapter
    prefix_at: str = ""  # the engine that had its prefix as it was submitted; "" for none
    overtaken: int = 0  # how many were taken before it as it waited for that engine
    handed: bytes = b""  # where its keys and values are, as in CommitRow; empty: they are to be computed


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """The answer of claim and holding."""

    requests: list[Claimed]
    last_claim: int
    needs: int  # slots that the first request of the queue needs, which did not fit; 0: nothing waits for this engine


@dataclass(frozen=True, slots=True)
class Renewed:
    """The answer of renew: what the pool knows of the engine."""

    claims: dict[str, int] | None  # request id -> claim number; None: as in the version that the master knows
    version: str  # of the claims
    needs: int  # slots that the first request of the queue needs; 0: none waits
    epoch: int
    reserved: int  # iteration numbers up to this one are reserved
    last_claim: int
    adapters: int = 0  # the version of their table


class PoolAdapter(NamedTuple):
    """An adapter that is served beside the model, or was: requests go on with it."""

    id: str  # its name with a number that was never given before
    name: str
    folder: str
    state: str  # pending: no engine has it yet; current: requests of its name begin with it; retired
    source: str  # setting, or load: an operator's call
    fingerprint: str = ""  # of its files, as the first engine has read them


class Adapters(NamedTuple):
    """The table of adapters."""

    version: int  # 0: there was never one
    entries: dict[str, PoolAdapter]  # by id
    # For each engine that has formed, about the adapter that was asked for: '+' and the fingerprint of its files, '-'
    # and why the engine does not have it, or ''.
    engines: dict[str, str]


def adapter_name(adapter: str) -> str:
    """The name in an adapter's id."""
    return adapter.rpartition("@")[0] or adapter


class Look(NamedTuple):
    """The answer of a scheduler's renewal: all engines' leases, and what there is of the rest."""

    leases: dict[str, EngineState]
    schedulers: int  # that live
    waiting: int  # requests in the queue
    oldest: float  # seconds since the first of them was submitted; 0: the queue is empty


class EngineLoad(NamedTuple):
    """An engine's load, for predictions of when a request of the queue begins and ends."""

    rows: int  # requests that it can run at a time; 0: none now
    free: int  # slots that nothing has reserved
    pace: float  # seconds from one token of a request to its next; 0: not known yet
    room_in: float  # seconds until a request that runs makes room, if it makes all its tokens
    finishing: bool = False  # it begins nothing: it goes on with what has tokens of its weights
    yields: int = 0  # the lowest class of requests that may give way to new ones; 0: of no request


class EngineUse(NamedTuple):
    """The load of an engine that has formed, as its master told last: what it holds, and what it has room for."""

    requests: int  # that it has claimed
    rows: int  # requests that it can run at a time; 0: it begins none now
    free: int  # slots that nothing has reserved; 0 where it begins none
    slots: int


NO_LOAD = EngineLoad(0, 0, 0.0, 0.0)
FINISHING_LOAD = NO_LOAD._replace(finishing=True)


class CommitRow(NamedTuple):
    """New tokens of one request, its end, or both. `tokens` are in the pool's form (`wire.TOKEN`).

    `tops` and `prompt` in that of orca_common.scores: the most probable tokens at the places of `tokens`, and with
    token 0 the prompt's logprobs, where the request asks for them. A tuple, as Packet is, and for the same reason.
    """

    request_id: str
    claim: int
    base: int  # index of the first token, so the count that the pool must have
    tokens: bytes
    finish: Reason | None
    tops: bytes = b""
    prompt: bytes = b""
    cached: int = 0  # tokens of the prompt that were not computed, as the pool keeps it with token 0
    handed: bytes = b""  # Handed of worker.proto: an engine that decodes goes on with it, and finds its blocks there


class CommitAnswer(NamedTuple):
    """The answer of commit."""

    rows: list[int]  # for each row Committed.OK, Committed.GONE or the pool's count
    needs: int  # slots that the first request of the queue needs, when the engine would not hear of it otherwise
    ended_at: int = 0  # Redis's TIME in microseconds, at which this commit ended requests; 0: it ended none


class Committed(IntEnum):
    """The answer of commit for a row.

    A number from 0 on is a count instead: the pool has that many tokens, and the row must be sent again from there.
    """

    OK = -1
    GONE = -2  # the request ended or was claimed by another engine: free it


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model that all services of a release agree on."""

    digest: str
    max_positions: int
    vocab_size: int
    slots: int  # of the largest engine that ever formed; 0: none has formed yet
    reservation: Reservation | None = None  # of the engine that formed last; None: none has formed yet
    prefix: str = "off"  # whose keys and values a request may begin with there, as of EngineInfo


ONE_BY_ONE = Reservation(1)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The sizes of an engine that has formed."""

    engine: str
    tensor_parallel: int
    pipeline_parallel: int
    slots: int
    epoch: int
    weights: str = ""  # fingerprint
    policy: str = ""  # by which its batches are chosen
    reservation: Reservation = ONE_BY_ONE  # of that policy; `Pool.engine_infos` does not tell it, nor the next
    prefix: str = "off"  # whose keys and values a request may begin with: off, tenant or shared
    role: str = ""  # prefill: it hands over what it has begun; decode: it goes on with that alone; "": it does both
