"""A rank's membership in the epochs of its engine: a pure state machine, without I/O, tasks, gRPC or torch.

Its methods are the events. Those that have actions in the table return them, and the caller must carry them out, in
order, and at once. `joined`, `allocated` and `store_failed` have none and return nothing.

    state     event                        actions                     next state
    any       host, a newer epoch          CloseStore?, OpenStore      unchanged
    any       host, the same again         none                        unchanged
    any       store failed                 none                        unchanged, the same may be hosted again
    any       form, a newer epoch          Leave?, CloseStore?, Join   Forming
    any       leave                        Leave?                      Idle
    Forming   form, the same again         none                        unchanged
    Forming   joined                       none                        Forming, its room is known
    Forming   allocate                     Allocate                    Forming, with a number of slots
    Forming   allocate, the same again     none                        unchanged
    Forming   allocated                    none                        Member
    Forming   failed                       Leave                       Idle
    Forming   peer lost                    Leave                       Broken
    Member    allocate, the same again     none                        unchanged
    Member    peer lost                    Leave                       Broken

A question mark: only if there is something to leave or to close. Any other request is refused and changes nothing.
Once an epoch was left, its events are too late: `joined` and `allocated` refuse, `failed` and `peer_lost` do nothing.
"""

from dataclasses import dataclass, replace

from orca_common.errors import FailedPrecondition

from ..data_plane.plane import PeerLost
from ..partition import Place


@dataclass(frozen=True)
class Formation:
    """A master's demand to one rank of a new epoch."""

    place: Place
    block_size: int
    return_tokens: bool  # sampled tokens also go back to the first stage on the data plane, for a run-ahead
    store: str = ""  # "host:port" at which the ranks find each other; unused in an engine of one rank
    controllers: tuple[str, ...] = ()  # addresses of all ranks of the engine, stage-major, then by tensor rank
    hands_over: bool = False  # ranks of other engines pull keys and values from this one


# The states


@dataclass(frozen=True)
class Idle:
    """In no epoch."""


@dataclass(frozen=True)
class Forming:
    """On the way into an epoch: it joins the other ranks first, then allocates memory and opens its relays."""

    epoch: int
    formation: Formation
    room: int | None = None  # slots that its memory holds; None: it has not joined yet
    slots: int | None = None  # that are being allocated; None: no number was given yet


@dataclass(frozen=True)
class Member:
    """In an epoch: it takes iterations."""

    epoch: int
    formation: Formation
    slots: int


@dataclass(frozen=True)
class Broken:
    """A neighbour was lost, so the epoch is over for this rank. The rank itself is well and waits for a new epoch."""

    epoch: int
    reason: str


State = Idle | Forming | Member | Broken


# The actions


@dataclass(frozen=True)
class OpenStore:
    """Open the store at which the ranks of an epoch will find each other."""

    epoch: int


@dataclass(frozen=True)
class CloseStore:
    """Close the store of an epoch."""

    epoch: int


@dataclass(frozen=True)
class Join:
    """Open the data plane of an epoch, load the model's slice and meet the other ranks. Then: `joined` or `failed`."""

    epoch: int
    formation: Formation


@dataclass(frozen=True)
class Allocate:
    """Allocate memory for keys and values and open the relays. Then: `allocated` or `failed`."""

    epoch: int
    slots: int


@dataclass(frozen=True)
class Leave:
    """Close the data plane and the relays of an epoch. Their waiters wake with the reason."""

    epoch: int
    reason: str


Action = OpenStore | CloseStore | Join | Allocate | Leave


