"""The memory of Redis under endless load: it follows what is retained, not what has ended.

    python -m orca_bench.pool_memory [--requests 20000] [--retain 2000]

Requests with a record of 600 bytes and 64 tokens are submitted, claimed, committed and ended, as fast as one process
can, by the pool's own client over a real Redis. At most `--retain` ended ones are kept. Prints its memory after each
tenth of the requests, and what one retained request takes. Exits with 1 when the memory still grew after the first
half.
"""

import argparse
import asyncio
import itertools

from orca_bench.pool import server
from orca_pool.pool import Pool
from orca_pool.records import Attached, CommitRow, CommittedToken, EngineInfo, Reason
from orca_pool.scripts import Constants
from orca_pool.wire import RECORD_OVERHEAD, pack_tokens

TOGETHER, TOKENS, RECORD = 32, 64, b"\x08" * 600
GROWTH = 1.05  # of the memory, in the second half


async def used(pool: Pool) -> int:
    """Bytes that Redis holds for its data, without the buffers of its clients."""
    info = (await pool._link.command("INFO", "memory")).decode()
    return int(next(line for line in info.splitlines() if line.startswith("used_memory_dataset:")).split(":")[1])


async def run(url: str, requests: int, retain: int) -> list[int]:
    """Returns the bytes after each tenth."""
    memory = list[int]()
    async with Pool(url, "memory", constants=Constants(retain_requests=retain)) as pool:
        await pool.renew_endpoint("e", register=True)
        term = await pool.acquire("g", "s", None)
        assert term is not None
        await pool.renew("g", "s", term, form=EngineInfo("g", 1, 1, 1 << 20, 0))
        before, last_claim, number = await used(pool), 0, itertools.count()
        tokens = pack_tokens([CommittedToken(7, -0.5, 1)] * TOKENS)
        for tenth in range(10):
            for _ in range(requests // TOGETHER // 10):
                for _ in range(TOGETHER):
                    call = {"deadline_in": 60.0, "detach_grace": 5.0, "endpoint": "e", "attempt": 1, "max_waiting": 999}
                    answer = await pool.submit(f"request-{next(number):016}", RECORD, "d" * 40, 128, 128, **call)
                    assert isinstance(answer, Attached)
                claimed = await pool.claim("g", "s", term, last_claim, count=TOGETHER, slots=1 << 20, total=1 << 20)
                assert claimed is not None
                last_claim = claimed.last_claim
                rows = [CommitRow(r.request_id, r.claim, 0, tokens, Reason.LENGTH) for r in claimed.requests]
                await pool.commit("g", "s", term, rows)
                entries = await pool.read("e", None, wait=1)
                await pool.renew_endpoint("e", read=entries[-1].number)
                await pool.renew_scheduler("s")
            memory.append(await used(pool))
            print(f"after {(tenth + 1) * requests // 10} requests: {memory[-1] / 1e6:.2f} MB", flush=True)
        each = (memory[-1] - before) / retain - len(RECORD) - len(tokens)
        print(f"a retained request takes {each:.0f} bytes beside its record and tokens; counted as {RECORD_OVERHEAD}")
    return memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--retain", type=int, default=2_000)
    given = parser.parse_args()
    with server() as url:
        memory = asyncio.run(run(url, given.requests, given.retain))
    raise SystemExit(0 if memory[-1] <= GROWTH * memory[4] else "the memory still grows")


if __name__ == "__main__":
    main()
