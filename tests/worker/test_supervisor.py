"""The supervisor and its ranks as processes: which come back, which are killed, and that none is left in the end."""

import asyncio
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import psutil
import pytest
from checkpoints import make_gpt2, make_timed
from iterations import begins, iteration_of
from properties import first
from warm_forks import begin_warm

from orca.v1 import worker_pb2 as pb
from orca.v1 import worker_pb2_grpc
from orca_common.protocol import PROTOCOL
from orca_local.pod import ServiceProcess
from orca_worker.machine import DRIVER
from orca_worker.pod.supervisor import RankProcess, Supervisor
from orca_worker.processes.beginning import POD, Begun, begin, pair
from orca_worker.processes.forks import Forked, ForkServer, ForkServerLost
from orca_worker.processes.process import why_ended
from orca_worker.settings import RankSettings, SupervisorSettings

OPTIONS = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]


class Pod:
    """A supervisor's process, and a stream of its table of ranks."""

    def __init__(self, process: asyncio.subprocess.Process | ServiceProcess, address: str, status: str) -> None:
        self.process, self.status = process, status
        self.channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self.stub = worker_pb2_grpc.SupervisorStub(self.channel)
        self.watch: Any = self.stub.Watch(pb.WatchRequest())

    async def until(self, condition: Callable[[list[pb.RankEntry]], bool]) -> list[pb.RankEntry]:
        """The first table that fulfils a condition."""
        async with asyncio.timeout(60):
            while not condition(ranks := list((await self.watch.read()).ranks)):
                pass
        return ranks

    async def running(self) -> list[pb.RankEntry]:
        return await self.until(lambda ranks: all(rank.pid for rank in ranks))

    async def fork_server(self, *others: int) -> int:
        """The pid of the supervisor's child beside these others, once it is the only one: it may be replaced."""
        async with asyncio.timeout(60):
            while len(found := self.children() - {*others}) != 1:
                await asyncio.sleep(0.02)
        return found.pop()

    def children(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    async def hello(self, rank: pb.RankEntry) -> pb.HelloResponse:
        """Says Hello to a rank, which may still be starting."""
        async with grpc.aio.insecure_channel(rank.address, options=OPTIONS) as channel:
            request = pb.HelloRequest(protocol=PROTOCOL, engine="e-0", term=1)
            stub = worker_pb2_grpc.ControllerStub(channel)
            return await stub.Hello(request, wait_for_ready=True, timeout=60)

    def ready(self) -> str | None:
        try:
            with urllib.request.urlopen(f"http://{self.status}/readyz") as answer:
                return json.load(answer)["reason"]
        except urllib.error.HTTPError as error:
            with error:
                return json.load(error)["reason"]


async def make_member(channel: grpc.aio.Channel) -> worker_pb2_grpc.ControllerStub:
    """Forms an engine of this one rank under epoch 1."""
    stub = worker_pb2_grpc.ControllerStub(channel)
    await stub.Form(
        pb.FormRequest(term=1, epoch=1, formation=pb.Formation(tensor_parallel=1, pipeline_parallel=1, block_size=16))
    )
    await stub.Allocate(pb.AllocateRequest(term=1, epoch=1, slots=160))
    return stub


@asynccontextmanager
async def running(
    folder: Path, *how: str, environment: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[Pod]:
    """Runs a supervisor. `how`: other arguments of Python to start it with. `environment`: besides this process's.

    Without either it is forked, as by `orca serve`: that takes a tenth of the processor time of a start.
    """
    of_orca = {"ORCA_MODEL": str(folder)} | {f"ORCA_{n.upper()}": str(v) for n, v in settings.items()}
    process: asyncio.subprocess.Process | ServiceProcess
    if how or environment:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(how or ("-m", "orca_worker")),
            env=os.environ | of_orca | (environment or {}),
            stdout=asyncio.subprocess.PIPE,
        )
    else:
        forks = ForkServer(begin_warm(POD), [], "INFO")
        process = ServiceProcess(await forks.fork(), of_orca)
        forks.kill()
        await forks.ended
    try:
        assert process.stdout is not None
        pod = Pod(process, **json.loads(await process.stdout.readline()))
        yield pod
        pod.watch.cancel()
        await pod.channel.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def make_tiny(folder: Path) -> Path:
    """A model that needs torch."""
    return make_gpt2(folder / "model", heads=1, layers=1, hidden=4, vocab=97, positions=8, seed=0)


def of_torch(pid: int) -> list[str]:
    """Where the code of torch lies in a process."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in maps if "libtorch_cpu" in line and " r-xp " in line]


async def gone(pid: int) -> None:
    """Waits until a process has ended."""
    try:
        await asyncio.to_thread(psutil.Process(pid).wait, 20)
    except psutil.NoSuchProcess:
        return


async def test_a_killed_rank_comes_back_at_its_address(tmp_path: Path) -> None:
    async with running(make_timed(tmp_path), ranks=2) as pod:
        before = await pod.running()
        assert len({rank.address for rank in before}) == 2
        hellos = [await pod.hello(rank) for rank in before]
        assert [hello.pid for hello in hellos] == [rank.pid for rank in before]
        os.kill(before[1].pid, signal.SIGKILL)
        down = await pod.until(lambda ranks: ranks[1].pid == 0)
        assert down[1].restarts == 1
        after = await pod.running()
        assert after[0] == before[0]
        assert after[1].address == before[1].address
        assert after[1].pid != before[1].pid
        again = await pod.hello(after[1])
        assert again.pid == after[1].pid
        assert again.incarnation != hellos[1].incarnation


@pytest.mark.parametrize(
    ("code", "out_of_memory", "why"),
    [
        (-signal.SIGKILL, True, "its process was killed, because the pod has reached its memory limit"),
        (-signal.SIGKILL, False, "its process ended with status -9"),
        (1, True, "its process ended with status 1"),
    ],
)
def test_why_a_rank_ended(code: int, out_of_memory: bool, why: str) -> None:
    """What the kernel counts comes from a real pod in tests/kubernetes/test_values.py."""
    assert why_ended(code, out_of_memory) == why


# A supervisor that reads the kernel's count of processes killed for want of memory from a file of the test.
COUNTED = """
import sys
from pathlib import Path
from orca_worker import machine
from orca_worker.pod.supervisor import main
machine.COUNTERS = (Path(sys.argv.pop(1)),)
main()
"""


async def test_a_pod_ends_when_memory_was_too_little_from_the_beginning(tmp_path: Path) -> None:
    """Kubernetes then says why. A pod that has been ready replaces the rank: requests have made it need more."""
    count = tmp_path / "memory.events"
    count.write_text("oom 3\noom_kill 3\n")
    async with running(make_timed(tmp_path), "-c", COUNTED, str(count)) as pod:
        (rank,) = await pod.running()
        await pod.hello(rank)
        async with grpc.aio.insecure_channel(rank.address) as channel:
            lane: Any = (await make_member(channel)).Run()
            await lane.write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=1, epoch=1)))
            await lane.read()
            assert await asyncio.to_thread(pod.ready) is None
        count.write_text("oom 4\noom_kill 4\n")
        os.kill(rank.pid, signal.SIGKILL)
        await pod.until(lambda ranks: ranks[0].pid == 0)
        assert (await pod.running())[0].restarts == 1
    async with running(make_timed(tmp_path), "-c", COUNTED, str(count)) as pod:
        (rank,) = await pod.running()
        os.kill(rank.pid, signal.SIGKILL)  # what was counted before the pod began says nothing about it
        await pod.until(lambda ranks: ranks[0].pid == 0)
        (rank,) = await pod.running()
        count.write_text("oom 5\noom_kill 5\n")
        os.kill(rank.pid, signal.SIGKILL)
        assert await asyncio.wait_for(pod.process.wait(), 60) == 1


async def test_fence_kills_that_process_and_no_other(tmp_path: Path) -> None:
    async with running(make_timed(tmp_path)) as pod:
        (rank,) = await pod.running()
        await pod.hello(rank)
        os.kill(rank.pid, signal.SIGSTOP)  # frozen: it would not hear SIGTERM
        for pid in (rank.pid + 1, 0):
            request = pb.FenceRequest(local_rank=0, pid=pid, verdict="a test")
            assert not (await pod.stub.Fence(request)).killed
        with pytest.raises(grpc.aio.AioRpcError, match="is 3 of 1 ranks"):
            await pod.stub.Fence(pb.FenceRequest(local_rank=3, pid=1, verdict="a test"))
        assert (await pod.stub.Fence(pb.FenceRequest(local_rank=0, pid=rank.pid, verdict="a test"))).killed
        await pod.until(lambda ranks: ranks[0].pid == 0)
        (successor,) = await pod.running()
        assert (await pod.hello(successor)).pid == successor.pid
        assert not (await pod.stub.Fence(pb.FenceRequest(local_rank=0, pid=rank.pid, verdict="late"))).killed


async def test_the_log_says_which_rank_was_fenced_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    supervisor: Any = Supervisor(SupervisorSettings(model=str(make_timed(tmp_path)), ranks=2), cast("Any", None))
    ended, signals = asyncio.get_running_loop().create_future(), list[int]()
    supervisor._ranks[1].process = SimpleNamespace(pid=4711, ended=ended, send_signal=signals.append)
    try:
        request = pb.FenceRequest(local_rank=1, pid=4711, verdict="it is silent")
        answer = asyncio.create_task(supervisor.Fence(request, None))
        await asyncio.sleep(0)
        assert not answer.done(), "until the process has ended, its port takes connections"
        ended.set_result(-signal.SIGKILL)
        assert (await answer).killed
    finally:
        supervisor.close()
    assert signals == [signal.SIGKILL]
    [said] = [vars(record) for record in caplog.records if record.name == "orca_worker.pod.supervisor"]
    names = ("levelname", "msg", "args", "rank", "rank_pid")
    assert [said[name] for name in names] == ["ERROR", "rank fenced: %s", ("it is silent",), 1, 4711]


@pytest.mark.parametrize("frozen", [False, True])
async def test_sigterm_leaves_nothing(tmp_path: Path, frozen: bool) -> None:
    async with running(make_timed(tmp_path), ranks=2, drain_seconds=0.5 if frozen else 20) as pod:
        ranks = await pod.running()
        pids = [(await pod.hello(rank)).pid for rank in ranks]
        forks = await pod.fork_server(*pids)
        if frozen:
            for pid in (forks, pids[0]):
                os.kill(pid, signal.SIGSTOP)
        pod.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await pod.process.wait() == 0
        for pid in (forks, *pids):
            assert not psutil.pid_exists(pid)


async def test_ranks_are_forked_by_one_process_and_are_the_supervisors_children(tmp_path: Path) -> None:
    """What they run has been imported once, before them, by a process of one thread."""
    async with running(make_tiny(tmp_path), ranks=2, device="cpu") as pod:
        ranks = await pod.running()
        pids = [(await pod.hello(rank)).pid for rank in ranks]
        forks = await pod.fork_server(*pids)
        assert [psutil.Process(pid).ppid() for pid in pids] == 2 * [pod.process.pid]
        assert [psutil.Process(pid).name() for pid in (forks, *pids)] == ["orca-forks", "orca-rank-0", "orca-rank-1"]
        assert len(os.listdir(f"/proc/{forks}/task")) == 1
        # Their address space was the fork server's: torch lies where it lies there.
        assert [of_torch(pid) for pid in pids] == 2 * [of_torch(forks)] != [[], []]
        os.kill(pids[1], signal.SIGKILL)
        after = await pod.until(lambda ranks: ranks[1].pid not in (0, pids[1]))
        assert (await pod.hello(after[1])).pid == after[1].pid
        assert of_torch(after[1].pid) == of_torch(forks)
        assert pod.children() == {forks, pids[0], after[1].pid}


async def test_the_fork_server_does_not_start_cuda(tmp_path: Path) -> None:
    """A process that has started CUDA's driver cannot be forked for a GPU. This driver says who starts it."""
    told = tmp_path / "told"
    source = (
        "#include <stdio.h>\n#include <unistd.h>\n"
        f'int cuInit(unsigned f) {{ FILE *o = fopen("{told}", "a");'
        'fprintf(o, "%d\\n", getpid()); fclose(o); return 100; }\n'
    )
    library = tmp_path / DRIVER
    compiler = ("cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library))
    await asyncio.to_thread(subprocess.run, compiler, input=source.encode(), check=True)
    async with running(make_tiny(tmp_path), environment={"LD_LIBRARY_PATH": str(tmp_path)}) as pod:
        (rank,) = await pod.running()
        await pod.hello(rank)
        forks = await pod.fork_server(rank.pid)
        started = {int(pid) for pid in told.read_text().split()}
        assert started == {pod.process.pid, rank.pid}
        assert of_torch(forks)


async def test_a_killed_fork_server_is_replaced_and_the_ranks_do_not_notice(tmp_path: Path) -> None:
    async with running(make_timed(tmp_path), ranks=2) as pod:
        before = await pod.running()
        pids = [rank.pid for rank in before]
        forks = await pod.fork_server(*pids)
        os.kill(forks, signal.SIGKILL)
        successor = await pod.fork_server(*pids, forks)
        assert [(await pod.hello(rank)).pid for rank in before] == pids
        os.kill(pids[0], signal.SIGKILL)
        after = await pod.until(lambda ranks: ranks[0].pid not in (0, pids[0]))
        assert after[1] == before[1]
        assert (await pod.hello(after[0])).pid == after[0].pid
        assert pod.children() == {successor, after[0].pid, pids[1]}


async def test_a_rank_that_dies_with_the_fork_server_comes_back(tmp_path: Path) -> None:
    async with running(make_timed(tmp_path)) as pod:
        (rank,) = await pod.running()
        forks = await pod.fork_server(rank.pid)
        for pid in (forks, rank.pid):
            os.kill(pid, signal.SIGKILL)
        (after,) = await pod.until(lambda ranks: ranks[0].pid not in (0, rank.pid))
        assert (await pod.hello(after)).pid == after.pid


async def test_a_frozen_fork_server_is_replaced_when_it_is_needed(tmp_path: Path) -> None:
    impatient = (
        "from orca_worker.pod import supervisor; from orca_worker.processes import forks; "
        "forks.ANSWER = 0.3; supervisor.main()"
    )
    async with running(make_timed(tmp_path), "-c", impatient) as pod:
        (rank,) = await pod.running()
        forks = await pod.fork_server(rank.pid)
        os.kill(forks, signal.SIGSTOP)
        os.kill(rank.pid, signal.SIGKILL)
        (after,) = await pod.until(lambda ranks: ranks[0].pid not in (0, rank.pid))
        assert (await pod.hello(after)).pid == after.pid
        assert not psutil.pid_exists(forks)


async def test_ranks_and_fork_server_end_with_their_supervisor_even_frozen(tmp_path: Path) -> None:
    async with running(make_timed(tmp_path), ranks=2) as pod:
        pids = [(await pod.hello(rank)).pid for rank in await pod.running()]
        forks = await pod.fork_server(*pids)
        for pid in (forks, pids[0]):
            os.kill(pid, signal.SIGSTOP)
        pod.process.kill()
        async with asyncio.timeout(60):
            await pod.process.wait()
            for pid in (forks, *pids):
                await gone(pid)


async def test_the_pod_is_ready_when_its_ranks_are_members(tmp_path: Path) -> None:
    async with running(make_timed(tmp_path)) as pod:
        (rank,) = await pod.running()
        await pod.hello(rank)
        reason = await asyncio.to_thread(pod.ready)
        assert reason is not None
        assert reason.startswith("rank 0")
        async with grpc.aio.insecure_channel(rank.address) as channel:
            stub = await make_member(channel)
            assert await asyncio.to_thread(pod.ready) == "rank 0: no master holds its control lane"
            lane: Any = stub.Run()
            await lane.write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=1, epoch=1)))
            await lane.read()
            assert await asyncio.to_thread(pod.ready) is None
        while await asyncio.to_thread(pod.ready) != "rank 0: no master holds its control lane":
            await asyncio.sleep(0.02)


