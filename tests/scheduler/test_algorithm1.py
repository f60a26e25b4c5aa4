"""Algorithm 1 of the paper and its traps, one by one (docs/policies.md, "Traps of Algorithm 1")."""

from dataclasses import replace

import pytest
from scheduler.world import made

from orca_scheduler.core.core import (
    Action,
    Arrived,
    BatchReturned,
    Cancelled,
    Commit,
    Core,
    Drain,
    EngineLost,
    EngineReady,
    GiveBack,
    Outcome,
    Room,
    ScheduleBatch,
    Tick,
)
from orca_scheduler.core.memory import Slots
from orca_scheduler.core.request import Arrival, Phase, Reason, Request
from orca_scheduler.core.selection import Limits, Stop, select
from orca_scheduler.core.sets import policy_named

WORD, EOS = 7, 0


def formed(max_bs: int, n_workers: int = 1, n_slots: int = 1000, block_size: int = 1, run_ahead: int = 0) -> Core:
    core = Core(max_bs, n_workers, block_size, run_ahead)
    assert core.step(EngineReady(0.0, n_slots, 1)) == []
    return core


def ask(claim: int, input_tokens: int = 3, max_new_tokens: int = 5, arrival: int | None = None) -> Arrival:
    """A request; its place in the queue is its claim number, unless given."""
    return Arrival(claim, claim if arrival is None else arrival, input_tokens, max_new_tokens, eos_token_ids=(EOS,))


def arrive(core: Core, *arrivals: Arrival) -> list[list[int]]:
    """The batches that arrivals cause, as lists of claims."""
    return batches(core.step(Arrived(0.0, arrivals)))


def back(core: Core, *tokens: int) -> list[Action]:
    """The oldest batch returns, with these tokens or WORD for everyone."""
    flight = core.in_flight[0]
    return core.step(BatchReturned(0.0, flight.iteration, made(*(tokens or (WORD,) * len(flight.requests)))))


def batches(actions: list[Action]) -> list[list[int]]:
    return [[m.claim for m in action.members] for action in actions if isinstance(action, ScheduleBatch)]


def only_batch(actions: list[Action]) -> ScheduleBatch:
    [batch] = [action for action in actions if isinstance(action, ScheduleBatch)]
    return batch


def finishes(actions: list[Action]) -> dict[int, Reason]:
    outcomes = [outcome for action in actions if isinstance(action, Commit) for outcome in action.outcomes]
    return {outcome.claim: outcome.finish for outcome in outcomes if outcome.finish is not None}


# -- the loop, lines 1 to 14


def test_only_an_engine_that_takes_requests_has_room() -> None:
    """What a master claims by: nothing before its engine has formed, while it drains, and after its loss."""
    core = Core(2, 1, 1, 0)
    assert core.room() == Room(0, 0)
    core.step(EngineReady(0.0, 64, 1))
    assert core.room() == Room(2, 64)
    core.step(EngineLost(0.0))
    assert core.room() == Room(0, 0)
    core.step(EngineReady(0.0, 64, 2))
    core.step(Drain(0.0))
    assert core.room() == Room(0, 0)


def test_room_counts_what_ends_with_the_oldest_batch() -> None:
    """The paper's scheduler sees its whole pool when a batch returns (line 10), so what follows an end by length is
    claimed while the last token is made, and no iteration runs with a place less."""
    core = formed(max_bs=2, n_slots=20)
    assert arrive(core, ask(1, max_new_tokens=1), ask(2)) == [[1, 2]]
    assert core.room() == Room(1, 20 - 8)
    assert arrive(core, ask(3, max_new_tokens=6)) == []
    assert core.room() == Room(0, 20 - 8 - 9)
    assert batches(back(core)) == [[3, 2]]
    assert core.room() == Room(0, 20 - 8 - 9)
    assert batches(back(core, EOS, WORD)) == [[2]]  # an end that only the token shows is known when it is there
    assert core.room() == Room(1, 20 - 8)
    core.step(Cancelled(0.0, (2,)))
    assert core.room() == Room(2, 20)


def test_room_counts_no_slots_that_the_next_batch_may_not_have() -> None:
    """A batch may be scheduled now, or the end is a batch later: there is a place, and its slots come in time."""
    core = formed(max_bs=1, n_workers=2, n_slots=20)
    assert arrive(core, ask(1, max_new_tokens=1)) == [[1]]
    assert core.room() == Room(2, 20 - 4)
    assert arrive(core, ask(2, max_new_tokens=2)) == [[2]]
    assert core.room() == Room(1, 20 - 5)
    assert batches(back(core)) == []
    assert core.room() == Room(1, 20 - 5)
    core = formed(max_bs=1, run_ahead=1, n_slots=20)
    assert arrive(core, ask(1, max_new_tokens=2)) == [[1], [1]]
    assert core.room() == Room(1, 20 - 5)
    assert arrive(core, ask(2)) == []
    assert batches(back(core)) == [[2]]
    assert core.room() == Room(0, 20 - 8)


def test_room_counts_no_end_that_drafts_alone_would_make() -> None:
    """They may be wrong. A request that was claimed for its place would wait here, while another engine has one."""
    core = Core(1, 1, 1, policy=policy_named("drafts=ngram"))
    core.step(EngineReady(0.0, 100, 1))
    core.step(Arrived(0.0, (ask(1, max_new_tokens=5),)))
    (batch, _) = core.step(BatchReturned(0.0, 1, made(WORD), offered=(4,)))
    assert isinstance(batch, ScheduleBatch)
    assert batch.members[0].drafts == 3
    assert core.room().requests == 0
    (batch, _) = core.step(BatchReturned(0.0, 2, made(WORD), offered=(0,)))
    assert isinstance(batch, ScheduleBatch)
    assert core.room().requests == 0
    core.step(Cancelled(0.0, (1,)))
    assert core.room().requests == 1


