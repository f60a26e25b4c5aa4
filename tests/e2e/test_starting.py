"""`orca serve` from its first process to its last: what can never work ends the start, and the end has a bound."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from checkpoints import make_timed
from stacks import generation, running

from orca_common.errors import FailedPrecondition
from orca_local.child import Child
from orca_local.settings import ServeSettings
from orca_local.stack import DEMO_MODEL, Stack


def mode(path: Path) -> int:
    """0 for a file that has another name by now, as what replaces one at once has."""
    with suppress(FileNotFoundError):
        return path.stat().st_mode
    return 0


async def refusal(run_dir: Path, model: Path, **settings: object) -> str:
    """Why a stack does not start. All of its processes have ended then."""
    stack = Stack(ServeSettings.load(model=str(model), port=0, http_port=0, **settings), run_dir, lambda line: None)
    try:
        with pytest.raises(FailedPrecondition) as raised:
            async with asyncio.timeout(120):
                await stack.start()
    finally:
        await stack.stop()
    return str(raised.value)


async def test_a_rank_that_cannot_work(tmp_path: Path) -> None:
    """The sentence was in the rank's log alone, and the rank was started again for ever."""
    sentence = await refusal(tmp_path, DEMO_MODEL, device="cpu", dtype="float16")
    assert sentence == "rank 0: dtype: on a CPU the weights are bfloat16 or float32, not float16"


async def test_a_start_that_takes_too_long(tmp_path: Path) -> None:
    model = make_timed(tmp_path / "model", seconds=0.01)
    sentence = await refusal(tmp_path / "run", model, start_timeout=0.2)
    assert sentence.startswith("not ready within 0.2 s (start_timeout)")


async def test_a_run_that_is_ready_has_told_of_its_ranks(tmp_path: Path) -> None:
    """On a busy machine `processes.json` had the ranks some milliseconds later."""
    model, heard = make_timed(tmp_path / "model", seconds=0.01), asyncio.Event()

    class Late(Stack):
        async def _watch_ranks(self, ordinal: int, supervisor: Child) -> None:
            await heard.wait()
            await super()._watch_ranks(ordinal, supervisor)

    def say(sentence: str) -> None:
        if sentence in ("ready", "waiting: supervisor-0 has not told of its ranks yet"):
            heard.set()

    settings = ServeSettings.load(model=str(model), port=0, http_port=0, device="cpu")
    stack = Late(settings, tmp_path / "run", say)
    try:
        async with asyncio.timeout(120):
            await stack.start()
        rows = json.loads((tmp_path / "run/processes.json").read_text())
        assert [row["rank"] for row in rows if row["role"] == "rank"] == [0]
    finally:
        await stack.stop()


def test_wrong_weights_and_foreign_modules(tmp_path: Path) -> None:
    """The command itself, in a folder whose redis.py is not Redis's: status 1 and one sentence, nothing else."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"n_layer": config["n_layer"] + 1}))
    for module in ("redis", "grpc", "json"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('not this one')")
    orca = Path(sys.executable).parent / "orca"
    command = [str(orca), "serve", "--port", "0", "--http-port", "0", "--model", "model", "--run-dir", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("engine-0 cannot form: ")
    assert done.stderr.endswith("refuses: --model: the weights in model lack h.4.ln_1.bias\n")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout.endswith("ended, nothing is left running; logs and journals: run\n")


async def test_a_frozen_redis_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """It took 110 s, because each role's processes had their whole bound. Also: names, slots, IPv6, file modes, and
    that Redis listens on no port, where any user of the machine could read what it holds."""
    model = make_timed(tmp_path / "model", seconds=0.01)
    async with running(
        *(tmp_path / "run", model),
        **{"slots": 300, "block_size": 8, "host": "::1", "drain_seconds": 1, "served_model_name": "owner/name"},
    ) as stack:
        assert (await stack.client.get_model()).name == "owner/name"
        assert stack.stack.model_name == "owner/name"
        await stack.stub.Generate(generation([1, 2], 4)).read()
        assert [engine.slots for engine in (await stack.client.get_model()).engines] == [296]
        assert all("status" in row for row in stack.processes() if row["role"] != "rank")
        assert stack.grpc.startswith("[::1]:")
        theirs = [path for path in stack.run_dir.rglob("*") if mode(path) & 0o077]
        assert not theirs, "only the owner may read a run's files"
        redis = next(row["pid"] for row in stack.processes() if row["role"] == "redis")
        assert not psutil.Process(redis).net_connections("inet")
        assert (stack.run_dir / "redis/socket").stat().st_mode & 0o777 == 0o600
        os.kill(redis, signal.SIGSTOP)
        async with asyncio.timeout(60):
            await stack.stack.stop()
        assert not Path(f"/proc/{redis}").exists()