async def test_probes_of_a_pod_with_frozen_ranks(tmp_path: Path) -> None:
    """All ranks are asked at the same time, so the answer comes within a probe's time. None ends the supervisor.

    A rank is asked for 1.5 s: one after the other they would take 6 s.
    """
    async with running(make_timed(tmp_path), ranks=4) as pod:
        ranks = await pod.running()
        for rank in ranks:
            await pod.hello(rank)
        for rank in ranks:
            os.kill(rank.pid, signal.SIGSTOP)

        async def probe() -> None:
            with pytest.raises(urllib.error.HTTPError) as error:
                await asyncio.to_thread(urllib.request.urlopen, f"http://{pod.status}/readyz", timeout=5)
            with error.value:
                assert json.load(error.value)["reason"] in ("rank 0: timed out", "rank 0: does not answer")
            with await asyncio.to_thread(urllib.request.urlopen, f"http://{pod.status}/livez", timeout=5) as answer:
                assert answer.status == 200

        await asyncio.gather(*(probe() for _ in range(8)))  # the queues of connections of their status ports fill up
        await probe()


async def test_a_rank_that_aborts_in_an_iteration_comes_back(tmp_path: Path) -> None:
    async with running(make_timed(tmp_path, abort_on_token=66)) as pod:
        (rank,) = await pod.running()
        await pod.hello(rank)
        async with grpc.aio.insecure_channel(rank.address) as channel:
            stub = await make_member(channel)
            run: Any = stub.Run()
            for number, token in ((1, 65), (2, 66)):
                new = [begins(1, [token], [0], claim=1)]
                iteration = iteration_of(new, term=1, epoch=1, number=number)
                await run.write(pb.ControlMessage(iteration=iteration))
                if number == 1:  # the abort would overtake its report
                    assert (await run.read()).iteration.number == 1
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await run.read()
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        (successor,) = await pod.until(lambda ranks: ranks[0].restarts == 1 and ranks[0].pid != 0)
        assert (await pod.hello(successor)).pid == successor.pid


