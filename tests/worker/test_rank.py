"""A rank's process before it serves: what it imports, and how it is told which rank it is."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from checkpoints import make_gpt2, make_timed

from orca.v1 import worker_pb2 as pb
from orca.v1 import worker_pb2_grpc
from orca_common.checkpoint import read_checkpoint
from orca_common.listening import reserve_port
from orca_common.protocol import PROTOCOL
from orca_worker.rank.app import RankApp
from orca_worker.settings import RankSettings

PIPE = asyncio.subprocess.PIPE


SUPERVISED = "import os; from orca_worker.rank import app as rank; rank.main(os.getppid())"


@asynccontextmanager
async def supervised() -> AsyncIterator[asyncio.subprocess.Process]:
    """A rank whose supervisor is this process."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SUPERVISED, stdin=PIPE, stdout=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_process_becomes_the_rank_that_it_is_told(tmp_path: Path) -> None:
    with reserve_port("rank_port", "127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        async with supervised() as process:
            assert process.stdin is not None
            assert process.stdout is not None
            settings = RankSettings(model=str(make_timed(tmp_path)), port=port)
            process.stdin.write(settings.model_dump_json().encode() + b"\n")
            process.stdin.close()
            async with asyncio.timeout(60):
                address = json.loads(await process.stdout.readline())["address"]
            assert address == f"127.0.0.1:{port}"
            async with grpc.aio.insecure_channel(address) as channel:
                request = pb.HelloRequest(protocol=PROTOCOL, engine="e-0", term=1)
                assert (await worker_pb2_grpc.ControllerStub(channel).Hello(request)).pid == process.pid


async def test_a_process_that_is_told_nothing_leaves_in_silence() -> None:
    async with supervised() as process:
        async with asyncio.timeout(60):
            printed, _ = await process.communicate(b"")
        assert (process.returncode, printed) == (0, b"")


async def test_a_ranks_gpu_is_counted_from_the_pods_first(tmp_path: Path) -> None:
    folder = make_gpt2(tmp_path, heads=2, layers=1, hidden=16, vocab=97, positions=48, seed=1)
    settings = RankSettings(model=str(folder), device="cuda", first_gpu=1000, local_rank=3)
    with pytest.raises(SystemExit, match=r"^device: GPU 1003 is needed"):
        await RankApp(settings, read_checkpoint(folder)).start()


FORM = """
import sys
from orca_worker.rank import app as rank
from orca_worker.data_plane.rendezvous import Rendezvous
from orca_worker.models.families import load_model
from orca_worker.iteration.model import Compute
from orca_worker.partition import Place, SINGLE, Types
checkpoint = rank.prepare(rank.RankSettings.load())
known = set(sys.modules)
device = rank.open_device("cpu", 0)
rendezvous = Rendezvous("127.0.0.1", device)
rendezvous.plane(Place(2, 1, 0, 0), 1, f"127.0.0.1:{rendezvous.open_store().port}", False)
load_model(checkpoint, SINGLE, Types.of("float32"), device, Compute())
print(sorted(set(sys.modules) - known), "llguidance" in sys.modules)
"""
PREPARE = (
    "import sys; from orca_worker.rank import app; app.prepare(app.RankSettings.load()); print('torch' in sys.modules)"
)


def said_by(script: str, folder: Path) -> str:
    """Returns what a script prints in a process with a rank's settings, which ends with this call in any case."""
    environment = os.environ | {"ORCA_MODEL": str(folder)}
    said = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True, timeout=120)
    return said.strip()


def test_a_prepared_rank_has_nothing_left_to_import(tmp_path: Path) -> None:
    """Requests without a form cost nothing: their library comes with the first form."""
    folder = make_gpt2(tmp_path, heads=1, layers=1, hidden=4, vocab=97, positions=8, seed=0)
    assert said_by(FORM, folder) == "[] False"


def test_a_model_that_needs_no_torch_imports_none(tmp_path: Path) -> None:
    assert said_by(PREPARE, make_timed(tmp_path)) == "False"
