"""How long an endpoint's streams stand still when it loses its connections to Redis, or a packet.

    python tests/e2e/pool_recovery.py [--streams 4096] [--tokens 1000]

An endpoint's real calls and delivery have shown `--tokens` tokens to each of `--streams` clients. Redis closes every
connection of the endpoint, and an engine commits one token more for each request. Then the same once more after a
missed packet: all calls attach again. Prints the seconds until every stream has shown its token, each exactly once.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from servers import redis_server  # noqa: E402

from orca.v1.pool_pb2 import PoolRequest  # noqa: E402
from orca_common.metrics import Metrics  # noqa: E402
from orca_endpoint.calls.call import Call, CallLimits  # noqa: E402
from orca_endpoint.calls.delivery import Delivery  # noqa: E402
from orca_endpoint.calls.events import Token  # noqa: E402
from orca_endpoint.calls.metrics import CallMetrics, Meter  # noqa: E402
from orca_endpoint.calls.transcript import Transcript  # noqa: E402
from orca_pool.pool import Pool  # noqa: E402
from orca_pool.records import Attached, CommitRow, CommittedToken, EngineInfo, Reason  # noqa: E402
from orca_pool.wire import pack_tokens  # noqa: E402

TOGETHER = 64  # rows of a commit


async def measure(url: str, streams: int, tokens: int) -> tuple[float, float]:
    """Returns the seconds of both standstills."""
    async with Pool(url, "bench", patience=60) as engine, Pool(url, "bench") as pool:
        await engine._link.command("CONFIG", "SET", "appendfsync", "no")
        term = await engine.acquire("g", "s", None)
        assert term is not None
        slots = streams * (tokens + 64)
        await engine.renew("g", "s", term, form=EngineInfo("g", 1, 1, slots, 0))
        delivery = Delivery(pool)
        tasks = [asyncio.create_task(delivery.renew()), asyncio.create_task(delivery.read())]
        sweeping = asyncio.create_task(sweep(engine))
        while not delivery.registered:
            await asyncio.sleep(0.01)
        names = [f"request-{n:08}" for n in range(streams)]
        for name in names:
            record = PoolRequest(request_id=name, prompt_ids=[1, 2, 3], max_new_tokens=tokens + 32).SerializeToString()
            call = {"deadline_in": None, "detach_grace": 60.0, "endpoint": delivery.incarnation, "attempt": 1}
            answer = await engine.submit(name, record, "d", tokens + 64, tokens + 64, **call, max_waiting=streams)
            assert isinstance(answer, Attached)
        claimed = await engine.claim("g", "s", term, 0, count=streams, slots=slots, total=slots)
        assert claimed is not None
        claims = {held.request_id: held.claim for held in claimed.requests}

        async def commit(base: int, count: int, reason: Reason | None) -> None:
            packed = pack_tokens([CommittedToken(base + i, -0.5, base + i + 1) for i in range(count)])
            for at in range(0, streams, TOGETHER):
                rows = [CommitRow(name, claims[name], base, packed, reason) for name in names[at : at + TOGETHER]]
                answer = await engine.commit("g", "s", term, rows)
                assert answer is not None
                assert set(answer.rows) == {-1}

        shown = dict.fromkeys(names, 0)

        async def show(name: str) -> None:
            meter = Meter(CallMetrics(Metrics("endpoint")), "", 0.0)
            transcript = Transcript(name, None)
            async with Call(pool, delivery, CallLimits(60.0, 4096), transcript, attempt=2, meter=meter) as call:
                async for piece in call.pieces():
                    for event in piece:
                        if isinstance(event, Token):
                            assert event.at == shown[name], "each token comes once, in order"
                            shown[name] += 1

        calls = [asyncio.create_task(show(name)) for name in names]

        async def shown_by_all(count: int) -> None:
            while min(shown.values()) < count:
                await asyncio.sleep(0.01)
                for call in calls:
                    if call.done():
                        call.result()

        await commit(0, tokens, None)
        await shown_by_all(tokens)
        print(f"{streams} streams have shown {tokens} tokens each", flush=True)
        start = time.monotonic()
        await engine._link.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await commit(tokens, 1, None)
        await shown_by_all(tokens + 1)
        closed = time.monotonic() - start
        start = time.monotonic()
        # The next entry's number is not the one that the endpoint waits for.
        await engine._link.command("XSETID", engine._keys.delivery(delivery.incarnation), f"0-{2**30}")
        await commit(tokens + 1, 1, Reason.LENGTH)
        await asyncio.gather(*calls)
        missed = time.monotonic() - start
        for task in (*tasks, sweeping):
            task.cancel()
        await delivery.close()
        assert set(shown.values()) == {tokens + 2}
        return closed, missed


async def sweep(pool: Pool) -> None:
    """A scheduler's looks."""
    while True:
        await pool.renew_scheduler("s")
        await asyncio.sleep(0.4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1000)
    given = parser.parse_args()
    with redis_server() as server:
        closed, missed = asyncio.run(measure(server.url, given.streams, given.tokens))
    print(f"all showed the next token {closed:.2f} s after the connections were lost")
    print(f"all attached again and showed the next token {missed:.2f} s after a packet was missed")


if __name__ == "__main__":
    main()
