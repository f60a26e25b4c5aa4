"""A disk that is full: the screen says so, services are started again, and all goes on when there is room again.

The run folder is a small file system of its own, which this program mounts in a namespace of its own.
"""

import asyncio
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

if __name__ != "__main__":
    from checkpoints import make_timed

    NAMESPACE = ["unshare", "--mount", "--user", "--map-root-user"]

    def test_a_full_disk(tmp_path: Path) -> None:
        tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, check=False)
        if tried.returncode:
            pytest.skip(f"no namespace of our own here: {tried.stderr}")
        make_timed(tmp_path / "model", seconds=0.002, positions=4096)
        command = [*NAMESPACE, sys.executable, __file__, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        said = json.loads(done.stdout.splitlines()[-1])
        assert any("No space left on device" in line for line in said), said
        assert len(said) < 40, "each state is told once"


def status(run_dir: Path) -> str:
    command = [sys.executable, "-m", "orca_cli", "status", "--run-dir", str(run_dir)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout


async def main(folder: Path) -> None:

    from orca_client import AsyncOrcaClient, Token
    from orca_local.settings import ServeSettings
    from orca_local.stack import Stack

    run_dir = folder / "run"
    said: list[str] = []
    settings = ServeSettings.load(model=str(folder / "model"), port=0, http_port=0, slots=8192, drain_seconds=2)
    stack = Stack(settings, run_dir, said.append)
    try:
        await stack.start()
        filler = run_dir / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):  # until nothing is left
                pass
        async with AsyncOrcaClient(stack.grpc_addresses) as client:
            tokens = 0

            async def read() -> None:
                nonlocal tokens
                async for event in client.generate([1, 2, 3], max_new_tokens=1500, ignore_eos=True):
                    tokens += isinstance(event, Token)

            reading = asyncio.create_task(read())
            while not any("No space left" in line for line in said):
                await asyncio.sleep(0.05)
            shown = await asyncio.to_thread(status, run_dir)
            assert f"{run_dir} cannot be written (No space left on device)" in shown, shown
            filler.unlink()
            await reading
            assert tokens == 1500
    finally:
        await stack.stop()
    print(json.dumps(said))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "run").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder / "run"], check=True)
    asyncio.run(asyncio.wait_for(main(folder), 150))
