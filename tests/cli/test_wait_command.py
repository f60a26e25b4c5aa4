"""`orca wait` as a command. The rule is tested in tests/scheduler/test_wait.py."""

import asyncio
import os
import sys
from pathlib import Path

from scheduler.discovery.api_server import api_server
from scheduler.discovery.manifests import NEW, pod
from scheduler.test_wait import WHOLE, workers

ORCA = str(Path(sys.executable).parent / "orca")


async def wait(*arguments: str, kubeconfig: str) -> tuple[int | None, str, str]:
    """Its exit code, its output and its errors."""
    process = await asyncio.create_subprocess_exec(
        *(ORCA, "wait", "--namespace=orca", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"KUBECONFIG": kubeconfig},
    )
    output, problems = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, output.decode(), problems.decode()


async def test_it_waits_in_the_cluster_of_kubeconfig(tmp_path: Path) -> None:
    async with api_server(tmp_path) as (server, kubeconfig):
        server.put("statefulsets", workers(4))
        server.put("pods", *(pod(ordinal, NEW) for ordinal in range(4)))
        assert await wait(kubeconfig=kubeconfig) == (0, f"{WHOLE}\n", "")
        missing = "release other: it has no workers in this namespace\n"
        assert await wait("--release=other", kubeconfig=kubeconfig) == (1, "", missing)
        server.put("pods", pod(0, NEW, ready=False, phase="Failed"))
        code, _, problems = await wait("--patience=0", kubeconfig=kubeconfig)
        assert (code, problems) == (
            1,
            "the rollout has stopped: engine-0 of orca-worker-new is not up: orca-worker-0 has ended\n",
        )


async def test_no_cluster() -> None:
    code, _, problems = await wait(kubeconfig="/nowhere")
    assert code == 1
    assert problems.startswith("no cluster is known (")
