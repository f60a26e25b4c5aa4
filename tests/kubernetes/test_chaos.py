"""`orca chaos` on a release: pods deleted without grace, ranks killed and frozen inside their pods."""

import sys

from cluster import call

from release import GRPC, Release

ROUNDS, SEED = 5, 1
REDIS = 6379


async def test_rounds_of_chaos(orca: Release) -> None:
    """Every stream is right, every pod Ready again, and nothing is left in the pool. `pytest -s` shows the report."""
    where = ["--release", orca.name, "--namespace", orca.cluster.namespace]
    doors = ["--address", f"{orca.host()}:{GRPC}", "--redis-url", f"redis://{orca.host('redis')}:{REDIS}/0"]
    command = [sys.executable, "-m", "orca_cli", "chaos", *where, *doors]
    print(await call(*command, "--seed", str(SEED), "--rounds", str(ROUNDS), seconds=1100))
    await orca.healed()
