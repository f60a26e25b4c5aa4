"""The life of a service and its status port, on real loops, ports and signals."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from loops import OwnThreadLoop

from orca_common import service
from orca_common.errors import Unavailable
from orca_common.listening import cannot_listen, listen, reserve_port


def test_the_pulse_is_asked_from_another_thread() -> None:
    async def ask() -> bool:
        return await asyncio.to_thread(service.LoopPulse().alive)

    with asyncio.Runner(loop_factory=OwnThreadLoop) as runner:
        assert runner.run(ask())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_status_port(host: str) -> None:
    status = service.StatusPort(host, 0, lambda: "not yet", lambda: True)
    try:
        at = f"[{host}]" if ":" in host else host
        with urllib.request.urlopen(f"http://{at}:{status.port}/livez") as answer:
            assert json.load(answer) == {"ok": True, "reason": None}
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://{at}:{status.port}/elsewhere")
        with refused.value as told:
            assert (told.code, told.read()) == (404, b"404 Not Found\n"), "no page of HTML"
        taken = rf"^status_port: cannot listen on .*:{status.port} \(Address already in use\); 0 takes a free one$"
        with pytest.raises(Unavailable, match=taken):
            service.StatusPort(host, status.port, lambda: None, lambda: True)
    finally:
        status.close()


def test_a_host_that_has_no_address() -> None:
    """Another port would not help."""
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    sentence = "host: cannot listen on nowhere (Name or service not known); give an address of this machine"
    assert str(cannot_listen("port", "nowhere", 50051, unknown)) == sentence


def test_streams_of_a_status_port_are_bounded_and_end_with_it() -> None:
    """Each reader begins anew, nothing is sent while there is nothing new, and a service waits for no reader."""

    def reader() -> Callable[[], bytes]:
        lines = [b"", b"second\n", b"first\n"]
        return lambda: lines.pop() if lines else b""

    status = service.StatusPort("127.0.0.1", 0, lambda: None, lambda: True, streams={"/live": reader})
    url = f"http://127.0.0.1:{status.port}/live"
    with contextlib.ExitStack() as opened:
        readers = [opened.enter_context(urllib.request.urlopen(url)) for _ in range(service.MOST_STREAMS)]
        assert [[one.readline(), one.readline()] for one in readers] == [[b"first\n", b"second\n"]] * len(readers)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(url)
        status.close()
        assert [one.read() for one in readers] == [b""] * len(readers)


class Blocked:
    """A service whose start waits in a thread for what never comes."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    async def start(self) -> dict[str, str]:
        def wait() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            self._gate.wait()

        await service.in_thread(wait)
        return {}

    async def run(self) -> None: ...
    async def drain(self) -> None: ...
    async def close(self) -> None: ...


def test_a_signal_ends_a_start_that_blocks() -> None:
    gate = threading.Event()
    try:
        service.run(lambda: service.serve(lambda: Blocked(gate)))  # returns
    finally:
        gate.set()


def test_the_error_of_a_lookup_that_was_given_up_is_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        for error in (socket.gaierror(socket.EAI_AGAIN, "no DNS"), ValueError("ours")):
            asyncio.get_running_loop().create_future().set_exception(error)
        gc.collect()

    service.run(main)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["ours"]


def test_what_a_thread_returns_and_raises() -> None:
    async def work() -> None:
        assert await service.in_thread(lambda: 1) == 1
        with pytest.raises(ZeroDivisionError):
            await service.in_thread(lambda: 1 // 0)

    asyncio.run(work())


def test_a_reserved_port_is_for_children_alone() -> None:
    """Those share it by SO_REUSEPORT. Most servers set SO_REUSEADDR, and must not listen there."""
    with reserve_port("port", "127.0.0.1") as reserved:
        address = reserved.getsockname()
        with pytest.raises(OSError, match="in use"):
            socket.create_server(address)
        socket.create_server(address, reuse_port=True).close()


async def test_an_accepted_connection_sends_without_delay() -> None:
    """On any event loop: an answer of two segments would wait 40 ms for the client's delayed acknowledgement."""
    accepted = asyncio.get_running_loop().create_future()
    listening = listen("port", "127.0.0.1", 0)
    server = await asyncio.start_server(lambda _, writer: accepted.set_result(writer), sock=listening)
    async with server:
        _, client = await asyncio.open_connection(*listening.getsockname())
        writer = await accepted
        assert writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for one in (writer, client):
            one.close()
            await one.wait_closed()