class Membership:
    """The state of one rank, and the events that change it."""

    def __init__(self) -> None:
        self.state: State = Idle()
        self.newest = 0  # epoch that this rank was last asked to form; no epoch up to it is formed again
        self.hosted: int | None = None  # epoch whose store this rank hosts

    # Requests of a master

    def host(self, epoch: int) -> list[Action]:
        """Host the store of an epoch that is about to be formed."""
        if epoch == self.hosted:
            return []
        self._check_newer(epoch)
        actions = self._close_store()
        self.hosted = epoch
        return [*actions, OpenStore(epoch)]

    def form(self, epoch: int, formation: Formation) -> list[Action]:
        """Take a place in an epoch. Empty: the same request came before, and is under way."""
        match self.state:
            case Forming(epoch=current, formation=same) if (epoch, formation) == (current, same):
                return []
        self._check_newer(epoch)
        actions = self._leave(f"epoch {epoch} is being formed")
        if self.hosted is not None and self.hosted < epoch:
            actions += self._close_store()
        self.newest = epoch
        self.state = Forming(epoch, formation)
        return [*actions, Join(epoch, formation)]

    def allocate(self, epoch: int, slots: int) -> list[Action]:
        """Make the rank a member with this much memory. Empty: it is one, or becomes one, by the same request."""
        match self.state:
            case Member(epoch=current, slots=same) if (epoch, slots) == (current, same):
                return []
            case Forming(epoch=current, slots=same) if (epoch, slots) == (current, same):
                return []
            case Forming(epoch=current, formation=formation, room=int(room), slots=None) if epoch == current:
                if not formation.block_size <= slots <= room:
                    raise FailedPrecondition(
                        f"{slots} slots: this rank's memory holds {room}, a block {formation.block_size}"
                    )
                self.state = replace(self.state, slots=slots)
                return [Allocate(epoch, slots)]
        raise FailedPrecondition(f"epoch {epoch} is not being formed here")

    def check_iteration(self, epoch: int, number: int, relayed: bool) -> None:
        """Whether an iteration that came by a relay, or by Run, is to be run. Changes nothing.

        Raises PeerLost when its epoch has broken here, FailedPrecondition when this rank is not a member of its epoch
        or it took the wrong way.
        """
        match self.state:
            case Member(epoch=current, formation=formation) if epoch == current:
                if relayed == (formation.place.index == 0):
                    way, right = ("a relay", "Run") if relayed else ("Run", "a relay")
                    raise FailedPrecondition(f"iteration {number} came by {way}: here they come by {right}")
                return
            case Broken(epoch=current, reason=reason) if epoch == current:
                raise PeerLost(reason)
            case Member(epoch=current):
                has = f"a member of {current}"
            case _:
                has = "a member of none"
        raise FailedPrecondition(f"iteration {number} is of epoch {epoch}: this rank is {has}")

    # What became of the actions

    def store_failed(self, epoch: int) -> None:
        """The store could not be opened: another request may try again."""
        if epoch == self.hosted:
            self.hosted = None

    def joined(self, epoch: int, room: int) -> None:
        """All ranks have met. `room`: slots that this rank's memory holds."""
        self.state = replace(self._forming(epoch), room=room)

    def allocated(self, epoch: int) -> None:
        """The memory is there and the relays are open."""
        forming = self._forming(epoch)
        assert forming.slots is not None
        self.state = Member(epoch, forming.formation, forming.slots)

    def failed(self, epoch: int, reason: str) -> list[Action]:
        """The epoch could not be formed."""
        match self.state:
            case Forming(epoch=current) if epoch == current:
                return self._leave(reason)
        return []

    def peer_lost(self, epoch: int, reason: str) -> list[Action]:
        """A relay or a data plane broke: a neighbour is gone."""
        match self.state:
            case Forming(epoch=current) | Member(epoch=current) if epoch == current:
                actions = self._leave(reason)
                self.state = Broken(epoch, reason)
                return actions
        return []

    def leave(self, reason: str) -> list[Action]:
        """The process is about to end."""
        return self._leave(reason)

    # Parts of events

    def _leave(self, reason: str) -> list[Action]:
        """Broken has nothing to leave: that was done when it broke."""
        state, self.state = self.state, Idle()
        return [Leave(state.epoch, reason)] if isinstance(state, Forming | Member) else []

    def _close_store(self) -> list[Action]:
        hosted, self.hosted = self.hosted, None
        return [CloseStore(hosted)] if hosted is not None else []

    def _forming(self, epoch: int) -> Forming:
        """The state, if this epoch is still being formed.

        Raises PeerLost when a neighbour was lost meanwhile, FailedPrecondition when the epoch was left.
        """
        match self.state:
            case Forming(epoch=current) if epoch == current:
                return self.state
            case Broken(epoch=current, reason=reason) if epoch == current:
                raise PeerLost(reason)
        if epoch == self.newest:
            raise FailedPrecondition(f"epoch {epoch} was left while it was being formed")
        raise self._is_old(epoch)

    def _check_newer(self, epoch: int) -> None:
        if epoch <= self.newest:
            raise self._is_old(epoch)

    def _is_old(self, epoch: int) -> FailedPrecondition:
        return FailedPrecondition(f"epoch {epoch} is old: this rank has seen {self.newest}")
