"""Process groups: whoever waits in them can be woken, and can join the next epoch in the same process."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from orca_common.errors import FailedPrecondition
from orca_lab.shapes import Shape, gpt
from orca_lab.shards import INITIATION, Case, formed
from orca_worker.data_plane.plane import DataPlane, Loopback, PeerLost
from orca_worker.data_plane.rendezvous import Rendezvous
from orca_worker.iteration.model import Output
from orca_worker.partition import SINGLE, Place

RENDEZVOUS = Rendezvous("127.0.0.1", torch.device("cpu"), returns_encoded=True)
Pool = ThreadPoolExecutor


def planes(tp: int, pp: int, epoch: int, port: int) -> list[DataPlane]:
    places = [Place(tp, pp, stage, rank) for stage in range(pp) for rank in range(tp)]
    return [RENDEZVOUS.plane(place, epoch, f"127.0.0.1:{port}", True) for place in places]


def join(pool: Pool, joining: list[DataPlane]) -> None:
    for joined in [pool.submit(plane.join) for plane in joining]:
        joined.result(20)


@pytest.fixture
def pool() -> Pool:
    return ThreadPoolExecutor(8)


def test_a_single_rank_has_no_process_groups() -> None:
    plane = RENDEZVOUS.plane(SINGLE, 1, "", True)
    assert isinstance(plane, Loopback)
    x = torch.ones(3)
    assert plane.all_reduce(x) is x
    with pytest.raises(FailedPrecondition, match="needs the address of a store"):
        RENDEZVOUS.plane(Place(2, 1), 1, "", True)


def test_a_store_listens_on_its_own_address_alone() -> None:
    """TCPStore itself would listen on all interfaces."""
    for host in ("127.0.0.1", "::1"):
        before = listening()
        store = Rendezvous("worker-0.example", torch.device("cpu"), listen_on=host).open_store()
        assert listening() - before == {(host, store.port)}


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def test_the_threads_of_groups_do_not_preempt(pool: Pool) -> None:
    """A rank's loop would spin for the lock of a thread whose core the peer's loop has just taken."""
    before = threads()
    store = RENDEZVOUS.open_store()
    both = planes(2, 1, 1, store.port)
    join(pool, both)
    of_gloo = [thread for thread in threads() - before if "gloo" in name_of(thread)]
    assert len(of_gloo) >= 4, "a loop and a queue of each rank"
    assert {os.sched_getscheduler(thread) for thread in of_gloo} == {os.SCHED_BATCH}
    joined = pool.submit(os.sched_getscheduler, 0)
    assert joined.result(20) == os.SCHED_OTHER
    for plane in both:
        plane.abort("the end")


def threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def name_of(thread: int) -> str:
    """Empty for one that has ended."""
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text()
    except OSError:  # ESRCH, if it ended after the file was opened
        return ""


def test_operations(pool: Pool) -> None:
    store = RENDEZVOUS.open_store()
    all_four = planes(2, 2, 1, store.port)
    join(pool, all_four)
    first, second = all_four[:2], all_four[2:]
    sums = [pool.submit(plane.all_reduce, torch.full((2, 3), 1.0 + i)) for i, plane in enumerate(first)]
    assert all(torch.equal(one.result(20), torch.full((2, 3), 3.0)) for one in sums)
    for i in range(4):  # nobody waits for the sends of what may be in flight
        for rank, plane in enumerate(first):
            plane.send(torch.tensor([10.0 * i + rank]))
    for i in range(4):
        for rank, plane in enumerate(second):
            x = plane.receive((1,), torch.float32)
            assert x is not None
            assert x.item() == 10 * i + rank
    assert all(plane.receive((1,), torch.float32) is None for plane in first)
    shards = torch.arange(10.0).view(2, 5).split([3, 2], 1)
    parts = [pool.submit(plane.gather, x, [3, 2]) for plane, x in zip(second, shards, strict=True)]
    logits, nothing = [part.result(20) for part in parts]
    assert nothing is None
    assert logits is not None
    assert torch.equal(logits, torch.arange(10.0).view(2, 5))
    for rank, plane in enumerate(second):  # the output of two iterations' encoders
        plane.return_encoded(torch.tensor([[20.0 + rank, 0.0]]))
        plane.return_encoded(torch.tensor([[30.0 + rank]]))
    assert [plane.receive_encoded((1, 2), torch.float32).tolist() for plane in first] == [[[20, 0]], [[21, 0]]]
    assert [plane.receive_encoded((1, 1), torch.float32).tolist() for plane in first] == [[[30]], [[31]]]
    for plane in first:
        plane.expect_tokens(3)
        plane.expect_tokens(1)
    second[0].send_tokens([4, 5, 6])
    second[0].send_tokens(torch.tensor([7]))  # as a device has them
    assert [plane.receive_tokens().tolist() for plane in first] == [[4, 5, 6]] * 2
    assert [plane.receive_tokens().tolist() for plane in first] == [[7]] * 2
    second[0].expect((2,), torch.float32)  # begun before it is sent
    first[0].send(torch.tensor([8.0, 9.0]))
    x = second[0].receive((2,), torch.float32)
    assert x is not None
    assert x.tolist() == [8, 9]
    assert all(plane.waited for plane in all_four), "each rank has waited for another one"
    waited = [second[1].waited]
    for _ in range(9):
        first[1].send(x)
        assert second[1].receive((2,), torch.float32) is not None
        waited.append(second[1].waited)
    assert waited == sorted(set(waited)), "all of it counts, not that of the last receive alone"
    for plane in all_four:
        plane.abort("the end")


def test_a_sum_does_not_depend_on_the_rest_of_the_batch(pool: Pool) -> None:
    """Of three numbers there are several orders of addition. A row must get the same one alone and among others."""
    store = RENDEZVOUS.open_store()
    ranks = planes(3, 1, 1, store.port)
    join(pool, ranks)
    torch.manual_seed(0)
    x = torch.randn(3, 50, 24) * 10 ** torch.randn(3, 50, 24)

    def total(rows: slice) -> torch.Tensor:
        sums = [pool.submit(plane.all_reduce, part[rows].clone()) for plane, part in zip(ranks, x, strict=True)]
        of_each = [one.result(20) for one in sums]
        assert all(torch.equal(one, of_each[0]) for one in of_each)
        return of_each[0]

    together = total(slice(0, 50))
    for row in range(0, 50, 7):
        assert torch.equal(total(slice(row, row + 1))[0], together[row])
    for plane in ranks:
        plane.abort("the end")


@pytest.mark.parametrize(
    ("rank", "wait"),
    [
        (2, lambda plane: plane.all_reduce(torch.ones(2))),
        (2, lambda plane: plane.receive((2,), torch.float32)),
        (2, lambda plane: plane.gather(torch.ones(2, 1), [1, 1])),
        (0, lambda plane: plane.receive_encoded((2,), torch.float32)),
    ],
    ids=["all_reduce", "receive", "gather", "receive_encoded"],
)
def test_an_abort_wakes_who_waits_for_a_silent_peer(pool: Pool, rank: int, wait: Callable[[DataPlane], object]) -> None:
    """The peers have joined and send nothing, like frozen processes. Then the next epoch works in this process."""
    store = RENDEZVOUS.open_store()
    silent = planes(2, 2, 1, store.port)
    join(pool, silent)
    plane = silent[rank]
    waiting = pool.submit(wait, plane)
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    plane.abort("epoch 2 is being formed")
    with pytest.raises(PeerLost, match="epoch 2 is being formed"):
        waiting.result(5)
    with pytest.raises(PeerLost, match="epoch 2 is being formed"):
        plane.check()
    again = planes(2, 2, 2, store.port)
    join(pool, again)
    again[0].send(torch.ones(2))
    assert again[2].receive((2,), torch.float32) is not None
    for one in silent + again:
        one.abort("the end")


def test_an_abort_wakes_who_joins(pool: Pool) -> None:
    store = RENDEZVOUS.open_store()
    plane = planes(2, 1, 1, store.port)[0]
    joining = pool.submit(plane.join)
    with pytest.raises(TimeoutError):
        joining.result(0.05)
    plane.abort("epoch 2 is being formed")
    with pytest.raises(PeerLost, match="epoch 2 is being formed"):
        joining.result(5)
    connecting = next(thread for thread in threading.enumerate() if thread.name == "join-1")
    del store  # ends the thread: an interpreter that ends under a thread in torch aborts the process
    connecting.join(60)
    assert not connecting.is_alive()


ENDS_AT_ONCE = """
from concurrent.futures import ThreadPoolExecutor

