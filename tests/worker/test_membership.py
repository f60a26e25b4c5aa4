"""The membership of a rank: random sequences of events, and the rows of its table one by one."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from properties import examples

from orca_common.errors import FailedPrecondition, OrcaError
from orca_worker.data_plane.plane import PeerLost
from orca_worker.partition import Place
from orca_worker.rank.membership import (
    Action,
    Allocate,
    Broken,
    CloseStore,
    Formation,
    Forming,
    Idle,
    Join,
    Leave,
    Member,
    Membership,
    OpenStore,
)

BLOCK = 4
FIRST = Formation(Place(1, 2, 0, 0), BLOCK, False, "store:1", ("a:1", "b:1"))
SECOND = Formation(Place(1, 2, 1, 0), BLOCK, False, "store:1", ("a:1", "b:1"))


class Rank(RuleBasedStateMachine):
    """A rank that carries out the actions, and checks that what is open is always what the state says.

    Requests come in any order, twice and late. So do the results of actions, once the actions were asked for. Epochs
    are drawn around the newest one.
    """

    epochs = st.integers(-2, 2)
    chances = st.integers(0, 100)

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership()
        self.stores: set[int] = set()  # open ones
        self.planes: set[int] = set()  # the same: data planes and relays
        self.joins: list[int] = []  # every epoch that was ever joined, in order
        self.joining: list[int] = []  # Join was asked for, and has not come to an end
        self.rooms: dict[int, int] = {}  # what each epoch's memory holds
        self.allocating: list[int] = []  # the same for Allocate
        self.allocations: dict[int, int] = {}  # slots that were asked for, by epoch

    def epoch(self, offset: int) -> int:
        return max(0, self.membership.newest + offset)

    def event(self, happen: Callable[[], list[Action] | None]) -> OrcaError | None:
        """Lets an event happen and carries out its actions. A refused event changes nothing."""
        before = self.snapshot()
        try:
            actions = happen()
        except OrcaError as error:
            assert self.snapshot() == before
            return error
        for action in actions or ():
            self.carry_out(action)
        return None

    def request(self, happen: Callable[[], list[Action]]) -> None:
        """Makes a master's request. If it is granted, the same request again asks for no more actions."""
        if self.event(happen) is None:
            after = self.snapshot()
            assert happen() == []
            assert self.snapshot() == after

    def snapshot(self) -> Any:
        return self.membership.state, self.membership.newest, self.membership.hosted

    def is_member(self, epoch: int) -> bool:
        return isinstance(self.membership.state, Member) and self.membership.state.epoch == epoch

    def carry_out(self, action: Action) -> None:
        match action:
            case OpenStore(epoch=epoch):
                assert not self.stores
                self.stores.add(epoch)
            case CloseStore(epoch=epoch):
                self.stores.remove(epoch)
            case Join(epoch=epoch):
                assert not self.planes, "the epoch before must be left first"
                assert all(epoch > joined for joined in self.joins), "an epoch is formed once, and never an older one"
                self.joins.append(epoch)
                self.joining.append(epoch)
                self.planes.add(epoch)
            case Allocate(epoch=epoch, slots=slots):
                assert epoch in self.planes
                assert epoch not in self.allocations
                assert BLOCK <= slots <= self.rooms[epoch]
                self.allocations[epoch] = slots
                self.allocating.append(epoch)
            case Leave(epoch=epoch, reason=reason):
                assert reason
                self.planes.remove(epoch)  # once

    # Requests of masters

    @rule(offset=epochs)
    def host(self, offset: int) -> None:
        epoch = self.epoch(offset)
        self.request(lambda: self.membership.host(epoch))

    @rule(offset=epochs, formation=st.sampled_from([FIRST, SECOND]))
    def form(self, offset: int, formation: Formation) -> None:
        epoch = self.epoch(offset)
        self.request(lambda: self.membership.form(epoch, formation))

    @rule(offset=st.sampled_from([-1, 0, 0, 0, 1]), slots=st.sampled_from([0, BLOCK - 1, BLOCK, 8, 12, 100]))
    def allocate(self, offset: int, slots: int) -> None:
        epoch = self.epoch(offset)
        self.request(lambda: self.membership.allocate(epoch, slots))

    @rule(offset=epochs, relayed=st.booleans())
    def iteration(self, offset: int, relayed: bool) -> None:
        epoch, before, state = self.epoch(offset), self.snapshot(), self.membership.state
        error = self.event(lambda: self.membership.check_iteration(epoch, 7, relayed))
        assert self.snapshot() == before
        match state:
            case Member(epoch=current, formation=formation) if epoch == current:
                assert (error is None) == (relayed == (formation is SECOND))
            case Broken(epoch=current) if epoch == current:
                assert isinstance(error, PeerLost)
            case _:
                assert isinstance(error, FailedPrecondition)

    # What became of the actions

    @precondition(lambda self: self.joining)
    @rule(chance=chances, room=st.sampled_from([0, 8, 12]))
    def joined(self, chance: int, room: int) -> None:
        epoch = self.joining.pop(-1 - chance % len(self.joining))
        self.rooms[epoch] = room
        error = self.event(lambda: self.membership.joined(epoch, room))
        assert (error is None) == (epoch in self.planes)

    @precondition(lambda self: self.allocating)
    @rule(chance=chances)
    def allocated(self, chance: int) -> None:
        epoch = self.allocating.pop(-1 - chance % len(self.allocating))
        error = self.event(lambda: self.membership.allocated(epoch))
        assert self.is_member(epoch) == (error is None) == (epoch in self.planes)

    @precondition(lambda self: self.joining or self.allocating)
    @rule(chance=chances)
    def failed(self, chance: int) -> None:
        steps = self.joining if (chance % 2 and self.joining) or not self.allocating else self.allocating
        epoch = steps.pop(-1 - chance // 2 % len(steps))
        self.event(lambda: self.membership.failed(epoch, "no weights"))
        assert epoch not in self.planes

    @rule(offset=epochs)
    def store_failed(self, offset: int) -> None:
        epoch = self.epoch(offset)
        self.stores.discard(epoch)
        self.event(lambda: self.membership.store_failed(epoch))

    @rule(offset=st.sampled_from([-1, 0]))
    def peer_lost(self, offset: int) -> None:
        epoch = self.epoch(offset)
        was_in = epoch in self.planes
        self.event(lambda: self.membership.peer_lost(epoch, "the relay broke"))
        assert epoch not in self.planes
        assert not was_in or self.membership.state == Broken(epoch, "the relay broke")

    @rule(formation=st.sampled_from([FIRST, SECOND]))
    def everything_goes_well(self, formation: Formation) -> None:
        """Chance alone hardly ever makes a member."""
        self.form(1, formation)
        self.joined(0, 12)
        self.allocate(0, 8)
        self.allocate(0, BLOCK)  # refused: 8 are under way
        self.allocated(0)

    @precondition(lambda self: self.planes)
    @rule()
    def leave(self) -> None:
        self.event(lambda: self.membership.leave("this rank is leaving"))
        assert self.membership.state == Idle()

    # What always holds

    @invariant()
    def planes_are_those_of_the_state(self) -> None:
        state = self.membership.state
        assert self.planes == ({state.epoch} if isinstance(state, Forming | Member) else set())

    @invariant()
    def the_store_is_not_of_an_older_epoch(self) -> None:
        hosted = self.membership.hosted
        assert self.stores == ({hosted} if hosted is not None else set())
        assert hosted is None or hosted >= self.membership.newest

    @invariant()
    def no_old_epoch(self) -> None:
        state, newest = self.membership.state, self.membership.newest
        assert newest == max(self.joins, default=0)
        assert isinstance(state, Idle) or state.epoch == newest

    @invariant()
    def a_member_has_the_memory_that_it_was_given(self) -> None:
        state = self.membership.state
        if isinstance(state, Member):
            assert state.slots == self.allocations[state.epoch]
            assert self.membership.allocate(state.epoch, state.slots) == [], "the answer may have been lost"


TestRank = Rank.TestCase
TestRank.settings = settings(
    max_examples=examples(300), stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)


def member(epoch: int = 3, formation: Formation = FIRST) -> Membership:
    membership = Membership()
    assert membership.host(epoch) == [OpenStore(epoch)]
    assert membership.form(epoch, formation) == [Join(epoch, formation)]
    membership.joined(epoch, 100)
    assert membership.allocate(epoch, 64) == [Allocate(epoch, 64)]
    membership.allocated(epoch)
    assert membership.state == Member(epoch, formation, 64)
    return membership


def test_a_broken_member_forms_again_under_a_newer_epoch() -> None:
    membership = member(3)
    assert membership.peer_lost(3, "the relay broke") == [Leave(3, "the relay broke")]
    assert membership.state == Broken(3, "the relay broke")
    with pytest.raises(PeerLost, match="the relay broke"):
        membership.check_iteration(3, 1, relayed=False)
    with pytest.raises(FailedPrecondition, match="epoch 3 is old: this rank has seen 3"):
        membership.form(3, FIRST)
    assert membership.form(4, FIRST) == [CloseStore(3), Join(4, FIRST)]  # epoch 3 was left when it broke


def test_a_newer_epoch_ends_the_one_that_is_being_formed() -> None:
    membership = Membership()
    membership.form(3, FIRST)
    assert membership.form(4, FIRST) == [Leave(3, "epoch 4 is being formed"), Join(4, FIRST)]
    with pytest.raises(FailedPrecondition, match="epoch 3 is old: this rank has seen 4"):
        membership.joined(3, 100)
    assert membership.failed(3, "epoch 4 is being formed") == []
    assert membership.state == Forming(4, FIRST)


def test_a_relay_that_breaks_before_the_last_has_opened() -> None:
    membership = Membership()
    membership.form(3, FIRST)
    membership.joined(3, 100)
    membership.allocate(3, 64)
    assert membership.peer_lost(3, "the relay broke") == [Leave(3, "the relay broke")]
    with pytest.raises(PeerLost, match="the relay broke"):  # a neighbour is gone, and this rank is well
        membership.allocated(3)
    assert membership.failed(3, "the relay broke") == []
    assert membership.state == Broken(3, "the relay broke")


def test_what_fails_while_it_is_formed_is_left() -> None:
    membership = Membership()
    membership.form(3, FIRST)
    assert membership.failed(3, "no weights") == [Leave(3, "no weights")]
    assert membership.state == Idle()
    with pytest.raises(FailedPrecondition, match="epoch 3 is not being formed here"):
        membership.allocate(3, 64)
    with pytest.raises(FailedPrecondition, match="epoch 3 was left while it was being formed"):
        membership.joined(3, 100)


def test_slots_must_fit() -> None:
    membership = Membership()
    membership.form(3, FIRST)
    with pytest.raises(FailedPrecondition, match="epoch 3 is not being formed here"):
        membership.allocate(3, 64)  # it has not joined yet
    membership.joined(3, 100)
    for slots in (BLOCK - 1, 101):
        with pytest.raises(FailedPrecondition, match=f"{slots} slots: this rank's memory holds 100, a block {BLOCK}"):
            membership.allocate(3, slots)
    assert membership.allocate(3, 64) == [Allocate(3, 64)]
    assert membership.allocate(3, 64) == []
    with pytest.raises(FailedPrecondition, match="epoch 3 is not being formed here"):
        membership.allocate(3, 32)  # 64 are under way


def test_a_store_is_hosted_ahead_of_its_epoch() -> None:
    membership = member(3)
    assert membership.host(3) == []  # the answer was lost
    assert membership.host(5) == [CloseStore(3), OpenStore(5)]
    assert membership.form(4, FIRST) == [Leave(3, "epoch 4 is being formed"), Join(4, FIRST)]
    assert membership.form(5, FIRST) == [Leave(4, "epoch 5 is being formed"), Join(5, FIRST)]
    assert membership.form(6, FIRST) == [Leave(5, "epoch 6 is being formed"), CloseStore(5), Join(6, FIRST)]
    with pytest.raises(FailedPrecondition, match="epoch 6 is old: this rank has seen 6"):
        membership.host(6)
