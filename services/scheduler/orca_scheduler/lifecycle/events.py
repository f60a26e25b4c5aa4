"""The lifecycle's inputs (events) and decisions (actions).

`life` numbers the attempts of one term to form the engine and run it, from Dial to HangUp. Events
that come from ranks or answer an action carry their life's number; those of an earlier life change nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ..core.core import Drain, EngineLost, EngineReady, GiveBack
from .suspicions import Suspicion

# -- events


@dataclass(frozen=True, slots=True)
class Opened:
    """The pool's books of this engine were read: its epoch, and the requests that an earlier master left claimed."""

    now: float
    epoch: int
    claims: tuple[int, ...]
    taken_over: bool  # from a master that had not released it: nobody knows what was RUNNING


@dataclass(frozen=True, slots=True)
class CandidateChanged:
    """Discovery says which pods this engine has, as addresses of their supervisors, "" for one that has none.

    None: the engine is no longer wanted.
    """

    now: float
    pods: tuple[str, ...] | None
    absent: str = ""  # why pods have no address; "" when all have one
    replace: bool = False  # the pods are of an old revision, and it is this engine's turn to get new ones
    other_model: bool = False  # .. whose model is another one: the engine finishes what it began before
    ending: bool = False  # the engine is to be taken away soon: it finishes what it began


class Entry(NamedTuple):
    """A rank in the table of its pod's supervisor."""

    local_rank: int
    address: str
    pid: int  # 0: it is not running
    iteration: int  # the last one that its master has heard of


@dataclass(frozen=True, slots=True)
class PodSeen:
    """A supervisor has sent its table of ranks."""

    now: float
    life: int
    pod: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class PodAway:
    """A supervisor cannot be heard. It may come back."""

    now: float
    life: int
    pod: int
    why: str


@dataclass(frozen=True, slots=True)
class Listens:
    """A rank's process accepts connections."""

    now: float
    life: int
    rank: int
    address: str
    pid: int


class Formation(NamedTuple):
    """A rank's formation, in whatever epoch."""

    tp: int
    pp: int
    stage: int
    tensor_rank: int
    block_size: int
    return_tokens: bool  # tokens also go back to the first stage on the data plane: for a run-ahead
    hands_over: bool = False  # other engines' ranks pull keys and values from it


class Standing(NamedTuple):
    """A rank's standing as a member of an epoch. Epoch 0: it is a member of none."""

    epoch: int
    iteration: int  # the last one that it ran
    slots: int
    rows: tuple[int, ...]  # that it holds
    formation: Formation


class Model(NamedTuple):
    """The values on which all services of a release must agree. Engines may differ in their weights."""

    digest: str
    max_positions: int
    vocab_size: int
    can: tuple[str, ...] = ()  # of what a policy may need (orca_common.protocol)


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank has answered the greeting, and its control lane is open."""

    now: float
    life: int
    rank: int
    host: str
    pid: int
    standing: Standing
    model: Model
    protocol: int
    weights: str  # fingerprint; "" from a rank that tells none


@dataclass(frozen=True, slots=True)
class Refused:
    """A rank, or the pool (rank None), says that the engine cannot be formed. `why` follows the rank's name."""

    now: float
    life: int
    rank: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Identified:
    """The pool agrees to the ranks' model."""

    now: float
    life: int


@dataclass(frozen=True, slots=True)
class EpochGiven:
    """The pool has written down a new epoch."""

    now: float
    life: int
    epoch: int


@dataclass(frozen=True, slots=True)
class StoreHosted:
    """The first rank hosts the epoch's store."""

    now: float
    life: int
    epoch: int
    address: str


@dataclass(frozen=True, slots=True)
class RankFormed:
    """A rank has taken its place in the epoch; its memory holds this number of slots."""

    now: float
    life: int
    epoch: int
    rank: int
    slots: int


@dataclass(frozen=True, slots=True)
class RankAllocated:
    """A rank is a member of the epoch."""

    now: float
    life: int
    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """The pool knows that the engine has formed. Its iterations are numbered from `iteration` on."""

    now: float
    life: int
    iteration: int


@dataclass(frozen=True, slots=True)
class Suspected:
    """Something speaks against a rank. `iteration`: the last one that its master has heard of."""

    now: float
    life: int
    suspicion: Suspicion
    iteration: int


@dataclass(frozen=True, slots=True)
class AllAnswered:
    """Each rank has answered a heartbeat that was sent after the last complaint about a neighbour."""

    now: float
    life: int


@dataclass(frozen=True, slots=True)
class RankLeaving:
    """A rank was asked to end. It waits for its engine to come to rest."""

    now: float
    life: int
    rank: int
    iteration: int


