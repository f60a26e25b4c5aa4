"""The cost of a commit to the request pool, on the embedded Valkey and on Redis where it is installed.

    python -m orca_bench.commit [ROWS ..]

Prints microseconds: of the server for a commit (Redis's own statistics), of Python to build the command, of the whole
round trip, and of an endpoint to parse one delivery entry. Each row has one token, all rows belong to one endpoint.
"""

import argparse
import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

from orca_local import embedded_pool
from orca_pool.link import pack_command
from orca_pool.pool import Pool
from orca_pool.records import Attached, CommitRow, CommittedToken, EngineInfo
from orca_pool.wire import pack_tokens, unpack_packets

ROUNDS = 400
BATCH = 20  # commits between two readings of the statistics; on a busy machine the best reading is nearest to the truth


async def measure(url: str, rows: int) -> dict[str, float]:
    async with Pool(url, "bench") as pool:
        await pool.renew_endpoint("e", register=True)
        term = await pool.acquire("g", "s", None)
        assert term is not None
        await pool.renew("g", "s", term, form=EngineInfo("g", 1, 1, rows * 10, 0))
        for i in range(rows):
            call = {"deadline_in": None, "detach_grace": 0.0, "endpoint": "e", "attempt": 1, "max_waiting": rows}
            assert isinstance(await pool.submit(f"request-{i:024}", b"x" * 2000, "d", 10, **call), Attached)
        answer = await pool.claim("g", "s", term, 0, count=rows, slots=rows * 10, total=rows * 10)
        assert answer is not None
        claims = {held.request_id: held.claim for held in answer.requests}
        building, trips, server = [], [], []
        for index in range(ROUNDS):
            tokens = pack_tokens([CommittedToken(index, -0.5, index)])
            batch = [CommitRow(i, claim, index, tokens, None) for i, claim in claims.items()]
            start = time.perf_counter()
            args = ["g", "s", term]
            for row in batch:
                args += (row.request_id, row.claim, row.base, "", row.tokens)
            pack_command(("EVALSHA", "0" * 40, 1, "orca:{bench}:pool", *args))
            building.append(time.perf_counter() - start)
            start = time.perf_counter()
            answer = await pool.commit("g", "s", term, batch)
            assert answer is not None
            assert answer.rows == [-1] * rows
            trips.append(time.perf_counter() - start)
            if index % BATCH == BATCH - 1:
                stats = (await pool._link.command("INFO", "commandstats")).decode()
                line = next(line for line in stats.splitlines() if line.startswith("cmdstat_evalsha:"))
                server.append(float(line.split("usec_per_call=")[1].split(",")[0]))
                await pool._link.command("CONFIG", "RESETSTAT")
        raw = await pool._link.command("XREVRANGE", "orca:{bench}:delivery:e", "+", "-", "COUNT", 1)
        entry = raw[0][1][3]
        start = time.perf_counter()
        for _ in range(ROUNDS):
            unpack_packets(entry, "g")
        parsing = (time.perf_counter() - start) / ROUNDS
        return {
            "server": median(server),
            "server at best": min(server),
            "building": median(building) * 1e6,
            "round trip": median(trips) * 1e6,
            "endpoint parses an entry": parsing * 1e6,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int, nargs="*", default=[1, 32, 64], help="rows of a commit")
    given = parser.parse_args()
    redis = shutil.which("redis-server")
    servers = {"valkey": None} | ({"redis": Path(redis)} if redis else {})
    for name, binary in servers.items():
        for rows in given.rows:
            with tempfile.TemporaryDirectory(prefix="orca-commit-") as folder:
                child, url = embedded_pool.start(Path(folder), None, binary)
                try:
                    costs = asyncio.run(measure(url, rows))
                finally:
                    child.terminate()
                    child.wait()
            print(name, f"{rows} rows:", ", ".join(f"{what} {value:.0f} us" for what, value in costs.items()))


if __name__ == "__main__":
    main()
