"""Formation, control lanes and verdicts of an engine of many ranks, against scripted ones."""

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from pydantic import ValidationError
from scheduler.scripted_ranks import EPOCH, Formed, Scripted, scripted

from orca.v1 import worker_pb2 as pb
from orca_common.tls import Plaintext
from orca_scheduler import timers
from orca_scheduler.lifecycle.events import (
    Entry,
    Formation,
    Hello,
    Identified,
    Listens,
    Model,
    NewEpoch,
    Opened,
    PodSeen,
    Standing,
    Wake,
)
from orca_scheduler.lifecycle.lifecycle import Lifecycle, Running
from orca_scheduler.lifecycle.places import Place, Shape
from orca_scheduler.lifecycle.suspicions import Kind, Suspicion, judge
from orca_scheduler.ranks.answers import MOST_SLOTS
from orca_scheduler.ranks.rank import LONGEST_ERROR, UNDER_WAY, Rank
from orca_scheduler.ranks.ranks import MOST_TIMES
from orca_scheduler.settings import SchedulerSettings


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def formed(engine: Scripted) -> Formed:
    """Waits until the engine runs, and every rank knows its control lane."""
    formed = await engine.master.formed()
    await until(lambda: all(rank.lanes == 1 for rank in engine.ranks))
    return formed


async def stands(engine: Scripted) -> bool:
    """Waits until the engine runs; whether it is the one that stood before, in EPOCH with 40 slots."""
    formed = await engine.master.formed()
    asked = [rank.form is not None for rank in engine.ranks]
    assert asked == [asked[0]] * len(asked), "all are asked to form, or nobody is"
    assert asked[0] or (formed.epoch, formed.slots) == (EPOCH, 40)
    assert not asked[0] or (formed.epoch > EPOCH and formed.stale_rows == ())
    return not asked[0]


def fenced_pids(engine: Scripted) -> list[int]:
    return [pid for pod in engine.pods for _, pid, _ in pod.fenced]


def silence(verdict: str) -> float:
    """The seconds for which a rank has been silent, as a verdict tells. A machine with other work looks later."""
    told = re.search(r"has been silent for (\d+\.\d) s", verdict)
    assert told is not None, verdict
    return float(told[1])


async def test_formation() -> None:
    async with scripted(3, 2) as engine:
        epoch, slots, stale_rows, first = await formed(engine)
        assert [engine.master.hellos[n].pid for n in range(6)] == [100, 101, 102, 103, 104, 105]
        assert (epoch, stale_rows) == (EPOCH, ())
        assert slots == 92, "95 slots of the smallest, in blocks of 4"
        assert first == 4, "the ranks have run 3"
        assert [rank.hosted for rank in engine.ranks] == [[EPOCH], [], [], [], [], []]
        for n, rank in enumerate(engine.ranks):
            form = rank.form
            assert form is not None
            stage, tensor_rank = divmod(n, 3)
            assert form.formation == pb.Formation(
                tensor_parallel=3, pipeline_parallel=2, stage=stage, tensor_rank=tensor_rank, block_size=4
            )
            assert (form.term, form.epoch) == (5, EPOCH)
            assert list(form.controllers) == [r.address for r in engine.ranks]
            assert form.store == "store:1"
            assert rank.allocated == 92
            assert rank.terms == ["5"], "each has a control lane, of the master's term"
        assert engine.master.sources() == [f"blocks:{n}" for n in range(6)]


async def test_slots_that_do_not_fit() -> None:
    async with scripted(1, 2, slots=100) as engine:
        refusal = await engine.master.refused()
        assert re.search(r"slots: 100 do not fit, stage 1 rank 0 .* has room for 99", refusal), refusal
        assert [rank.allocated for rank in engine.ranks] == [None, None]


async def test_fewer_slots_than_there_is_room_for() -> None:
    async with scripted(1, 2, slots=42) as engine:
        assert (await engine.master.formed()).slots == 40, "whole blocks of 4"
        assert [rank.allocated for rank in engine.ranks] == [40, 40]