@dataclass(frozen=True, slots=True)
class Rested:
    """The core drains, and nothing is in flight any more."""

    now: float
    life: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The engine begins nothing more, and nothing is left that it alone can go on with."""

    now: float
    life: int


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The pool says that the lease is still this term's."""

    now: float
    life: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """The pods of an old revision are being made anew, unless that could not be asked for."""

    now: float
    life: int
    why: str  # it could not; "" when it could


@dataclass(frozen=True, slots=True)
class Fenced:
    """The process of a lost rank has ended, or its supervisor could not be asked."""

    now: float
    life: int
    rank: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """The pool has given this engine requests."""

    now: float
    claims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gone:
    """These claims ended elsewhere. The core did not hold them."""

    now: float
    claims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Orphaned:
    """The pool counts these claims as this engine's, and this master has never held them."""

    now: float
    claims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolAway:
    """The pool does not answer. Until PoolBack, the time in which an engine is to finish stands still."""

    now: float


@dataclass(frozen=True, slots=True)
class PoolBack:
    """The pool answers again."""

    now: float


@dataclass(frozen=True, slots=True)
class Leave:
    """The scheduler is leaving."""

    now: float


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The lease is another's, or was released: nothing more may be done in this term."""

    now: float
    why: str


@dataclass(frozen=True, slots=True)
class Wake:
    """The moment has come that `Lifecycle.wake_at` named."""

    now: float


LifeEvent = (
    Opened
    | CandidateChanged
    | PodSeen
    | PodAway
    | Listens
    | Hello
    | Refused
    | Identified
    | EpochGiven
    | StoreHosted
    | RankFormed
    | RankAllocated
    | Recorded
    | Suspected
    | AllAnswered
    | RankLeaving
    | Rested
    | Finished
    | Confirmed
    | Fenced
    | Replaced
    | Claimed
    | Gone
    | Orphaned
    | PoolAway
    | PoolBack
    | Leave
    | LeaseLost
    | Wake
)

# -- actions. The core's own events among them are for the core: EngineReady, EngineLost, Drain.


@dataclass(frozen=True, slots=True)
class Dial:
    """Begin a life: watch these pods, find their ranks, say Hello to each and open its control lane."""

    life: int
    pods: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Identify:
    """Ask the pool whether it agrees to these models."""

    life: int
    models: tuple[Model, ...]


@dataclass(frozen=True, slots=True)
class NewEpoch:
    """Have the pool write down a new epoch, above every other and above this one."""

    life: int
    above: int


@dataclass(frozen=True, slots=True)
class HostStore:
    """Have the first rank host the store at which the epoch's ranks find each other."""

    life: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Form:
    """Have all ranks take their places. `store` is empty when the engine is one rank."""

    life: int
    epoch: int
    store: str


@dataclass(frozen=True, slots=True)
class Allocate:
    """Have all ranks allocate their K/V memory."""

    life: int
    epoch: int
    slots: int


@dataclass(frozen=True, slots=True)
class Record:
    """Tell the pool that the engine has formed, and reserve iteration numbers above every one that was used."""

    life: int
    epoch: int
    slots: int
    above: int
    weights: str


@dataclass(frozen=True, slots=True)
class Run:
    """The engine runs: a rank is suspected after SILENCE without a message.

    `stale_rows`: rows that the ranks hold from an earlier master.
    """

    life: int
    epoch: int
    stale_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Admit:
    """Hand these claims to the core."""

    claims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Confirm:
    """Ask the pool whether the lease is still this term's. If not, another master has the ranks, and none is fenced."""

    life: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Have a rank's supervisor kill this process, if it still lives."""

    life: int
    rank: int
    pid: int
    verdict: str


@dataclass(frozen=True, slots=True)
class HangUp:
    """End a life: close its control lanes and, once all fences are answered, the channels to its pods."""

    life: int


@dataclass(frozen=True, slots=True)
class ReplacePods:
    """Have those pods of the engine made anew that are of an old revision.

    The pool is asked before whether the lease is still this term's. If not, another master may run the engine on them.
    """

    life: int


@dataclass(frozen=True, slots=True)
class Expect:
    """Pods are lost before the engine has finished: those requests wait this long for an engine of its weights."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Release:
    """Commit all tokens, then release the lease: another scheduler may take the engine."""


@dataclass(frozen=True, slots=True)
class Retire:
    """Delete what the pool keeps of this engine."""


@dataclass(frozen=True, slots=True)
class Say:
    """For the log and the journal."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The term is over."""

    why: str


LifeAction = (
    Dial
    | Identify
    | NewEpoch
    | HostStore
    | Form
    | Allocate
    | Record
    | Run
    | Admit
    | Confirm
    | Fence
    | HangUp
    | ReplacePods
    | Expect
    | Release
    | Retire
    | Say
    | Stop
    | GiveBack
    | EngineReady
    | EngineLost
    | Drain
)
