"""grpc.aio's thread waits while the loop runs."""

import logging
import os
import threading

import pytest
from endpoint.harness import World

from orca_endpoint import poller


def test_a_thread_that_is_not_found_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of grpcio may call it otherwise: the endpoint then serves as before."""
    monkeypatch.setattr(poller, "NAME", "a name of tomorrow")
    with caplog.at_level(logging.INFO):
        poller.calm_poller()
    [line] = caplog.records
    assert "no thread of grpc.aio was found" in line.message


async def test_the_thread_that_hears_of_written_messages_is_a_batch_thread(orca: World) -> None:
    found = [thread.native_id for thread in threading.enumerate() if poller.NAME in thread.name]
    assert [os.sched_getscheduler(number) for number in found if number is not None] == [os.SCHED_BATCH]