@pytest.mark.parametrize(
    ("tp", "pp", "run_ahead", "wanted"),
    [(1, 1, 0, False), (1, 1, 1, False), (2, 1, 0, False), (2, 1, 1, True), (1, 2, 0, False), (1, 2, 1, True)],
)
async def test_tokens_go_back_when_a_batch_is_ahead(tp: int, pp: int, run_ahead: int, wanted: bool) -> None:
    """With a run-ahead the ranks of the first stage need the tokens; one rank has its own."""
    async with scripted(tp, pp, run_ahead=run_ahead) as engine:
        await engine.master.formed()
        assert [rank.form is not None and rank.form.formation.return_tokens for rank in engine.ranks] == [
            wanted
        ] * tp * pp


@pytest.mark.parametrize(
    ("code", "said", "fenced"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "refuses: it says so", []),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "listens and does not answer: it says so", [101]),
        (grpc.StatusCode.UNAVAILABLE, "does not form: UNAVAILABLE: it says so", []),
        (grpc.StatusCode.INTERNAL, "does not form: INTERNAL: it says so", [101]),
    ],
)
async def test_a_rank_that_does_not_form(
    monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode, said: str, fenced: list[int]
) -> None:
    monkeypatch.setattr(timers, "DOUBT", 0.2)
    async with scripted(1, 2) as engine:
        engine.ranks[1].fails = code
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            sentence, pids = await engine.master.refused(), fenced_pids(engine)
        else:
            sentence, pids = await engine.master.verdict()
        assert re.search(rf"stage 1 rank 0 .*{said}$", sentence), sentence
        assert pids == fenced


async def test_a_pod_with_another_number_of_ranks() -> None:
    async with scripted(2, 1) as engine:
        engine.pods[0].ranks.pop()
        engine.pods[0].pids.pop()
        refusal = await engine.master.refused()
        assert re.search(r"gpus_per_pod: .* has 1 ranks, not 2", refusal), refusal


async def test_iterations_go_down_one_lane_and_reports_come_up_all() -> None:
    async with scripted(2, 3, ranks_per_pod=1) as engine:
        await formed(engine)
        engine.master.send(pb.Iteration(number=9))
        await until(lambda: engine.ranks[0].iterations == [9])
        engine.ranks[4].report(9, token_ids=[1, 2])
        await until(lambda: len(engine.master.returned) == 1)
        assert engine.master.timed == {}, "tokens are back before the other ranks' times"
        for n in (3, 0, 1, 5, 2):
            engine.ranks[n].report(9)
        await until(lambda: engine.master.timed == {9: 6})
        assert engine.master.places == {divmod(n, 2) for n in range(6)}, "its place is not what a rank says"
        assert [list(report.token_ids) for report in engine.master.returned] == [[1, 2]]
        assert all(rank.iterations == [] for rank in engine.ranks[1:])
        held = pb.AdaptersHeld(number=2)
        engine.ranks[3].say(pb.Report(adapters=held).SerializeToString())
        await until(lambda: engine.master.held == [(3, held)])


async def test_times_that_do_not_come_from_all_ranks() -> None:
    """Those of the oldest iteration go where too many wait."""
    async with scripted(1, 2) as engine:
        await formed(engine)
        for number in (4, 5, 901, 900):
            engine.ranks[1].report(number)
        engine.ranks[0].report(900)
        await until(lambda: engine.master.timed == {900: 2})
        for number in (*range(6, 4 + MOST_TIMES), 5, 4, 901):  # with 4, 5 and 901 one more than may wait
            engine.ranks[0].report(number)
        await until(lambda: 901 in engine.master.timed)
        assert engine.master.timed == {900: 2, 5: 2, 901: 2}


async def test_standing() -> None:
    async with scripted(1, 2, books=EPOCH, claims=(4,)) as engine:
        for rank in engine.ranks:
            rank.stand(1, 2)
            rank.hello.rows.add(row=3)
        assert await engine.master.formed() == Formed(EPOCH, slots=40, stale_rows=(3,), iteration=4)
        assert [rank.form for rank in engine.ranks] == [None, None]
        await until(lambda: engine.master.admitted == [4])
        assert engine.master.given_back == {}


