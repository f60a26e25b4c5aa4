"""What the probes of each service answer while others die, freeze and come back. Real processes."""

import json
import os
import signal
import urllib.request
from pathlib import Path

from checkpoints import make_timed
from stacks import Running, running

from orca_local.child import Child


def child(stack: Running, name: str) -> Child:
    return next(one for one in stack.stack._children if one.name == name)


def alive(stack: Running, *names: str) -> None:
    """Liveness depends on nothing but the process itself."""
    for name in names:
        with urllib.request.urlopen(f"http://{child(stack, name).addresses['status']}/livez", timeout=5) as answer:
            assert json.load(answer)["ok"]


async def says(stack: Running, name: str, *parts: str) -> None:
    """Waits until a service is not ready for a reason that has one of these parts."""
    await stack.until(lambda: any(part in (child(stack, name).unready() or "") for part in parts))


async def ready(stack: Running, *names: str) -> None:
    await stack.until(lambda: all(child(stack, name).unready() is None for name in names))


def pid(stack: Running, role: str, stage: int = 0) -> int:
    return next(p["pid"] for p in stack.processes() if p["role"] == role and p.get("stage", 0) == stage)


async def test_probes(tmp_path: Path) -> None:
    everyone = "endpoint-0", "scheduler-0", "supervisor-0", "supervisor-1"
    async with running(tmp_path / "run", make_timed(tmp_path / "model", seconds=0.0), pp=2) as stack:
        await ready(stack, *everyone)
        alive(stack, *everyone)

        os.kill(pid(stack, "scheduler"), signal.SIGKILL)
        await says(stack, "supervisor-0", "rank 0: no master holds its control lane")
        alive(stack, "endpoint-0", "supervisor-0", "supervisor-1")
        assert child(stack, "endpoint-0").unready() is None  # requests queue meanwhile
        await ready(stack, *everyone)

        supervisor = child(stack, "supervisor-1").pid
        assert supervisor is not None
        os.kill(supervisor, signal.SIGSTOP)  # so that nobody starts its rank again
        os.kill(pid(stack, "rank", 1), signal.SIGKILL)
        await says(stack, "supervisor-0", "broke: ", "no master holds", "waits for the engine's other ranks")
        await stack.until(lambda: child(stack, "scheduler-0").engines().get("engine-0") is not None)
        assert child(stack, "scheduler-0").unready() is None  # it does its part
        alive(stack, "endpoint-0", "scheduler-0", "supervisor-0")
        assert child(stack, "supervisor-0").unready() is not None  # its peer is still gone
        assert child(stack, "endpoint-0").unready() is None
        os.kill(supervisor, signal.SIGCONT)
        await ready(stack, *everyone)
        assert await stack.tokens([1, 2, 3], 5)

        os.kill(pid(stack, "redis"), signal.SIGSTOP)
        await says(stack, "endpoint-0", "the request pool does not answer")
        await says(stack, "scheduler-0", "pool")
        alive(stack, *everyone)
        os.kill(pid(stack, "redis"), signal.SIGCONT)
        await ready(stack, *everyone)
        assert await stack.tokens([1, 2, 3], 5)
