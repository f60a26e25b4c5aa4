"""Formation, control lanes and verdicts of an engine of many ranks, against scripted ones."""

import asyncio
from collections.abc import Callable

import grpc
import pytest
from pydantic import ValidationError
from scheduler.scripted_ranks import EPOCH, Scripted, scripted

from orca.v1 import worker_pb2 as pb
from orca_common.errors import FailedPrecondition
from orca_scheduler import ranks as module
from orca_scheduler.discovery import Place, places
from orca_scheduler.ranks import RankLost, Standing
from orca_scheduler.settings import SchedulerSettings
from orca_scheduler.signs import Kind, Sign, fenced


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def formed(engine: Scripted) -> None:
    await engine.master.greet()
    await engine.master.form(EPOCH)
    engine.master.run()


async def verdict(engine: Scripted) -> RankLost:
    with pytest.raises(RankLost) as raised:
        await asyncio.wait_for(engine.master.watch(), 20)
    await engine.master.fence(raised.value)
    return raised.value


def fenced_pids(engine: Scripted) -> list[int]:
    return [pid for pod in engine.pods for _, pid, _ in pod.fenced]


async def test_formation() -> None:
    async with scripted(3, 2) as engine:
        hellos = await engine.master.greet()
        assert [hello.pid for hello in hellos] == [100, 101, 102, 103, 104, 105]
        assert engine.master.standing() is None
        assert await engine.master.form(EPOCH) == 92, "95 slots of the smallest, in blocks of 4"
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


async def test_slots_that_do_not_fit() -> None:
    async with scripted(1, 2, slots=100) as engine:
        await engine.master.greet()
        with pytest.raises(FailedPrecondition, match=r"slots: 100 do not fit, stage 1 rank 0 .* has room for 99"):
            await engine.master.form(EPOCH)


async def test_fewer_slots_than_there_is_room_for() -> None:
    async with scripted(1, 2, slots=42) as engine:
        await engine.master.greet()
        assert await engine.master.form(EPOCH) == 40, "whole blocks of 4"
        assert [rank.allocated for rank in engine.ranks] == [40, 40]


@pytest.mark.parametrize(
    ("tp", "pp", "run_ahead", "wanted"),
    [(1, 1, 0, False), (1, 1, 1, False), (2, 1, 0, False), (2, 1, 1, True), (1, 2, 0, False), (1, 2, 1, True)],
)
async def test_tokens_go_back_when_a_batch_is_ahead(tp: int, pp: int, run_ahead: int, wanted: bool) -> None:
    """With a run-ahead the ranks of the first stage need the tokens; one rank has its own."""
    async with scripted(tp, pp, run_ahead=run_ahead) as engine:
        await engine.master.greet()
        await engine.master.form(EPOCH)
        assert [rank.form is not None and rank.form.formation.return_tokens for rank in engine.ranks] == [
            wanted
        ] * tp * pp


async def test_a_pod_with_another_number_of_ranks() -> None:
    async with scripted(2, 1) as engine:
        engine.pods[0].ranks.pop()
        engine.pods[0].pids.pop()
        with pytest.raises(FailedPrecondition, match=r"gpus_per_pod: .* has 1 ranks, not 2"):
            await engine.master.greet()


async def test_iterations_go_down_one_lane_and_reports_come_up_all() -> None:
    async with scripted(2, 2, ranks_per_pod=1) as engine:
        await formed(engine)
        await engine.master.send(pb.Iteration(number=9))
        await until(lambda: engine.ranks[0].iterations == [9])
        engine.ranks[2].report(9, token_ids=[1, 2])
        await until(lambda: len(engine.returned) == 1)
        assert engine.timed == {}, "tokens are back before the other ranks' times"
        for n in (3, 0, 1):
            engine.ranks[n].report(9)
        await until(lambda: engine.timed == {9: 4})
        assert [list(report.token_ids) for report in engine.returned] == [[1, 2]]
        assert all(rank.iterations == [] for rank in engine.ranks[1:])


async def test_standing() -> None:
    async with scripted(1, 2) as engine:
        for rank in engine.ranks:
            rank.stand(1, 2)
            rank.hello.rows.add(row=3)
        await engine.master.greet()
        assert engine.master.standing() == Standing(EPOCH, 3, 40, (3,))


@pytest.mark.parametrize(
    "another",
    [{"epoch": EPOCH - 1}, {"iteration": 2}, {"slots": 44}, {"stage": 0}, {"block_size": 8}, {"return_tokens": True}],
    ids=lambda fields: next(iter(fields)),
)
async def test_ranks_that_do_not_stand_alike(another: dict[str, int]) -> None:
    async with scripted(1, 2) as engine:
        for rank in engine.ranks:
            rank.stand(1, 2)
        hello = engine.ranks[1].hello
        for name, value in another.items():
            setattr(hello.formation if name in pb.Formation.DESCRIPTOR.fields_by_name else hello, name, value)
        await engine.master.greet()
        assert engine.master.standing() is None


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
async def test_what_a_standing_epoch_suits(values: dict[str, int], suits: bool) -> None:
    """40 slots in blocks of 4, formed for two stages without a run-ahead."""
    async with scripted(1, 2, **values) as engine:
        for rank in engine.ranks:
            rank.stand(1, 2)
        await engine.master.greet()
        assert (engine.master.standing() is not None) is suits