async def test_ranks_that_stand_in_another_epoch_than_the_books() -> None:
    async with scripted(1, 2, books=EPOCH + 3, claims=(4,)) as engine:
        for rank in engine.ranks:
            rank.stand(1, 2)
        assert not await stands(engine)
        assert engine.master.given_back == {4: False}
        assert engine.master.admitted == []


async def test_a_report_of_an_iteration_from_before() -> None:
    """In an epoch that is kept, ranks may still run an iteration that an earlier life sent."""
    async with scripted(1, 2, books=EPOCH) as engine:
        for rank in engine.ranks:
            rank.stand(1, 2)
        await formed(engine)
        engine.ranks[1].report(3, token_ids=[1])
        engine.master.send(pb.Iteration(number=4))
        await until(lambda: engine.ranks[0].iterations == [4])
        engine.ranks[1].report(4, token_ids=[2])
        await until(lambda: len(engine.master.returned) > 0)
        assert [report.number for report in engine.master.returned] == [4]


@pytest.mark.parametrize(
    "another",
    [{"epoch": EPOCH - 1}, {"iteration": 2}, {"slots": 44}, {"stage": 0}, {"block_size": 8}, {"return_tokens": True}],
    ids=lambda fields: next(iter(fields)),
)
async def test_ranks_that_do_not_stand_alike(another: dict[str, int]) -> None:
    async with scripted(1, 2, books=EPOCH) as engine:
        for rank in engine.ranks:
            rank.stand(1, 2)
        hello = engine.ranks[1].hello
        for name, value in another.items():
            setattr(hello.formation if name in pb.Formation.DESCRIPTOR.fields_by_name else hello, name, value)
        assert not await stands(engine)


@pytest.mark.parametrize(
    ("values", "suits"),
    [
        ({}, True),
        ({"slots": 40}, True),
        ({"slots": 43}, True),  # in whole blocks
        ({"slots": 44}, False),
        ({"slots": 39}, False),
        ({"block_size": 8}, False),
        ({"block_size": 8, "slots": 40}, False),
        ({"block_size": 2, "slots": 40}, False),
        ({"run_ahead": 1}, False),
    ],
)
async def test_what_a_standing_epoch_suits(values: dict[str, Any], suits: bool) -> None:
    """40 slots in blocks of 4, formed for two stages without a run-ahead."""
    async with scripted(1, 2, books=EPOCH, **values) as engine:
        for rank in engine.ranks:
            rank.stand(1, 2)
        assert await stands(engine) is suits


@pytest.mark.parametrize(("run_ahead", "suits"), [(0, False), (1, True)])
async def test_a_standing_epoch_that_returns_tokens(run_ahead: int, suits: bool) -> None:
    async with scripted(1, 2, books=EPOCH, run_ahead=run_ahead) as engine:
        for rank in engine.ranks:
            rank.stand(1, 2, return_tokens=True)
        assert await stands(engine) is suits


async def test_ranks_of_another_shape() -> None:
    """Two pods that were two tensor ranks of one stage are two stages now."""
    async with scripted(1, 2, books=EPOCH) as engine:
        for rank in engine.ranks:
            rank.stand(2, 1)
        assert not await stands(engine)


async def test_a_neighbour_complains_before_the_process_is_seen_to_be_gone() -> None:
    async with scripted(2, 2) as engine:
        await formed(engine)
        engine.ranks[1].report(9)
        for rank in engine.ranks:
            rank.report(4)
        await until(lambda: engine.master.timed == {4: 4})
        engine.ranks[0].report(5, error="connection closed by peer", peer_lost=True)
        engine.ranks[3].end(grpc.StatusCode.UNAVAILABLE)
        engine.pods[1].died(1)
        lost, pids = await engine.master.verdict()
        assert lost.startswith(f"stage 1 rank 1 of engine-0 at {engine.ranks[3].address} (host here, pid 103, last")
        assert lost.endswith("iteration 4) has ended")
        assert pids == fenced_pids(engine) == [103]


async def test_a_frozen_rank() -> None:
    async with scripted(1, 3) as engine:
        await formed(engine)
        engine.ranks[1].frozen = True
        lost, pids = await engine.master.verdict()
        assert "stage 1 rank 0 of engine-0" in lost
        assert silence(lost) >= timers.SILENCE
        assert pids == fenced_pids(engine) == [101]
        engine.ranks[1].frozen = False