def test_figure_8a() -> None:
    """Three workers, max_bs 2: AB, CD, EF, then AB again. No batch waits for n_workers batches to fill."""
    core = formed(max_bs=2, n_workers=3)
    a, b, c, d, e, f = range(1, 7)
    assert arrive(core, *(ask(claim) for claim in (a, b, c, d, e, f))) == [[a, b], [c, d], [e, f]]
    for again in ([a, b], [c, d], [e, f], [a, b], [c, d], [e, f]):
        assert batches(back(core)) == [again]
        assert core.n_scheduled == 3


def test_a_batch_does_not_wait_for_the_pipeline_to_fill() -> None:
    """Trap of figure 8: scheduling never waits until there is work for all workers."""
    core = formed(max_bs=2, n_workers=3)
    assert arrive(core, ask(1)) == [[1]]
    assert arrive(core, ask(2)) == [[2]]
    assert batches(back(core)) == [[1]]


@pytest.mark.parametrize("n_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("max_bs", [1, 2, 5])
def test_n_scheduled_counts_batches(max_bs: int, n_workers: int) -> None:
    """Trap 2, line 7: n_scheduled grows by one for each batch, not for each request."""
    core = formed(max_bs, n_workers)
    wanted = max_bs * n_workers
    made = arrive(core, *(ask(claim) for claim in range(1, wanted + 4)))
    assert [len(batch) for batch in made] == [max_bs] * n_workers
    assert core.n_scheduled == n_workers
    assert len(batches(back(core))) == 1
    assert core.n_scheduled == n_workers


def test_nothing_is_scheduled_at_n_workers() -> None:
    """Line 8: with n_workers batches in flight, the core waits for a return, whatever arrives."""
    core = formed(max_bs=4, n_workers=2)
    assert arrive(core, ask(1)) == [[1]]
    assert arrive(core, ask(2)) == [[2]]
    assert arrive(core, ask(3)) == []
    assert core.step(Tick(1.0)) == []
    assert batches(back(core)) == [[3, 1]]


def test_increments_run() -> None:
    """Trap 1: the request joins the batch in both phases, not in its initiation alone."""
    core = formed(max_bs=1)
    first = only_batch(core.step(Arrived(0.0, (ask(1, input_tokens=3, max_new_tokens=4),))))
    seen = [(first.members[0].phase, first.members[0].count, first.members[0].token)]
    for token in (11, 12, 13):
        [member] = only_batch(back(core, token)).members
        seen.append((member.phase, member.start, member.token))
    assert seen == [
        (Phase.INITIATION, 3, None),
        (Phase.INCREMENT, 3, 11),
        (Phase.INCREMENT, 4, 12),
        (Phase.INCREMENT, 5, 13),
    ]
    assert back(core, 14) == [Commit(4, (Outcome(1, 3, 14, Reason.LENGTH),))]


def test_a_running_request_is_not_selected_again() -> None:
    """Lines 6 and 17."""
    core = formed(max_bs=2, n_workers=4)
    assert arrive(core, ask(1)) == [[1]]
    assert core.step(Tick(0.0)) == []
    assert arrive(core, ask(2)) == [[2]]
    assert core.n_scheduled == 2


def test_finished_requests_release_their_slots() -> None:
    """Lines 11 to 13, for the length, an end token and a stop token alike."""
    core = formed(max_bs=3, n_slots=30)
    requests = (ask(1, 3, 1), ask(2, 3, 5), replace(ask(3, 3, 5), stop_token_ids=(9,)), ask(4, 3, 5))
    assert arrive(core, *requests) == [[1, 2, 3]]
    assert core.memory.reserved == 4 + 8 + 8
    actions = back(core, WORD, EOS, 9)
    assert finishes(actions) == {1: Reason.LENGTH, 2: Reason.EOS, 3: Reason.STOP_TOKEN}
    assert batches(actions) == [[4]]
    assert core.memory.reserved == 8
    assert sorted(only_batch(actions).free_rows) == [0, 1, 2]


# -- iterations: who joins and who leaves


def test_an_arrival_joins_the_very_next_iteration() -> None:
    """Section 3.1: a new request waits for one iteration at most, while others generate."""
    core = formed(max_bs=3)
    assert arrive(core, ask(1), ask(2)) == [[1, 2]]
    assert batches(back(core)) == [[1, 2]]
    assert arrive(core, ask(3)) == []
    batch = only_batch(back(core))
    assert [(m.claim, m.phase) for m in batch.members] == [
        (3, Phase.INITIATION),
        (1, Phase.INCREMENT),
        (2, Phase.INCREMENT),
    ]


def test_an_early_finisher_leaves_while_its_batch_mates_go_on() -> None:
    """Figure 3's waste does not exist: a request ends with its last return, and another takes its place at once."""
    core = formed(max_bs=2)
    assert arrive(core, ask(1, 2, 5), ask(2, 2, 2), ask(3, 2, 5)) == [[1, 2]]
    assert batches(back(core)) == [[1, 2]]
    actions = back(core, 21, 22)
    assert actions[1:] == [Commit(2, (Outcome(1, 1, 21, None), Outcome(2, 1, 22, Reason.LENGTH)))]
    assert batches(actions) == [[3, 1]]


def test_a_later_request_may_finish_earlier() -> None:
    core = formed(max_bs=2)
    arrive(core, ask(1, 2, 5), ask(2, 2, 1))
    assert finishes(back(core)) == {2: Reason.LENGTH}
    assert [request.claim for request in core.requests] == [1]


def test_mixed_phases_lengths_and_indexes_share_a_batch() -> None:
    """Figure 5: two increments at different indexes, and two initiations of different lengths."""
    core = formed(max_bs=4)
    arrive(core, ask(1, 4))
    back(core)
    arrive(core, ask(2, 2))
    back(core)
    arrive(core, ask(3, 2), ask(4, 3))
    members = only_batch(back(core)).members
    assert [(m.claim, m.phase, m.start + m.count) for m in members] == [
        (3, Phase.INITIATION, 2),
        (4, Phase.INITIATION, 3),
        (1, Phase.INCREMENT, 7),
        (2, Phase.INCREMENT, 3),
    ]


def test_members_stand_in_the_order_in_which_ranks_run_them() -> None:
    """Initiations before increments, each kind by arrival. Tokens come back in that order."""
    core = formed(max_bs=5)
    assert arrive(core, ask(2), ask(4)) == [[2, 4]]
    assert arrive(core, ask(1), ask(3), ask(5)) == []
    batch = only_batch(back(core))
    assert [m.claim for m in batch.members] == [1, 3, 5, 2, 4]
    assert [request.claim for flight in core.in_flight for request in flight.requests] == [1, 3, 5, 2, 4]
    actions = back(core, 11, 13, 15, 12, 14)
    assert actions[1:] == [
        Commit(
            2,
            (
                Outcome(1, 0, 11, None),
                Outcome(3, 0, 13, None),
                Outcome(5, 0, 15, None),
                Outcome(2, 1, 12, None),
                Outcome(4, 1, 14, None),
            ),
        )
    ]
    members = only_batch(actions).members
    assert [(m.claim, m.token) for m in members] == [(1, 11), (2, 12), (3, 13), (4, 14), (5, 15)]


def test_batches_come_before_commits() -> None:
    """Actions are executed in their order: stage 0 must not wait while a commit is put together."""
    core = formed(max_bs=1, n_workers=2, n_slots=16)
    assert arrive(core, ask(1, 8, 8)) == [[1]]
    assert arrive(core, ask(2), ask(3)) == []
    actions = back(core, EOS)
    assert [type(action) for action in actions] == [ScheduleBatch, ScheduleBatch, Commit]
    assert batches(actions) == [[2], [3]]


def test_the_order_is_that_of_arrival_numbers() -> None:
    """Line 18: a request that was given back comes late and stands before those that arrived after it."""
    core = formed(max_bs=2)
    assert arrive(core, ask(1, arrival=5), ask(2, arrival=6)) == [[1, 2]]
    assert arrive(core, replace(ask(3, arrival=2), generated=2)) == []
    batch = only_batch(back(core))
    assert [m.claim for m in batch.members] == [3, 1]
    assert batch.members[0].phase is Phase.INITIATION
    assert batch.members[0].count == 3 + 2


def test_committed_tokens_join_the_initiation_and_keep_their_indexes() -> None:
    core = formed(max_bs=1)
    again = replace(ask(1, 3, 5), generated=3)
    [member] = only_batch(core.step(Arrived(0.0, (again,)))).members
    assert (member.phase, member.count, member.token) == (Phase.INITIATION, 6, None)
    assert len(member.new_blocks) == 8  # of max_tokens, as ever
    assert back(core, 31)[1:] == [Commit(1, (Outcome(1, 3, 31, None),))]
    assert back(core, 32) == [Commit(2, (Outcome(1, 4, 32, Reason.LENGTH),))]


# -- slots


def test_a_failed_reservation_lets_nobody_overtake() -> None:
    """Trap 3: the scan stops for INITIATION, though a later request would fit."""
    core = formed(max_bs=3, n_slots=10)
    assert arrive(core, ask(1, 3, 3)) == [[1]]
    assert arrive(core, ask(2, 4, 4), ask(3, 1, 1)) == []
    batch = only_batch(back(core))
    assert [m.claim for m in batch.members] == [1]
    assert batch.stop == Stop.SLOTS
    assert batch.reserved == 6
    assert batches(back(core)) == [[1]]
    actions = back(core)
    assert finishes(actions) == {1: Reason.LENGTH}
    assert batches(actions) == [[2, 3]]


def test_a_failed_reservation_keeps_no_increment_out() -> None:
    """Trap 3: a given-back request may stand before INCREMENT requests and not fit; they go on, and so free slots."""
    core = formed(max_bs=3, n_slots=10)
    assert arrive(core, ask(1, 3, 3, arrival=8)) == [[1]]
    assert arrive(core, ask(2, 4, 4, arrival=2), ask(3, 1, 1, arrival=9)) == []
    batch = only_batch(back(core))
    assert [m.claim for m in batch.members] == [1]
    assert batch.stop == Stop.SLOTS
    assert batches(back(core)) == [[1]]
    assert batches(back(core)) == [[2, 3]]


def test_an_increment_takes_no_new_slots() -> None:
    core = formed(max_bs=1, n_slots=8)
    arrive(core, ask(1, 3, 5))
    assert core.memory.free == 0
    for _ in range(4):
        batch = only_batch(back(core))
        assert batch.members[0].new_blocks == ()
        assert batch.reserved == 8


def test_what_never_fits_goes_back() -> None:
    """Trap 5: it would stand at the head of the queue for ever. The engine was formed again with fewer slots while the
    claim was under way; a larger engine may exist. A request exactly as large as the engine runs."""
    core = formed(max_bs=2, n_slots=10)
    actions = core.step(Arrived(0.0, (ask(1, 6, 5), ask(2, 5, 5))))
    assert actions[1:] == [GiveBack(((1, False),))]
    assert batches(actions) == [[2]]
    assert core.memory.free == 0
    assert [request.claim for request in core.requests] == [2]


def test_never_fits_counts_whole_blocks() -> None:
    """19 slots in blocks of 8 are two blocks: 16 tokens fit, 17 never do."""
    core = formed(max_bs=2, n_slots=19, block_size=8)
    assert core.step(Arrived(0.0, (ask(1, 16, 1),))) == [GiveBack(((1, False),))]
    assert arrive(core, ask(2, 15, 1)) == [[2]]
    assert core.memory.reserved == 16


def test_a_block_is_reserved_whole() -> None:
    """Nine tokens in blocks of 8 take 16 slots, and so a third block stays for a third request alone."""
    core = formed(max_bs=3, n_slots=24, block_size=8)
    batch = only_batch(core.step(Arrived(0.0, (ask(1, 8, 1), ask(2, 8, 1)))))
    assert [m.claim for m in batch.members] == [1]
    assert (batch.reserved, batch.stop) == (16, Stop.SLOTS)


# -- no empty batches, nothing spins (trap 4)


def test_no_empty_batch_is_scheduled() -> None:
    core = Core(2, 3, 1)
    assert core.step(Tick(0.0)) == []
    assert core.step(EngineReady(0.0, 10, 1)) == []
    assert core.step(Arrived(0.0, ())) == []
    assert core.step(Cancelled(0.0, (1,))) == []
    assert arrive(core, ask(1, 3, 1)) == [[1]]
    assert core.step(Tick(0.0)) == []  # RUNNING, and two workers idle
    assert arrive(core, ask(2, 5, 5)) == []  # does not fit beside it
    assert back(core)[1:] != []
    assert batches(back(core)) == [[2]]
    core.step(Cancelled(0.0, (2,)))
    assert back(core) == []
    assert core.n_scheduled == 0


# -- ends that the paper leaves out (trap 6)


def test_a_cancelled_running_request_keeps_its_slots_until_its_batch_returns() -> None:
    core = formed(max_bs=1, n_workers=2, n_slots=16)
    assert arrive(core, ask(1)) == [[1]]
    assert arrive(core, ask(2)) == [[2]]
    assert arrive(core, ask(3)) == []
    assert core.step(Cancelled(0.0, (1,))) == []
    assert core.memory.reserved == 16
    actions = back(core)
    assert actions == [only_batch(actions)]  # its token is void
    assert batches(actions) == [[3]]
    assert only_batch(actions).free_rows == (0,)
    assert core.memory.reserved == 16


def test_a_cancelled_running_request_keeps_its_slots_while_workers_idle() -> None:
    core = formed(max_bs=1, n_workers=3, n_slots=8)
    assert arrive(core, ask(1)) == [[1]]
    assert core.step(Cancelled(0.0, (1,))) == []
    assert arrive(core, ask(2)) == []
    assert core.step(Cancelled(0.0, (1,))) == []
    assert core.memory.reserved == 8
    assert batches(back(core)) == [[2]]


def test_a_cancelled_increment_frees_its_slots_at_once() -> None:
    """Claim 2 has run and waits beside a full batch; the row it leaves is told to the ranks with its reuse."""
    core = formed(max_bs=1, n_workers=2, n_slots=24)
    assert arrive(core, ask(2, arrival=2)) == [[2]]
    assert arrive(core, ask(1, arrival=1)) == [[1]]
    assert arrive(core, ask(0, arrival=0)) == []
    assert batches(back(core)) == [[0]]  # claim 2 is in INCREMENT and waits
    assert core.memory.reserved == 24
    assert core.step(Cancelled(0.0, (2,))) == []
    assert core.memory.reserved == 16
    assert arrive(core, ask(3, arrival=3)) == []
    batch = only_batch(back(core, EOS))
    assert [(m.claim, m.row) for m in batch.members] == [(3, 0)]
    assert sorted(batch.free_rows) == [0, 1]


def test_a_cancelled_waiting_request_never_runs() -> None:
    core = formed(max_bs=1)
    assert arrive(core, ask(1), ask(2), ask(3)) == [[1]]
    assert core.step(Cancelled(0.0, (2,))) == []
    assert batches(back(core, EOS)) == [[3]]


def test_a_deadline_ends_the_waiting_at_the_tick_and_the_running_at_its_return() -> None:
    """Never a shortened answer: a late token is not committed."""
    core = formed(max_bs=1)
    late = [replace(ask(claim), deadline=1.0) for claim in (1, 2)]
    assert arrive(core, *late) == [[1]]
    assert core.step(Tick(0.9)) == []
    assert core.step(Tick(1.0)) == [Commit(None, (Outcome(2, 0, None, Reason.DEADLINE),))]
    assert core.memory.reserved == 8
    assert core.step(BatchReturned(1.1, 1, made(WORD))) == [Commit(1, (Outcome(1, 0, None, Reason.DEADLINE),))]
    assert core.memory.reserved == 0


def test_a_loss_gives_back_who_had_not_ended() -> None:
    """Claim 1 is RUNNING, claim 2 was cancelled while RUNNING, claim 3 waits."""
    core = formed(max_bs=2)
    assert arrive(core, ask(1), ask(2), ask(3)) == [[1, 2]]
    core.step(Cancelled(0.0, (2,)))
    assert core.step(EngineLost(0.0)) == [GiveBack(((1, True), (3, False)))]
    assert core.step(EngineLost(0.0)) == []
    assert core.step(EngineReady(0.0, 8, 50)) == []
    batch = only_batch(core.step(Arrived(0.0, (ask(4, arrival=1),))))
    assert (batch.iteration, batch.free_rows) == (50, ())  # the new ranks know no rows


def test_a_drained_core_lets_its_batches_return_and_schedules_none() -> None:
    core = formed(max_bs=1, n_workers=2)
    assert arrive(core, ask(1), ask(2)) == [[1], [2]]
    assert core.step(Drain(0.0)) == []
    assert batches(back(core)) == []
    assert batches(back(core)) == []
    assert core.n_scheduled == 0
    assert arrive(core, ask(3)) == []
    assert core.step(EngineLost(0.0)) == [GiveBack(((1, False), (2, False), (3, False)))]
    assert core.step(EngineReady(0.0, 100, 9)) == []
    assert arrive(core, ask(4)) == [[4]], "the engine as it was formed then was drained, this one is not"


def test_a_return_out_of_order_is_our_own_mistake() -> None:
    core = formed(max_bs=1, n_workers=2)
    arrive(core, ask(1), ask(2))
    with pytest.raises(AssertionError, match="iteration 2 returned before 1"):
        core.step(BatchReturned(0.0, 2, made(WORD)))


# -- run-ahead: one batch more, of requests whose tokens are not back


def ahead(max_bs: int, n_workers: int = 1, n_slots: int = 1000) -> Core:
    return formed(max_bs, n_workers, n_slots, run_ahead=1)


def test_figure_8a_with_a_fourth_batch() -> None:
    """AB, CD, EF, and AB again before AB is back: then every return makes room for the next in turn."""
    core = ahead(max_bs=2, n_workers=3)
    a, b, c, d, e, f = range(1, 7)
    assert arrive(core, *(ask(claim) for claim in (a, b, c, d, e, f))) == [[a, b], [c, d], [e, f], [a, b]]
    for again in ([c, d], [e, f], [a, b], [c, d], [e, f]):
        assert batches(back(core)) == [again]
        assert core.n_scheduled == 4


def test_two_batches_of_the_same_requests() -> None:
    """One worker: the next iteration is on its way while the first computes, and no increment carries a token."""
    core = ahead(max_bs=2)
    requests = ask(1, input_tokens=3, max_new_tokens=4), ask(2, input_tokens=5, max_new_tokens=5)
    made = [action for action in core.step(Arrived(0.0, requests)) if isinstance(action, ScheduleBatch)]
    assert core.n_scheduled == 2
    for tokens in ((11, 21), (12, 22), (13, 23)):
        made.append(only_batch(back(core, *tokens)))
        assert core.n_scheduled == 2
    assert [[(m.claim, m.start + m.count) for m in batch.members] for batch in made] == [
        [(1, 3), (2, 5)],
        [(1, 4), (2, 6)],
        [(1, 5), (2, 7)],
        [(1, 6), (2, 8)],
        [(2, 9)],
    ]
    phases = [{m.phase for m in batch.members} for batch in made]
    assert phases == [{Phase.INITIATION}, *[{Phase.INCREMENT}] * 4]
    assert all(m.token is None for batch in made for m in batch.members)
    assert [bool(m.new_blocks) for batch in made for m in batch.members] == [True] * 2 + [False] * 7
    assert back(core, 14, 24) == [Commit(4, (Outcome(1, 3, 14, Reason.LENGTH), Outcome(2, 3, 24, None)))]
    assert back(core, 25) == [Commit(5, (Outcome(2, 4, 25, Reason.LENGTH),))]
    assert core.memory.reserved == 0


def test_an_end_by_length_is_known_before() -> None:
    """Requests of all lengths: the rows that run are the tokens that are wanted, not one more."""
    core = ahead(max_bs=3, n_workers=2)
    rows = [claim for batch in arrive(core, *(ask(claim, 2, claim) for claim in range(1, 8))) for claim in batch]
    while core.in_flight:
        rows += [claim for batch in batches(back(core)) for claim in batch]
    assert sorted(rows) == [claim for claim in range(1, 8) for _ in range(claim)]


def test_a_single_token_has_nothing_ahead() -> None:
    core = ahead(max_bs=2)
    assert arrive(core, ask(1, 3, 1)) == [[1]]
    assert arrive(core, replace(ask(2, 3, 5), generated=4)) == [[2]]  # its last token, after a recovery
    assert finishes(back(core)) == {1: Reason.LENGTH}
    assert finishes(back(core)) == {2: Reason.LENGTH}
    assert core.n_scheduled == 0


def test_low_load_fills_no_pipeline() -> None:
    """Three workers and one request: it is in two batches, never in three."""
    core = ahead(max_bs=2, n_workers=3)
    assert arrive(core, ask(1, 3, 9)) == [[1], [1]]
    assert core.step(Tick(0.0)) == []
    for _ in range(7):
        assert batches(back(core)) == [[1]]
        assert core.n_scheduled == 2
    assert batches(back(core)) == []
    assert finishes(back(core)) == {1: Reason.LENGTH}


def test_only_the_oldest_batch_is_run_ahead_of() -> None:
    """Claim 2 is in one batch, and a fourth would be in the pipeline: but its batch is not the next to return."""
    core = ahead(max_bs=1, n_workers=3)
    assert arrive(core, ask(1), ask(2)) == [[1], [2], [1]]
    assert core.n_scheduled == 3
    assert batches(back(core)) == [[2]]  # now it is, and claim 1's is not
    assert batches(back(core)) == [[1]]


def test_who_is_not_running_goes_first() -> None:
    """Algorithm 1 has a batch while n_workers are not in flight: nobody runs ahead before it, nor within it."""
    core = ahead(max_bs=2, n_workers=2)
    assert arrive(core, ask(1), ask(2), ask(3)) == [[1, 2], [3], [1, 2]]
    core = ahead(max_bs=2, n_workers=2)
    assert arrive(core, ask(1)) == [[1], [1]]
    assert arrive(core, ask(2)) == [[2]]
    assert batches(back(core)) == [[1]]  # [1], [2], [1]: n_workers + 1
    assert core.n_scheduled == 3


def test_a_newcomer_joins_those_ahead() -> None:
    """It waits for one return at most, as without a run-ahead."""
    core = ahead(max_bs=3)
    assert arrive(core, ask(1), ask(2)) == [[1, 2], [1, 2]]
    assert arrive(core, ask(3)) == []
    batch = only_batch(back(core))
    assert [(m.claim, m.phase, m.start + m.count) for m in batch.members] == [
        (3, Phase.INITIATION, 3),
        (1, Phase.INCREMENT, 5),
        (2, Phase.INCREMENT, 5),
    ]
    assert batches(back(core)) == [[1, 2, 3]]


def test_a_newcomer_may_be_the_batch_ahead() -> None:
    """n_workers batches are in flight, and nobody of the oldest goes on: the one more is the newcomer's."""
    core = ahead(max_bs=3)
    assert arrive(core, ask(1, 3, 1)) == [[1]]
    batch = only_batch(core.step(Arrived(0.0, (ask(2, 3, 1),))))
    assert [(m.claim, m.phase, m.row) for m in batch.members] == [(2, Phase.INITIATION, 1)]
    assert (batch.free_rows, batch.reserved) == ((), 8)


def test_those_ahead_keep_the_order_of_arrival() -> None:
    """A full batch: the earlier ones run ahead, a later one waits; an earlier one that comes late stands before all."""
    core = ahead(max_bs=2)
    assert arrive(core, ask(5), ask(6)) == [[5, 6], [5, 6]]
    assert arrive(core, ask(7)) == []
    batch = only_batch(back(core))
    assert ([m.claim for m in batch.members], batch.stop) == ([5, 6], Stop.BATCH_FULL)
    assert arrive(core, ask(4)) == []
    batch = only_batch(back(core))
    assert ([m.claim for m in batch.members], batch.stop) == ([4, 5], Stop.BATCH_FULL)
    assert batches(back(core)) == [[4, 5]]  # now claim 6 is in none, with two tokens to go
    members = only_batch(back(core, EOS, WORD)).members
    assert [(m.claim, m.phase, m.start + m.count, m.token) for m in members] == [
        (7, Phase.INITIATION, 3, None),
        (6, Phase.INCREMENT, 6, None),
    ]


def test_a_blocked_initiation_keeps_nobody_from_running_ahead() -> None:
    core = ahead(max_bs=3, n_workers=2, n_slots=10)
    assert arrive(core, ask(1, 3, 4)) == [[1], [1]]
    assert arrive(core, ask(2, 4, 4), ask(3, 1, 1)) == []
    batch = only_batch(back(core))
    assert ([m.claim for m in batch.members], batch.stop, batch.reserved) == ([1], Stop.SLOTS, 7)
    assert batches(back(core)) == [[1]]
    assert batches(back(core)) == []  # it ends by the batch in flight
    assert batches(back(core)) == [[2, 3], [2]]


def test_a_forced_end_is_an_end_by_length() -> None:
    """The model did not choose its last token, so the answer is not whole. One that ends before chose it."""
    core = formed(max_bs=3)
    arrive(core, *(replace(ask(n, 3, 2), forced_end=True) for n in (1, 2)), ask(3, 3, 2))
    assert finishes(back(core, WORD, EOS, WORD)) == {2: Reason.EOS}
    assert finishes(back(core, EOS, EOS)) == {1: Reason.LENGTH, 3: Reason.EOS}


@pytest.mark.parametrize(("token", "reason"), [(EOS, Reason.EOS), (9, Reason.STOP_TOKEN)])
def test_an_end_found_late_costs_one_row(token: int, reason: Reason) -> None:
    """What the batch ahead made of it is discarded. Its slots and row stay until that batch is back."""
    core = ahead(max_bs=2, n_slots=16)
    assert arrive(core, *(replace(ask(claim), stop_token_ids=(9,)) for claim in (1, 2))) == [[1, 2], [1, 2]]
    assert arrive(core, ask(3)) == []
    actions = back(core, token, 21)
    assert actions[1:] == [Commit(1, (Outcome(1, 0, token, reason), Outcome(2, 0, 21, None)))]
    batch = only_batch(actions)
    assert [m.claim for m in batch.members] == [2]  # not 1 again, and 3 does not fit beside it
    assert (batch.free_rows, batch.reserved, batch.stop) == ((), 16, Stop.SLOTS)
    assert [request.claim for request in core.requests] == [1, 2, 3]
    actions = back(core, 12, 22)
    assert actions[1:] == [Commit(2, (Outcome(2, 1, 22, None),))]
    batch = only_batch(actions)
    assert [(m.claim, m.row) for m in batch.members] == [(3, 0), (2, 1)]
    assert (batch.free_rows, batch.reserved) == ((0,), 16)
    assert only_batch(back(core, 23)).free_rows == ()


def test_a_token_that_ends_in_the_void_ends_nobody_twice() -> None:
    """The discarded row may hold an end token too, or be alone in its batch."""
    core = ahead(max_bs=2)
    assert arrive(core, ask(1)) == [[1], [1]]
    assert back(core, EOS) == [Commit(1, (Outcome(1, 0, EOS, Reason.EOS),))]
    assert core.memory.reserved == 8
    assert back(core, EOS) == []
    assert (core.memory.reserved, core.requests, core.n_scheduled) == (0, (), 0)


def test_a_request_in_two_batches_is_cancelled() -> None:
    """Both of its rows are void; its slots and row are released once, when the second is back."""
    core = ahead(max_bs=2, n_slots=16)
    assert arrive(core, ask(1), ask(2)) == [[1, 2], [1, 2]]
    assert arrive(core, ask(3)) == []
    assert core.step(Cancelled(0.0, (1,))) == []
    assert core.memory.reserved == 16
    actions = back(core, 11, 21)
    assert actions[1:] == [Commit(1, (Outcome(2, 0, 21, None),))]
    assert batches(actions) == [[2]]
    assert (only_batch(actions).free_rows, core.memory.reserved) == ((), 16)
    assert core.step(Cancelled(0.0, (1,))) == []  # once more, now in one batch
    assert core.memory.reserved == 16
    actions = back(core, 12, 22)
    assert actions[1:] == [Commit(2, (Outcome(2, 1, 22, None),))]
    batch = only_batch(actions)
    assert [(m.claim, m.row) for m in batch.members] == [(3, 0), (2, 1)]
    assert batch.free_rows == (0,)
    assert core.step(Cancelled(0.0, (1,))) == []
    assert only_batch(back(core, 23)).free_rows == ()


def test_a_cancelled_request_is_not_run_ahead() -> None:
    core = ahead(max_bs=1, n_workers=2)
    assert arrive(core, ask(1), ask(2)) == [[1], [2], [1]]
    assert core.step(Cancelled(0.0, (2,))) == []
    assert batches(back(core)) == []  # claim 2's batch is the oldest
    assert batches(back(core)) == [[1]]


def test_a_deadline_of_a_request_in_two_batches() -> None:
    """No tick ends it. The first return does, without its token; the second is void."""
    core = ahead(max_bs=1)
    assert arrive(core, replace(ask(1), deadline=1.0)) == [[1], [1]]
    assert core.step(Tick(1.0)) == []
    assert core.step(BatchReturned(1.0, 1, made(11))) == [Commit(1, (Outcome(1, 0, None, Reason.DEADLINE),))]
    assert core.memory.reserved == 8
    assert core.step(Tick(2.0)) == []
    assert core.step(BatchReturned(2.0, 2, made(12))) == []
    assert core.memory.reserved == 0


@pytest.mark.parametrize(("stuck", "reason"), [((), Reason.NOT_FINITE), ((0,), Reason.STUCK)])
def test_a_member_without_a_token(stuck: tuple[int, ...], reason: Reason) -> None:
    """Its logits were not finite, or no token could follow by its form. It ends alone; a run-ahead of it is void."""
    core = ahead(max_bs=2)
    assert arrive(core, ask(1), ask(2)) == [[1, 2], [1, 2]]
    ended, goes_on = Outcome(1, 0, None, reason), Outcome(2, 0, 12, None)
    assert core.step(BatchReturned(0.0, 1, made(None, 12), stuck))[-1] == Commit(1, (ended, goes_on))
    assert core.step(BatchReturned(0.0, 2, made(13, 14)))[-1] == Commit(2, (Outcome(2, 1, 14, None),))
    assert [request.claim for request in core.requests] == [2]


def test_a_member_that_waits_runs_its_last_position_again() -> None:
    """Its form's work is not done in time. The other one of its batch goes on."""
    core = formed(max_bs=2)
    assert arrive(core, ask(1), ask(2)) == [[1, 2]]
    again, commit = core.step(BatchReturned(0.0, 1, made(None, 12), (), (0,)))
    assert commit == Commit(1, (Outcome(2, 0, 12, None),))
    assert isinstance(again, ScheduleBatch)
    assert [(m.start, m.count, m.token) for m in again.members] == [(2, 1, None), (3, 1, 12)]
    again, commit = core.step(BatchReturned(0.0, 2, made(21, 13)))
    assert commit == Commit(2, (Outcome(1, 0, 21, None), Outcome(2, 1, 13, None)))
    assert isinstance(again, ScheduleBatch)
    assert [(m.start, m.count, m.token) for m in again.members] == [(3, 1, 21), (4, 1, 13)]
    again = only_batch(core.step(BatchReturned(0.0, 3, made(None, 14), (), (0,))))
    assert [(m.start, m.count, m.token) for m in again.members] == [(3, 1, 21), (5, 1, 14)]


def test_what_a_run_ahead_makes_of_a_member_that_waits_is_void() -> None:
    core = ahead(max_bs=2)
    assert arrive(core, ask(1), ask(2)) == [[1, 2], [1, 2]]
    again, commit = core.step(BatchReturned(0.0, 1, made(None, 12), (), (0,)))
    assert commit == Commit(1, (Outcome(2, 0, 12, None),))
    assert isinstance(again, ScheduleBatch)
    assert [(m.start, m.count) for m in again.members] == [(2, 1), (4, 1)]
    assert core.step(BatchReturned(0.0, 2, made(99, 13)))[-1] == Commit(2, (Outcome(2, 1, 13, None),))
    assert core.step(BatchReturned(0.0, 3, made(21, 14)))[-1] == Commit(
        3, (Outcome(1, 0, 21, None), Outcome(2, 2, 14, None))
    )


def test_a_deadline_between_two_returns() -> None:
    core = ahead(max_bs=1)
    assert arrive(core, replace(ask(1), deadline=1.0)) == [[1], [1]]
    assert core.step(BatchReturned(0.9, 1, made(11)))[1:] == [Commit(1, (Outcome(1, 0, 11, None),))]
    assert core.step(BatchReturned(1.1, 2, made(12))) == [Commit(2, (Outcome(1, 1, None, Reason.DEADLINE),))]
    assert core.step(BatchReturned(1.2, 3, made(13))) == []
    assert core.memory.reserved == 0


def test_a_drain_with_a_batch_ahead() -> None:
    """Both batches return and are committed; the request stays, to be given back."""
    core = ahead(max_bs=1)
    assert arrive(core, ask(1)) == [[1], [1]]
    assert core.step(Drain(0.0)) == []
    assert back(core, 11) == [Commit(1, (Outcome(1, 0, 11, None),))]
    assert back(core, 12) == [Commit(2, (Outcome(1, 1, 12, None),))]
    assert core.n_scheduled == 0
    assert core.step(EngineLost(0.0)) == [GiveBack(((1, False),))]


def test_a_loss_with_a_batch_ahead() -> None:
    """Who is in two batches is RUNNING, and given back once; who had ended is not, though a batch still held it."""
    core = ahead(max_bs=3)
    assert arrive(core, ask(1), ask(2), ask(3)) == [[1, 2, 3], [1, 2, 3]]
    assert arrive(core, ask(4)) == []
    core.step(Cancelled(0.0, (2,)))
    back(core, 11, 21, EOS)
    assert core.step(EngineLost(0.0)) == [GiveBack(((1, True), (4, True)))]
    assert (core.n_scheduled, core.requests) == (0, ())
    core.step(EngineReady(0.0, 8, 50))
    batch, again = core.step(Arrived(0.0, (replace(ask(5, arrival=1), generated=1),)))
    assert isinstance(batch, ScheduleBatch)
    assert isinstance(again, ScheduleBatch)
    assert (batch.iteration, batch.free_rows, batch.members[0].count) == (50, (), 4)
    assert (again.iteration, again.free_rows, again.members[0].start + 1) == (51, (), 5)


def test_ahead_by_more_than_one_is_refused() -> None:
    for run_ahead in (-1, 2):
        with pytest.raises(AssertionError, match=r"in flight, or (in )?two"):
            Core(1, 1, 1, run_ahead)


# -- select, lines 15 to 27


def a_request(arrival: int, size: int = 4, phase: Phase = Phase.INITIATION) -> Request:
    arrived = Arrival(arrival, arrival, size - 1, 1)
    request = Request.of(arrived, in_order=True)
    if phase is Phase.INCREMENT:
        request.row, request.computed, request.generated, request.known = arrival, size - 1, 1, size
    return request


def selected(pool: list[Request], max_bs: int, n_slots: int) -> tuple[list[int], Stop]:
    plan = select(pool, Limits(max_bs), Slots(n_slots, 1))
    assert all(count == request.remaining for request, count in plan.batch)
    assert not plan.preempt
    return [request.claim for request, _ in plan.batch], Stop(plan.stop)


def test_select_stops_at_max_bs() -> None:
    assert selected([a_request(1), a_request(2), a_request(3)], 2, 100) == ([1, 2], Stop.BATCH_FULL)


def test_select_stops_at_the_slots() -> None:
    assert selected([a_request(1), a_request(2, size=8), a_request(3)], 3, 10) == ([1], Stop.SLOTS)
    assert selected([a_request(1, size=11)], 3, 10) == ([], Stop.SLOTS)


def test_select_stops_at_the_pools_end() -> None:
    assert selected([], 2, 10) == ([], Stop.POOL)
    assert selected([a_request(1), a_request(2)], 2, 8) == ([1, 2], Stop.POOL)  # full, and nobody else waits


def test_select_gets_no_running_requests() -> None:
    """Line 17: the batch is not "full" of a pool whose others are RUNNING."""
    core = formed(max_bs=1, n_workers=2)
    stops = [only_batch(core.step(Arrived(0.0, (ask(claim),)))).stop for claim in (1, 2)]
    assert stops == [Stop.POOL, Stop.POOL]


def test_select_passes_a_blocked_initiation_for_increments_alone() -> None:
    pool = [a_request(1, size=8), a_request(2, phase=Phase.INCREMENT), a_request(3), a_request(4, size=1)]
    assert selected(pool, 4, 4) == ([2], Stop.SLOTS)
    assert selected(pool, 4, 12) == ([1, 2, 3], Stop.SLOTS)
    assert selected(pool, 1, 4) == ([2], Stop.BATCH_FULL)


def test_select_counts_what_it_has_selected() -> None:
    """Two requests that fit one by one, and not together."""
    assert selected([a_request(1, size=6), a_request(2, size=6)], 2, 10) == ([1], Stop.SLOTS)


def test_select_changes_nothing() -> None:
    pool, slots = [a_request(1), a_request(2, size=9)], Slots(10, 1)
    first = select(pool, Limits(2), slots)
    assert (slots.free, slots.rows()) == (10, {})
    assert all(request.row is None and not request.running and not request.iterations for request in pool)
    assert select(pool, Limits(2), slots) == first


# -- slots


def begun(slots: Slots, tokens: int) -> tuple[int, tuple[int, ...]]:
    """A row with blocks for this many tokens."""
    row = slots.new_row()
    return row, slots.grow(row, tokens)


def test_slots_hand_out_and_take_back() -> None:
    slots = Slots(35, 8)
    assert (slots.n_slots, slots.free, slots.reserved) == (32, 32, 0)
    assert [slots.need(a_request(1, size), 1) for size in (2, 8, 9)] == [8, 8, 16]
    (one, first), (two, second) = begun(slots, 9), begun(slots, 8)
    assert one != two
    assert (len(first), len(second), len({*first, *second})) == (2, 1, 3)
    assert (slots.free, slots.reserved) == (8, 24)
    assert slots.rows() == {one: first, two: second}
    slots.release(one)
    assert (slots.free, slots.rows()) == (24, {two: second})
    with pytest.raises(KeyError):
        slots.release(one)  # exactly once
    assert begun(slots, 24)[0] == one  # rows are small: the lowest free one
    with pytest.raises(AssertionError, match="more than is free"):
        begun(slots, 1)


def test_a_row_grows_behind_what_it_has() -> None:
    slots = Slots(32, 8)
    row, first = begun(slots, 9)
    more = slots.grow(row, 8)
    assert slots.rows() == {row: (*first, *more)}
    assert slots.free == 8


def test_a_shared_block_is_free_when_its_last_row_ends() -> None:
    slots = Slots(32, 8)
    one, first = begun(slots, 16)
    two, three = slots.new_row(), slots.new_row()
    slots.share(two, first)
    slots.share(three, first[:1])
    own = slots.grow(two, 8)
    assert (slots.free, slots.rows()[two]) == (8, (*first, *own))
    slots.release(one)
    assert slots.free == 8
    slots.release(two)
    assert slots.free == 24
    slots.release(three)
    assert slots.free == 32
    assert len(set(begun(slots, 32)[1])) == 4, "a block came back twice"


def test_a_request_that_has_begun_needs_nothing_more() -> None:
    assert Slots(32, 8).need(a_request(1, 20, Phase.INCREMENT), 1) == 0


def test_room_is_left_when_all_have_begun() -> None:
    assert Slots(32, 8).room([a_request(1, 9), a_request(2, 3)]) == 32 - 16 - 8