async def test_a_failed_iteration_ends_the_process_behind_its_report(tmp_path: Path) -> None:
    async with running(make_timed(tmp_path)) as pod:
        (rank,) = await pod.running()
        await pod.hello(rank)
        async with grpc.aio.insecure_channel(rank.address) as channel:
            stub = await make_member(channel)
            run: Any = stub.Run()
            iteration = iteration_of(rows=[5], starts=[1], term=1, epoch=1, number=1)
            await run.write(pb.ControlMessage(iteration=iteration))
            assert (await run.read()).iteration.error == "row 5 is not held"
        (successor,) = await pod.until(lambda ranks: ranks[0].restarts == 1 and ranks[0].pid != 0)
        assert successor.pid != rank.pid


WRONG = [
    ({"MODEL": "/nowhere"}, "orca-supervisor: ORCA_MODEL: /nowhere: there is no such folder"),
    ({"DTYPE": "float8"}, "ORCA_DTYPE: "),
    ({"RANKS": "0"}, "ORCA_RANKS: "),
]


@pytest.mark.parametrize(("settings", "sentence"), first(1, WRONG), ids=str)
async def test_a_wrong_setting_stops_the_start_with_a_sentence(
    tmp_path: Path, settings: dict[str, str], sentence: str
) -> None:
    environment = os.environ | {"ORCA_MODEL": str(make_timed(tmp_path))} | {f"ORCA_{n}": v for n, v in settings.items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "orca_worker", env=environment, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode().startswith(sentence)


@pytest.mark.parametrize(
    ("module", "setting"),
    [("orca_worker", "port"), ("orca_worker", "rank_port"), ("orca_worker.rank.app", "status_port")],
)
async def test_a_taken_port_stops_the_start_with_a_sentence(tmp_path: Path, module: str, setting: str) -> None:
    """One sentence: gRPC wrote of port in a form of its own, and rank_port was a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = os.environ | {"ORCA_MODEL": str(make_timed(tmp_path)), f"ORCA_{setting.upper()}": str(port)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, env=environment, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    sentence = f"{setting}: cannot listen on 127.0.0.1:{port} (address already in use); 0 takes a free one"
    _, line, rest = errors.decode().lower().replace("orca_", "").partition(sentence)
    assert (line, rest.strip()) == (sentence, "")
    assert errors.count(b"\n") == 1, errors


@pytest.fixture
async def forks() -> AsyncIterator[ForkServer]:
    """A fork server of this process, which imports nothing more."""
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a job in the background ignores it, as its children
    server = ForkServer(begin(), [], "INFO")
    signal.signal(signal.SIGINT, before)
    yield server
    server.kill()
    await server.ended


async def left(pid: int) -> int | None:
    """Waits until a child has ended, and leaves it to be reaped. Returns its exit status."""
    async with asyncio.timeout(60):
        while (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:  # noqa: ASYNC222
            await asyncio.sleep(0.01)
    return ended.si_status


async def test_a_process_may_end_before_it_is_told(tmp_path: Path, forks: ForkServer) -> None:
    forked = await forks.fork()
    os.kill(forked.pid, signal.SIGKILL)
    await left(forked.pid)
    process = RankProcess(forked, RankSettings(model=str(tmp_path)))
    async with asyncio.timeout(60):
        assert await process.ended == -signal.SIGKILL


async def test_a_process_without_settings_ends(forks: ForkServer) -> None:
    """As one that was forked just before the fork server died: nobody has heard of it."""
    await forget(await forks.fork())


async def forget(forked: Forked) -> None:
    """Lets a process end that waits for its settings."""
    os.close(forked.input)
    assert await left(forked.pid) == 0
    os.close(forked.output)
    os.waitpid(forked.pid, os.WNOHANG)  # noqa: ASYNC222


async def test_a_fork_leaves_no_descriptor(forks: ForkServer) -> None:
    """Neither in the fork server nor here: a rank that dies again and again would use them up."""
    gc.collect()  # descriptors of earlier tests
    await forget(await forks.fork())
    first = descriptors(forks)
    for _ in range(3):
        await forget(await forks.fork())
    async with asyncio.timeout(60):  # the fork server closes its own of a fork after that has begun
        while any(now > before for now, before in zip(descriptors(forks), first, strict=True)):
            await asyncio.sleep(0.01)


def descriptors(forks: ForkServer) -> tuple[int, int]:
    """How many the fork server has, and how many this process has."""
    return psutil.Process(forks.pid).num_fds(), psutil.Process().num_fds()


async def test_a_fork_server_goes_on_after_ctrl_c(forks: ForkServer) -> None:
    """Its supervisor ends it, after the ranks that it may still have to make."""
    await forget(await forks.fork())
    os.kill(forks.pid, signal.SIGINT)
    await forget(await forks.fork())


async def test_a_fork_server_that_has_died_says_so(forks: ForkServer) -> None:
    await forks.fork()
    forks.kill()
    with pytest.raises(ForkServerLost, match="the fork server: its process ended with status -9"):
        await forks.fork()


async def test_a_fork_server_that_cannot_be_asked_is_ended() -> None:
    """Its connection has ended, and it lives on: nothing else would tell its supervisor."""
    ours, its = pair()
    its.close()
    sleeper = os.posix_spawnp("sleep", ["sleep", "inf"], os.environ)  # noqa: ASYNC221
    forks = ForkServer(Begun(sleeper, ours), [], "INFO")
    try:
        async with asyncio.timeout(60):
            with pytest.raises(ForkServerLost, match="the fork server: its process ended with status -9"):
                await forks.fork()
    finally:
        forks.kill()
        await forks.ended


async def test_a_fork_server_that_is_killed_leaves_no_connection() -> None:
    """`orca serve` is ended by a second Ctrl-C: its loop ends before it reads that the fork server has ended."""
    ours, its = pair()
    sleeper = os.posix_spawnp("sleep", ["sleep", "inf"], os.environ)  # noqa: ASYNC221
    forks = ForkServer(Begun(sleeper, ours), [], "INFO")
    forks.kill()
    its.close()
    assert (forks.ended.done(), ours.fileno()) == (False, -1)
    await forks.ended


async def test_a_process_ends_where_many_descriptors_are_open(tmp_path: Path, forks: ForkServer) -> None:
    settings = RankSettings(model=str(make_timed(tmp_path / "model")))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    with ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1_100):
            files.callback(os.close, os.dup(sys.stderr.fileno()))
        process = RankProcess(await forks.fork(), settings)
        process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(60):
            assert await process.ended == -signal.SIGKILL