async def test_a_master_that_was_late_itself_judges_nobody() -> None:
    """Its loop stood still, and with it the answers of every rank."""
    async with scripted(1, 2) as engine:
        await formed(engine)
        loop, ranks = asyncio.get_running_loop(), engine.master._ranks
        assert ranks is not None
        heard = ranks._ranks[0].last_heard
        ranks._ranks[0].run(EPOCH)
        assert ranks._ranks[0].last_heard != heard, "its silence counts from then on"
        time.sleep(timers.SILENCE + 0.5)  # noqa: ASYNC251 (the fault)
        late = loop.time()
        await until(lambda: all(rank.last_heard is not None and rank.last_heard > late for rank in ranks._ranks))
        assert engine.master.lifecycle.suspicions == []
        assert isinstance(engine.master.lifecycle.state, Running)


async def test_a_pull_that_is_never_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that ends no pull is lost, and its engine's requests begin again. The time of each pull begins when those
    before it have ended, and those of other ranks do not count."""
    monkeypatch.setattr(timers, "PULL", 1.5)
    async with scripted(2, 1, ranks_per_pod=1) as engine:
        await formed(engine)
        engine.master.send(pb.Iteration(number=8))  # which has none, so no rank owes its end
        for number in (9, 10):
            engine.master.send(pb.Iteration(number=number, pull=pb.Pull(admission=pb.Admission(claim=number))))
        await until(lambda: engine.ranks[0].iterations == [8, 9, 10])
        for number in (8, 9, 10):
            engine.ranks[0].report(number)
        for n, number in ((0, 9), (0, 10), (1, 10)):
            engine.ranks[n].pulled(number)
        verdict = await engine.master.verdict()
        assert re.search(r"rank 1 .*answers and has ended no pull for \d\.\d s", verdict.sentence), verdict
        assert verdict.pids == [101]


@pytest.mark.parametrize(
    ("ran", "over", "stuck"),
    [
        ((5, 5, 4, 3), True, [103]),
        ((4, 3, 3, 3), False, [101]),  # the second stage waits for the first
        ((4, 4, 3, 3), False, [102, 103]),  # and its ranks for each other
        ((4, 4, 4, 4), False, [102]),  # it samples
    ],
)
async def test_of_ranks_that_are_stuck_the_last_ones_are_suspected(
    monkeypatch: pytest.MonkeyPatch, ran: tuple[int, ...], over: bool, stuck: list[int]
) -> None:
    """All answer and nothing moves: the ranks ahead wait for those that are furthest behind. ran: the last iteration of
    each; over: iteration 4 has returned, and 5 is the oldest."""
    monkeypatch.setattr(timers, "STUCK", 3.0)
    async with scripted(2, 2) as engine:
        await formed(engine)
        for number in (4, 5):
            engine.master.send(pb.Iteration(epoch=EPOCH, number=number))
        engine.ranks[2].samples = over
        for rank, number in zip(engine.ranks, ran, strict=True):
            rank.report(number)
        lost, pids = await engine.master.verdict()
        assert "answers and has made no progress for" in lost
        assert sorted(pids) == sorted(fenced_pids(engine)) == stuck


async def test_a_pull_has_ended_when_it_has_on_all_ranks() -> None:
    async with scripted(2, 1) as engine:
        await formed(engine)
        for number in (4, 5):
            engine.master.send(pb.Iteration(number=number, pull=pb.Pull(admission=pb.Admission(claim=10 * number))))
        for rank in engine.ranks:
            rank.pulled(3, 100)  # of an earlier life
            rank.pulled(4, 1 + rank.index)
        await until(lambda: engine.master.pulled == [(40, 3, "")])
        engine.ranks[0].pulled(4, 9)  # once more
        engine.ranks[1].pulled(5, 2, "x" * (LONGEST_ERROR + 9))
        engine.ranks[0].pulled(5, 1)
        await until(lambda: engine.master.pulled[1:] == [(50, 3, "x" * (LONGEST_ERROR - 1) + "…")])


async def test_two_at_once() -> None:
    async with scripted(2, 2) as engine:
        await formed(engine)
        engine.pods[0].died(1)
        engine.pods[1].died(0)
        lost, pids = await engine.master.verdict()
        assert sorted(pids) == sorted(fenced_pids(engine)) == [101, 102]
        assert [f"pid {pid}" in lost for pid in (100, 101, 102, 103)] == [False, True, True, False]


async def test_a_rank_that_failed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else is gone or silent: then it is the one that failed, not its neighbour."""
    monkeypatch.setattr(timers, "DOUBT", 1.0)  # both are heard within it
    async with scripted(1, 2) as engine:
        await formed(engine)
        engine.ranks[0].report(4, error="no data", peer_lost=True)
        engine.ranks[1].report(4, error="x" * (LONGEST_ERROR + 9))
        lost, pids = await engine.master.verdict()
        assert lost.endswith(f"last iteration 3) failed: {'x' * (LONGEST_ERROR - 1)}…")
        assert pids == fenced_pids(engine) == [101]


