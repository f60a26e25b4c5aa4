"""The GPU thread and its reader: it launches while tokens are read. Here a device ends its work when it is told."""

import threading
from queue import Queue
from typing import cast

import pytest
import torch

from orca.v1 import worker_pb2
from orca_common.errors import Unavailable
from orca_worker.data_plane.plane import Loopback
from orca_worker.iteration.model import Output
from orca_worker.stage.gpu_thread import GpuThread
from orca_worker.stage.stage import Launched, Stage

PATIENCE = 20  # seconds


class Work:
    """`Later` of one iteration, whose token is its number."""

    def __init__(self, number: int) -> None:
        self.tokens = torch.tensor([number])
        self.ended = threading.Event()

    def is_there(self) -> bool:
        return self.ended.is_set()

    def result(self) -> Output:
        assert self.ended.wait(PATIENCE)
        if self.tokens.item() < 0:
            raise RuntimeError("an illegal address")
        return Output(self.tokens.tolist(), [0.0])

    def fail(self) -> None:
        self.tokens.fill_(-1)
        self.ended.set()


class Device:
    """A stage that launches. Numbers from 100 on cannot be launched."""

    def __init__(self) -> None:
        self.launched: Queue[Work] = Queue()

    def launch(
        self, iteration: worker_pb2.Iteration, times: worker_pb2.StageTimes, following: worker_pb2.Iteration | None
    ) -> Launched:
        if iteration.number >= 100:
            raise ValueError("no such row")
        work = Work(iteration.number)
        self.launched.put(work)
        return Launched(Output([], [], later=work), Loopback(), times)


class Rank:
    """A GPU thread over such a device."""

    def __init__(self) -> None:
        self.device, self.reports = Device(), Queue[worker_pb2.Report]()
        self.gpu = GpuThread(cast(Stage, self.device), self.reports.put)

    def run(self, number: int) -> None:
        self.gpu.submit(worker_pb2.Iteration(epoch=1, number=number), 1)

    def launched(self) -> Work:
        return self.device.launched.get(timeout=PATIENCE)

    def report(self) -> worker_pb2.IterationReport:
        return self.reports.get(timeout=PATIENCE).iteration

    def close(self) -> None:
        self.gpu.stop()
        assert self.gpu.join(PATIENCE)


def test_the_next_iteration_is_launched_before_the_tokens_are_read() -> None:
    rank = Rank()
    rank.run(1)
    first = rank.launched()
    rank.run(2)
    second = rank.launched()  # the first has not ended
    assert rank.reports.empty()
    second.ended.set()
    first.ended.set()
    for number in (1, 2):
        report = rank.report()
        assert list(report.token_ids) == [report.number] == [number]
        assert report.times.computed >= report.times.received
    assert rank.gpu.iteration == 2
    rank.close()


def test_a_call_comes_after_all_that_was_launched() -> None:
    rank = Rank()
    rank.run(1)
    work = rank.launched()
    called = rank.gpu.call(lambda: rank.gpu.iteration)
    assert not called.done()
    work.ended.set()
    assert called.result(PATIENCE) == 1
    rank.close()


def test_a_device_that_fails_is_reported_once() -> None:
    rank = Rank()
    rank.run(1)
    rank.run(2)
    first, second = rank.launched(), rank.launched()
    first.fail()
    second.ended.set()
    assert "an illegal address" in rank.report().error
    with pytest.raises(Unavailable):
        rank.gpu.call(lambda: None).result(PATIENCE)
    assert rank.gpu.failed
    assert rank.reports.empty(), "what the device made after that counts for nothing"
    rank.close()


def test_a_token_that_no_report_can_hold() -> None:
    """The device has computed nonsense, or what was read is not its memory."""
    rank = Rank()
    rank.run(1)
    rank.run(2)
    first, second = rank.launched(), rank.launched()
    first.tokens.fill_(1 << 40)
    first.ended.set()
    second.ended.set()
    report = rank.report()
    assert "ValueError" in report.error
    assert not report.token_ids
    with pytest.raises(Unavailable):
        rank.gpu.call(lambda: None).result(PATIENCE)
    assert rank.reports.empty()
    rank.close()


def test_a_report_that_cannot_be_given_does_not_stop_the_reader() -> None:
    rank = Rank()

    def report(report: worker_pb2.Report) -> None:
        if report.iteration.number == 1:
            raise RuntimeError("Event loop is closed")
        rank.reports.put(report)

    rank.gpu._report = report
    for number in (1, 2):
        rank.run(number)
        rank.launched().ended.set()
    assert rank.report().number == 2
    assert rank.gpu.call(lambda: True).result(PATIENCE)
    rank.close()


def test_tokens_that_are_on_their_way_come_before_a_later_failure() -> None:
    rank = Rank()
    rank.run(1)
    work = rank.launched()
    rank.run(100)
    rank.run(101)  # nothing is launched any more
    work.ended.set()
    assert list(rank.report().token_ids) == [1]
    assert "no such row" in rank.report().error
    rank.close()
    assert rank.reports.empty()