@pytest.mark.parametrize(("run_ahead", "suits"), [(0, False), (1, True)])
async def test_a_standing_epoch_that_returns_tokens(run_ahead: int, suits: bool) -> None:
    async with scripted(1, 2, run_ahead=run_ahead) as engine:
        for rank in engine.ranks:
            rank.stand(1, 2, return_tokens=True)
        await engine.master.greet()
        assert (engine.master.standing() is not None) is suits


async def test_ranks_of_another_shape() -> None:
    """Two pods that were two tensor ranks of one stage are two stages now."""
    async with scripted(1, 2) as engine:
        for rank in engine.ranks:
            rank.stand(2, 1)
        await engine.master.greet()
        assert engine.master.standing() is None


async def test_a_neighbour_complains_before_the_process_is_seen_to_be_gone() -> None:
    async with scripted(2, 2) as engine:
        await formed(engine)
        watching = asyncio.create_task(verdict(engine))
        engine.ranks[0].report(4, error="connection closed by peer", peer_lost=True)
        engine.ranks[3].end(grpc.StatusCode.UNAVAILABLE)
        engine.pods[1].died(1)
        lost = await watching
        assert str(lost).startswith(
            f"stage 1 rank 1 of engine-0 at {engine.ranks[3].address} (host here, pid 103, last"
        )
        assert str(lost).endswith("iteration 3) has ended")
        assert fenced_pids(engine) == [103]


async def test_a_frozen_rank() -> None:
    async with scripted(1, 3) as engine:
        await formed(engine)
        engine.ranks[1].frozen = True
        lost = await verdict(engine)
        assert "stage 1 rank 0 of engine-0" in str(lost)
        assert "has been silent for 2." in str(lost)
        assert fenced_pids(engine) == [101]
        engine.ranks[1].frozen = False


async def test_two_at_once() -> None:
    async with scripted(2, 2) as engine:
        await formed(engine)
        watching = asyncio.create_task(verdict(engine))
        engine.pods[0].died(1)
        engine.pods[1].died(0)
        lost = await watching
        assert sorted(rank.pid for rank in lost.lost) == [101, 102]


async def test_a_rank_that_failed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else is gone or silent: then it is the one that failed, not its neighbour."""
    monkeypatch.setattr(module, "DOUBT_SECONDS", 0.2)
    async with scripted(1, 2) as engine:
        await formed(engine)
        engine.ranks[0].report(4, error="no data", peer_lost=True)
        engine.ranks[1].report(4, error="CUDA error")
        lost = await verdict(engine)
        assert str(lost).endswith("failed: CUDA error")
        assert fenced_pids(engine) == [101]


async def test_nobody_is_killed_for_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its data plane broke and no rank is missing: form again, kill nobody."""
    monkeypatch.setattr(module, "DOUBT_SECONDS", 0.2)
    async with scripted(1, 2) as engine:
        await formed(engine)
        engine.ranks[0].report(4, error="no data", peer_lost=True)
        lost = await verdict(engine)
        assert "stage 0 rank 0 of engine-0" in str(lost)
        assert fenced_pids(engine) == []


async def test_a_supervisor_that_dies_with_its_rank() -> None:
    async with scripted(1, 2) as engine:
        await formed(engine)
        watching = asyncio.create_task(verdict(engine))
        await engine.pods[1].server.stop(None)
        engine.ranks[1].end(grpc.StatusCode.UNAVAILABLE)
        lost = await watching
        assert "stage 1 rank 0" in str(lost)
        assert "has ended, and so has its supervisor" in str(lost)


async def test_a_rank_that_is_frozen_when_it_is_greeted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orca_scheduler.rank.DIAL_SECONDS", 0.5)
    async with scripted(1, 2) as engine:
        engine.ranks[1].frozen = True
        greeting = asyncio.create_task(engine.master.greet())
        lost = await verdict(engine)
        greeting.cancel()
        assert "stage 1 rank 0" in str(lost)
        assert "listens and does not answer" in str(lost)
        assert fenced_pids(engine) == [101]
        engine.ranks[1].frozen = False


def test_places() -> None:
    assert places(3, 2, 3)[4] == Place(stage=1, tensor_rank=1, pod=1, local_rank=1)
    assert places(2, 2, 1)[3] == Place(stage=1, tensor_rank=1, pod=3, local_rank=0)


def test_gpus_per_pod() -> None:
    settings = SchedulerSettings(workers="a:1", tp=4, pp=2, gpus_per_pod=2)
    assert settings.pods_per_engine == 4
    with pytest.raises(ValidationError, match="gpus_per_pod: 3 is no divisor of tp, 4"):
        SchedulerSettings(workers="a:1", tp=4, pp=2, gpus_per_pod=3)


def test_a_rank_that_said_why_before_it_ended() -> None:
    place, other = Place(0, 0, 0, 0), Place(1, 0, 1, 0)
    signs = [
        Sign(other, Kind.PEER_LOST, "lost a neighbour"),
        Sign(place, Kind.FAILED, "failed: x"),
        Sign(place, Kind.GONE, "has ended"),
    ]
    assert fenced(signs) == [Sign(place, Kind.FAILED, "failed: x")]