@pytest.mark.parametrize("sent", [0, 9])
async def test_an_iteration_that_was_never_sent(monkeypatch: pytest.MonkeyPatch, sent: int) -> None:
    """Some may be under way yet of those that the rank had run when it was greeted. Then it is believed no more."""
    monkeypatch.setattr(timers, "DOUBT", 0.2)
    async with scripted(1, 2) as engine:
        await formed(engine)
        if sent:
            engine.master.send(pb.Iteration(number=sent))
        most = max(3, sent) + UNDER_WAY
        for number in (most, most + 1, sent):
            engine.ranks[1].report(number, token_ids=[1])
        lost, pids = await engine.master.verdict()
        reported = f"failed: it reported iteration {most + 1}, which it was never sent"
        assert lost.endswith(f"pid 101, last iteration {most}) {reported}")
        assert (pids, engine.master.returned) == ([101], [])


async def test_reports_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a verdict on its rank: 3 bytes of nonsense, tokens of a rank that makes none, and nonsense in tokens."""
    monkeypatch.setattr(timers, "DOUBT", 0.2)
    async with scripted(1, 2) as engine:
        engine.ranks[0].samples = True
        for n, does, said in (
            (0, lambda: engine.ranks[0].say(b"\xff\xff\xff"), "3 bytes that are no report"),
            (0, lambda: engine.ranks[0].report(3), "tokens, and another rank makes them"),
            (1, lambda: engine.master.wrong("nonsense"), "nonsense"),
        ):
            await formed(engine)
            does()
            lost, pids = await engine.master.verdict()
            assert lost.endswith(f"pid {100 + n}, last iteration 3) failed: it reported {said}")
            assert pids == [100 + n]


async def test_nobody_is_killed_for_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its data plane broke and no rank is missing: form again, kill nobody, as soon as all say that they live."""
    monkeypatch.setattr(timers, "DOUBT", 600.0)
    async with scripted(1, 2) as engine:
        await formed(engine)
        engine.ranks[0].report(4, error="no data", peer_lost=True)
        lost, pids = await engine.master.verdict()
        assert "stage 0 rank 0 of engine-0" in lost
        assert pids == fenced_pids(engine) == []


async def test_a_complaint_waits_for_a_rank_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is frozen is found by its silence, and it alone is fenced."""
    monkeypatch.setattr(timers, "DOUBT", 600.0)
    async with scripted(1, 2) as engine:
        await formed(engine)
        engine.ranks[1].frozen = True
        engine.ranks[0].report(4, error="no data", peer_lost=True)
        lost, pids = await engine.master.verdict()
        assert silence(lost) >= timers.SILENCE
        assert pids == fenced_pids(engine) == [101]
        engine.ranks[1].frozen = False


async def test_a_rank_whose_connection_broke_is_greeted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process lives, as its supervisor knows: nobody is killed."""
    monkeypatch.setattr(timers, "DOUBT", 600.0)
    async with scripted(1, 2) as engine:
        await formed(engine)
        engine.ranks[1].end(grpc.StatusCode.UNAVAILABLE)
        lost, pids = await engine.master.verdict()
        assert "was cut off from the control lane" in lost
        assert pids == fenced_pids(engine) == []
        await formed(engine)
        assert [rank.lanes for rank in engine.ranks] == [1, 1]


