"""What the terminal shows of the end of `orca serve`: nothing of a start that was refused, the bound of a drain."""

import asyncio
import io
import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from checkpoints import make_timed
from rich.console import Console

from orca_cli import serving
from orca_client import AsyncOrcaClient
from orca_common.errors import Aborted, FailedPrecondition
from orca_local.settings import ServeSettings
from orca_worker.processes.beginning import begin


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is written to the terminal, 80 columns wide."""
    terminal = io.StringIO()
    monkeypatch.setattr(serving, "console", Console(file=terminal, force_terminal=True, width=80, highlight=False))
    return terminal


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoints have as long as they want to tell how many streams they have: a busy machine needs more than 1 s."""
    monkeypatch.setattr("orca_local.stack.COUNT_SECONDS", 60.0)


async def test_a_refused_start_drains_nothing(tmp_path: Path, shown: io.StringIO) -> None:
    """ "draining" flashed up, though nothing was started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ServeSettings.load([f"--port={taken.getsockname()[1]}", "--http-port=0", f"--run-dir={tmp_path}"])
        with pytest.raises(FailedPrecondition, match=r"^--port: cannot listen on "):
            await serving.serve(settings)
    assert "starting" in shown.getvalue()
    assert "draining" not in shown.getvalue()


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork servers that no process of the tests keeps warm: all children of a stack are its own."""
    monkeypatch.setattr("orca_local.stack.begin", begin)


@pytest.mark.usefixtures("cold")
async def test_a_second_ctrl_c(tmp_path: Path, shown: io.StringIO) -> None:
    """The drain tells its bound. An end that was forced is an error, and leaves nothing running."""
    model = make_timed(tmp_path / "model", seconds=0.01)
    arguments = [f"--model={model}", f"--run-dir={tmp_path / 'run'}", "--port=0", "--http-port=0", "--drain-seconds=50"]
    before = set(psutil.Process().children(recursive=True))
    serve = asyncio.create_task(serving.serve(ServeSettings.load(arguments)))
    await until(lambda: "redis at " in shown.getvalue())
    (redis,) = re.findall(r"redis at \S+ \(pid (\d+)\)", shown.getvalue())
    os.kill(int(redis), signal.SIGSTOP)  # the end waits for it
    serve.cancel()
    await until(lambda: "Ctrl-C again kills everything" in shown.getvalue())
    started = set(psutil.Process().children(recursive=True)) - before
    serve.cancel()
    with pytest.raises(Aborted, match=f"^killed before all was drained; logs and journals: {tmp_path / 'run'}$"):
        await serve
    assert not psutil.pid_exists(int(redis)), "it has ended before the command does"
    assert "nothing is left running" not in shown.getvalue()
    _, alive = await asyncio.to_thread(psutil.wait_procs, started, timeout=60)
    assert not alive
    log = (tmp_path / "run/logs/serve.log").read_text().splitlines()
    told = [(line["level"], line["event"]) for line in map(json.loads, log)]
    assert told[-2:] == [("INFO", "draining, 60 s at most"), ("WARNING", "killed before all was drained")]


@pytest.mark.usefixtures("cold", "counting")
async def test_a_second_ctrl_c_while_streams_are_counted(tmp_path: Path, shown: io.StringIO) -> None:
    """No process that it kills is started again, and all have ended before the command does."""
    model = make_timed(tmp_path / "model", seconds=0.01)
    arguments = [f"--model={model}", f"--run-dir={tmp_path / 'run'}", "--port=0", "--http-port=0"]
    before = set(psutil.Process().children())
    serve = asyncio.create_task(serving.serve(ServeSettings.load(arguments)))
    await until(lambda: "try: " in shown.getvalue())
    (endpoint,) = re.findall(r"endpoint-0 at .*\(pid (\d+)\)", shown.getvalue())
    os.kill(int(endpoint), signal.SIGSTOP)  # it does not say how many streams it has
    started = set(psutil.Process().children()) - before
    serve.cancel()
    await until(lambda: "Ctrl-C again kills everything" in shown.getvalue())
    serve.cancel()
    with pytest.raises(Aborted):
        await serve
    assert not [one for one in started if psutil.pid_exists(one.pid)]
    assert "draining" not in shown.getvalue(), "they were still counted"
    assert "starting it again" not in shown.getvalue()


@pytest.mark.usefixtures("counting")
async def test_streams_that_are_cut_off(tmp_path: Path, shown: io.StringIO) -> None:
    """Only the endpoint's log told of them."""
    model = make_timed(tmp_path / "model", seconds=0.05, positions=4096)
    arguments = [
        f"--model={model}",
        f"--run-dir={tmp_path / 'run'}",
        "--port=0",
        "--http-port=0",
        "--drain-seconds=0.1",
    ]
    serve = asyncio.create_task(serving.serve(ServeSettings.load(arguments)))
    await until(lambda: "try: " in shown.getvalue())
    (address,) = re.findall(r"gRPC (\S+) ", shown.getvalue())
    async with AsyncOrcaClient([address]) as client:
        events = client.generate([1, 2, 3], max_new_tokens=4000, ignore_eos=True)
        await anext(events)
        serve.cancel()
        await asyncio.gather(serve, return_exceptions=True)
    assert "draining 1 stream, 10.1 s at most" in shown.getvalue()
    assert "1 stream was cut off: they did not end within 0.1 s (drain_seconds)" in shown.getvalue()
