"""The pods of `orca serve` are forked, all from one process that has imported what they need."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from stacks import Running, running

from orca_local import stack as of_stack
from orca_local.child import Child
from orca_local.stack import DEMO_MODEL
from orca_worker.processes.beginning import begin

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One for all tests, whose fork servers import by themselves. Processes that a test kills are back when it ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_stack, "begin", begin)
        folder = tmp_path_factory.mktemp("forks") / "run"
        async with running(folder, DEMO_MODEL, tp=2, pp=2, endpoints=2, kv_dtype="int8") as started:
            yield started


def supervisors(stack: Running) -> list[Child]:
    return [child for child in stack.stack.children if child.role == "supervisor"]


async def test_torch_is_imported_once_on_a_machine(stack: Running) -> None:
    """Supervisors, their fork servers and their ranks are forks: each has the command line of the one that imported."""
    prompt = list(range(5))
    assert len(await stack.tokens(prompt, 8)) == 8
    imported = psutil.Process(stack.stack.fork_server).cmdline()
    for child in supervisors(stack):
        supervisor = psutil.Process(child.pid)
        assert (supervisor.ppid(), supervisor.name()) == (os.getpid(), "orca-supervisor")
        below = supervisor.children()
        assert sorted(process.name() for process in below) == ["orca-forks", "orca-rank-0", "orca-rank-1"]
        assert all(process.cmdline() == imported for process in (supervisor, *below))


async def test_fork_servers_at_rest_map_little_of_libraries(stack: Running) -> None:
    """Relocating torch's libraries maps 200 MB of them. Ranks that are forked after the unmapping begin as before."""
    pods = [psutil.Process(child.pid) for child in supervisors(stack)]
    forks = [one for pod in pods for one in pod.children() if one.name() == "orca-forks"]
    assert len(forks) == 2
    for process in (psutil.Process(stack.stack.fork_server), *forks):
        await stack.until(lambda process=process: process.memory_info().shared < 64 << 20)


async def test_a_forked_rank_keeps_keys_and_values_as_the_setting_says(stack: Running) -> None:
    assert stack.stack.computed_by.startswith("float32, keys and values in int8, kernels ")


async def test_services_are_forked_too(stack: Running) -> None:
    """One that has died is there again without the imports of a start."""
    services = [child for child in stack.stack.children if child.role in ("endpoint", "scheduler")]
    imported = {tuple(psutil.Process(child.pid).cmdline()) for child in services}
    assert len(services) == 3
    assert len(imported) == 1
    for child in services:
        before = child.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await stack.until(lambda child=child, before=before: child.pid not in (None, before))
        again, name = psutil.Process(child.pid), f"orca-{child.role}"
        await stack.until(lambda again=again, name=name: again.name() == name)
        assert again.ppid() == os.getpid()
        assert tuple(again.cmdline()) in imported
        assert os.getsid(again.pid) == again.pid, "Ctrl-C does not reach it"
        assert "Umask:\t0077" in Path(f"/proc/{again.pid}/status").read_text()
    assert len(await stack.tokens(list(range(5)), 8)) == 8


async def test_a_pod_outlives_what_forked_it_and_comes_again(stack: Running) -> None:
    come = asyncio.Event()
    stream = asyncio.create_task(stack.tokens([1, 2, 3], 100, lambda token: come.set()))
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
    assert tokens == await stack.tokens([1, 2, 3], 100)
    assert pod.pid is not None
    assert psutil.Process(pod.pid).ppid() == os.getpid()
    # They died with their supervisor. This process did not inherit them: they would stay, as zombies.
    await stack.until(lambda: not any(process.is_running() for process in below))