async def test_an_abandoned_iteration_of_an_older_epoch_is_no_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is asked to form leaves its epoch, and tells on its new lane which iteration it has abandoned."""
    monkeypatch.setattr(timers, "DOUBT", 0.2)
    async with scripted(1, 2) as engine:
        await formed(engine)
        engine.ranks[0].report(3, epoch=EPOCH - 1, error="a new epoch is being formed", peer_lost=True)
        engine.ranks[0].report(4, error="no data", peer_lost=True)
        lost, _ = await engine.master.verdict()
        assert lost.endswith("lost a neighbour: no data")


async def test_a_supervisor_that_dies_with_its_rank() -> None:
    async with scripted(1, 2) as engine:
        await formed(engine)
        await engine.pods[1].server.stop(None)
        engine.ranks[1].end(grpc.StatusCode.UNAVAILABLE)
        lost, _ = await engine.master.verdict()
        assert "stage 1 rank 0" in lost
        assert "has ended, and so has its supervisor" in lost


async def test_a_rank_that_is_frozen_when_it_is_greeted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "DIAL", 2.0)
    async with scripted(1, 2) as engine:
        engine.ranks[1].frozen = True
        lost, pids = await engine.master.verdict()
        assert "stage 1 rank 0" in lost
        assert "listens and does not answer" in lost
        assert pids == fenced_pids(engine) == [101]
        engine.ranks[1].frozen = False


async def test_a_rank_that_froze_since_it_was_greeted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has answered before, so it is asked for as long as a heartbeat may have no answer."""
    monkeypatch.setattr(timers, "DIAL", 600.0)
    monkeypatch.setattr(timers, "SILENCE", 600.0)
    monkeypatch.setattr(timers, "DOUBT", 0.2)
    async with scripted(1, 2) as engine:
        await formed(engine)
        engine.ranks[1].frozen = True
        engine.ranks[0].report(4, error="no data", peer_lost=True)
        _, pids = await engine.master.verdict()
        assert pids == []
        lost, pids = await engine.master.verdict()
        assert "stage 1 rank 0" in lost
        assert silence(lost) >= timers.GREETING
        assert pids == fenced_pids(engine) == [101]
        engine.ranks[1].frozen = False


async def test_a_greeting_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the scheduler, with all its engines: it is a verdict on that rank. `test_answers.py` has all of them."""
    monkeypatch.setattr(timers, "DOUBT", 0.2)
    async with scripted(1, 2) as engine:
        before = pb.HelloResponse.FromString(engine.ranks[1].hello.SerializeToString())
        engine.ranks[1].hello.host = "x" * 1000
        lost, pids = await engine.master.verdict()
        assert "stage 1 rank 0" in lost
        assert "failed: it reported" in lost
        assert len(lost) < 600
        assert pids == [101]
        engine.ranks[1].hello = before
        await formed(engine)


async def test_more_slots_than_an_engine_has() -> None:
    """The core has a number for each block."""
    async with scripted(1, 2) as engine:
        for rank in engine.ranks:
            rank.slots = (1 << 64) - 1
        assert (await formed(engine)).slots == MOST_SLOTS


async def test_a_table_of_ranks_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor is not believed; the engine forms when it tells better. `test_answers.py` has all of them."""
    monkeypatch.setattr(timers, "DIAL", 0.5)
    async with scripted(1, 2) as engine:
        right, engine.ranks[1].address = engine.ranks[1].address, "127.0.0.1:99999"
        lost, pids = await engine.master.verdict()
        assert "cannot be reached: its list of ranks has" in lost
        assert pids == []
        engine.ranks[1].address = right
        await formed(engine)


