"""The pods of `orca serve` are forked, all from one process that has imported what they need."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
from checkpoints import make_timed
from stacks import Running, running

from orca_local.child import Child
from orca_local.stack import DEMO_MODEL


def supervisors(stack: Running) -> list[Child]:
    return [child for child in stack.stack.children if child.role == "supervisor"]


async def test_torch_is_imported_once_on_a_machine(tmp_path: Path) -> None:
    """Supervisors, their fork servers and their ranks are forks: each has the command line of the one that imported."""
    async with running(tmp_path, DEMO_MODEL, pp=2, tp=2) as stack:
        prompt = list(range(5))
        assert len(await stack.tokens(prompt, 8)) == 8
        imported = psutil.Process(stack.stack.fork_server).cmdline()
        for child in supervisors(stack):
            supervisor = psutil.Process(child.pid)
            assert (supervisor.ppid(), supervisor.name()) == (os.getpid(), "orca-supervisor")
            below = supervisor.children()
            assert sorted(process.name() for process in below) == ["orca-forks", "orca-rank-0", "orca-rank-1"]
            assert all(process.cmdline() == imported for process in (supervisor, *below))


async def test_a_pod_outlives_what_forked_it_and_comes_again(tmp_path: Path) -> None:
    model = make_timed(tmp_path / "model", seconds=0.005)
    async with running(tmp_path / "run", model, pp=2) as stack:
        come = asyncio.Event()
        stream = asyncio.create_task(stack.tokens([1, 2, 3], 200, lambda token: come.set()))
        await come.wait()
        first = stack.stack.fork_server
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await stack.until(lambda: stack.stack.fork_server not in (None, first))
        pod = supervisors(stack)[1]
        before = pod.pid
        assert before is not None
        below = psutil.Process(before).children()
        os.kill(before, signal.SIGKILL)
        await stack.until(lambda: pod.pid not in (None, before))
        tokens = await stream
        assert tokens == await stack.tokens([1, 2, 3], 200)
        assert pod.pid is not None
        assert psutil.Process(pod.pid).ppid() == os.getpid()
        # They died with their supervisor. This process did not inherit them: they would stay, as zombies.
        await stack.until(lambda: not any(process.is_running() for process in below))
