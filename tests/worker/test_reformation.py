"""Ranks die or freeze in the middle of a run: the others keep their processes and weights, and form again."""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from checkpoints import make_gpt2
from reference import Reference
from worker.driver import Sampled
from worker.engines import Broken, Master, Process, fork_server, processes

from orca.v1 import worker_pb2 as pb
from orca.v1 import worker_pb2_grpc
from orca_common.protocol import PROTOCOL
from orca_worker.processes.forks import ForkServer

SLOTS = 600

pytestmark = pytest.mark.asyncio(loop_scope="module")


def make_model(folder: Path) -> Path:
    return make_gpt2(folder, heads=2, layers=3, hidden=16, vocab=97, positions=48, seed=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def forks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ForkServer]:
    async with fork_server(make_model(tmp_path_factory.mktemp("forks") / "model")) as server:
        yield server


def copies(folder: Path, count: int) -> list[Path]:
    """A checkpoint folder for each rank."""
    return [Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-{i}"))) for i in range(count)]


@pytest.mark.parametrize(
    ("tp", "pp", "victim", "number"),
    [
        (1, 3, 0, signal.SIGKILL),
        (1, 3, 1, signal.SIGSTOP),
        (2, 2, 3, signal.SIGKILL),
        (2, 2, 0, signal.SIGSTOP),
    ],
)
async def test_survivors_form_again(
    tmp_path: Path, forks: ForkServer, tp: int, pp: int, victim: int, number: signal.Signals
) -> None:
    folder = make_model(tmp_path / "model")
    folders = copies(folder, tp * pp)
    survivors = [i for i in range(tp * pp) if i != victim]
    requests = [Sampled([i, 3 * i + 1, 50 - i], 12) for i in range(8)]
    async with processes(forks, folders) as ranks:
        master = Master([rank.address for rank in ranks], tp, pp, SLOTS)
        await master.form()
        for one in folders:
            (one / "model.safetensors").unlink()  # survivors must keep their weights: there are none to read
        pids = [ranks[i].pid for i in survivors]
        running = asyncio.create_task(master.run(requests))
        while master.number < 9:
            assert not running.done()
            await asyncio.sleep(0)

        ranks[victim].send(number)
        channels = [grpc.aio.insecure_channel(ranks[i].address) for i in survivors]
        stubs = [worker_pb2_grpc.ControllerStub(channel) for channel in channels]
        waiting: list[Any] = []
        if number == signal.SIGSTOP:
            # The frozen rank still holds its sockets. A new formation wakes whoever waits for that rank, and then waits
            # for it too, until a newer formation takes its place.
            master.epoch += 1
            hosted = await stubs[0].HostStore(pb.HostStoreRequest(term=1, epoch=master.epoch))
            asked = master.form_requests(hosted.address)
            waiting = [stub.Form(asked[i]) for stub, i in zip(stubs, survivors, strict=True)]
        for stub, pid in zip(stubs, pids, strict=True):  # a rank that lost its neighbours answers
            assert (await stub.Hello(pb.HelloRequest(protocol=PROTOCOL, engine="e-0", term=1))).pid == pid
        await ranks[victim].end()
        with pytest.raises(Broken):
            await running
        shutil.copy(folder / "model.safetensors", folders[victim])
        ranks[victim] = await Process(forks, folders[victim], SLOTS).start()

        master.addresses = [rank.address for rank in ranks]
        lost = sum(len(request.made) for request in requests)
        await master.form()
        for call in waiting:
            assert await call.code() == grpc.StatusCode.UNAVAILABLE
            told = f"epoch {master.epoch} is being formed"
            gone = f"the process groups of epoch {master.epoch - 1} cannot be formed"  # its store closed first
            assert (await call.details()).startswith((told, gone))
        assert 0 < lost < 8 * 12
        await master.run([request for request in requests if len(request.made) < request.new_tokens])
        assert [ranks[i].pid for i in survivors if ranks[i].running] == pids
        await master.close()
        for channel in channels:
            await channel.close()
        for rank in ranks:
            assert await rank.end(signal.SIGTERM) == 0
    reference = Reference(folder)
    for request in requests:
        assert request.made == reference.greedy(request.prompt, request.new_tokens)