async def test_ranks_that_nobody_killed_form_again_on_lanes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the first life's lanes still say counts in the second."""
    monkeypatch.setattr(timers, "DOUBT", 0.2)
    async with scripted(1, 2) as engine:
        await formed(engine)
        engine.master.send(pb.Iteration(number=4))
        engine.ranks[0].report(4, error="no data", peer_lost=True)
        await engine.master.verdict()
        again = await formed(engine)
        assert (again.epoch, again.slots) == (EPOCH + 1, 96)
        assert [rank.terms for rank in engine.ranks] == [["5", "5"]] * 2
        assert [rank.form is not None and rank.form.epoch for rank in engine.ranks] == [EPOCH + 1] * 2
        engine.master.send(pb.Iteration(number=9))
        await until(lambda: 9 in engine.ranks[0].iterations)
        engine.ranks[1].report(9, token_ids=[1])
        await until(lambda: [report.number for report in engine.master.returned] == [9])


async def test_a_rank_that_leaves_is_not_killed() -> None:
    async with scripted(1, 2) as engine:
        await formed(engine)
        engine.ranks[1].leave()
        lost, pids = await engine.master.verdict()
        assert lost.startswith(f"stage 1 rank 0 of engine-0 at {engine.ranks[1].address} (host here, pid 101, ")
        assert lost.endswith("is leaving")
        assert pids == fenced_pids(engine) == []


async def test_a_rank_that_leaves_while_the_engine_forms() -> None:
    """The formation is given up at once, though it has not failed."""
    async with scripted(1, 2, claims=(4,)) as engine:
        engine.ranks[0].may_form.clear()
        await until(lambda: engine.ranks[0].form is not None and engine.ranks[1].lanes == 1)
        engine.ranks[1].leave()
        lost, pids = await engine.master.verdict()
        assert lost.endswith("is leaving")
        assert pids == fenced_pids(engine) == []
        assert engine.master.given_back == {4: False}
        engine.ranks[0].may_form.set()
        assert (await formed(engine)).epoch == EPOCH + 1


async def test_a_rank_without_a_lane() -> None:
    """It answers the next heartbeat that it is sent, and until then its silence does not count."""
    nothing: Any = None
    rank = Rank(0, "engine-0", 5, 1, Plaintext(), nothing, {})
    rank.run(EPOCH)
    assert (rank.ask(), rank.last_heard) == (1, None)


def test_ranks_are_not_late_when_the_pool_is_away() -> None:
    """All have said Hello, and the pool does not answer: nobody is judged for that."""
    lifecycle = Lifecycle("engine-0", Shape(1, 1, 1, block_size=4), ("pod:1",))
    nowhere = Standing(0, 0, 0, (), Formation(0, 0, 0, 0, 0, False))
    lifecycle.step(Opened(0.0, EPOCH, (), False))
    lifecycle.step(PodSeen(0.1, 1, 0, (Entry(0, "rank:1", 100, 0),)))
    lifecycle.step(Listens(0.2, 1, 0, "rank:1", 100))
    assert lifecycle.wake_at == timers.START
    lifecycle.step(Hello(0.3, 1, 0, "here", 100, nowhere, Model("digest", 1, 1), 3, "weights"))
    assert lifecycle.wake_at is None
    assert lifecycle.step(Wake(timers.START)) == []
    assert lifecycle.step(Identified(500.0, 1)) == [NewEpoch(1, 0)]


def test_places() -> None:
    assert Shape(3, 2, 3, block_size=4).places()[4] == Place(stage=1, tensor_rank=1, pod=1, local_rank=1)
    assert Shape(2, 2, 1, block_size=4).places()[3] == Place(stage=1, tensor_rank=1, pod=3, local_rank=0)


def test_gpus_per_pod() -> None:
    settings = SchedulerSettings(workers="a:1", tp=4, pp=2, gpus_per_pod=2)
    assert settings.shape.pods == 4
    with pytest.raises(ValidationError, match="gpus_per_pod: 3 is no divisor of tp, 4"):
        SchedulerSettings(workers="a:1", tp=4, pp=2, gpus_per_pod=3)


def test_a_rank_that_said_why_before_it_ended() -> None:
    suspicions = [
        Suspicion(1, Kind.PEER_LOST, "lost a neighbour"),
        Suspicion(0, Kind.FAILED, "failed: x"),
        Suspicion(0, Kind.GONE, "has ended"),
    ]
    assert judge(suspicions) == [Suspicion(0, Kind.FAILED, "failed: x")]