import torch

from orca_worker.data_plane.rendezvous import Rendezvous
from orca_worker.partition import Place

rendezvous = Rendezvous("127.0.0.1", torch.device("cpu"))
store = rendezvous.open_store()
both = [rendezvous.plane(Place(2, 1, 0, rank), 1, f"127.0.0.1:{store.port}", False) for rank in range(2)]
for joined in [ThreadPoolExecutor(2).submit(plane.join) for plane in both]:
    joined.result()
for plane in both:
    plane.abort("the end")
"""


def test_a_process_may_end_while_it_leaves_its_groups() -> None:
    """An interpreter that ends under a thread in torch aborts the process (status -6)."""
    ended = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_peer_that_leaves_is_noticed_by_all(pool: Pool) -> None:
    """Three stages: the first leaves, so the second loses it, and then the third loses the second."""
    store = RENDEZVOUS.open_store()
    stages = planes(1, 3, 1, store.port)
    join(pool, stages)

    def receive(plane: DataPlane) -> object:
        return plane.receive((1,), torch.float32)

    waiting: list[Future[object]] = [pool.submit(receive, plane) for plane in stages[1:]]
    stages[0].abort("leaving")
    for one in waiting:
        with pytest.raises(PeerLost, match="upstream operation failed"):
            one.result(5)


def test_what_an_abort_left_is_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU an aborted operation raises nothing and leaves garbage in its memory."""
    shape = Shape("tiny", gpt(1, 8, 2, positions=48, vocab_size=97), 2, 1)
    case = Case(INITIATION, 1, 4)
    with formed(shape, Place(2, 1), "float32", torch.device("cpu"), case.slots) as stage:
        assert len(stage.run(case.message(97)).token_ids) == 1
        model = stage._model
        assert model is not None
        run = model.run

        def aborted(*arguments: Any) -> Output:
            output = run(*arguments)
            stage._plane.abort("a peer is gone")
            return output

        monkeypatch.setattr(model, "run", aborted)
        with pytest.raises(PeerLost, match="a peer is gone"):
            stage.run(case.message(97))
